#!/usr/bin/env python3
"""Draws reports of `foretoken bench --json` as an SVG of bars with intervals, and writes a LaTeX table of them. Uses only
the standard library.

    foretoken bench MODEL --drafters tables,ngram --json a.json
    scripts/plot.py a.json                        # writes a.svg and a.tex
    scripts/plot.py a.json b.json --svg both.svg --tex both.tex

A bar is the speed-up over plain decoding. Its line is the interval over prompts; where there are too few prompts for one,
a thin line reaches from the slowest to the fastest prompt.

>>> group = lambda name, speed_up, interval: {"category": name, "speed_up": speed_up, "interval": interval,
...     "spread": {"low": 0.9, "high": 2.0}, "prompts": 8, "tokens_per_step": 1.5, "verdict": "helps"}
>>> report = {"subject": {"model": "tiny_1", "drafters": ["tables", "ngram"], "cpu": "some CPU", "threads": 2,
...     "device": "cpu", "version": "0.1.0", "commit": None, "date": "2026-11-28T03:00:00Z", "flags": ["-m", "tiny_1"]},
...     "temperatures": [{"temperature": 0.0, "drafter": 0, "spec_length": 8, "spec_topk": 1, "acceptance": "coupled",
...     "categories": [group("code", 1.5, None)], "overall": group("overall", 1.3, {"low": 1.1, "high": 1.4})}]}
>>> [one] = series([report])
>>> one.label, one.temperature, [bar.name for bar in one.bars]
('tables', 0.0, ['code', 'overall'])
>>> print(latex([report]))
% tiny_1 on some CPU, 2 threads, cpu; foretoken 0.1.0, 2026-11-28T03:00:00Z: -m tiny_1
\\begin{tabular}{lrr}
temperature 0 & code & overall \\\\
\\hline
tables & 1.50 & 1.30 [1.10, 1.40] \\\\
\\end{tabular}
>>> root = ElementTree.fromstring(svg([report]))
>>> len(root.findall(".//{*}rect[@class='bar']")), len(root.findall(".//{*}line[@class='interval']"))
(2, 1)
"""

import argparse
import json
import math
import sys
from collections import namedtuple
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

# Colours that people with colour blindness tell apart (Okabe and Ito).
COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000"]
BAR, GAP, LEFT, RIGHT, TOP, HEIGHT, BELOW = 22, 30, 60, 20, 46, 260, 60

Bar = namedtuple("Bar", "name speed_up interval spread")
Series = namedtuple("Series", "label temperature bars")


def finite(number):
    """The number, or None where nothing was measured."""
    return number if isinstance(number, (int, float)) and math.isfinite(number) else None


def ends(interval):
    return (interval["low"], interval["high"]) if interval else None


def bar(group):
    return Bar(
        group["category"], finite(group["speed_up"]), ends(group.get("interval")), ends(group.get("spread"))
    )


def series(reports):
    """A series for each report, temperature and mode: the bars of its categories and of all prompts."""
    found = []
    for report in reports:
        subject, modes = report["subject"], report["temperatures"]
        varies = [key for key in ("spec_length", "spec_topk", "acceptance") if len({mode[key] for mode in modes}) > 1]
        for mode in modes:
            names = subject["drafters"]
            drafter = names[mode["drafter"]] if mode["drafter"] < len(names) else "plain"
            marks = {"spec_length": "K = {}", "spec_topk": "{} siblings", "acceptance": "{}"}
            parts = [drafter] + [marks[key].format(mode[key]) for key in varies]
            if mode.get("synthetic_acceptance") is not None:
                parts.append(f"SYNTHETIC {mode['synthetic_acceptance']}")
            if len(reports) > 1:
                parts.append(subject["model"])
            bars = [bar(group) for group in [*mode["categories"], mode["overall"]]]
            found.append(Series(", ".join(parts), mode["temperature"], bars))
    return found


def by_temperature(reports):
    """The series of each temperature, and the names of their bars."""
    panels = {}
    for one in series(reports):
        panels.setdefault(one.temperature, []).append(one)
    for temperature, group in sorted(panels.items()):
        names = list(dict.fromkeys(bar.name for one in group for bar in one.bars if bar.name != "overall"))
        yield temperature, group, [*names, "overall"]


def source(report):
    """What was measured, where and how, in a line."""
    subject = report["subject"]
    commit = f" ({subject['commit'][:12]})" if subject.get("commit") else ""
    return (
        f"{subject['model']} on {subject['cpu']}, {subject['threads']} threads, {subject['device']}; "
        f"foretoken {subject['version']}{commit}, {subject['date']}: {' '.join(subject['flags'])}"
    )


