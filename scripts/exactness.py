#!/usr/bin/env python3
"""Asks a running server whether its texts are exact. Uses only the standard library.

It needs no more than OpenAI's /v1/completions, so any server can be asked. It counts the texts that differ
  - from the text of the same request alone: repeated, batched, after hits of a prefix cache, with chunked prefill;
  - with and without drafts: --plain has the fields with which a request turns drafts off, or further URLs have the same
    model, served in another way;
greedy, and sampled with a seed. Then it compares the first and the second tokens of many samples with the server's own
log-probabilities (chi-square). A wrong rule, which writes the likeliest token 63 times where 60 is right, is simulated
with as many samples and must be rejected: otherwise there were too few of them, which is a failure.

    scripts/exactness.py http://127.0.0.1:8000 --plain '{"spec_length": 0}'    # foretoken
    scripts/exactness.py http://127.0.0.1:8000 http://127.0.0.1:8001           # one server with drafts, one without

Prints tables in Markdown. Exits with 0 if nothing differs and no sample is rejected, with 1 if something is or could not be
finished, and with 2 if the server cannot be asked. What the server does not offer is listed, and is no failure.
"""

import argparse
import collections
import concurrent.futures
import http.client
import itertools
import json
import math
import os
import random
import sys
import threading
import time
import urllib.parse

from chi_square import categories, chi_square_p, statistic, wrong_rule

TOPICS = ["the sea", "a bridge", "prime numbers", "bread", "the moon", "an old clock", "rain", "Zürich"]
WORDS = "river clock the baker found a garden letter beside old mountains while seven trains watched their captain".split()
SHAPES = [
    "Write a sentence about {}.",
    "{0}, {0}, {0}, {0}, {0},",
    "Notes on {0}: " + "they go on and on, as notes about {0} do. " * 12 + "In short, {0}",
    "One day {} was gone. Nobody knew",
    "def count(items):\n    # {}\n    total = 0\n    for item in items:\n        total",
]
# Prompts after which a model hesitates between few tokens.
HESITATIONS = [
    "The weather today is", "The capital of France is", "She opened the door and", "Once upon a time, there was a",
    "The best way to learn is", "In the morning I drink", "He looked at the sky and", "The answer to the question is",
    "My favourite colour is", "The two most important things are", "The cat sat on the", "It was a dark and",
]  # fmt: skip
SAMPLE_TOKENS = 3  # one more than is looked at, so that the second can be a draft
LEVEL = 1e-3  # p below which samples are rejected
CONTROLS = 40  # samples of the wrong rule
BUSY = (429, 503)
REPEATED, BATCHED, CACHED, CHUNKED = "repeated", "batched", "prefix-cache hit", "chunked prefill"


class Unaskable(Exception):
    """The server cannot be asked."""


class Refused(Exception):
    """The server answers 4xx."""


class Spent(Exception):
    """--minutes or --tokens are used up."""


