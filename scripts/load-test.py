#!/usr/bin/env python3
"""Load test of a running server. Uses only the standard library.

Sends every prompt alone first, then all of them at once over many streams, at temperature 0, and checks
that each text is the same: a request must not depend on others. Prints time to first token, time
between events and tokens per second. Exits with 1 if a text differs or a stream fails.
"""

import argparse
import http.client
import ipaddress
import json
import os
import sys
import threading
import time
import urllib.parse

TOPICS = ["the sea", "a bridge", "prime numbers", "bread", "the moon", "an old clock", "rain"]


def prompts(count):
    """Short, long and repetitive prompts in turn; no two are equal."""
    for i in range(count):
        topic = f"{TOPICS[i % len(TOPICS)]} (number {i})"
        yield [
            f"Write a sentence about {topic}.",
            f"Here are notes on {topic}. " + "They go on and on, as notes do. " * 20 + "In short:",
            f"{topic}, {topic}, {topic}, {topic}, {topic},",
        ][i % 3]


class Result:
    """One stream: its text, and the times of its events, in seconds from the start."""

    def __init__(self):
        self.text = ""
        self.times = []
        self.tokens = 0
        self.error = None


def ask(options, prompt):
    result = Result()
    try:
        stream(options, prompt, result)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
        result.error = f"{type(e).__name__}: {e}"
    return result


def connect(options):
    url = options.url
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname, url.port, timeout=options.timeout)


def headers(options):
    key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return {"Content-Type": "application/json", **key}


def stream(options, prompt, result):
    body = {
        "model": options.model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = connect(options)
    started = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), headers(options))
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"status {response.status}: {response.read(500)!r}")
    done = False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"])
        if event.get("usage"):
            result.tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            if choice["text"]:
                result.text += choice["text"]
                result.times.append(time.monotonic() - started)
    connection.close()
    if not done:
        raise ValueError("the stream ended without [DONE]")


def ask_all(options, todo):
    """Sends all prompts over `options.streams` concurrent connections; returns results in order."""
    results = [None] * len(todo)
    left = iter(range(len(todo)))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                i = next(left, None)
            if i is None:
                return
            results[i] = ask(options, todo[i])

    threads = [threading.Thread(target=work) for _ in range(options.streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def percentiles(name, values):
    values = sorted(values)
    if not values:
        print(f"{name:28} nothing measured")
        return
    at = [values[min(len(values) - 1, int(p / 100 * len(values)))] for p in (50, 90, 99)]
    print(f"{name:28} p50 {at[0] * 1e3:9.1f} ms   p90 {at[1] * 1e3:9.1f} ms   p99 {at[2] * 1e3:9.1f} ms")


def is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", type=urllib.parse.urlsplit)
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--streams", type=int, default=16, help="concurrent connections")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=600, help="seconds without a byte after which a stream fails")
    parser.add_argument("--api-key", default=os.environ.get("FORETOKEN_API_KEY"))
    parser.add_argument("--allow-remote", action="store_true", help="allow a server that is not on this machine")
    options = parser.parse_args()
    if not options.allow_remote and not is_loopback(options.url.hostname or ""):
        parser.error(f"{options.url.hostname} is not this machine: add --allow-remote if you may load-test it")
    return options


def first_model(options):
    connection = connect(options)
    connection.request("GET", "/v1/models", headers=headers(options))
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise OSError(f"/v1/models: status {response.status}: {body[:500]!r}")
    return json.loads(body)["data"][0]["id"]


def report(results, seconds):
    percentiles("time to first token", [r.times[0] for r in results if r.times])
    gaps = [b - a for r in results for a, b in zip(r.times, r.times[1:])]
    percentiles("between events", gaps)
    # The time per token, because an event may contain several tokens.
    each = [(r.times[-1] - r.times[0]) / (r.tokens - 1) for r in results if r.times and r.tokens > 1]
    percentiles("time per token after the first", each)
    tokens = sum(r.tokens for r in results)
    print(f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s")


def main():
    options = parse_arguments()
    try:
        options.model = options.model or first_model(options)
    except OSError as e:
        sys.exit(f"error: no server answers at {options.url.geturl()}: {e}")
    todo = list(prompts(options.requests))

    print(f"{len(todo)} prompts, one at a time")
    started = time.monotonic()
    alone = [ask(options, prompt) for prompt in todo]
    report(alone, time.monotonic() - started)

    print(f"\nthe same over {options.streams} streams")
    started = time.monotonic()
    together = ask_all(options, todo)
    report(together, time.monotonic() - started)

    wrong = 0
    for prompt, a, b in zip(todo, alone, together):
        if a.error or b.error or a.text != b.text:
            wrong += 1
            print(f"\nWRONG {prompt[:60]!r}\n  alone    {a.error or a.text!r}\n  together {b.error or b.text!r}")
    print(f"\n{len(todo) - wrong} of {len(todo)} texts are the same as alone")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
