#!/usr/bin/env python3
"""Compares foretoken with llama.cpp's server on one GGUF file, standard library only.

Starts llama-server and foretoken in turn, never both at once, with equally many threads, and sends
both the same prompts at temperature 0, without speculation and without a prompt cache. Measures
decoding of one stream, without its prefill; time to first token of a long prompt; tokens per second
of many streams at once; with --llama-bench also what forwards of 4 and 8 rows cost llama.cpp. Prints
medians and ranges over the rounds. Needs an idle machine; benches/README.md has the rest.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

LLAMA, FORETOKEN = "llama.cpp", "foretoken"
PATIENCE_SECONDS = 600
VERIFY_ROWS = [1, 4, 8]
NOUNS = "bridge clock river baker teacher ship garden letter mountain window train captain".split()
VERBS = "found watched carried followed painted forgot opened crossed repaired described".split()


class Failed(Exception):
    """What the user has to know, in one line."""


class Server:
    """A running server, as its clients see it."""

    def __init__(self, name, port, extra):
        self.name, self.port, self.extra = name, port, extra

    @contextlib.contextmanager
    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()

    def tokenize(self, text):
        # One calls it content, the other prompt.
        with self.call("POST", "/tokenize", {"content": text, "prompt": text, "add_special_tokens": False}) as response:
            return json.loads(response.read())["tokens"]

    def ask(self, prompt, max_tokens):
        """Streams a greedy completion of token ids: when it was asked, first and last event, text."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.extra}
        asked, parts = time.monotonic(), []
        with self.call("POST", "/v1/completions", body) as response:
            # Parsed only when all is here: this process takes its time from the server's cores.
            while part := response.read1():
                parts.append((time.monotonic(), part))
        whole = b"".join(part for _, part in parts)
        if response.status != 200:
            raise Failed(f"status {response.status}: {whole[:300]!r}")
        text = checked_text(whole, len(prompt), max_tokens)
        # What comes before data is a comment that keeps the connection alive.
        first = next(seconds for seconds, part in parts if b"data:" in part)
        return {"asked": asked, "first": first, "last": parts[-1][0], "text": text}


