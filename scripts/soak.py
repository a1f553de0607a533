#!/usr/bin/env python3
"""Soak of a running server: a long mixed load in which every text is compared with its solo text.

Each task is answered alone first. Then many clients ask for the tasks again and again at once: whole,
streamed, read slowly, dropped in the middle, in choices, with wrong fields among them. A text must equal
its solo text; what was read of a dropped stream must be how the solo text begins. At the end nothing may
run, wait or hold a block. The last line is the summary. The exit code is 1 if anything differs, if the
server answers with an unexpected status or dies, or if too little happened for the run to mean anything.

Uses only the standard library.
"""

import argparse
import collections
import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.parse

TOPICS = ["the sea", "a bridge", "prime numbers", "bread", "the moon", "an old clock", "rain", "Zürich"]
SHAPES = [
    "Write a sentence about {}.",
    "Notes on {0}: " + "they go on and on. " * 12 + "In short, {0}",
    "{0}, {0}, {0}, {0}, {0},",
    "One day {} was gone. Nobody knew",
]
# Answered 400, and nothing else happens.
WRONG = [
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": "a", "n": 0},
    {"prompt": [[10**8]]},
    {"prompt": "a", "n": 3, "best_of": 2},
    {"prompt": "a", "allowed_token_ids": []},
    {"prompt": "a", "guided_regex": "("},
    {"prompt": "a" * 400_000},
]
# The server is full, and says so.
BUSY = (429, 503)


