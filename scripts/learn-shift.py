#!/usr/bin/env python3
"""Acceptance before and after a head has learned from one kind of requests. Uses only the standard library.

    foretoken --model TARGET --draft-model HEAD --learn DIR --learn-share 1 --port 8001
    learn-shift.py measure http://127.0.0.1:8001 PROMPTS.jsonl 40
    learn-shift.py train http://127.0.0.1:8001 PROMPTS.jsonl 300
    learn-shift.py wait http://127.0.0.1:8001 300
    learn-shift.py measure http://127.0.0.1:8001 PROMPTS.jsonl 40

PROMPTS.jsonl has one `prompt` a line, as `head_prompts.py prompts` writes them; CATEGORY (environment) takes those
of one category. `measure` sends the first prompts, each with a cache_salt of its own: nothing is learned from them, and tables
know no earlier answer. `train` sends those after the first 100, four at a time. `wait` returns when the learner has
learned from all that came, or after so many seconds. TEMPERATURE (0) and MAX_TOKENS (128) are those of all requests.
"""

import concurrent.futures
import hashlib
import json
import os
import random
import sys
import time
import urllib.request

MEASURED = 100


def prompts(path):
    category = os.environ.get("CATEGORY")
    lines = map(json.loads, open(path))
    return [line["prompt"] for line in lines if category in (None, line.get("category"))]


def ask(url, prompt, salt):
    body = {
        "model": os.environ.get("MODEL") or names(url)[0],
        "messages": [{"role": "user", "content": prompt}],
        "temperature": float(os.environ.get("TEMPERATURE", "0")),
        "max_tokens": int(os.environ.get("MAX_TOKENS", "128")),
        "seed": 1,
    }
    if salt:
        body["cache_salt"] = salt
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def names(url):
    with urllib.request.urlopen(url + "/v1/models") as reply:
        return [model["id"] for model in json.load(reply)["data"]]


def metrics(url):
    with urllib.request.urlopen(url + "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("foretoken:"):
            name, value = line.rsplit(" ", 1)
            source = name.partition('source="')[2].partition('"')[0]
            name = name.removeprefix("foretoken:").partition("{")[0]
            key = f"{name} {source}" if source else name
            found[key] = found.get(key, 0.0) + float(value)
    return found


def measure(url, texts):
    before, started, digest = metrics(url), time.time(), hashlib.sha256()
    salt = random.random()
    tokens = 0
    for number, text in enumerate(texts):
        reply = ask(url, text, f"{salt}-{number}")
        digest.update(reply["choices"][0]["message"]["content"].encode())
        tokens += reply["usage"]["completion_tokens"]
    seconds, after = time.time() - started, metrics(url)

    def rise(name):
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafted = rise("spec_decode_num_draft_tokens_by_source_total model")
    accepted = rise("spec_decode_num_accepted_tokens_by_source_total model")
    rounds = rise("spec_decode_num_drafts_total")
    every = rise("spec_decode_num_accepted_tokens_total")
    print(
        f"{len(texts)} requests, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} a second); "
        f"head: {accepted:.0f} of {drafted:.0f} draft tokens accepted ({accepted / max(drafted, 1):.3f}); "
        f"head and tables: {1 + every / max(rounds, 1):.3f} tokens a round with a draft, "
        f"{tokens / max(tokens - every, 1):.3f} a step; "
        f"texts {digest.hexdigest()[:12]}"
    )


def learner(url):
    found = metrics(url)
    return {name: value for name, value in found.items() if name.startswith("learn_")}


def wait(url, patience):
    started, last, same = time.time(), -1.0, 0
    while same < 5 and time.time() - started < patience:
        time.sleep(2)
        now = learner(url)["learn_seconds_total"]
        same = 0 if now > last else same + 1
        last = now
    print(json.dumps(learner(url)))


def main():
    what, url = sys.argv[1:3]
    if what == "wait":
        return wait(url, float(sys.argv[3]))
    texts, count = prompts(sys.argv[3]), int(sys.argv[4])
    if what == "measure":
        return measure(url, texts[: min(count, MEASURED)])
    texts = texts[MEASURED : MEASURED + count]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda text: ask(url, text, None), texts))
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    print(f"{len(replies)} requests, {tokens} tokens")


main()
