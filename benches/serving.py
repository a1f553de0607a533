"""Running servers, and requests to them, for the comparisons with peers. Uses only the standard library."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import tempfile
import time

FORETOKEN = "foretoken"
PATIENCE_SECONDS = 600
NOUNS = "bridge clock river baker teacher ship garden letter mountain window train captain".split()
VERBS = "found watched carried followed painted forgot opened crossed repaired described".split()


class Failed(Exception):
    """A failure, described to the user in one line."""


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

    def tokenize(self, text, special=False):
        # One server calls the fields content and add_special, the other prompt and add_special_tokens.
        body = {"content": text, "prompt": text, "add_special": special, "add_special_tokens": special}
        with self.call("POST", "/tokenize", body) as response:
            return json.loads(response.read())["tokens"]

    def first_ids(self):
        """The ids with which every text begins: Gemma without its first id writes nonsense."""
        whole, plain = self.tokenize("The", special=True), self.tokenize("The")
        return whole[: whole.index(plain[0])]

    def ask(self, prompt, max_tokens):
        """Streams a greedy completion of token ids. Returns the times of the request, the first and the last
        event, and the text."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **self.extra}
        asked, parts = time.monotonic(), []
        with self.call("POST", "/v1/completions", body) as response:
            # Parsed only at the end, because this process uses the server's cores.
            while part := response.read1():
                parts.append((time.monotonic(), part))
        whole = b"".join(part for _, part in parts)
        if response.status != 200:
            raise Failed(f"status {response.status}: {whole[:300]!r}")
        text = checked_text(whole, len(prompt), max_tokens)
        # Lines without data are comments that keep the connection alive.
        first = next(seconds for seconds, part in parts if b"data:" in part)
        return {"asked": asked, "first": first, "last": parts[-1][0], "text": text}


def checked_text(stream, prompt_tokens, max_tokens):
    """Returns the text, after checking that the server computed everything that the figures count."""
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
    """Starts a server on a free port, and kills it however the block is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The environment of a user's own server (keys, log levels) must not affect this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "FORETOKEN_", "RUST_LOG"))}
    # For a foretoken without the flag --threads.
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
    """The long flags in the program's help."""
    done = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return set(re.findall(r"--[a-z][\w-]*", done.stdout + done.stderr))


def foretoken(options):
    seqs = str(max(64, *options.streams))  # 64 is its default
    command = [options.foretoken, "--model", options.model, "--max-num-seqs", seqs]
    command += ["--threads", str(options.threads)] if "--threads" in flags(options.foretoken) else []
    command += ["--no-prefix-caching"] if "--no-prefix-caching" in flags(options.foretoken) else []
    return FORETOKEN, command, {"spec_length": 0}


def sentences(count, seed):
    """`count` words or more, in English, because servers hold back tokens with incomplete characters."""
    draw, said = random.Random(seed), []
    while len(said) < count:
        said += ["The", draw.choice(NOUNS), draw.choice(VERBS), "the", draw.choice(NOUNS) + "."]
    return " ".join(said)


def at_once(server, prompts, max_tokens):
    pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(lambda prompt: server.ask(prompt, max_tokens), prompts))
    finally:
        # After an interrupt the threads end when their server is killed, so do not wait for them first.
        pool.shutdown(wait=False)


def cell(values, digits=2):
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"
