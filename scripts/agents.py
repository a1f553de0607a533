#!/usr/bin/env python3
"""Runs coding agents against a server through whole loops: prompt, call of a tool, its result, answer.

    scripts/agents.sh [--model FILE] [--only codex,aider] [--record FOLDER]

By default the model is scripted (scripted_model.py), so each agent has to reach the same end: the file is repaired, the
answer arrives, and nearly all of the second prompt comes from the prefix cache. Each agent is started once more and
interrupted while an answer streams, after which the server must have nothing left to do. With --model, what a real model
does is reported, and only what the server refuses is a failure. Uses only the standard library.
"""

import argparse
import contextlib
import dataclasses
import http.client
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse

import scripted_model
from scripted_model import call

KEY = "secret"
MODEL = "foretoken"
TASK = "The function add in calc.py subtracts. Fix it."
COUNT = "Do not call any tool. Count from 1 to 1000 in words."
BROKEN = "def add(a, b):\n    return a - b\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\n"
DONE = "The function add in calc.py adds its arguments now."
# Of the second turn's prompt. Aider puts what was said before the files, which have changed.
MIN_CACHED = 0.95
MIN_CACHED_OF = {"aider": 0.5}
ENDLESS = "endless"


@dataclasses.dataclass
class Place:
    """Where an agent runs, and whom it asks."""

    url: str
    project: pathlib.Path
    home: pathlib.Path
    installed: pathlib.Path

    def bin(self, name):
        return str(self.installed / "node/node_modules/.bin" / name)


@dataclasses.dataclass
class Command:
    argv: list
    env: dict
    # What is written first, by path.
    files: dict = dataclasses.field(default_factory=dict)


def claude(place, prompt):
    env = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Command([place.bin("claude"), "-p", prompt, "--allowedTools", "Read,Edit,Bash"], env)


