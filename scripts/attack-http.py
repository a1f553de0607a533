#!/usr/bin/env python3
"""Attacks the HTTP side of a running server while a small request is timed beside each attack.

    scripts/attack-http.py [--url http://127.0.0.1:8000] [--key KEY] [--other-key KEY] [--pid PID] [--only NAME]
        [--random N] [--patience SECONDS] [--grace SECONDS]

Prints one line an attack: the requests tried, the statuses, the worst wait of the small request beside its worst
alone, and the peak memory of the server's process (--pid; by default the one that listens on the port).
Exits with 1 on any 5xx other than 503, a server that died, or a request that is never given up.

The attacks of `attack_grammars.py` promise more: only the statuses that are named there; a small request of another client
(--other-key and, on loopback, another address), with a grammar of its own and without, waits at most 3 times its worst time
alone (or --grace); and the server takes at most 1 GiB more than at rest. What is broken is said in capitals.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import socket
import sys
import threading
import time
import urllib.parse

from attack_grammars import fresh_choice, grammar_attacks

LARGE = 2 * 1024 * 1024 - 1000
# How long a client waits for the server to end a connection.
PATIENCE = 65
# What the attacks by grammars may cost others.
SLOWER, MORE_MIB = 3, 1024


class Target:
    def __init__(self, url, key, source=None):
        parts = urllib.parse.urlsplit(url)
        self.address = (parts.hostname, parts.port or 80)
        self.key = f"Authorization: Bearer {key}\r\n" if key else ""
        self.source = (source, 0) if source else None

    def connect(self, timeout=None):
        return socket.create_connection(self.address, timeout=timeout or PATIENCE, source_address=self.source)

    def head(self, method, path, length=None, more=""):
        length = "" if length is None else f"Content-Length: {length}\r\n"
        start = f"{method} {path} HTTP/1.1\r\nHost: {self.address[0]}\r\n{self.key}"
        return f"{start}{length}{more}\r\n".encode()

    def ask(self, path, body=None, timeout=120, more="Connection: close\r\n"):
        """The status and the body of a whole response."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        method = "GET" if data is None else "POST"
        with self.connect(timeout) as stream:
            # A server that refuses a body may close before it has all of it.
            with contextlib.suppress(ConnectionError):
                stream.sendall(self.head(method, path, None if data is None else len(data), more))
                stream.sendall(data or b"")
            reply = rest(stream)
        return status_of(reply), reply.partition(b"\r\n\r\n")[2]


def rest(stream):
    """What is received until the connection ends."""
    parts = []
    try:
        while part := stream.recv(65536):
            parts.append(part)
    except TimeoutError:
        return b"".join(parts) or b"open"
    except OSError:
        return b"".join(parts) or b"reset"
    return b"".join(parts)


def status_of(reply):
    if reply.startswith(b"HTTP/1.1 100 "):
        return status_of(reply.partition(b"\r\n\r\n")[2])
    if reply.startswith(b"HTTP/1."):
        return reply[9:12].decode()
    return reply.decode() if reply in (b"open", b"reset") else "closed" if not reply else "other"


def at_once(count, work):
    """The statuses of `count` calls in threads."""
    statuses, lock = [], threading.Lock()

    def one(index):
        try:
            status = work(index)
        except OSError as e:
            status = type(e).__name__
        with lock:
            statuses.append(status)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 6)
    return statuses + ["hung"] * (count - len(statuses))


