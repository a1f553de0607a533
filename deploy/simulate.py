#!/usr/bin/env python3
"""Simulates many replicas: what routing by prefix gains over round robin, from one replica to a thousand.

A replica is a server as this one is: each step computes a token for every running request and as much of the oldest
prompt as --max-prompt-wait allows; what is cached of a prompt is not computed; the cache has a fixed number of tokens,
and the least recently used go first. The costs of steps and prompts are those of a real server (it prints the first when
it starts, `--measure URL` measures the second). Conversations begin at random times (Poisson); each has several turns,
each of which repeats everything before it, after a pause to read and write. Every conversation begins with one of some
system prompts. The router is the one of deploy/ray (`affinity.py`): its table, its formula, its two random others.

    deploy/simulate.py --svg deploy/simulation.svg     all policies, 1 to 1,000 replicas
    deploy/simulate.py --capacity 100                  the most conversations a second that 100 replicas serve well

Uses only the standard library. A run is a function of its options and --seed.
"""

import argparse
import collections
import heapq
import json
import pathlib
import random
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from deploy.ray.affinity import PrefixTable, by_cost

POLICIES = ("round robin", "less loaded of two", "prefix affinity")
BLOCK = 64
"""Tokens a block of the simulated table; the real one has blocks of about 16, and four times as many."""


class Costs:
    """Seconds of a step, by its number of decoding requests, and of a token of a prompt."""

    def __init__(self, steps, prompt_rate):
        self.steps = sorted(steps.items())
        self.per_prompt_token = 1 / prompt_rate

    def step(self, rows):
        """Between the measured numbers of rows: linear; beyond: as the last two."""
        points = self.steps
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        at = next((i for i, (n, _) in enumerate(points) if n >= rows), len(points) - 1)
        (n0, t0), (n1, t1) = points[at - 1], points[at]
        return t0 + (t1 - t0) * (rows - n0) / (n1 - n0)