def codex(place, prompt):
    config = f"""\
model = "{MODEL}"
model_provider = "foretoken"
model_context_window = 131072

[model_providers.foretoken]
name = "foretoken"
base_url = "{place.url}/v1"
wire_api = "responses"
env_key = "FORETOKEN_API_KEY"
"""
    # The project itself is all that it can reach here, and sandboxes in containers fail.
    argv = [place.bin("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]
    home = place.home / ".codex"
    env = {"CODEX_HOME": str(home), "FORETOKEN_API_KEY": KEY}
    return Command(argv, env, {home / "config.toml": config})


def opencode(place, prompt):
    options = {"baseURL": f"{place.url}/v1", "apiKey": KEY}
    model = {"name": MODEL, "limit": {"context": 131_072, "output": 16_384}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": MODEL, "options": options, "models": {MODEL: model}}
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"foretoken": provider},
        "model": f"foretoken/{MODEL}",
        "small_model": f"foretoken/{MODEL}",
        "autoupdate": False,
    }
    env = {"OPENCODE_DISABLE_MODELS_FETCH": "1"}
    files = {place.project / "opencode.json": json.dumps(config, indent=2)}
    return Command([place.bin("opencode"), "run", prompt], env, files)


def qwen(place, prompt):
    env = {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
    return Command([place.bin("qwen"), "--auth-type", "openai", "--yolo", "--prompt", prompt], env)


def aider(place, prompt):
    # Usage is not asked for otherwise.
    settings = [{
        "name": f"openai/{MODEL}", "edit_format": "diff", "extra_params": {"stream_options": {"include_usage": True}},
    }]
    file = place.home / "settings.yml"
    argv = [
        str(place.installed / "aider/bin/aider"), "--model", f"openai/{MODEL}", "--model-settings-file", str(file),
        "--no-show-model-warnings", "--no-check-update", "--analytics-disable", "--no-git", "--yes-always",
        "--auto-test", "--test-cmd", f"{sys.executable} -B check.py", "--message", prompt, "calc.py",
    ]
    env = {"OPENAI_API_BASE": f"{place.url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # YAML contains JSON.
    return Command(argv, env, {file: json.dumps(settings)})


def replaced(old, new):
    """An edit in the form that aider asks for."""
    return f"calc.py\n```python\n<<<<<<< SEARCH\n    return {old}\n=======\n    return {new}\n>>>>>>> REPLACE\n```\n"


def scripts(folder):
    """What the scripted model says to each agent. Its project is in `folder`."""
    path = lambda name: str(folder / name / "loop/project/calc.py")
    turns = {
        "claude": [
            call("Read", file_path=path("claude")),
            call("Edit", file_path=path("claude"), old_string="a - b", new_string="a + b"),
        ],
        "codex": [call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py && python3 check.py && echo ok")],
        "opencode": [
            call("read", filePath=path("opencode")),
            call("edit", filePath=path("opencode"), oldString="a - b", newString="a + b"),
        ],
        "qwen": [
            call("read_file", file_path=path("qwen")),
            call("edit", file_path=path("qwen"), old_string="    return a - b", new_string="    return a + b"),
        ],
        # The first edit does not pass the check, whose output makes the second turn.
        "aider": ["This multiplies.\n\n" + replaced("a - b", "a * b")],
    }
    found = {name: {"turns": [*texts, f"{DONE} ({name})"], "tools": True} for name, texts in turns.items()}
    found["aider"] = {"turns": [turns["aider"][0], f"{DONE} (aider)\n\n{replaced('a * b', 'a + b')}"], "tools": False}
    endless = {"turns": ["One more line of a text that has no end, and then the next.\n"]}
    return found | {f"{ENDLESS} {name}": endless | {"tools": found[name]["tools"]} for name in turns}


AGENTS = {"claude": claude, "codex": codex, "opencode": opencode, "qwen": qwen, "aider": aider}


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards requests to the server, and keeps them with what their answers say."""

    daemon_threads = True

    def __init__(self, upstream):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = urllib.parse.urlparse(upstream)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.exchanges = []
        # Set when the first events of an answer have been sent on.
        self.streaming = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that goes away is no error here."""


@dataclasses.dataclass
class Exchange:
    method: str
    path: str
    headers: dict
    body: object
    status: int = 0
    answer: bytes = b""
    broken: bool = False

    def usage(self):
        """The tokens of the prompt, and those of them that came from the cache."""
        found = None
        for text in re.findall(rb'"usage":(\{.*\})', self.answer):
            # What follows the object belongs to objects around it.
            usage, _ = json.JSONDecoder().raw_decode(text.decode())
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            if details is not None:
                found = usage.get("prompt_tokens", usage.get("input_tokens")), details["cached_tokens"]
            elif "cache_read_input_tokens" in usage:
                cached = usage["cache_read_input_tokens"]
                found = usage["input_tokens"] + cached, cached
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        raw = self.received()
        exchange = Exchange(self.command, self.path, dict(self.headers), json.loads(raw) if raw else None)
        self.server.exchanges.append(exchange)
        upstream = http.client.HTTPConnection(self.server.upstream.netloc, timeout=600)
        dropped = ("host", "transfer-encoding", "content-length", "connection", "accept-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        upstream.request(self.command, self.path, raw or None, headers)
        response = upstream.getresponse()
        exchange.status = response.status
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        try:
            while part := response.read1(65_536):
                exchange.answer += part
                self.wfile.write(part)
                if exchange.answer.count(b"\n\n") > 8:
                    self.server.streaming.set()
        except OSError:
            exchange.broken = True
        finally:
            # The server notices that nobody reads any more.
            upstream.close()

    do_GET = do_HEAD = do_POST = forward

    def received(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(binary, flags, log):
    """A server of these flags: its URL."""
    argv = [binary, *flags, "--port", "0", "--api-key", KEY, "--served-model-name", MODEL]
    with open(log, "wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not (found := re.search(rb"serves (http://[0-9.:]+)", log.read_bytes())):
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.1)
        yield found[1].decode()
    finally:
        process.terminate()
        process.wait()


def metric(url, name):
    parsed = urllib.parse.urlparse(url)
    connection = http.client.HTTPConnection(parsed.netloc, timeout=10)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    text = connection.getresponse().read().decode()
    values = re.findall(rf"^foretoken:{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


class Check:
    """One agent, and what it did."""

    def __init__(self, name, options, url, folder):
        self.name, self.options, self.server, self.folder = name, options, url, folder
        self.failures = []

    def expect(self, ok, what):
        if not ok:
            self.failures.append(what)

    def started(self, kind, prompt):
        """Starts the agent in a folder of its own."""
        place = self.folder / self.name / kind
        shutil.rmtree(place, ignore_errors=True)
        proxy = Proxy(self.server)
        at = Place(proxy.url, place / "project", place / "home", self.options.installed)
        command = AGENTS[self.name](at, prompt)
        files = {at.project / "calc.py": BROKEN, at.project / "check.py": CHECK} | command.files
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        at.home.mkdir(exist_ok=True)
        # A repository of its own, so that no agent looks for its project further up.
        subprocess.run(["git", "init", "--quiet", str(at.project)], check=True)
        names = ("PATH", "LANG", "TERM", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        env = {name: os.environ[name] for name in names if name in os.environ}
        env |= {"HOME": str(at.home), "NO_PROXY": "127.0.0.1", **command.env}
        log = open(place / "output.txt", "wb")
        process = subprocess.Popen(
            command.argv, cwd=at.project, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return process, proxy, at

    def asked(self, text, script):
        return text if self.options.model else f"{text} [script: {script}]"

    def loop(self):
        begin = time.monotonic()
        process, proxy, at = self.started("loop", self.asked(TASK, self.name))
        try:
            code = process.wait(self.options.timeout)
        except subprocess.TimeoutExpired:
            code = f"none within {self.options.timeout} s"
        finally:
            ended(process)
        self.seconds = time.monotonic() - begin
        self.record(proxy.exchanges)
        output = (at.project.parent / "output.txt").read_text(errors="replace")
        refused = [e for e in proxy.exchanges if e.status >= 400 and e.method == "POST"]
        for exchange in refused[:1]:
            text = exchange.answer.decode(errors="replace")[:400]
            self.expect(False, f"{exchange.path} is answered {exchange.status}: {text}")
        turns = [e for e in proxy.exchanges if e.status == 200 and is_turn(self.name, e)]
        self.turns = len(turns)
        repaired = (at.project / "calc.py").read_text() == BROKEN.replace("-", "+")
        self.did = "repaired calc.py" if repaired else "did not repair calc.py"
        usages = [turn.usage() for turn in turns]
        self.cached = usages[1] if len(usages) > 1 else None
        if self.options.model:
            return
        if not refused:
            self.expect(code == 0, f"it exits with {code}: {output[-300:]}")
        wanted = len(scripts(self.folder)[self.name]["turns"])
        self.expect(len(turns) == wanted, f"{len(turns)} turns instead of {wanted}")
        self.expect(all(turn.body.get("stream") for turn in turns), "it does not stream")
        self.expect(repaired, self.did)
        self.expect(DONE in " ".join(output.split()), "it does not show the answer")
        if len(turns) > 1:
            self.expect(self.cached, "the second answer does not report its usage")
        if self.cached:
            tokens, cached = self.cached
            wanted = MIN_CACHED_OF.get(self.name, MIN_CACHED)
            self.expect(cached >= wanted * tokens, f"only {cached} of {tokens} tokens are cached in the second turn")

    def cancel(self):
        prompt = COUNT if self.options.model else TASK
        process, proxy, _ = self.started("cancel", self.asked(prompt, f"{ENDLESS} {self.name}"))
        try:
            deadline = time.monotonic() + self.options.timeout
            while not proxy.streaming.wait(0.1):
                if process.poll() is not None or time.monotonic() > deadline:
                    # A real model may answer in a few words.
                    return self.expect(self.options.model, "no answer streams that could be cancelled")
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            # Some agents want a second signal.
            ended(process)
        deadline = time.monotonic() + 10
        while running := metric(self.server, "num_requests_running") + metric(self.server, "num_requests_waiting"):
            if time.monotonic() > deadline:
                return self.expect(False, f"{running:.0f} requests run on after the agent has ended")
            time.sleep(0.1)
        cancelled = any(exchange.broken for exchange in proxy.exchanges)
        self.expect(cancelled or self.options.model, "the answer has ended before it was cancelled")

    def record(self, exchanges):
        """Writes the requests without keys."""
        if not self.options.record:
            return
        folder = pathlib.Path(self.options.record)
        folder.mkdir(parents=True, exist_ok=True)
        for i, exchange in enumerate(exchanges, 1):
            secret = ("authorization", "x-api-key")
            headers = {name: value for name, value in exchange.headers.items() if name.lower() not in secret}
            answer = {"status": exchange.status, "text": exchange.answer.decode(errors="replace")}
            request = {"method": exchange.method, "path": exchange.path, "headers": headers, "body": exchange.body}
            text = json.dumps(request | {"answer": answer}, indent=1, ensure_ascii=False)
            (folder / f"{self.name}-{i}.json").write_text(text + "\n")

    def line(self):
        cached = ""
        if self.cached:
            tokens, hits = self.cached
            cached = f", {hits / tokens:.1%} of {tokens} tokens of the second prompt cached"
        ok = "ok" if not self.failures else "FAILED: " + "; ".join(self.failures)
        return f"{self.name}: {self.turns} turns, {self.did}{cached}, {self.seconds:.1f} s; {ok}"


def is_turn(name, exchange):
    """Whether a request is one of the loop, and not one for a title or a summary."""
    body = exchange.body
    return exchange.method == "POST" and isinstance(body, dict) and (name == "aider" or bool(body.get("tools")))


def ended(process):
    """Ends the agent and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--installed", required=True, type=pathlib.Path, help="where agents.sh installs the agents")
    parser.add_argument("--model", help="a model that is not scripted")
    parser.add_argument("--only", default=",".join(AGENTS), help="the agents (default %(default)s)")
    parser.add_argument("--record", help="a folder for the requests, without keys")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each run of an agent (default %(default)s)")
    options, flags = parser.parse_known_args()
    options.installed = options.installed.resolve()
    names = options.only.split(",")
    if unknown := [name for name in names if name not in AGENTS]:
        parser.error(f"there is no agent {unknown[0]}: {', '.join(AGENTS)}")

    folder = options.installed / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = options.model
    if not model:
        model = str(folder / "model")
        said = scripts(folder)
        scripted_model.write(model, said, [name for name in said if name.startswith(ENDLESS)])
    failed = False
    with serving(options.binary, ["--model", model, *flags], folder / "server.txt") as url:
        for name in names:
            check = Check(name, options, url, folder)
            check.loop()
            check.cancel()
            print(check.line(), flush=True)
            failed |= bool(check.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