def post_many(count, path, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda t: at_once(count, lambda _: t.ask(path, data)[0])


def leave(path, body):
    """Clients that send a request and close the connection."""
    data = json.dumps(body).encode()

    def attack(target):
        def one(_):
            with target.connect() as stream:
                stream.sendall(target.head("POST", path, len(data)) + data)
                time.sleep(0.2)
            return "left"

        return at_once(20, one)

    return attack


def hold(count, send):
    """Connections that send something and then wait for what the server does, up to PATIENCE."""

    def attack(target):
        def one(index):
            with target.connect() as stream:
                stream.sendall(send(target))
                return status_of(rest(stream))

        return at_once(count, one)

    return attack


def trickle(target):
    """Headers of which a byte arrives now and then."""

    def one(_):
        with target.connect() as stream:
            stream.sendall(b"GET /health HTTP/1.1\r\nX: ")
            end = time.monotonic() + PATIENCE
            stream.settimeout(0.5)
            while time.monotonic() < end:
                try:
                    stream.sendall(b"a")
                    return status_of(stream.recv(65536))
                except TimeoutError:
                    continue
            return "open"

    return at_once(50, one)


def slow_readers(target):
    """Streams and large replies of which nothing is read."""
    body = {"prompt": "Once", "max_tokens": 400, "stream": True, "n": 4, "logprobs": 5, "ignore_eos": True}
    data = json.dumps(body).encode()

    def one(_):
        stream = socket.socket()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.settimeout(PATIENCE)
        with stream:
            stream.connect(target.address)
            stream.sendall(target.head("POST", "/v1/completions", len(data)) + data)
            time.sleep(10)
            return status_of(stream.recv(64))

    return at_once(4, one)


def oversized(target):
    def one(index):
        data = b"a" * (20 * 1024 * 1024)
        if index % 2:
            return target.ask("/v1/completions", data)[0]
        with target.connect() as stream:
            with contextlib.suppress(ConnectionError):
                stream.sendall(target.head("POST", "/v1/completions", None, "Transfer-Encoding: chunked\r\n"))
                stream.sendall(b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n")
            return status_of(rest(stream))

    return at_once(10, one)


def expect(target):
    def one(_):
        with target.connect() as stream:
            more = "Expect: 100-continue\r\n"
            stream.sendall(target.head("POST", "/v1/completions", 10**9, more))
            return "asked" if (reply := rest(stream)).startswith(b"HTTP/1.1 100") else status_of(reply)

    return at_once(20, one)


def keep_alive(target):
    streams = [target.connect() for _ in range(100)]
    statuses = []
    for stream in streams:
        stream.sendall(target.head("GET", "/health"))
    for stream in streams:
        statuses.append(status_of(stream.recv(65536)))
    time.sleep(2)
    for stream in streams:
        stream.close()
    return statuses


def half_closed(target):
    data = json.dumps({"prompt": "Once", "max_tokens": 8}).encode()

    def one(_):
        with target.connect() as stream:
            stream.sendall(target.head("POST", "/v1/completions", len(data)) + data)
            stream.shutdown(socket.SHUT_WR)
            return status_of(rest(stream))

    return at_once(4, one)


def dropped(target):
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}

    def one(index):
        data = json.dumps(body | {"stream": index % 3 != 0}).encode()
        stream = target.connect()
        stream.sendall(target.head("POST", "/v1/completions", len(data)) + data)
        time.sleep(random.random())
        stream.close()
        return "dropped"

    return [status for _ in range(4) for status in at_once(25, one)]


FIELDS = """model prompt messages max_tokens n temperature top_p top_k min_p seed stop stream stream_options logprobs
top_logprobs echo suffix best_of logit_bias stop_token_ids ignore_eos min_tokens tools tool_choice response_format
prediction cache_salt spec_length acceptance guided_json guided_regex guided_choice structured_outputs tokens
add_special_tokens chat_template_kwargs allowed_token_ids bad_words include_stop_str_in_output skip_special_tokens
truncate_prompt_tokens return_token_ids input dimensions encoding_format unknown""".split()
PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/reset_prefix_cache", "/x",
]


def random_value(rng, depth=0):
    kinds = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, 4.0, 1e308]),
        lambda: rng.choice(["", "a", "\0", "\ud800", "é" * 50, "user", "text", "function", "a" * 3000]),
        lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {rng.choice(FIELDS + ["role", "content", "type"]): random_value(rng, depth + 1) for _ in range(3)},
    ]
    return rng.choice(kinds[:4] if depth > 3 else kinds)()


def hoards(prompts, **fields):
    """Completions that take places in the batch and blocks of the pool for as long as they may."""

    def attack(target):
        def one(index):
            body = {"prompt": prompts[index], "max_tokens": 400, "ignore_eos": True, "seed": index} | fields
            return target.ask("/v1/completions", body, timeout=PATIENCE * 5)[0]

        return at_once(len(prompts), one)

    return attack