def tasks(count, rng):
    """Requests whose text depends on nothing but themselves. Half of them are greedy."""
    for i in range(count):
        body = {
            "prompt": SHAPES[i % len(SHAPES)].format(TOPICS[i // len(SHAPES) % len(TOPICS)] + f" {i}"),
            "max_tokens": rng.choice([1, 8, 24, 64, 120]),
            "temperature": 0 if i % 2 == 0 else rng.choice([0.6, 1.0, 1.3]),
        }
        if body["temperature"]:
            body["seed"] = i
            body["top_p"] = rng.choice([1, 0.9])
            body["min_p"] = rng.choice([0, 0.05])
        extra = [
            {},
            {"bad_words": ["the", "in", "a"], "return_token_ids": True},
            {"repetition_penalty": 1.2},
            {"stop": ["and", "\n\n"]},
            {"logit_bias": {"5": 3, "11": -100}},
            {"guided_regex": "[a-z ]{10,40}\\."},
            {"spec_length": 2},
        ]
        yield {**body, **extra[i % len(extra)]}


class Soak:
    def __init__(self, options):
        self.options = options
        self.counts = collections.Counter()
        self.failures = []
        self.lock = threading.Lock()
        self.end = 0

    def count(self, what, by=1):
        with self.lock:
            self.counts[what] += by

    def fail(self, what):
        with self.lock:
            self.failures.append(what)
        print(f"soak: {what}", file=sys.stderr, flush=True)

    def connect(self):
        url = self.options.url
        return http.client.HTTPConnection(url.hostname, url.port, timeout=300)

    def open(self, path, body):
        """A connection, and the answer's head."""
        connection = self.connect()
        headers = {"Content-Type": "application/json"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        return connection, connection.getresponse()

    def ask(self, path, body=None):
        connection, response = self.open(path, body)
        try:
            return response.status, response.read()
        finally:
            connection.close()

    def texts(self, body):
        """The texts of all choices; None if the server is full."""
        status, answer = self.ask("/v1/completions", body)
        if status in BUSY:
            return None
        if status != 200:
            self.fail(f"status {status} for {body}: {answer[:300]}")
            return None
        return [choice["text"] for choice in json.loads(answer)["choices"]]

    def stream(self, body, pause, events):
        """The text of a stream, read with pauses, of at most `events` events; None if the server is full."""
        connection, response = self.open("/v1/completions", {**body, "stream": True})
        try:
            if response.status in BUSY:
                return None
            if response.status != 200:
                self.fail(f"status {response.status} for a stream of {body}: {response.read()[:300]}")
                return None
            text, done = "", False
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    break
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.fail(f"a stream of {body} failed: {chunk}")
                    return None
                text += chunk["choices"][0]["text"]
                events -= 1
                if events == 0:
                    return text
                time.sleep(pause)
            if not done:
                self.fail(f"a stream of {body} ended without [DONE]")
                return None
            return text
        finally:
            connection.close()

    def same(self, body, texts, solo, what):
        """Compares whole texts, and counts them by kind."""
        for text in texts:
            kind = "greedy" if body["temperature"] == 0 else "seeded"
            if text == solo:
                self.count(f"{kind} texts equal")
            else:
                self.count("texts different")
                self.fail(f"{what}: {body} gave {text!r}, alone {solo!r}")

    def client(self, number):
        rng = random.Random(self.options.seed * 1000 + number)
        ways = [self.whole, self.streamed, self.slow, self.dropped, self.choices, self.wrong, self.other]
        weights = [6, 6, 1, 3, 2, 2, 1]
        while time.monotonic() < self.end and len(self.failures) < 20:
            body, solo = rng.choice(self.known)
            try:
                rng.choices(ways, weights)[0](rng, body, solo)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
                self.fail(f"{type(e).__name__}: {e} for {body}")
                time.sleep(1)

    def whole(self, rng, body, solo):
        body = {**body, **rng.choice([{}, {}, {"spec_length": 0}, {"spec_length": 3}, {"logprobs": 3}])}
        self.compare(body, self.texts(body), solo, "whole")

    def streamed(self, rng, body, solo):
        text = self.stream(body, 0, -1)
        self.compare(body, None if text is None else [text], solo, "streamed")

    def slow(self, rng, body, solo):
        text = self.stream(body, 0.2, -1)
        self.compare(body, None if text is None else [text], solo, "read slowly")
        self.count("read slowly", text is not None)

    def compare(self, body, texts, solo, what):
        if texts is None:
            self.count("refused as full")
            time.sleep(0.05)
        else:
            self.same(body, texts, solo, what)

    def dropped(self, rng, body, solo):
        text = self.stream(body, 0, rng.randint(1, 12))
        if text is None:
            return self.count("refused as full")
        self.count("streams dropped")
        if not solo.startswith(text):
            self.fail(f"dropped: {body} began with {text!r}, alone {solo!r}")

    def choices(self, rng, body, solo):
        """Greedy choices are equal; the first of sampled ones has the request's own seed."""
        texts = self.texts({**body, "n": rng.choice([2, 4, 16])})
        if texts is not None and body["temperature"]:
            texts = texts[:1]
        self.compare(body, texts, solo, "choices")

    def wrong(self, rng, body, solo):
        body = rng.choice(WRONG)
        status, answer = self.ask("/v1/completions", body)
        if status in BUSY:
            return self.count("refused as full")
        if status not in (400, 413) or "message" not in json.loads(answer).get("error", {}):
            self.fail(f"status {status} for {str(body)[:100]}: {answer[:300]}")
        self.count("wrong requests refused")

    def other(self, rng, body, solo):
        path, body = rng.choice([
            ("/metrics", None),
            ("/v1/models", None),
            ("/tokenize", {"prompt": body["prompt"]}),
            ("/reset_prefix_cache", {}),
        ])
        status, answer = self.ask(path, body)
        if status != 200 and status not in BUSY:
            self.fail(f"status {status} for {path}: {answer[:300]}")
        self.count("other requests")

    def metric(self, name):
        """The sum of a metric over its labels; None if the server does not have it."""
        _, text = self.ask("/metrics")
        lines = (line for line in text.decode().splitlines() if line.startswith(f"foretoken:{name}"))
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line[len("foretoken:" + name)] in "{ "]
        return sum(values) if values else None

    def memory(self):
        """Resident memory of the server in MiB, if it runs here and its process is known."""
        try:
            with open(f"/proc/{self.options.pid}/status") as status:
                lines = [line for line in status if line.startswith("VmRSS")]
            return int(lines[0].split()[1]) // 1024
        except (OSError, IndexError):
            return None

    def descriptors(self):
        """Open files and connections of the server, as memory()."""
        try:
            return len(os.listdir(f"/proc/{self.options.pid}/fd"))
        except OSError:
            return None

    def solo(self):
        self.known = []
        for body in tasks(self.options.tasks, random.Random(self.options.seed)):
            texts = self.texts(body)
            if texts is None:
                sys.exit("soak: a request alone was not answered")
            self.known.append((body, texts[0]))

    def checked(self):
        """Whether a text that differs would be seen: a wrong solo text must be reported."""
        quiet = Soak(self.options)
        quiet.fail = quiet.failures.append
        body, solo = self.known[0]
        quiet.compare(body, quiet.texts(body), solo + "x", "check")
        return len(quiet.failures) == 1

    def idle(self):
        """Waits until nothing runs or waits; what is left otherwise."""
        for _ in range(600):
            left = {name: self.metric(name) for name in ("num_requests_running", "num_requests_waiting")}
            if not any(left.values()):
                break
            time.sleep(0.1)
        names = ("kv_cache_usage_perc", "draft_kv_cache_usage_perc")
        left.update({name: self.metric(name) or 0 for name in names})
        return {name: value for name, value in left.items() if value}

    def run(self):
        self.solo()
        if not self.checked():
            self.fail("a wrong text was not noticed: this script is broken")
        before, preempted = self.memory(), self.metric("num_preemptions_total")
        opened = self.descriptors()
        self.end = time.monotonic() + 60 * self.options.minutes
        clients = [threading.Thread(target=self.client, args=[i]) for i in range(self.options.clients)]
        started = time.monotonic()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        seconds = time.monotonic() - started
        left = self.idle()
        if left:
            self.fail(f"left over: {left}")
        counts = self.counts
        counts["preemptions"] = int(self.metric("num_preemptions_total") - preempted)
        after, still_open = self.memory(), self.descriptors()
        # This script's own connections may still be closing.
        if opened and still_open > opened + self.options.clients:
            self.fail(f"{opened} descriptors before, {still_open} after")
        for what in ("greedy texts equal", "seeded texts equal", "streams dropped", "wrong requests refused"):
            if counts[what] < self.options.at_least:
                self.fail(f"only {counts[what]} {what}: the run means nothing")
        if self.options.need_preemptions and not counts["preemptions"]:
            self.fail("nothing was preempted: the pool is too large")
        counts.setdefault("texts different", 0)
        parts = [f"{count} {what}" for what, count in sorted(counts.items())]
        memory = f", {before} to {after} MiB, {opened} to {still_open} descriptors" if before else ""
        verdict = "FAILED" if self.failures else "ok"
        print(f"soak {verdict}: {seconds:.0f} s, {self.options.clients} clients, {', '.join(parts)}{memory}, "
              f"{'pools empty' if not left else left}, {len(self.failures)} failures")
        return 1 if self.failures else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", type=urllib.parse.urlparse)
    parser.add_argument("--api-key")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pid", type=int, default=0, help="the server's process, to report its memory")
    parser.add_argument("--at-least", type=int, default=20, help="fewer of anything is a failure")
    parser.add_argument("--need-preemptions", action="store_true", help="no preemption is a failure")
    sys.exit(Soak(parser.parse_args()).run())


if __name__ == "__main__":
    main()
