#!/usr/bin/env python3
"""Tables of steps by kernel, of what ncu measured of the bench `gpu`. Uses only the standard library.

    FORETOKEN_BENCH_PROFILE=1,8 ncu --profile-from-start off --clock-control none --csv --print-units base \
        --metrics gpu__time_duration.sum,dram__bytes.sum --log-file steps.csv GPU_BENCH --bench
    step-by-kernel.py steps.csv

A sine begins each step. Its number is the one that the bench prints.

>>> head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
>>> rows = ['0,"usin_f32","gpu__time_duration.sum","nsecond","900"',
...         '1,"norm_bf16","gpu__time_duration.sum","nsecond","2,000"',
...         '1,"norm_bf16","dram__bytes.sum","byte","4,000,000"',
...         '2,"void gemm<int, 4>(int)","gpu__time_duration.sum","nsecond","5,000"',
...         '3,"norm_bf16","gpu__time_duration.sum","nsecond","3,000"']
>>> print(tables(["==PROF== Connected", head, *rows]))
<BLANKLINE>
step 1: 3 launches, 10.0 us
|       us | launches | us each |  GB/s | kernel
|      5.0 |        2 |     2.5 |   800 | norm_bf16
|      5.0 |        1 |     5.0 |     0 | void gemm<int, 4>
"""

import csv
import sys

MARK = "usin_"
TIME, BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
WIDTH = 70


def launches(lines):
    """The launches in order: a kernel's name, and its metrics by name."""
    lines = iter(lines)
    head = next((line for line in lines if line.startswith('"ID"')), None)
    if head is None:
        sys.exit("ncu has measured nothing")
    found = {}
    for row in csv.DictReader(lines, next(csv.reader([head]))):
        # Warnings of ncu may follow.
        if row["Metric Value"]:
            name, metrics = found.setdefault(int(row["ID"]), (row["Kernel Name"], {}))
            metrics[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [found[number] for number in sorted(found)]


def table(number, step):
    """The kernels of a step, the longest together first."""
    kernels = {}
    for name, metrics in step:
        # Without the types of the parameters.
        sums = kernels.setdefault(name.split("(")[0][:WIDTH], [0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += metrics.get(TIME, 0) / 1e3
        sums[2] += metrics.get(BYTES, 0) / 1e3
    total = sum(time for _, time, _ in kernels.values())
    lines = ["", f"step {number}: {len(step)} launches, {total:.1f} us"]
    lines.append("|       us | launches | us each |  GB/s | kernel")
    for name, (count, time, size) in sorted(kernels.items(), key=lambda item: -item[1][1]):
        speed = size / time if time else 0
        lines.append(f"| {time:8.1f} | {count:8} | {time / count:7.1f} | {speed:5.0f} | {name}")
    return "\n".join(lines)


def tables(lines):
    steps = []
    for launch in launches(lines):
        if launch[0].startswith(MARK):
            steps.append([])
        elif steps:
            steps[-1].append(launch)
    return "\n".join(table(number, step) for number, step in enumerate(steps, 1))


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        print(tables(file))