def compared(reference, text, tokens):
    """How many of the reference's tokens can be compared, up to the first that differs, and whether one does. What
    follows a difference has another context. Servers give the number of tokens, not where each ends, so the place is that
    of the character.

    >>> compared("abcd", "abcd", 2), compared("abcdefgh", "abcXefgh", 4), compared("abcd", "ab", 4), compared("", "", 1)
    ((2, 0), (2, 1), (3, 1), (1, 0))
    """
    if reference == text:
        return tokens, 0
    same = len(os.path.commonprefix([reference, text]))
    return min(tokens, tokens * same // max(1, len(reference)) + 1), 1


class Answer:
    def __init__(self, answer):
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        self.text = choice["text"]
        self.tokens = usage.get("completion_tokens") or max(1, len(self.text) // 4)
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        self.positions = positions(choice.get("logprobs") or {})
        # Where servers count accepted drafts: foretoken in the usage, llama.cpp in the timings.
        self.accepted = (usage.get("speculative_decoding") or {}).get("num_accepted_tokens")
        if answer.get("timings"):
            self.accepted = answer["timings"].get("draft_n_accepted", 0)


def positions(logprobs):
    """A token and the log-probabilities of the likeliest for each position, in the form of completions or of chats."""
    if logprobs.get("content"):
        tops = lambda entry: {top["token"]: top["logprob"] for top in entry.get("top_logprobs") or []}
        return [(entry["token"], tops(entry)) for entry in logprobs["content"]]
    tokens = logprobs.get("tokens") or []
    return list(zip(tokens, logprobs.get("top_logprobs") or [{}] * len(tokens)))


class Budget:
    def __init__(self, options):
        self.started, self.seconds, self.tokens = time.monotonic(), options.minutes * 60, options.tokens
        self.spent, self.requests, self.lock, self.share = 0, 0, threading.Lock(), 1.0

    def left(self):
        """Whether anything is left of the share that may be used by now."""
        return time.monotonic() - self.started < self.share * self.seconds and self.spent < self.share * self.tokens

    def spend(self, tokens):
        with self.lock:
            self.spent, self.requests = self.spent + tokens, self.requests + 1


class Server:
    """A server as its clients see it; each thread keeps its connection."""

    def __init__(self, url, options, budget):
        self.url, self.options, self.budget, self.local = url, options, budget, threading.local()
        self.accepted, self.streams = collections.Counter(), options.streams
        self.model = options.model or json.loads(self.call("GET", "/v1/models"))["data"][0]["id"]

    def call(self, method, path, body=None):
        headers = {"Content-Type": "application/json"}
        if self.options.api_key:
            headers["Authorization"] = f"Bearer {self.options.api_key}"
        kind = http.client.HTTPSConnection if self.url.scheme == "https" else http.client.HTTPConnection
        for attempt in itertools.count():
            connection = getattr(self.local, "connection", None)
            self.local.connection = connection = connection or kind(self.url.netloc, timeout=600)
            try:
                connection.request(method, self.url.path.rstrip("/") + path, body and json.dumps(body), headers)
                response = connection.getresponse()
                data = response.read()
            except (OSError, http.client.HTTPException) as e:
                connection.close()
                self.local.connection = None
                # A kept connection may be closed by the server; a new one may not.
                if attempt > 2:
                    raise Unaskable(f"{self.url.geturl()}: {e!r}") from e
                continue
            if response.status in BUSY and self.budget.left():
                time.sleep(0.1)
            elif 400 <= response.status < 500:
                raise Refused(f"status {response.status}: {data[:300]!r}")
            elif response.status != 200:
                raise Unaskable(f"{self.url.geturl()}{path}: status {response.status}: {data[:300]!r}")
            else:
                return data

    def ask(self, body):
        if not self.budget.left():
            raise Spent
        body = {"model": self.model, **self.options.fields, **body}
        try:
            answer = Answer(json.loads(self.call("POST", "/v1/completions", body)))
        except (ValueError, KeyError, IndexError) as e:
            raise Unaskable(f"{self.url.geturl()}: not an answer: {e!r}") from e
        self.budget.spend(answer.tokens)
        return answer

    def alone(self, bodies):
        return [self.ask(body) for body in bodies]

    def together(self, bodies):
        """Many at a time; the answers in the order of the bodies."""
        with concurrent.futures.ThreadPoolExecutor(self.streams) as pool:
            asked = [pool.submit(self.ask, body) for body in bodies]
            try:
                return [one.result() for one in asked]
            finally:
                pool.shutdown(cancel_futures=True)


class Check:
    """A row of the table of texts."""

    def __init__(self):
        self.texts = self.tokens = self.divergences = 0
        self.cached = self.accepted = None
        self.example = None

    def add(self, bodies, references, answers):
        for body, reference, answer in zip(bodies, references, answers):
            tokens, differs = compared(reference.text, answer.text, reference.tokens)
            self.texts, self.tokens, self.divergences = self.texts + 1, self.tokens + tokens, self.divergences + differs
            for name in ("cached", "accepted"):
                if (count := getattr(answer, name)) is not None:
                    setattr(self, name, (getattr(self, name) or 0) + count)
            if differs and not self.example:
                self.example = {"request": body, "expected": reference.text, "got": answer.text}

    def cells(self):
        rate = f"{1000 * self.divergences / max(1, self.tokens):.2f}"
        reported = ["not reported" if n is None else n for n in (self.accepted, self.cached)]
        return [self.texts, self.tokens, self.divergences, rate, *reported]


class Texts:
    """Rounds of requests whose texts must not depend on how they are asked."""

    def __init__(self, servers, options):
        self.server, self.others, self.options = servers[0], servers[1:], options
        self.checks = collections.defaultdict(Check)
        self.not_offered = {}
        # What answers without drafts, or as another server: its name, the server and the fields of a request.
        self.ways = [("without drafts", self.server, options.plain)] if options.plain else []
        self.ways += [(f"at {other.url.netloc}", other, {}) for other in self.others]
        if not self.ways:
            self.not_offered["with and without drafts"] = "neither --plain nor a second URL"

    def not_reached(self):
        kinds = ["greedy"] + ["seeded"] * ("seeds" not in self.not_offered)
        names = [REPEATED, BATCHED, *(name + also for name, *_ in self.ways for also in ("", f", {BATCHED}"))]
        names += [CACHED, CHUNKED]
        return [f"{kind}, {name}" for kind in kinds for name in names if f"{kind}, {name}" not in self.checks]

    def prompts(self, number, kind):
        """No two are equal, nor begin in the same way for long, so the first time none is cached."""
        for i in range(self.options.texts):
            name = f"{kind} {number}-{i}"
            yield f"{name}: " + SHAPES[i % len(SHAPES)].format(TOPICS[i // len(SHAPES) % len(TOPICS)])

    def round(self, number, kind):
        sampled = lambda i: {"temperature": 1, "seed": number * 1000 + i} if kind == "seeded" else {"temperature": 0}
        limit = lambda i: {"max_tokens": [self.options.max_tokens, self.options.max_tokens // 2][i % 2]}
        bodies = [{"prompt": p, **sampled(i), **limit(i)} for i, p in enumerate(self.prompts(number, kind))]
        check = lambda what, *pairs: self.checks[f"{kind}, {what}"].add(*pairs)
        if kind == "seeded" and not self.has_seeds(bodies[0]):
            return
        alone = self.server.alone(bodies)
        check(REPEATED, bodies, alone, self.server.alone(bodies))
        mixed = random.Random(number).sample(range(len(bodies)), len(bodies)) * self.options.company
        pick = lambda things: [things[i] for i in mixed]
        check(BATCHED, pick(bodies), pick(alone), self.server.together(pick(bodies)))
        for name, server, fields in self.ways:
            others = [{**body, **fields} for body in bodies]
            check(name, others, alone, server.alone(others))
            check(f"{name}, {BATCHED}", pick(others), pick(alone), server.together(pick(others)))
        self.prefixes(number, bodies, check)
        self.chunked(number, kind, [sampled(i) for i in range(len(bodies) // 2)], check)

    def has_seeds(self, body):
        """Whether a seed decides anything alone: two texts of each of three seeds are equal at least once."""
        if "seeds" in self.not_offered:
            return False
        seeds = [] if self.checks.get(f"seeded, {REPEATED}") else range(3)
        bodies = [{**body, "seed": seed, "max_tokens": 16} for seed in seeds]
        pairs = list(zip(self.server.alone(bodies), self.server.alone(bodies)))
        if pairs and all(one.text != other.text for one, other in pairs):
            self.not_offered["seeds"] = "the same seed gives another text each time"
            return False
        return True

    def prefixes(self, number, bodies, check):
        """Another question after the same beginning hits a part of a prompt; asked again, all of it."""
        bodies = [{**body, "prompt": body["prompt"] + f" And then, {number}:"} for body in bodies]
        check(CACHED, bodies, self.server.alone(bodies), self.server.alone(bodies))

    def chunked(self, number, kind, sampled, check):
        """New prompts of some length, together and beside longer ones, which cut them in other places than alone."""
        dice, done = random.Random(f"{kind} {number}"), threading.Event()
        words = lambda count: " ".join(dice.choice(WORDS) for _ in range(count))
        count = self.options.long_words
        prompt = lambda i: f"{kind} {number}/{i} " + words(count * (i % 3 + 1) // 4)
        bodies = [{"prompt": prompt(i), "max_tokens": 24, **fields} for i, fields in enumerate(sampled)]

        def disturb(thread):
            for turn in itertools.count():
                if done.is_set() or not self.server.budget.left():
                    return
                own = random.Random(f"{number} {thread} {turn}")
                prompt = " ".join(own.choice(WORDS) for _ in range(count))
                self.server.ask({"prompt": prompt, "max_tokens": 1, "temperature": 0})

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            others = [pool.submit(disturb, thread) for thread in range(2)]
            try:
                together = self.server.together(bodies)
            finally:
                done.set()
            [other.result() for other in others]
        check(CHUNKED, bodies, self.server.alone(bodies), together)


class Samples:
    """First and second tokens of many seeds against the server's log-probabilities."""

    def __init__(self, servers, options):
        self.server, self.options, self.rows, self.not_offered = servers[0], options, [], {}
        # Log-probabilities are those without drafts if possible: some servers have none for tokens that were drafts.
        self.plain = servers[0] if options.plain else servers[-1]
        self.sampling = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}

    def probe(self):
        """Finds how log-probabilities are asked for: OpenAI's completions have at most 5, and neither top_k nor min_p."""
        small = {"temperature": 1, "top_p": 1}
        for sampling, count in itertools.product((self.sampling, small), (20, 5)):
            body = {"prompt": HESITATIONS[0], "max_tokens": 2, "seed": 1, **sampling, "logprobs": count}
            try:
                answer = self.plain.ask({**body, **self.options.plain})
            except Refused as e:
                why = str(e)
                continue
            if len(answer.positions) == 2 and len(answer.positions[0][1]) > 1:
                self.sampling, self.logprobs = sampling, {"logprobs": count}
                return True
            why = "its answers have no log-probabilities"
        self.not_offered["log-probabilities"] = why
        return False

    def ask(self, server, prompt, count, fields):
        for start in range(0, count, 256):
            seeds = range(start, min(count, start + 256))
            body = {"prompt": prompt, "max_tokens": SAMPLE_TOKENS, **self.sampling, **fields}
            try:
                yield from server.together([{**body, "seed": seed} for seed in seeds])
            except Spent:
                return

    def tables(self, prompt):
        """The log-probabilities of the first token, and those of the second by the first."""
        first, second = {}, {}
        for answer in self.ask(self.plain, prompt, 64, {**self.logprobs, **self.options.plain}):
            if len(answer.positions) > 1:
                (token, first), (_, tops) = answer.positions[:2]
                if len(tops) > 1:
                    second[token] = tops
        return first, second

    def run(self):
        if not self.probe():
            return
        choices = [(prompt, *self.tables(prompt)) for prompt in HESITATIONS]
        hesitation = lambda tops: (lambda p: p * (1 - p))(math.exp(max(tops.values(), default=0)))
        later = lambda first, second: sum(math.exp(first.get(t, -99)) * hesitation(tops) for t, tops in second.items())
        prompt, first, second = max(choices, key=lambda c: min(hesitation(c[1]), later(c[1], c[2])))
        answers = list(self.ask(self.server, prompt, self.options.samples, {"logprobs": 1}))
        pairs = [tuple(token for token, _ in a.positions[:2]) for a in answers if len(a.positions) > 1]
        told = [a.accepted for a in answers if a.accepted is not None]
        self.accepted = sum(told) if told else None
        self.prompt, self.ended = prompt, len(answers) - len(pairs)
        self.judge("first token", [(first, [one for one, _ in pairs])])
        by_first = collections.defaultdict(list)
        for one, two in pairs:
            by_first[one].append(two)
        common = sorted(by_first, key=lambda token: -len(by_first[token]))[:3]
        groups = [(second[one], by_first[one]) for one in common if one in second and len(by_first[one]) >= 100]
        self.judge("second token, given the first", groups)

    def judge(self, name, groups):
        """Tests all groups of tokens at once, and does the same to simulated tokens of the wrong rule."""
        groups = [(*categories(tops, len(tokens)), tokens) for tops, tokens in groups]
        groups = [(kinds, weights, tokens) for kinds, weights, tokens in groups if len(kinds) > 1]
        degrees = sum(len(kinds) - 1 for kinds, _, _ in groups)
        total, wrong = 0.0, [0.0] * CONTROLS
        for kinds, weights, tokens in groups:
            counts = collections.Counter(token if token in kinds else None for token in tokens)
            total += statistic([counts[kind] for kind in kinds], weights)
            for i in range(CONTROLS):
                drawn = random.Random(f"{name} {i}").choices(range(len(kinds)), wrong_rule(weights), k=len(tokens))
                wrong[i] += statistic([drawn.count(kind) for kind in range(len(kinds))], weights)
        self.rows.append({
            "name": name, "samples": sum(len(tokens) for _, _, tokens in groups), "chi_square": total, "degrees": degrees,
            "p": chi_square_p(total, degrees) if degrees else 1.0,
            "caught": sum(degrees > 0 and chi_square_p(value, degrees) < LEVEL for value in wrong),
        })  # fmt: skip


def verdict(row):
    """What a row of samples shows.

    >>> verdict({"p": 0.2, "caught": 40}), verdict({"p": 1e-9, "caught": 40}), verdict({"p": 0.2, "caught": 12})
    ('not rejected', 'REJECTED', 'TOO FEW SAMPLES')
    """
    if row["p"] < LEVEL:
        return "REJECTED"
    return "not rejected" if row["caught"] >= 0.95 * CONTROLS else "TOO FEW SAMPLES"


def report(texts, samples, cut, budget, options):
    """Prints the tables; returns whether all is well."""
    line = lambda cells: print("| " + " | ".join(map(str, cells)) + " |")
    line(["check", "texts", "tokens", "divergences", "per 1,000 tokens", "accepted draft tokens", "cached prompt tokens"])
    line(["---"] + ["---:"] * 6)
    for name, check in texts.checks.items():
        line([name, *check.cells()])
    if samples.rows:
        print()
        line(["tokens", "samples", "chi-square", "degrees of freedom", "p", "wrong rule rejected", "verdict"])
        line(["---"] + ["---:"] * 5 + ["---"])
    for row in samples.rows:
        figures = [row["samples"], f"{row['chi_square']:.1f}", row["degrees"], f"{row['p']:.3g}"]
        line([row["name"], *figures, f"{row['caught']} of {CONTROLS}", verdict(row)])
    print()
    if samples.rows:
        accepted = "not reported" if samples.accepted is None else samples.accepted
        print(f"Prompt of the samples: {samples.prompt!r}. Accepted draft tokens: {accepted}. Shorter texts: {samples.ended}.")
    missing = {**texts.not_offered, **samples.not_offered}
    print(*(f"Not offered: {what} ({why})." for what, why in missing.items()), *cut, sep="\n")
    differ = [check for check in texts.checks.values() if check.divergences]
    if differ:
        print("For example:", json.dumps(differ[0].example, ensure_ascii=False))
    seconds = time.monotonic() - budget.started
    tokens, count = (sum(getattr(c, name) for c in texts.checks.values()) for name in ("tokens", "divergences"))
    print(f"{count} divergences in {tokens} tokens, {1000 * count / max(1, tokens):.2f} per 1,000;")
    print(f"{budget.requests} requests and {budget.spent} tokens in {seconds:.0f} s.")
    if options.json:
        checks = {name: vars(check) for name, check in texts.checks.items()}
        found = {"texts": checks, "samples": samples.rows, "not_offered": missing, "tokens": budget.spent, "seconds": seconds}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**found, "cut": cut}, file, indent=1, ensure_ascii=False)
    return not (differ or cut) and all(verdict(row) == "not rejected" for row in samples.rows)


def run(servers, options, budget):
    """All checks: rounds of texts for half of the time, then samples. What is cut short is said, but for further rounds."""
    texts, samples, cut = Texts(servers, options), Samples(servers, options), []
    servers[0].ask({"prompt": HESITATIONS[0], "max_tokens": 1, "temperature": 0})
    budget.share, number = 0.5, 0
    try:
        while budget.left():
            number += 1
            for kind in ("greedy", "seeded"):
                texts.round(number, kind)
            print(f"round {number}: {budget.spent} tokens", file=sys.stderr)
    except Spent:
        cut += [f"Not reached within half of --minutes or --tokens: {name}." for name in texts.not_reached()]
    budget.share = 1.0
    try:
        samples.run()
    except Spent:
        cut.append("No samples: --minutes or --tokens were used up.")
    return report(texts, samples, cut, budget, options)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fields = lambda text: {"type": json.loads, "default": {}, "metavar": "JSON", "help": text}
    url = {"type": urllib.parse.urlsplit, "metavar": "URL"}
    parser.add_argument("urls", nargs="+", **url, help="the server, and further servers of the same model")
    parser.add_argument("--plain", **fields("fields that turn drafts off in a request to the first URL"))
    parser.add_argument("--fields", **fields("further fields of every request"))
    parser.add_argument("--model", help="default: the first of /v1/models")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    parser.add_argument("--minutes", type=float, default=10, help="time limit (default %(default)s); texts take half of it")
    parser.add_argument("--tokens", type=int, default=10**6, help="limit of generated tokens (default %(default)s)")
    parser.add_argument("--texts", type=int, default=20, help="texts of each kind in a round (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="limit of a text (default %(default)s)")
    parser.add_argument("--long-words", type=int, default=600, help="words of the long prompts (default %(default)s)")
    parser.add_argument("--streams", type=int, default=12, help="largest number of concurrent requests (default %(default)s)")
    parser.add_argument("--company", type=int, default=2, help="copies of each request in a batch (default %(default)s)")
    parser.add_argument("--samples", type=int, default=16_000, help="seeds whose tokens are counted (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    numbers = [options.tokens, options.long_words, options.streams, options.company, options.samples]
    if min(numbers) < 1 or options.texts < 2 or options.max_tokens < 2 or options.minutes <= 0:
        parser.error("numbers must be positive, --texts and --max-tokens at least 2")
    return options


def main():
    options = parse_arguments()
    budget = Budget(options)
    try:
        servers = [Server(url, options, budget) for url in options.urls]
        sys.exit(0 if run(servers, options, budget) else 1)
    except (Unaskable, Refused, ValueError, KeyError, IndexError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
