#!/usr/bin/env python3
"""Compares foretoken with llama.cpp's server on one GGUF file. Uses only the standard library.

Starts llama-server and foretoken in turn, never both at once, with the same number of threads, and
sends both the same prompts at temperature 0, without speculation and without a prompt cache. Measures
decoding of one stream, without its prefill; time to first token of a long prompt; tokens per second
of many streams at once; with --llama-bench also the cost of forwards of 4 and 8 rows in llama.cpp.
Prints medians and ranges over the rounds. Needs an idle machine; see benches/README.md.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys

from serving import FORETOKEN, Failed, at_once, cell, flags, foretoken, running, sentences

LLAMA = "llama.cpp"
VERIFY_ROWS = [1, 4, 8]


def llama_server(options):
    threads, known = str(options.threads), flags(options.llama_server)
    context = max(1024, options.prefill_tokens + 16, options.prompt_tokens + options.tokens + 16)
    command = [options.llama_server, "--model", options.model, "--threads", threads, "--threads-batch", threads]
    command += ["--parallel", str(options.streams), "--ctx-size", str(context * options.streams)]
    # Otherwise it saves the caches of idle slots for prompts that might come again.
    command += ["--cache-ram", "0"] if "--cache-ram" in known else []
    command += ["--no-webui"] if "--no-webui" in known else []
    return LLAMA, command, {"cache_prompt": False}


def measure(server, begin, ids, options):
    """All figures of one server in one round; each prompt is `begin` and a different part of `ids`."""
    rest = iter(ids)
    take = lambda count: begin + list(itertools.islice(rest, count - len(begin)))
    server.ask(take(options.prefill_tokens), 8)
    found = {"decode": [], "prefill": [], "streams": [], "texts": []}
    for _ in range(options.repeats):
        answer = server.ask(take(options.prompt_tokens), options.tokens)
        # The first token belongs to the prefill.
        found["decode"].append((options.tokens - 1) / (answer["last"] - answer["first"]))
        found["texts"].append(answer["text"])
        answer = server.ask(take(options.prefill_tokens), 1)
        found["prefill"].append((answer["first"] - answer["asked"]) * 1e3)
    answers = at_once(server, [take(options.prompt_tokens) for _ in range(options.streams)], options.tokens)
    seconds = max(a["last"] for a in answers) - min(a["asked"] for a in answers)
    found["streams"].append(options.streams * options.tokens / seconds)
    return found


def rows_cost(options):
    """Milliseconds of llama.cpp's forwards, by the number of rows of one sequence."""
    command = [options.llama_bench, "-m", options.model, "-t", str(options.threads), "-r", "10", "-o", "json"]
    command += ["-n", "0", "-p", ",".join(map(str, VERIFY_ROWS))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-300:]!r}")
    return {run["n_prompt"]: statistics.median(run["samples_ns"]) / 1e6 for run in json.loads(done.stdout)}


def one_round(number, options):
    found, ids, begin = {}, None, None
    short, long = options.repeats + options.streams, options.repeats + 1  # the warm-up is a long one
    needed = options.prompt_tokens * short + options.prefill_tokens * long
    for name, command, extra in (llama_server(options), foretoken(options)):
        print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
        with running(name, command, extra, options.threads) as server:
            # Both get the ids into which the first server encoded the text, so lengths are exact.
            if ids is None:
                ids, begin = server.tokenize(sentences(needed, seed=number)), server.first_ids()
            found[name] = measure(server, begin, ids, options)
    if options.llama_bench:
        found["rows_ms"] = rows_cost(options)
    return found


def table(rounds, options):
    yield f"| measure | {LLAMA} | {FORETOKEN} | ratio {FORETOKEN}/{LLAMA} |\n| --- | --- | --- | --- |"
    prefill = f"time to first token of {options.prefill_tokens}, ms (less is better)"
    streams = f"{options.streams} streams with their prefill, tokens/s"
    for key, label in [("decode", "decode, 1 stream, tokens/s"), ("prefill", prefill), ("streams", streams)]:
        theirs, ours = ([statistics.median(r[name][key]) for r in rounds] for name in (LLAMA, FORETOKEN))
        yield f"| {label} | {cell(theirs, 1)} | {cell(ours, 1)} | {cell([b / a for a, b in zip(theirs, ours)])} |"
    for rows in VERIFY_ROWS[1:] if options.llama_bench else []:
        costs = [r["rows_ms"][rows] / r["rows_ms"][1] for r in rounds]
        yield f"| forward of {rows} rows, in forwards of 1 | {cell(costs)} | | |"


def notes(rounds, options):
    pairs = [pair for r in rounds for pair in zip(r[LLAMA]["texts"], r[FORETOKEN]["texts"])]
    equal = statistics.median(len(os.path.commonprefix(pair)) / max(1, len(pair[0])) for pair in pairs)
    yield f"\nMedian (range) of {options.rounds} rounds. The greedy texts are the same for {equal:.0%} of their length"
    yield "(median): at some point they differ by rounding; almost 0% would mean two different models."
    if options.llama_bench:
        yield "llama-bench computes logits only for the last row, so a verification costs llama.cpp more than these"
        yield "forwards. The cost of foretoken's verification is measured by its own bench, not here."


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--llama-server", required=True, help="llama.cpp's llama-server")
    parser.add_argument("--llama-bench", help="llama.cpp's llama-bench, for the cost of a verification")
    parser.add_argument("--foretoken", default="target/release/foretoken", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write all individual figures to FILE")
    count = lambda flag, default, text: parser.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{text} (default {default})"
    )
    count("--threads", 2, "threads of each server")
    count("--rounds", 5, "rounds, each of which starts both servers")
    count("--repeats", 3, "requests of each kind per round; their median is the round's figure")
    count("--streams", 16, "concurrent connections")
    count("--tokens", 128, "tokens to generate, at least 2: the first belongs to the prefill")
    count("--prompt-tokens", 32, "tokens of the prompts of these requests")
    count("--prefill-tokens", 256, "tokens of the long prompts")
    options = parser.parse_args()
    if min(v for v in vars(options).values() if isinstance(v, int)) < 1 or options.tokens < 2:
        parser.error("each number must be at least 1, --tokens at least 2")
    return options


def missing(options):
    if not os.path.isfile(options.model):
        yield f"no model file {options.model}"
    programs = filter(None, (options.llama_server, options.foretoken, options.llama_bench))
    yield from (f"no executable file {program}" for program in programs if not shutil.which(program))
    if options.json and not os.path.isdir(os.path.dirname(os.path.abspath(options.json))):
        yield f"no folder for {options.json}"


def report(rounds, options):
    model = os.path.basename(options.model)
    print(f"{model}, {options.threads} threads, {options.tokens} tokens after {options.prompt_tokens}\n")
    print(*table(rounds, options), *notes(rounds, options), sep="\n")
    if options.json:
        counts = {k: v for k, v in vars(options).items() if isinstance(v, int)}
        with open(options.json, "w") as file:
            json.dump({"model": model, "options": counts, "rounds": rounds}, file, indent=1)


def main():
    options = parse_arguments()
    for message in missing(options):
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    # Raises an exception, so that the running server is killed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if os.getloadavg()[0] > 0.5:
        print("note: the machine is busy; this slows down llama.cpp most, because its threads spin", file=sys.stderr)
    try:
        report([one_round(n + 1, options) for n in range(options.rounds)], options)
    except (Failed, OSError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
