#!/usr/bin/env python3
"""Load test of running servers. Uses only the standard library.

Sends every conversation alone first, then all of them over many streams or at random times, at temperature 0, and
checks that each text is the same: a request must not depend on others. With several --url, conversation i goes to
number i modulo their count, so that they share the load and a conversation stays where its cache is. --turns makes
conversations of several turns, in which a model reads its own answers again.

Prints time to first token, time per token, tokens per second, accepted drafts and cached prompt tokens. Exits with 1 if
a text differs or a stream fails.
"""

import argparse
import http.client
import ipaddress
import json
import os
import random
import re
import sys
import threading
import time
import urllib.parse

TOPICS = ["the sea", "a bridge", "prime numbers", "bread", "the moon", "an old clock", "rain"]
FOLLOW_UPS = ["Go on.", "Say that in other words.", "And what happened then?", "Why?", "Give an example."]
SAMPLE = re.compile(r"^(foretoken:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def prompts(count):
    """Short, long and repetitive prompts in turn; no two are equal."""
    for i in range(count):
        topic = f"{TOPICS[i % len(TOPICS)]} (number {i})"
        yield [
            f"Write a sentence about {topic}.",
            f"Here are notes on {topic}. " + "They go on and on, as notes do. " * 20 + "In short:",
            f"{topic}, {topic}, {topic}, {topic}, {topic},",
        ][i % 3]


def prompts_of(path, count):
    """The first prompts of a file of JSON lines with "prompt"."""
    with open(path, encoding="utf-8") as lines:
        found = [json.loads(line)["prompt"] for line in lines if line.strip()]
    if len(found) < count:
        sys.exit(f"error: {path} has {len(found)} prompts, --requests asks for {count}")
    return found[:count]


class Result:
    """One turn: its text, the times of its events in seconds from the start, and its usage."""

    def __init__(self):
        self.text = ""
        self.times = []
        self.seconds = 0.0
        self.usage = {}
        self.error = None

    @property
    def tokens(self):
        return self.usage.get("completion_tokens", 0)

    @property
    def time_per_token(self):
        """Seconds a token after the first; an event may have several tokens."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.times and self.tokens > 1 else None


def converse(options, index, prompt):
    """All turns of a conversation, one after the other; ends at the first that fails."""
    url = options.url[index % len(options.url)]
    messages, results = [], []
    for turn in range(options.turns):
        messages.append({"role": "user", "content": prompt if turn == 0 else FOLLOW_UPS[(index + turn) % 5]})
        result = Result()
        results.append(result)
        started = time.monotonic()
        try:
            stream(options, url, messages, started, result)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
            result.error = f"{type(e).__name__}: {e}"
            break
        finally:
            result.seconds = time.monotonic() - started
        messages.append({"role": "assistant", "content": result.text})
    return results


def connect(options, url):
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname, url.port, timeout=options.timeout)


def headers(options):
    key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    return {"Content-Type": "application/json", **key}


def stream(options, url, messages, started, result):
    body = {
        "model": options.model,
        "temperature": 0,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.chat:
        path, content = "/v1/chat/completions", {"messages": messages}
    else:
        path, content = "/v1/completions", {"prompt": messages[0]["content"]}
    if options.ignore_eos:
        body["ignore_eos"] = True
    connection = connect(options, url)
    try:
        connection.request("POST", url.path.rstrip("/") + path, json.dumps({**body, **content}), headers(options))
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(500)!r}")
        read_events(response, started, result)
    finally:
        connection.close()


def read_events(response, started, result):
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"])
        result.usage = event.get("usage") or result.usage
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if text:
                result.text += text
                result.times.append(time.monotonic() - started)
    raise ValueError("the stream ended without [DONE]")


def converse_closed(options, todo):
    """All conversations over `options.streams` at a time."""
    results = [None] * len(todo)
    left = iter(range(len(todo)))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                i = next(left, None)
            if i is None:
                return
            results[i] = converse(options, i, todo[i])

    run_all([threading.Thread(target=work) for _ in range(options.streams)])
    return results


def converse_poisson(options, todo):
    """Conversations begin at random times, `options.rate` a second on average, however long they take."""
    results = [None] * len(todo)
    random_times = random.Random(options.seed)
    threads, at, started = [], 0.0, time.monotonic()

    def work(i, at):
        time.sleep(max(0.0, started + at - time.monotonic()))
        results[i] = converse(options, i, todo[i])

    for i in range(len(todo)):
        at += random_times.expovariate(options.rate)
        threads.append(threading.Thread(target=work, args=(i, at)))
    run_all(threads)
    return results


def run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def percentiles(values):
    """p50, p95 and p99 of some seconds, in milliseconds."""
    values = sorted(values)
    at = [values[min(len(values) - 1, int(p / 100 * len(values)))] * 1e3 for p in (50, 95, 99)] if values else []
    return dict(zip(("p50", "p95", "p99"), (round(v, 3) for v in at)))


def counters(options):
    """The sum of each counter of ours over all servers; none where there are no such metrics."""
    sums = {}
    for url in options.metrics_url or options.url:
        connection = connect(options, url)
        try:
            connection.request("GET", url.path.rstrip("/") + "/metrics")
            response = connection.getresponse()
            text = response.read().decode() if response.status == 200 else ""
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
        for name, value in SAMPLE.findall(text):
            if name.endswith("_total"):
                sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def summary(results, seconds, before, after):
    """What a run showed, as one object."""
    turns = [turn for conversation in results for turn in conversation]
    usage = [turn.usage for turn in turns]
    spec = [u.get("speculative_decoding") or {} for u in usage]
    gaps = [b - a for turn in turns for a, b in zip(turn.times, turn.times[1:])]
    prompt = sum(u.get("prompt_tokens", 0) for u in usage)
    cached = sum((u.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for u in usage)
    drafted = sum(s.get("num_draft_tokens", 0) for s in spec)
    tokens = sum(turn.tokens for turn in turns)
    found = {name.removeprefix("foretoken:"): after[name] - before.get(name, 0.0) for name in after}
    return {
        "conversations": len(results),
        "turns": len(turns),
        "failed": sum(turn.error is not None for turn in turns),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2),
        "ttft_ms": percentiles([turn.times[0] for turn in turns if turn.times]),
        "itl_ms": percentiles([turn.time_per_token for turn in turns if turn.time_per_token is not None]),
        "event_gap_ms": percentiles(gaps),
        "request_ms": percentiles([turn.seconds for turn in turns]),
        "prompt_tokens": prompt,
        "cached_share": round(cached / prompt, 4) if prompt else None,
        "acceptance": round(sum(s.get("num_accepted_tokens", 0) for s in spec) / drafted, 4) if drafted else None,
        "prefix_hit_rate": share(found, "prefix_cache_hits_total", "prefix_cache_queries_total"),
    }


def share(found, part, whole):
    return round(found.get(part, 0.0) / found[whole], 4) if found.get(whole) else None


def report(name, figures):
    def line(label, key):
        at = figures[key]
        values = "   ".join(f"{p} {v:9.1f} ms" for p, v in at.items()) if at else "nothing measured"
        print(f"{label:32} {values}")

    print(f"\n{name}")
    line("time to first token", "ttft_ms")
    line("time per token after the first", "itl_ms")
    line("between events", "event_gap_ms")
    line("whole request", "request_ms")
    print(f"{figures['tokens']} tokens in {figures['seconds']:.1f} s: {figures['tokens_per_second']:.1f} tokens/s", end="")
    for label, key in (("accepted", "acceptance"), ("cached", "cached_share"), ("hits by /metrics", "prefix_hit_rate")):
        print(f"; {label} {figures[key]:.3f}" if figures[key] is not None else "", end="")
    print()


def is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    url = {"type": urllib.parse.urlsplit, "action": "append", "metavar": "URL"}
    parser.add_argument("--url", **url, help="a server, or a gateway; several share the conversations")
    parser.add_argument("--metrics-url", **url, help="where /metrics is, if not there; for example the servers of a gateway")
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--streams", type=int, default=16, help="conversations at a time")
    parser.add_argument("--rate", type=float, help="instead: conversations a second, at random times (Poisson)")
    parser.add_argument("--seed", type=int, default=0, help="of these times")
    parser.add_argument("--requests", type=int, default=48, help="conversations")
    parser.add_argument("--turns", type=int, default=1, help="turns of each; more than one makes chats of them")
    parser.add_argument("--chat", action="store_true", help="ask for chat completions, not completions")
    parser.add_argument("--prompts", help='JSON lines with "prompt", instead of the prompts of this script')
    parser.add_argument("--max-tokens", type=int, default=32, help="of each turn")
    parser.add_argument("--ignore-eos", action="store_true", help="every turn has --max-tokens tokens")
    parser.add_argument("--no-alone", action="store_true", help="measure only: no text is compared with its text alone")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--timeout", type=float, default=600, help="seconds without a byte after which a stream fails")
    parser.add_argument("--api-key", default=os.environ.get("FORETOKEN_API_KEY"))
    parser.add_argument("--allow-remote", action="store_true", help="allow a server that is not on this machine")
    options = parser.parse_args()
    options.url = options.url or [urllib.parse.urlsplit("http://127.0.0.1:8000")]
    options.chat = options.chat or options.turns > 1
    for url in options.url:
        if not options.allow_remote and not is_loopback(url.hostname or ""):
            parser.error(f"{url.hostname} is not this machine: add --allow-remote if you may load-test it")
    if options.turns < 1 or options.streams < 1 or options.requests < 1 or (options.rate or 1) <= 0:
        parser.error("--turns, --streams, --requests and --rate must be positive")
    return options


def first_model(options):
    connection = connect(options, options.url[0])
    connection.request("GET", options.url[0].path.rstrip("/") + "/v1/models", headers=headers(options))
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise OSError(f"/v1/models: status {response.status}: {body[:500]!r}")
    return json.loads(body)["data"][0]["id"]


def measure(options, name, run):
    before = counters(options)
    started = time.monotonic()
    results = run()
    figures = summary(results, time.monotonic() - started, before, counters(options))
    report(name, figures)
    return results, figures


def main():
    options = parse_arguments()
    try:
        options.model = options.model or first_model(options)
    except OSError as e:
        sys.exit(f"error: no server answers at {options.url[0].geturl()}: {e}")
    todo = prompts_of(options.prompts, options.requests) if options.prompts else list(prompts(options.requests))
    turns = f" of {options.turns} turns" if options.turns > 1 else ""
    figures = {}
    if not options.no_alone:
        alone, figures["alone"] = measure(
            options,
            f"{len(todo)} conversations{turns}, one at a time",
            lambda: [converse(options, i, prompt) for i, prompt in enumerate(todo)],
        )
    if options.rate:
        how, run = f"{options.rate} a second, at random times", lambda: converse_poisson(options, todo)
    else:
        how, run = f"{options.streams} at a time", lambda: converse_closed(options, todo)
    together, figures["together"] = measure(options, f"{len(todo)} conversations{turns}, {how}", run)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)

    wrong = 0
    for i, prompt in enumerate(todo):
        a = together[i] if options.no_alone else alone[i]
        texts, errors = [[r.text for r in run] for run in (a, together[i])], [r.error for r in a + together[i] if r.error]
        if errors or texts[0] != texts[1]:
            wrong += 1
            print(f"\nWRONG {prompt[:60]!r}\n  alone    {texts[0]!r}\n  together {texts[1]!r}\n  errors   {errors}")
    if options.no_alone:
        print(f"\n{len(todo) - wrong} of {len(todo)} conversations ended well")
    else:
        print(f"\n{len(todo) - wrong} of {len(todo)} texts are the same as alone")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