class Conversation:
    __slots__ = ("id", "app", "turns", "length", "system")

    def __init__(self, id, app, turns, system):
        self.id, self.app, self.turns, self.length, self.system = id, app, turns, system, system

    def keys(self):
        """Keys of the full blocks of the text so far: those of the system prompt are the same for all its users."""
        shared = self.system // BLOCK
        return [(-1 - self.app, i) if i < shared else (self.id, i) for i in range(self.length // BLOCK)]


class Request:
    __slots__ = ("conversation", "arrived", "left", "answer")


class Replica:
    __slots__ = ("running", "waiting", "cache", "cached", "capacity", "busy", "spent")

    def __init__(self, capacity):
        self.running, self.waiting = [], collections.deque()
        self.cache, self.cached, self.capacity = collections.OrderedDict(), 0, capacity
        self.busy, self.spent = False, 0.0

    def load(self):
        return len(self.running) + len(self.waiting)

    def found(self, conversation):
        """Tokens of its prompt that are cached; at least one has to be computed."""
        own = self.cache.get(conversation.id, 0)
        if own == 0 and (-1 - conversation.app) in self.cache:
            own = conversation.system
        return min(own, conversation.length - 1)

    def keep(self, conversation):
        """Everything so far is cached now, and what was used least recently makes room."""
        for key, tokens in ((-1 - conversation.app, conversation.system), (conversation.id, conversation.length)):
            own = tokens if key < 0 else tokens - conversation.system
            old = self.cache.pop(key, 0)
            self.cached += own - ((old if key < 0 else old - conversation.system) if old else 0)
            self.cache[key] = tokens
        while self.cached > self.capacity and len(self.cache) > 2:
            key, tokens = self.cache.popitem(last=False)
            self.cached -= tokens if key < 0 else tokens - conversation.system


class Simulation:
    def __init__(self, options, costs, policy, replicas, rate):
        """`rate`: conversations a second over all replicas."""
        self.options, self.costs, self.policy, self.rate = options, costs, policy, rate
        self.random = random.Random(f"{options.seed} {policy} {replicas}")
        self.replicas = [Replica(options.cache_tokens) for _ in range(replicas)]
        # Each replica has as many blocks as its cache, so that the router remembers what they do.
        self.table = PrefixTable(max(1, replicas * options.cache_tokens // BLOCK))
        self.events, self.order, self.turn = [], 0, 0
        self.ttft, self.prompt, self.hits, self.answered, self.now = [], 0, 0, 0, 0.0
        self.apps = [1 / (i + 1) for i in range(options.apps)]

    def at(self, time, what, which):
        self.order += 1
        heapq.heappush(self.events, (time, self.order, what, which))

    def run(self, seconds, warm):
        self.at(self.random.expovariate(self.rate), "new", None)
        while self.events:
            self.now, _, what, which = heapq.heappop(self.events)
            if self.now > seconds:
                break
            if what == "new":
                self.at(self.now + self.random.expovariate(self.rate), "new", None)
                self.begin()
            elif what == "turn":
                self.ask(which)
            else:
                self.end_step(which, self.now >= warm)
        return self.figures(seconds, warm)

    def begin(self):
        app = self.random.choices(range(len(self.apps)), self.apps)[0]
        turns = 1 + int(self.random.expovariate(1 / (self.options.turns - 1))) if self.options.turns > 1 else 1
        self.ask(Conversation(self.order, app, turns, self.options.system_tokens))

    def ask(self, conversation):
        conversation.turns -= 1
        conversation.length += 1 + int(self.random.expovariate(1 / self.options.question_tokens))
        request = Request()
        request.conversation, request.arrived = conversation, self.now
        request.answer = 1 + int(self.random.expovariate(1 / self.options.answer_tokens))
        replica = self.route(conversation)
        found = replica.found(conversation)
        request.left = conversation.length - found
        if self.now >= self.options.warm:
            self.prompt += conversation.length
            self.hits += found
        replica.waiting.append(request)
        if not replica.busy:
            self.start_step(replica)

    def route(self, conversation):
        count = len(self.replicas)
        if self.policy == "round robin":
            self.turn += 1
            return self.replicas[self.turn % count]
        others = self.random.sample(range(count), min(2, count))
        if self.policy == "less loaded of two":
            return self.replicas[min(others, key=lambda i: self.replicas[i].load())]
        keys = conversation.keys()
        matched = self.table.matches(keys)
        chosen = list(dict.fromkeys([*matched, *others]))
        loads = {i: self.replicas[i].load() for i in chosen}
        best = by_cost(chosen, len(keys), matched, loads, self.options.load_blocks * 16 / BLOCK)[0]
        self.table.insert(keys, best)
        return self.replicas[best]

    def start_step(self, replica):
        decoding = len(replica.running)
        seconds = self.costs.step(decoding) if decoding else 0.0
        chunk = 0
        if replica.waiting and decoding < self.options.max_num_seqs:
            room = int(self.options.max_prompt_wait / self.costs.per_prompt_token) if decoding else 2048
            chunk = min(max(16, room), replica.waiting[0].left)
            seconds += chunk * self.costs.per_prompt_token
        replica.busy = decoding > 0 or chunk > 0
        if replica.busy:
            replica.spent += seconds
            self.at(self.now + seconds, "step", (replica, chunk))

    def end_step(self, which, counted):
        replica, chunk = which
        still = []
        for request in replica.running:
            request.answer -= self.options.tokens_per_step
            if request.answer > 0:
                still.append(request)
            else:
                self.finish(replica, request, counted)
        replica.running = still
        if chunk:
            request = replica.waiting[0]
            request.left -= chunk
            if request.left <= 0:
                replica.waiting.popleft()
                if counted:
                    self.ttft.append(self.now - request.arrived)
                request.conversation.length += request.answer
                replica.running.append(request)
        self.start_step(replica)

    def finish(self, replica, request, counted):
        conversation = request.conversation
        self.answered += counted
        replica.keep(conversation)
        if conversation.turns > 0:
            self.at(self.now + self.random.expovariate(1 / self.options.pause), "turn", conversation)

    def figures(self, seconds, warm):
        self.ttft.sort()

        def at(p):
            return self.ttft[min(len(self.ttft) - 1, int(p * len(self.ttft)))] if self.ttft else float("inf")

        spent = sorted(r.spent / seconds for r in self.replicas)
        return {
            "policy": self.policy,
            "replicas": len(self.replicas),
            "conversations_per_second": round(self.rate, 3),
            "answers_per_second": round(self.answered / (seconds - warm), 2),
            "cached_share": round(self.hits / max(1, self.prompt), 4),
            "ttft_p50": round(at(0.5), 4),
            "ttft_p95": round(at(0.95), 4),
            "busy_mean": round(sum(spent) / len(spent), 3),
            "busy_max": round(spent[-1], 3),
        }


def simulate(options, costs, policy, replicas, rate):
    return Simulation(options, costs, policy, replicas, rate * replicas).run(options.seconds, options.warm)


def capacity(options, costs, policy, replicas):
    """The most conversations a second and replica with a p95 of the time to first token below the limit."""
    low, high = 0.0, 8 * options.rate
    for _ in range(8):
        middle = (low + high) / 2
        if simulate(options, costs, policy, replicas, middle)["ttft_p95"] <= options.ttft_limit:
            low = middle
        else:
            high = middle
    return low


def measure(url):
    """Prompt tokens a second of a running server: the longest of three different prompts of about 1,000 tokens."""
    model = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
    best = 0.0
    for i in range(3):
        text = " ".join(f"{i}{n}" for n in range(300))
        body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "cache_salt": f"{time.time()}"}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        started = time.monotonic()
        usage = json.load(urllib.request.urlopen(request))["usage"]
        best = max(best, usage["prompt_tokens"] / (time.monotonic() - started))
    return best


def plot(results, path):
    """Two charts side by side, over the number of replicas: share of cached tokens, and p95 of the time to first token."""
    import math

    colours = dict(zip(POLICIES, ("#9a9a9a", "#d08a2e", "#2f7ed8")))
    counts = sorted({r["replicas"] for r in results})
    width, height, left, top = 330, 200, 60, 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (width + left) + 40} {height + top + 62}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]

    def chart(number, title, key, low, high, ticks, label, log):
        x0 = left + number * (width + left + 20)
        span = (math.log10(high) - math.log10(low)) if log else high - low

        def x(n):
            return x0 + width * math.log10(n) / math.log10(max(counts[-1], 10))

        def y(v):
            v = min(max(v, low), high)
            part = (math.log10(v) - math.log10(low)) / span if log else (v - low) / span
            return top + height * (1 - part)

        out.append(f'<text x="{x0}" y="{top - 14}" font-weight="bold" fill="#222">{title}</text>')
        for tick in ticks:
            out.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{x0 - 6}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#555">{label(tick)}</text>')
        for n in (1, 10, 100, 1000):
            if n <= counts[-1]:
                out.append(f'<text x="{x(n):.1f}" y="{top + height + 16}" text-anchor="middle" fill="#555">{n:,}</text>')
        out.append(f'<text x="{x0 + width / 2}" y="{top + height + 32}" text-anchor="middle" fill="#555">replicas</text>')
        for policy, colour in colours.items():
            points = [(x(r["replicas"]), y(r[key])) for r in results if r["policy"] == policy]
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            out.extend(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points)

    chart(0, "Prompt tokens found in the cache", "cached_share", 0, 1, (0, 0.25, 0.5, 0.75, 1), lambda v: f"{v:.0%}", False)
    chart(1, "Time to first token, p95", "ttft_p95", 0.1, 10, (0.1, 1, 10), lambda v: f"{v:g} s", True)
    for i, (policy, colour) in enumerate(colours.items()):
        x = left + i * 170
        out.append(f'<rect x="{x}" y="{top + height + 42}" width="14" height="4" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="{top + height + 48}" fill="#222">{policy}</text>')
    out.append("</svg>\n")
    pathlib.Path(path).write_text("\n".join(out))


def steps_of(text):
    """1:2.4,2:2.6,...: milliseconds of a step by its number of rows."""
    return {int(rows): float(ms) / 1e3 for rows, ms in (pair.split(":") for pair in text.split(","))}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=steps_of, default="1:2.40,2:2.61,4:3.50,6:4.69,8:6.04,16:10.87", help="milliseconds of a step by its rows, as the server prints when it starts")
    add("--prompt-rate", type=float, default=1150.0, help="prompt tokens a second of a replica")
    add("--measure", metavar="URL", help="print the prompt tokens a second of a running server, and end")
    add("--tokens-per-step", type=float, default=1.0, help="tokens of a request in a step: more than 1 where drafts are accepted")
    add("--cache-tokens", type=int, default=65536, help="of a replica's KV cache")
    add("--max-num-seqs", type=int, default=64)
    add("--max-prompt-wait", type=float, default=0.1, help="seconds")
    add("--load-blocks", type=float, default=8.0, help="of the router, in blocks of about 16 tokens")
    add("--rate", type=float, default=0.3, help="conversations a second for each replica")
    add("--turns", type=float, default=5.0, help="mean")
    add("--apps", type=int, default=20, help="system prompts; the n-th is used 1/n as often as the first")
    add("--system-tokens", type=int, default=400)
    add("--question-tokens", type=float, default=60.0, help="mean")
    add("--answer-tokens", type=float, default=150.0, help="mean")
    add("--pause", type=float, default=20.0, help="mean seconds between an answer and the next question")
    add("--replicas", default="1,2,4,10,30,100,300,1000")
    add("--policies", default=",".join(POLICIES))
    add("--capacity", type=int, metavar="REPLICAS", help="search for the highest rate instead")
    add("--ttft-limit", type=float, default=2.0, help="seconds, of its p95, with --capacity")
    add("--seconds", type=float, default=240.0, help="simulated")
    add("--warm", type=float, default=90.0, help="seconds before anything is counted")
    add("--seed", type=int, default=0)
    add("--svg", help="write the plot there")
    add("--json", help="write the figures there")
    return parser.parse_args()


def main():
    options = parse_arguments()
    if options.measure:
        print(f"{measure(options.measure):.0f} prompt tokens a second")
        return
    costs = Costs(options.steps, options.prompt_rate)
    policies = options.policies.split(",")
    if options.capacity:
        for policy in policies:
            rate = capacity(options, costs, policy, options.capacity)
            print(f"{policy:20} {rate:.3f} conversations a second and replica", flush=True)
        return
    print(f"{'replicas':>8} {'policy':20} {'cached':>7} {'TTFT p50':>9} {'p95':>9} {'busy mean':>10} {'max':>6} {'answers/s':>10}")
    results = []
    for count in (int(n) for n in options.replicas.split(",")):
        for policy in policies:
            r = simulate(options, costs, policy, count, options.rate)
            results.append(r)
            print(
                f"{count:8} {policy:20} {r['cached_share']:7.3f} {r['ttft_p50']:7.3f} s {r['ttft_p95']:7.3f} s"
                f" {r['busy_mean']:10.3f} {r['busy_max']:6.3f} {r['answers_per_second']:10.1f}",
                flush=True,
            )
    if options.svg:
        plot(results, options.svg)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
