#!/usr/bin/env python3
"""Measures how long running streams wait while long prompts arrive. Uses only the standard library.

Starts each of the given servers in turn, never two at once, for several rounds. Each reads a long
prompt while nothing else runs; then, while some streams decode, it reads long prompts one after another.
Prints the gaps between the events of the streams, and the time of the prompts alone and beside the
streams, as medians over the rounds of each server. Example:

    benches/prompt-stall.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf \\
      "before=old/foretoken" "after=target/release/foretoken" "64 rows=target/release/foretoken --max-num-batched-tokens 64"
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time

PATIENCE_SECONDS = 600
TOPICS = "the sea|a bridge|prime numbers|bread|the moon|an old clock|rain|a lonely owl".split("|")


@contextlib.contextmanager
def running(command):
    """Starts a server, yields its port, and kills it however the block is left."""
    environment = {k: v for k, v in os.environ.items() if k not in ("FORETOKEN_API_KEY", "RUST_LOG")}
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, env=environment | {"RUST_LOG": "warn"})
    try:
        addresses = (re.search(rb"http://127\.0\.0\.1:(\d+)", line) for line in process.stdout)
        address = next(filter(None, addresses), None)
        if not address:
            sys.exit(f"error: {shlex.join(command)} does not serve")
        yield int(address[1])
    finally:
        process.kill()
        process.wait()


def ask(port, prompt, max_tokens, seen, stop=None):
    """Streams a completion, and appends the time of each event to `seen`."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(300)!r}")
        while part := response.read1():
            if b"data:" in part:
                seen.append(time.monotonic())
            if stop and stop.is_set():
                return


def prompt_seconds(port, dice, tokens):
    """Time until the single token after a prompt of random ids."""
    asked, seen = time.monotonic(), []
    ask(port, [dice.randrange(100, 40000) for _ in range(tokens)], 1, seen)
    return seen[0] - asked


def measure(options, command, dice):
    with running(command) as port:
        prompt_seconds(port, dice, 64)
        alone = prompt_seconds(port, dice, options.prompt_tokens)
        stop, streams, threads = threading.Event(), [], []
        for i in range(options.streams):
            streams.append([])
            told = (port, f"A long story about {TOPICS[i % len(TOPICS)]}:", options.stream_tokens, streams[i], stop)
            threads.append(threading.Thread(target=ask, args=told, daemon=True))
            threads[i].start()
        while min(map(len, streams)) < 10:
            time.sleep(0.05)
        started, beside = time.monotonic(), []
        for _ in range(options.prompts):
            time.sleep(options.pause)
            beside.append(prompt_seconds(port, dice, options.prompt_tokens))
        ended = time.monotonic()
        if not all(thread.is_alive() for thread in threads):
            sys.exit("error: a stream ended before the last prompt: raise --stream-tokens")
        stop.set()
        for thread in threads:
            thread.join()
    windows = [[at for at in stream if started <= at <= ended] for stream in streams]
    gaps = sorted(b - a for times in windows for a, b in zip(times, times[1:]))
    at = lambda share: gaps[min(len(gaps) - 1, int(share * len(gaps)))]
    return {
        "gap p50, ms": 1e3 * at(0.5),
        "p99, ms": 1e3 * at(0.99),
        "max, ms": 1e3 * gaps[-1],
        "tokens/s of the streams": sum(map(len, windows)) / (ended - started),
        "prompt beside them, s": statistics.median(beside),
        "prompt alone, s": alone,
    }


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--stream-tokens", type=int, default=4000, help="more tokens than a stream can get per round")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--pause", type=float, default=2, help="seconds before each prompt")
    options = parser.parse_args()
    if not all("=" in server for server in options.servers):
        parser.error("each server must be given as NAME=COMMAND")
    options.servers = dict(server.split("=", 1) for server in options.servers)
    return options


def main():
    options = parse_arguments()
    rounds = {name: [] for name in options.servers}
    for round in range(options.rounds):
        for name, command in options.servers.items():
            # Each server gets the same prompts.
            figures = measure(options, [*shlex.split(command), "--model", options.model], random.Random(round))
            rounds[name].append(figures)
            told = ", ".join(f"{key} {value:.1f}" for key, value in figures.items())
            print(f"round {round + 1}, {name}: {told}", file=sys.stderr)
    figures = list(next(iter(rounds.values()))[0])
    print(f"| | {' | '.join(figures)} |\n| --- |{' ---: |' * len(figures)}")
    for name, measured in rounds.items():
        medians = (statistics.median(one[figure] for one in measured) for figure in figures)
        print(f"| {name} | {' | '.join(f'{median:.1f}' for median in medians)} |")


if __name__ == "__main__":
    main()