def checked_text(stream, prompt_tokens, max_tokens):
    """The text, once it is certain that all was computed that the figures will count."""
    lines = [line[5:].strip() for line in stream.split(b"\n") if line.startswith(b"data:")]
    if not lines or lines.pop() != b"[DONE]":
        raise Failed(f"a stream ended without [DONE]: {stream[-300:]!r}")
    events = [json.loads(line) for line in lines]
    usage = next((event["usage"] for event in events if event.get("usage")), {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counted = [usage.get("prompt_tokens"), usage.get("completion_tokens"), cached]
    if counted != [prompt_tokens, max_tokens, 0]:
        raise Failed(f"{counted} tokens of prompt, completion and cache, not {[prompt_tokens, max_tokens, 0]}")
    return "".join(choice["text"] for event in events for choice in event["choices"])


@contextlib.contextmanager
def running(name, command, extra, threads):
    """Starts a server on a free port; it is gone when the block is left, in whatever way."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What is set for a user's own server (keys, log levels) must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "FORETOKEN_", "RUST_LOG"))}
    # A foretoken without --threads takes its number from here.
    environment["RAYON_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryFile() as log:
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            server = Server(name, port, extra)
            wait_until_ready(server, process)
            yield server
        except (Failed, OSError, http.client.HTTPException, ValueError, KeyError) as e:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().split("\n")[-1][:300]
            raise Failed(f"{name}: {e if isinstance(e, Failed) else repr(e)}. Its last line was: {said}") from e
        finally:
            process.kill()
            process.wait()


def wait_until_ready(server, process):
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError, http.client.HTTPException), server.call("GET", "/health") as response:
            if response.status == 200:
                return
        if process.poll() is not None:
            raise Failed(f"ended with {process.returncode} before it was ready")
        time.sleep(0.1)
    raise Failed(f"not ready after {PATIENCE_SECONDS} s")


def flags(program):
    """The long flags that its help lists."""
    done = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return set(re.findall(r"--[a-z][\w-]*", done.stdout + done.stderr))


def llama_server(options):
    threads, known = str(options.threads), flags(options.llama_server)
    context = max(1024, options.prefill_tokens + 16, options.prompt_tokens + options.tokens + 16)
    command = [options.llama_server, "--model", options.model, "--threads", threads, "--threads-batch", threads]
    command += ["--parallel", str(options.streams), "--ctx-size", str(context * options.streams)]
    # Or it copies the caches of idle slots aside, for prompts that might come again.
    command += ["--cache-ram", "0"] if "--cache-ram" in known else []
    command += ["--no-webui"] if "--no-webui" in known else []
    return LLAMA, command, {"cache_prompt": False}


def foretoken(options):
    seqs = str(max(64, options.streams))  # 64 is its default
    command = [options.foretoken, "--model", options.model, "--max-num-seqs", seqs]
    command += ["--threads", str(options.threads)] if "--threads" in flags(options.foretoken) else []
    return FORETOKEN, command, {"spec_length": 0}


def sentences(count, seed):
    """`count` words or more, in English: servers hold back a token that is half a character."""
    draw, said = random.Random(seed), []
    while len(said) < count:
        said += ["The", draw.choice(NOUNS), draw.choice(VERBS), "the", draw.choice(NOUNS) + "."]
    return " ".join(said)


def measure(server, ids, options):
    """All figures of one server in one round; each prompt is another piece of `ids`."""
    rest = iter(ids)
    take = lambda count: list(itertools.islice(rest, count))
    server.ask(take(options.prefill_tokens), 8)
    found = {"decode": [], "prefill": [], "streams": [], "texts": []}
    for _ in range(options.repeats):
        answer = server.ask(take(options.prompt_tokens), options.tokens)
        # The first token came with the prefill.
        found["decode"].append((options.tokens - 1) / (answer["last"] - answer["first"]))
        found["texts"].append(answer["text"])
        answer = server.ask(take(options.prefill_tokens), 1)
        found["prefill"].append((answer["first"] - answer["asked"]) * 1e3)
    answers = at_once(server, [take(options.prompt_tokens) for _ in range(options.streams)], options.tokens)
    seconds = max(a["last"] for a in answers) - min(a["asked"] for a in answers)
    found["streams"].append(options.streams * options.tokens / seconds)
    return found


def at_once(server, prompts, max_tokens):
    pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(lambda prompt: server.ask(prompt, max_tokens), prompts))
    finally:
        # After an interrupt the threads end when their server is killed, which must not wait for them.
        pool.shutdown(wait=False)


def rows_cost(options):
    """Milliseconds of llama.cpp's forwards of some rows of one sequence."""
    command = [options.llama_bench, "-m", options.model, "-t", str(options.threads), "-r", "10", "-o", "json"]
    command += ["-n", "0", "-p", ",".join(map(str, VERIFY_ROWS))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-300:]!r}")
    return {run["n_prompt"]: statistics.median(run["samples_ns"]) / 1e6 for run in json.loads(done.stdout)}


def one_round(number, options):
    found, ids = {}, None
    short, long = options.repeats + options.streams, options.repeats + 1  # the warm-up is a long one
    needed = options.prompt_tokens * short + options.prefill_tokens * long
    for name, command, extra in (llama_server(options), foretoken(options)):
        print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
        with running(name, command, extra, options.threads) as server:
            # Both get the ids that the first one made of the text, so lengths are exact.
            ids = ids or server.tokenize(sentences(needed, seed=number))
            found[name] = measure(server, ids, options)
    if options.llama_bench:
        found["rows_ms"] = rows_cost(options)
    return found


def cell(values, digits=2):
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


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
    yield "(median): rounding parts them at some point; next to nothing would mean two different models."
    if options.llama_bench:
        yield "llama-bench computes logits for the last row alone, so a verification costs llama.cpp more than these"
        yield "forwards. What foretoken's costs is measured by a bench of its own, not here."


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--llama-server", required=True, help="llama.cpp's llama-server")
    parser.add_argument("--llama-bench", help="llama.cpp's llama-bench, for the cost of a verification")
    parser.add_argument("--foretoken", default="target/release/foretoken", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write all single figures there")
    count = lambda flag, default, text: parser.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{text} (default {default})"
    )
    count("--threads", 2, "of each server")
    count("--rounds", 5, "each starts both servers")
    count("--repeats", 3, "single requests of a kind in a round; their median is the round's figure")
    count("--streams", 16, "connections at once")
    count("--tokens", 128, "to generate, at least 2: the first belongs to the prefill")
    count("--prompt-tokens", 32, "of the prompts before those")
    count("--prefill-tokens", 256, "of the long prompts")
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
    # As an exception, so that the running server is killed on the way out.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if os.getloadavg()[0] > 0.5:
        print("note: the machine is busy; llama.cpp suffers most, since its threads spin", file=sys.stderr)
    try:
        report([one_round(n + 1, options) for n in range(options.rounds)], options)
    except (Failed, OSError) as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