def random_bodies(count):
    def attack(target):
        def some(index):
            rng, statuses = random.Random(index), collections.Counter()
            for _ in range(count // 4):
                body = {rng.choice(FIELDS): random_value(rng) for _ in range(rng.randrange(5))}
                if rng.random() < 0.5:
                    body |= {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
                body.setdefault("max_tokens", 1)
                data = bytearray(json.dumps(body).encode())
                if rng.random() < 0.3:
                    for _ in range(rng.randrange(1, 4)):
                        data[rng.randrange(len(data))] = rng.randrange(256)
                if rng.random() < 0.1:
                    del data[rng.randrange(len(data)) :]
                statuses[target.ask(rng.choice(PATHS), bytes(data), timeout=20)[0]] += 1
            return statuses

        total = collections.Counter()
        for statuses in at_once(4, some):
            total.update(statuses if isinstance(statuses, dict) else [statuses])
        return total

    return attack


def attacks(options):
    nested = b'{"prompt":"a","max_tokens":1,"x":' + b"[0," * 60 + b"0" + b"]" * 60 + b"}"
    wide = b'{"prompt":"a","max_tokens":1,"x":[' + b"0," * (LARGE // 2 - 40) + b"0]}"
    tree = b'{"messages":[{"role":"user","content":"a","x":[' + b"0," * (LARGE // 2 - 60) + b"0]}]}"
    inputs = b'{"input":[' + b"[0]," * (LARGE // 4 - 10) + b"[0]]}"
    text = lambda piece: json.dumps({"prompt": piece * (LARGE // len(piece) - 20)}).encode()
    logprobs = {"messages": [{"role": "user", "content": "a"}], "n": 64, "logprobs": True, "top_logprobs": 20,
                "max_tokens": 64, "ignore_eos": True}
    return [
        ("stalled headers", hold(200, lambda t: b"GET /health HTTP/1.1\r\nHost: loc")),
        ("headers byte by byte", trickle),
        ("stalled small bodies", hold(100, lambda t: t.head("POST", "/v1/completions", 1000) + b"{")),
        ("stalled large bodies", hold(100, lambda t: t.head("POST", "/tokenize", LARGE) + b"a" * (LARGE - 1))),
        ("slow readers", slow_readers),
        ("bodies over the limit", oversized),
        ("Expect over the limit", expect),
        ("100 idle keep-alive", keep_alive),
        ("half-closed clients", half_closed),
        ("40 x 2 MiB of words", post_many(40, "/tokenize", text("the cat sat on a mat. "))),
        ("8 x 2 MiB of digits", post_many(8, "/tokenize", text("1234567890"))),
        ("8 x 2 MiB of spaces", post_many(8, "/tokenize", text(" "))),
        ("80 x deep JSON", post_many(80, "/v1/completions", nested)),
        ("80 x wide JSON", post_many(80, "/v1/completions", wide)),
        ("20 x wide messages", post_many(20, "/v1/chat/completions", tree)),
        ("20 x wide inputs", post_many(20, "/v1/embeddings", inputs)),
        ("4 x 2,048 embeddings", post_many(4, "/v1/embeddings", {"input": [[1]] * 2048})),
        ("embeddings, clients gone", leave("/v1/embeddings", {"input": [[1] * 100] * 2048})),
        ("n=64, 20 log-probs", post_many(1, "/v1/chat/completions", logprobs)),
        ("128 choices", hoards(["Once upon a time"], n=128)),
        ("a prompt of 6,000 tokens", hoards(["one two three four five six seven eight. " * 660])),
        ("48 long requests", hoards([f"{i} " + "a long story. " * 300 for i in range(48)], max_tokens=200)),
        ("random bodies", random_bodies(options.random)),
        ("100 dropped requests", dropped),
    ]


# The smallest request that goes all the way: the wait for a first token.
SMALL = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}


class Beside(threading.Thread):
    """Times a small request again and again."""

    def __init__(self, target, small=lambda: SMALL):
        super().__init__(daemon=True)
        self.target, self.small = target, small
        self.waits, self.statuses, self.ends = [], collections.Counter(), False

    def run(self):
        while not self.ends:
            started = time.monotonic()
            try:
                status, _ = self.target.ask("/v1/completions", self.small(), timeout=PATIENCE * 10)
            except OSError as e:
                status = type(e).__name__
            self.waits.append(time.monotonic() - started)
            self.statuses[status] += 1
            time.sleep(0.05)

    def end(self):
        """The worst wait. A request that waits for too long counts as long as it has waited."""
        self.ends = True
        self.join(PATIENCE * 10)
        return max(self.waits, default=float("nan"))


def alone(target, small):
    """The worst of many waits of a small request while nothing else happens."""
    beside = Beside(target, small)
    beside.start()
    time.sleep(5)
    return beside.end()


def memory(pid):
    """The peak memory of the process since the last call, in MiB."""
    try:
        with open(f"/proc/{pid}/status") as lines:
            peak = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))
        with contextlib.suppress(OSError), open(f"/proc/{pid}/clear_refs", "w") as clear:
            clear.write("5")
        return peak
    except (OSError, StopIteration):
        return None


def listener(port):
    """The process that listens on `port`."""
    with open("/proc/net/tcp") as lines:
        rows = [line.split() for line in list(lines)[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                    return int(pid)
    return None


def at_rest(target):
    """Whether no request is running or waiting, after some time at most."""
    for _ in range(int(PATIENCE * 2)):
        with contextlib.suppress(OSError):
            status, metrics = target.ask("/metrics")
            gauges = [l for l in metrics.decode().splitlines() if "num_requests_" in l and not l.startswith("#")]
            if status == "200" and gauges and all(float(line.split()[-1]) == 0 for line in gauges):
                return True
        time.sleep(1)
    return False


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="")
    parser.add_argument("--other-key", default="", help="key of the client whose small requests are timed")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--random", type=int, default=2000, help="number of random bodies")
    parser.add_argument("--patience", type=float, default=65, help="seconds after which a connection counts as open")
    parser.add_argument("--grace", type=float, default=0.25, help="seconds that a small request may always wait")
    return parser.parse_args()


def run(target, other, attack):
    """The statuses of an attack, how long it took, and the small requests beside it."""
    small, choosing = besides = [Beside(other), Beside(other, fresh_choice)]
    started = time.monotonic()
    for beside in besides:
        beside.start()
    statuses = collections.Counter(attack(target))
    seconds = time.monotonic() - started
    waits = [beside.end() for beside in besides]
    return statuses, seconds, waits, small.statuses + choosing.statuses


def broken(statuses, allowed, waits, usual, grace, more):
    """The promises about strangers' grammars that an attack has broken."""
    said = [f"{status} IS NOT ALLOWED" for status in statuses if status not in allowed]
    for wait, alone, what in zip(waits, usual, ["A SMALL REQUEST", "A SMALL GRAMMAR"]):
        if wait > max(SLOWER * alone, grace):
            said.append(f"{what} WAITED {wait:.2f} s, {wait / alone:.0f} TIMES ITS {alone:.2f} s ALONE")
    if more > MORE_MIB:
        said.append(f"{more} MiB MORE THAN AT REST")
    return said


def main():
    given = options()
    global PATIENCE
    PATIENCE = given.patience
    target = Target(given.url, given.key)
    # Loopback has many addresses, so that the other client can be another one there.
    source = "127.0.0.2" if target.address[0] in ("127.0.0.1", "localhost") else None
    other = Target(given.url, given.other_key or given.key, source)
    pid = given.pid or listener(target.address[1])
    context = json.loads(target.ask("/v1/models")[1])["data"][0]["max_model_len"]
    usual = [alone(other, small) for small in [lambda: SMALL, fresh_choice]]
    memory(pid)
    at_start = memory(pid) or 0
    print(f"{at_start} MiB at rest; alone, a small request takes {usual[0]:.3f} s, and with a grammar {usual[1]:.3f} s at worst")
    print(f"{'attack':26}{'tried':>6}  {'seconds':>7}  {'small, grammar, worst ms':>25}  {'peak MiB':>8}  statuses")
    failed = False
    every = [(*attack, None) for attack in attacks(given)] + grammar_attacks(at_once, context)
    for name, attack, allowed in every:
        if given.only not in name:
            continue
        statuses, seconds, waits, beside = run(target, other, attack)
        peak = memory(pid)
        alive, peak = pid is None or peak is not None, peak or 0
        rests = alive and at_rest(target)
        faults = [] if allowed is None else broken(statuses, allowed, waits, usual, given.grace, peak - at_start)
        faults += [] if alive else ["THE SERVER DIED"]
        faults += [] if rests or not alive else ["NOT AT REST"]
        said = [f"{status}: {count}" for status, count in sorted(statuses.items())]
        said += [f"SMALL {s}: {n}" for s, n in beside.items() if s != "200"] + faults
        failed |= bool(faults) or any(s.startswith("5") and s != "503" or s in ("hung", "other") for s in statuses + beside)
        shown = ", ".join(f"{wait * 1000:.0f}" for wait in waits)
        print(f"{name:26}{sum(statuses.values()):6}  {seconds:7.1f}  {shown:>25}  {peak:8}  {', '.join(said)}", flush=True)
        if not alive:
            break
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
