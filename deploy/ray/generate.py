#!/usr/bin/env python3
"""`foretoken generate` over a Ray cluster: many machines write one corpus.

    python deploy/ray/generate.py --prompts prompts.jsonl --out corpus.jsonl --workers 8 -- --model MODEL --samples 4

What follows `--` are flags of `foretoken generate`. The corpus holds the same lines as a single machine's, in another
order: a text depends on its prompt, the prompt's place in the file, the number of its sample, and the seed, and so every
worker reads the whole file of prompts and writes only the texts of its shard. An interrupted run continues with what
the corpus does not hold yet, here or with `foretoken generate` on one machine. Needs a `foretoken` on every machine.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import ray

from deploy.ray import process

# A text of another worker, in the form of a corpus. It is never read as a text.
ELSEWHERE = {"prompt": "", "prompt_ids": [], "text": "", "ids": [], "finish_reason": "length"}


def tasks_of(prompts, samples):
    """(id, sample) of every text, in the order of the file."""
    ids = {}
    for number, line in enumerate(prompts.split("\n"), 1):
        if not line.strip():
            continue
        value = json.loads(line)
        id = value.get("id", value.get("question_id"))
        if not isinstance(id, str):
            id = str(number) if id is None else json.dumps(id, separators=(",", ":"))
        if id in ids:
            sys.exit(f"error: lines {ids[id]} and {number} of the prompts have the same id, {id}")
        ids[id] = number
    return [(id, sample) for id in ids for sample in range(samples)]


def open_corpus(path):
    """The corpus, open for appending, without an incomplete last line; and the (id, sample) that it holds."""
    file = open(path, "a+b")
    file.seek(0)
    contents = file.read()
    file.truncate(contents.rfind(b"\n") + 1)
    done = set()
    for line in contents[: contents.rfind(b"\n") + 1].splitlines():
        text = json.loads(line)
        done.add((text["id"], text["sample"]))
    return file, done


def shards_of(todo, count):
    """Cuts the texts into runs of about equal length; the texts of a prompt stay together where they can."""
    count = min(count, len(todo))
    return [todo[len(todo) * i // count : len(todo) * (i + 1) // count] for i in range(count)]


def run_shard(row, prompts, tasks, flags, binary):
    """Generates the texts of one shard."""
    mine = {tuple(task) for task in json.loads(row["tasks"])}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "prompts.jsonl").write_bytes(ray.get(prompts))
        with open(folder / "corpus.jsonl", "w", encoding="utf-8") as corpus:
            for id, sample in ray.get(tasks):
                if (id, sample) not in mine:
                    corpus.write(json.dumps({"id": id, "category": "", "sample": sample, **ELSEWHERE}) + "\n")
            others = corpus.tell()
        threads = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
        named = any(flag.split("=")[0] == "--threads" for flag in flags)
        command = [process.find_binary(binary), "generate", *flags]
        command += [] if named or threads < 1 else ["--threads", str(int(threads))]
        command += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "corpus.jsonl")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode != 0:
            raise RuntimeError(f"foretoken generate ended with status {done.returncode}: {done.stdout[-2000:]}")
        lines = (folder / "corpus.jsonl").read_bytes()[others:].decode().splitlines()
    return [{"line": line} for line in lines]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", required=True, type=pathlib.Path, help="JSON lines, as for foretoken generate")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="the corpus, on this machine")
    parser.add_argument("--workers", type=int, default=1, help="shards that run at a time, over all machines")
    parser.add_argument("--shards", type=int, help="default: 4 a worker; what an interruption may lose is one a worker")
    parser.add_argument("--num-cpus", type=float, default=1, help="of a worker, and its --threads")
    parser.add_argument("--num-gpus", type=float, default=0, help="of a worker")
    parser.add_argument("--binary", help="foretoken; default: the one in PATH, else target/release/foretoken")
    parser.add_argument("--address", help="of the cluster; default: a local one is started unless RAY_ADDRESS is set")
    parser.add_argument("flags", nargs="*", help="after --: flags of foretoken generate")
    options = parser.parse_args()
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--samples", type=int, default=1)
    options.samples = own.parse_known_args(options.flags)[0].samples
    for flag in ("--prompts", "--out", "--limit-per-category", "--config"):
        if any(given.split("=")[0] == flag for given in options.flags):
            parser.error(f"{flag} cannot be among the flags of foretoken generate here")
    return options


def main():
    options = parse_arguments()
    prompts = options.prompts.read_bytes()
    corpus, done = open_corpus(options.out)
    tasks = tasks_of(prompts.decode("utf-8"), options.samples)
    todo = [task for task in tasks if task not in done]
    print(f"{len(tasks)} texts, {len(tasks) - len(todo)} of them in {options.out}")
    if not todo:
        return
    # Other machines need not have this repository.
    ray.cloudpickle.register_pickle_by_value(process)
    ray.init(address=options.address, log_to_driver=False)
    shards = shards_of(todo, options.shards or 4 * options.workers)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # A shard's lines are written when the shard is done, not when all are.
    context.execution_options.preserve_order = False
    rows = ray.data.from_items([{"tasks": json.dumps(shard)} for shard in shards], override_num_blocks=len(shards)).flat_map(
        run_shard,
        fn_args=(ray.put(prompts), ray.put(tasks), options.flags, options.binary),
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        compute=ray.data.TaskPoolStrategy(size=options.workers),
    )
    count = 0
    for row in rows.iter_rows():
        corpus.write(row["line"].encode() + b"\n")
        corpus.flush()
        count += 1
    os.fsync(corpus.fileno())
    corpus.close()
    print(f"{count} texts in {len(shards)} shards")


if __name__ == "__main__":
    main()