def panel(top, temperature, group, names):
    """The shapes of one temperature, the first at the height `top`; and their width."""
    tops = [1.0]
    for one in group:
        for bar in one.bars:
            tops += [value for value in (bar.speed_up, *(bar.interval or bar.spread or ())) if value]
    highest = max(tops) * 1.05
    floor = top + TOP + HEIGHT

    def y(value):
        return floor - HEIGHT * min(value, highest) / highest

    step = len(group) * BAR + GAP
    width = LEFT + len(names) * step + RIGHT
    lines = [f'<text x="{LEFT}" y="{top + 16}" class="title">temperature {temperature:g}</text>']
    tick = next(size for size in (0.1, 0.2, 0.25, 0.5, 1, 2, 5, 10, 1e9) if highest / size <= 8)
    for number in range(int(highest / tick) + 1):
        at = y(number * tick)
        lines.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{width - RIGHT}" y2="{at:.1f}" class="grid"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{number * tick:g}</text>')
    legend = LEFT
    for index, one in enumerate(group):
        of_name = {bar.name: bar for bar in one.bars}
        colour = COLOURS[index % len(COLOURS)]
        for place, name in enumerate(names):
            bar = of_name.get(name)
            if bar is None or bar.speed_up is None:
                continue
            x = LEFT + GAP / 2 + place * step + index * BAR
            lines.append(
                f'<rect class="bar" x="{x:.1f}" y="{y(bar.speed_up):.1f}" width="{BAR - 2}" '
                f'height="{floor - y(bar.speed_up):.1f}" fill="{colour}">'
                f"<title>{escape(one.label)}, {escape(name)}: {bar.speed_up:.2f}</title></rect>"
            )
            low, high = bar.interval or bar.spread or (None, None)
            if low is not None:
                kind, middle = ("interval" if bar.interval else "spread"), x + BAR / 2 - 1
                lines.append(
                    f'<line class="{kind}" x1="{middle:.1f}" y1="{y(low):.1f}" x2="{middle:.1f}" y2="{y(high):.1f}"/>'
                )
        lines.append(f'<rect x="{legend}" y="{top + 26}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{legend + 15}" y="{top + 35}">{escape(one.label)}</text>')
        legend += 30 + 7 * len(one.label)
        width = max(width, legend)
    for place, name in enumerate(names):
        middle = LEFT + place * step + step / 2
        lines.append(f'<text x="{middle:.1f}" y="{floor + 18}" text-anchor="middle">{escape(name)}</text>')
    lines.append(f'<line x1="{LEFT}" y1="{y(1):.1f}" x2="{width - RIGHT}" y2="{y(1):.1f}" class="plain"/>')
    return lines, width


def svg(reports):
    """All temperatures, one below the other."""
    shapes, width, top = [], 0, 10
    for temperature, group, names in by_temperature(reports):
        lines, needed = panel(top, temperature, group, names)
        shapes += lines
        width, top = max(width, needed), top + TOP + HEIGHT + BELOW
    for report in reports:
        shapes.append(f'<text x="{LEFT}" y="{top}" class="source">{escape(source(report))}</text>')
        top += 16
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.source{font-size:9px;fill:#666}"
        ".grid{stroke:#ddd}.plain{stroke:#222;stroke-dasharray:4 3}.interval{stroke:#222;stroke-width:2}"
        ".spread{stroke:#888;stroke-width:1}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top:.0f}">'
    return "\n".join([head, f"<style>{style}</style>", '<rect width="100%" height="100%" fill="#fff"/>', *shapes, "</svg>"])


def tex(text):
    """The text as LaTeX writes it."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special.update({mark: "\\" + mark for mark in "&%$#_{}"})
    return "".join(special.get(mark, mark) for mark in text)


def cell(bar):
    if bar is None or bar.speed_up is None:
        return "--"
    interval = f" [{bar.interval[0]:.2f}, {bar.interval[1]:.2f}]" if bar.interval else ""
    return f"{bar.speed_up:.2f}{interval}"


def latex(reports):
    """A table for each temperature; what was measured is in comments."""
    lines = ["% " + source(report) for report in reports]
    for temperature, group, names in by_temperature(reports):
        lines.append(r"\begin{tabular}{l" + "r" * len(names) + "}")
        lines.append(" & ".join([f"temperature {temperature:g}", *map(tex, names)]) + r" \\")
        lines.append(r"\hline")
        for one in group:
            of_name = {bar.name: bar for bar in one.bars}
            lines.append(" & ".join([tex(one.label), *(cell(of_name.get(name)) for name in names)]) + r" \\")
        lines.append(r"\end{tabular}")
    return "\n".join(lines)


def read(path):
    """A report with figures of single prompts."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if not report["temperatures"]:
            sys.exit(f"{path} has no figures of single requests: run bench without --streams")
        series([report])
        source(report)
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{path} is no report of foretoken bench --json: {error!r}")
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--svg", type=Path, help="default: the first file's name with .svg")
    parser.add_argument("--tex", type=Path, help="default: the first file's name with .tex")
    args = parser.parse_args()
    reports = [read(path) for path in args.reports]
    first = args.reports[0]
    for path, text in [(args.svg or first.with_suffix(".svg"), svg(reports)), (args.tex or first.with_suffix(".tex"), latex(reports))]:
        path.write_text(text + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
