#!/usr/bin/env python3
"""Checks of deploy/: see test.sh, which starts it. Prints a line a check, and exits with 1 if one fails."""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deploy.ray.affinity import BLOCK, PrefixTable, by_cost, keys_of, prompt_of
from deploy.ray.process import Server

FLAGS = {"threads": 1, "num-blocks": 1024, "max-num-seqs": 16, "shutdown-timeout": 20}
PROMPTS = [f"Write a short story about {what}." for what in ("a lonely owl", "the sea", "an old clock", "two bears")]
# Eight streams that last for seconds, so that something can happen to a replica meanwhile.
LONG = [{"content": f"Tell me about number {i}.", "max_tokens": 700, "ignore_eos": True} for i in range(8)]
POWER_OF_TWO = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
failures = []
started = time.monotonic()


def check(name, passed, detail=""):
    print(f"{'ok    ' if passed else 'FAILED'} {time.monotonic() - started:5.0f} s  {name}{': ' if detail else ''}{detail}", flush=True)
    if not passed:
        failures.append(name)


def wait_for(what, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            found = condition()
            if found:
                return found
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {seconds} s")


def request(base, method, path, body=None, timeout=120):
    """Status, headers and body of a reply."""
    url = urllib.parse.urlsplit(base)
    path = url.path + path
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def chat_body(content, **fields):
    body = {"model": "foretoken-demo", "messages": [{"role": "user", "content": content}], "max_tokens": 40}
    return {**body, "temperature": 0, **fields}


def text_of(base, content, **fields):
    status, _, body = request(base, "POST", "/v1/chat/completions", chat_body(content, **fields))
    if status != 200:
        raise ValueError(f"status {status}: {body[:300]}")
    return json.loads(body)["choices"][0]["message"]["content"]


class Stream:
    """A streamed chat in a thread. `end` says how it ended: done, error event, broken, or a status."""

    def __init__(self, base, content, stop_after=None, **fields):
        self.text, self.events, self.end = "", 0, None
        self.body = chat_body(content, stream=True, **fields)
        self.stop_after = stop_after
        self.thread = threading.Thread(target=self._run, args=(urllib.parse.urlsplit(base),))
        self.thread.start()

    def _run(self, url):
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(self.body), headers)
            response = connection.getresponse()
            self.end = self._read(response) if response.status == 200 else f"status {response.status}"
        except (OSError, http.client.HTTPException) as e:
            self.end = f"broken ({type(e).__name__})"
        finally:
            connection.close()

    def _read(self, response):
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return "done"
            event = json.loads(data)
            if "error" in event:
                return "error event"
            for choice in event["choices"]:
                self.text += choice["delta"].get("content") or ""
            self.events += 1
            if self.events == self.stop_after:
                return "left"
        return "broken (no [DONE])"

    def join(self):
        self.thread.join()
        return self


def references(base):
    """What one server by itself answers."""
    texts = {}
    for content in PROMPTS:
        texts[content, 0] = text_of(base, content)
        texts[content, 7] = text_of(base, content, temperature=1, seed=7)
    for fields in LONG:
        texts[fields["content"]] = text_of(base, **fields)
    return texts


def check_texts(name, base, texts):
    plain = [text_of(base, c) == texts[c, 0] for c in PROMPTS]
    seeded = [text_of(base, c, temperature=1, seed=7) == texts[c, 7] for c in PROMPTS]
    streams = [Stream(base, c) for c in PROMPTS] + [Stream(base, c, temperature=1, seed=7) for c in PROMPTS]
    expected = [texts[c, 0] for c in PROMPTS] + [texts[c, 7] for c in PROMPTS]
    streamed = [s.join().text == text and s.end == "done" for s, text in zip(streams, expected)]
    right = f"{sum(plain)} + {sum(seeded)} + {sum(streamed)} of 4 + 4 + 8"
    check(f"{name}: texts at T = 0, with a seed, and streamed are a single server's", all(plain + seeded + streamed), right)


def start_long(base, count=8):
    """Long streams, all of which have begun; one after the other, so that each is routed by the load of those before."""
    streams = []
    for fields in LONG[:count]:
        streams.append(stream := Stream(base, **fields))
        wait_for("a stream that has begun", lambda: stream.events > 0 or stream.end)
    return streams


def check_kill(name, base, texts, kill):
    """Kills a replica while it streams. `kill` returns how many streams it had."""
    streams = start_long(base)
    lost = kill()
    ends = [s.join().end for s in streams]
    whole = [s for s in streams if s.end == "done"]
    equal = sum(s.text == texts[s.body["messages"][0]["content"]] for s in whole)
    cut = sum(texts[s.body["messages"][0]["content"]].startswith(s.text) for s in streams if s.end != "done")
    fine = 0 < lost < 8 and len(whole) == equal == 8 - lost and cut == lost
    how = ", ".join(f"{ends.count(end)} x {end}" for end in sorted(set(ends)))
    check(f"{name}: a killed replica costs its own {lost} of 8 streams only", fine, how)
    return ends


def metric(base, name, labels=""):
    """The values of a metric, one a replica."""
    status, _, body = request(base, "GET", "/metrics")
    if status != 200:
        raise ValueError(f"/metrics: status {status}")
    found = re.findall(rf"^foretoken:{name}{{([^}}]*)}} (\S+)$", body.decode(), re.MULTILINE)
    return [float(value) for l, value in found if labels in l]


def hit_rate(base, metrics):
    """Share of the prompt tokens of chats with several turns that were cached, by the servers' metrics."""
    for url in metrics:
        request(url, "POST", "/reset_prefix_cache")
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, str(ROOT / "scripts/load-test.py"), "--url", base, "--no-alone", "--json", out.name]
        command += ["--requests", "12", "--turns", "4", "--streams", "3", "--max-tokens", "48"]
        for url in metrics:
            command += ["--metrics-url", url]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            raise ValueError(run.stdout[-500:] + run.stderr[-500:])
        return json.load(open(out.name))["together"]["prefix_hit_rate"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def program(command, log, **env):
    """A program that runs meanwhile, in a session of its own, and ends with it."""
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, cwd=ROOT, env={**os.environ, **env}
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def router(command, policy, workers, log):
    """A router in front of workers; its base URL."""
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *workers]
    base = f"http://127.0.0.1:{port}"
    with program(command, log):
        wait_for(f"{command[0]}", lambda: text_of(base, "Hi", max_tokens=1) is not None)
        yield base


def check_affinity():
    """The router's decisions, without Ray."""
    turns = [{"role": "user", "content": f"{i} " * 100} for i in range(3)]
    first, second = (keys_of(prompt_of({"messages": turns[:n]})) for n in (1, 2))
    check("affinity: the next turn begins with the keys of the one before", second[: len(first)] == first != second)
    text = "a system prompt " * 40
    owners = [keys_of(text, owner) for owner in ("one", "another")]
    check("affinity: prompts of different owners have no key in common", not set(owners[0]) & set(owners[1]))
    table = PrefixTable(max_blocks=200)
    for replica in range(20):
        table.insert(keys_of(text + f"conversation {replica} " * 20), replica)
    keys = keys_of(text + "conversation 3 " * 20)
    table.insert(keys, 3)
    for replica in range(10, 20):
        table.insert(keys_of(text), replica)
    matched = table.matches(keys)
    found = max(matched, key=matched.get)
    check("affinity: a conversation's replica is found, whoever else has its system prompt", found == 3 and matched[3] == len(keys))
    check("affinity: the table is bounded", len(table.holders) <= 200)
    busy = by_cost([3, 4], len(keys), matched, {3: 100, 4: 0}, 8.0)
    check("affinity: a replica with too many requests is left alone", busy[0] == 4 and by_cost([4, 3], len(keys), matched, {3: 1}, 8.0)[0] == 3)
    table.remove(3)
    check("affinity: a replica that is gone is forgotten", 3 not in table.matches(keys))
    check("affinity: a short prompt has no keys", keys_of("x" * (BLOCK - 1)) == [])


def test_routers(options, folder, texts):
    commands = {"vllm-router": ["vllm-router"], "smg": ["smg", "launch"]}
    servers = [Server(options.binary, FLAGS) for _ in range(2)]
    try:
        for name, (program, *rest) in commands.items():
            command, log = [str(options.routers / program), *rest], folder / f"{name}.log"
            workers = [s.url for s in servers]
            with router(command, "cache_aware", workers, log) as base:
                check_texts(name, base, texts)
                aware = hit_rate(base, workers)
            with router(command, "round_robin", workers, log) as base:
                robin = hit_rate(base, workers)
                check(f"{name}: cache-aware routing finds more of the prompts cached than round robin", aware > robin, f"{aware:.3f} against {robin:.3f}")

                def kill():
                    lost = sum(metric(servers[1].url, "num_requests_running"))
                    servers[1].process.kill()
                    return int(lost)

                check_kill(name, base, texts, kill)
                again = text_of(base, PROMPTS[0])
                check(f"{name}: the other replica answers what comes next", again == texts[PROMPTS[0], 0])
            servers[1] = Server(options.binary, FLAGS)
    finally:
        for server in servers:
            server.stop(30)


class Ray:
    """`serve run deploy/ray/app.yaml`, with changes for a small machine and for what is tested."""

    def __init__(self, options, folder):
        self.options, self.folder, self.port = options, folder, free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        # A name of its own, by which the test finds the processes of its replicas.
        self.binary = folder / "foretoken-of-ray"
        shutil.copy(options.binary, self.binary)
        self.serve = str(pathlib.Path(sys.executable).parent / "serve")
        self.env = {
            "RAY_TMPDIR": str(folder / "r"),
            "RAY_USAGE_STATS_ENABLED": "0",
            # The REST API imports what the configuration names, in a process that `serve run` gives no path.
            "PYTHONPATH": str(ROOT),
            # And it wants no token then; Ray listens on the loopback interface only.
            "RAY_AUTH_MODE": "disabled",
            # Ray's workers have niceness 15, and so have their children, unless this says otherwise.
            "RAY_worker_niceness": "0",
            # This machine is small and busy.
            "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
        }
        (folder / "r").mkdir()

    def config(self, low=2, high=2, baseline=False):
        """The configuration: `low` to `high` replicas, for 2 requests each; and perhaps the same application once more,
        with two replicas and Serve's own router."""
        config = yaml.safe_load((ROOT / "deploy/ray/app.yaml").read_text())
        config["http_options"]["port"] = self.port
        (app,) = config["applications"]
        app["args"].update(binary=str(self.binary), flags=FLAGS)
        _, replica = app["deployments"]
        replica["ray_actor_options"] = {"num_cpus": 0.5}
        replica["health_check_period_s"] = 1
        autoscaling = replica["autoscaling_config"]
        autoscaling.update(min_replicas=low, max_replicas=high, metrics_interval_s=0.5, look_back_period_s=1)
        autoscaling.update(upscale_delay_s=0, downscale_delay_s=600)
        autoscaling["policy"]["policy_kwargs"] = {"target_requests": 2}
        if baseline:
            other = json.loads(json.dumps(app))
            other.update(name="baseline", route_prefix="/baseline")
            other["deployments"][1]["request_router_config"] = {"request_router_class": POWER_OF_TWO}
            config["applications"].append(other)
        return config

    def run(self):
        path = self.folder / "app.yaml"
        path.write_text(yaml.safe_dump(self.config(baseline=True)))
        return program([self.serve, "run", str(path)], self.folder / "ray.log", **self.env)

    def change(self, **changes):
        """Changes the configuration of the running Serve, by its REST API."""
        dashboard = re.search(r"dashboard at \S*?(http://[0-9.:]+)", (self.folder / "ray.log").read_text())[1]
        status, _, body = request(dashboard, "PUT", "/api/serve/applications/", self.config(**changes))
        if status != 200:
            raise ValueError(f"status {status}: {body[-1500:].decode()}")

    def processes(self):
        """Process ids of the foretokens."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if path.read_bytes().split(b"\0")[0] == str(self.binary).encode():
                    found.append(int(path.parent.name))
        return sorted(found)

    def replicas(self):
        return len(metric(self.base, "num_requests_running"))

    def answers(self, count):
        wait_for(f"{count} replicas", lambda: self.replicas() == count, 240)


def port_of(pid):
    """Where a process listens."""
    inodes = set()
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd))
    for line in open("/proc/net/tcp"):
        field = line.split()
        if field[3] == "0A" and f"socket:[{field[9]}]" in inodes:
            return int(field[1].split(":")[1], 16)
    raise ValueError(f"{pid} listens nowhere")


def test_ray(app, texts):
    baseline = app.base + "/baseline"
    for base in (app.base, baseline):

        def ready():
            if app.process.poll() is not None:
                sys.exit(f"serve run ended with status {app.process.returncode}: {app.folder}/ray.log")
            return len(metric(base, "num_requests_running")) == 2

        wait_for(f"2 replicas at {base}", ready, 300)
    check("ray: serve run starts two applications of two replicas, and waits until they are ready", len(app.processes()) == 4)
    affinity, default = hit_rate(app.base, [app.base]), hit_rate(baseline, [baseline])
    check("ray: prefix affinity finds more of the prompts cached than Serve's default router", affinity > default, f"{affinity:.3f} against {default:.3f}")
    app.change()
    wait_for("one application", lambda: len(app.processes()) == 2)
    check_texts("ray", app.base, texts)
    check_pass_through(app)
    check_disconnect(app)
    check_ray_kill(app, texts)
    check_scaling(app, texts)
    check_generate(app)


def check_pass_through(app):
    """Replies are those of a replica, byte for byte, but for what is an answer's own."""
    direct = f"http://127.0.0.1:{port_of(app.processes()[0])}"
    paths = [("GET", "/v1/models?x=%2F", None), ("GET", "/no/such%20route", None), ("POST", "/tokenize", {"prompt": "a b"})]
    paths += [("POST", "/v1/chat/completions", {"model": "other", "messages": []}), ("POST", "/v1/messages", [1])]
    own = re.compile(rb'"(created|request_id)": ?("[^"]*"|\d+)')
    same = []
    for method, path, body in paths:
        a, b = (request(base, method, path, body) for base in (direct, app.base))
        same.append(a[0] == b[0] and own.sub(b"", a[2]) == own.sub(b"", b[2]) and a[1]["content-type"] == b[1]["content-type"])
    check("ray: other routes, and errors, pass through", all(same), f"{sum(same)} of {len(same)}")


def check_disconnect(app):
    before = sum(metric(app.base, "request_success_total", 'finished_reason="abort"'))
    stream = Stream(app.base, stop_after=3, **LONG[0]).join()

    def aborted():
        return sum(metric(app.base, "request_success_total", 'finished_reason="abort"')) > before

    begun = time.monotonic()
    with contextlib.suppress(TimeoutError):
        wait_for("the cancelled request", aborted, 20)
    check("ray: a client that goes cancels its request", stream.end == "left" and aborted(), f"within {time.monotonic() - begun:.1f} s")


def check_ray_kill(app, texts):
    victim = app.processes()[1]

    def kill():
        lost = sum(metric(f"http://127.0.0.1:{port_of(victim)}", "num_requests_running"))
        os.kill(victim, signal.SIGKILL)
        return int(lost)

    ends = check_kill("ray", app.base, texts, kill)
    check("ray: they end with an error event", set(ends) == {"done", "error event"})
    answers = [text_of(app.base, c) == texts[c, 0] for c in PROMPTS]
    check("ray: what comes next is answered, although the dead replica is not replaced yet", all(answers))
    begun = time.monotonic()
    wait_for("a new replica", lambda: app.replicas() == 2 and victim not in app.processes(), 240)
    check("ray: the dead replica is replaced", True, f"within {time.monotonic() - begun:.0f} s")


@contextlib.contextmanager
def load(base, count):
    """`count` long streams at a time, one after the other; the streams."""
    streams, stop = [], threading.Event()

    def work(fields):
        while not stop.is_set():
            streams.append(Stream(base, **fields))
            streams[-1].join()

    threads = [threading.Thread(target=work, args=(fields,)) for fields in LONG[:count]]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def check_scaling(app, texts):
    with load(app.base, 8) as streams:
        time.sleep(1)
        app.change(low=1, high=1)
        wait_for("one replica", lambda: len(app.processes()) == 1)
        gone = len(streams)
    whole = [s.end == "done" and s.text == texts[s.body["messages"][0]["content"]] for s in streams]
    check("ray: scaled down under load, every stream is whole", all(whole), f"{sum(whole)} of {len(whole)}, {gone} of them begun before the replica was gone")
    # What the load left in the autoscaler's window has to be gone before a second replica is allowed.
    time.sleep(15)
    app.change(low=1, high=2)
    time.sleep(5)
    one = len(app.processes())
    begun = time.monotonic()
    with load(app.base, 6):
        app.answers(2)
    check("ray: 6 requests at a time, 2 a replica, start a second one; none does not", one == 1, f"within {time.monotonic() - begun:.0f} s")


def check_generate(app):
    folder, binary = app.folder, str(app.options.binary)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(PROMPTS * 2)))
    flags = ["--samples", "2", "--max-tokens", "32", "--temperature", "0.8", "--threads", "1", "--num-blocks", "512"]
    single, corpus = folder / "single.jsonl", folder / "corpus.jsonl"
    subprocess.run([binary, "generate", "--prompts", prompts, "--out", single, *flags], check=True, capture_output=True)
    lines = sorted(single.read_text().splitlines())
    # What an interrupted run leaves: some texts, and the beginning of one.
    corpus.write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])
    command = [sys.executable, ROOT / "deploy/ray/generate.py", "--binary", binary, "--prompts", prompts, "--out", corpus]
    command += ["--address", "auto", "--workers", "2", "--shards", "2", "--num-cpus", "0.5", "--", *flags]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **app.env})
    same = run.returncode == 0 and sorted(corpus.read_text().splitlines()) == lines
    check("ray: two workers of generate.py continue a corpus and end with a single machine's texts", same, run.stdout.strip().replace("\n", "; "))
    if not same:
        print(run.stderr[-2000:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--routers", required=True, type=lambda path: pathlib.Path(path).absolute())
    parser.add_argument("--keep", action="store_true", help="keep the logs, even if all is well")
    parser.add_argument("parts", nargs="*", help="routers, ray; default: both")
    options = parser.parse_args()
    options.parts = options.parts or ["routers", "ray"]
    if set(options.parts) - {"routers", "ray"}:
        parser.error("parts are routers and ray")
    os.environ.setdefault("RUST_LOG", "warn")
    # A shell's background jobs ignore SIGINT, and so would the programs that are ended by it here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A short path: Ray's sockets have names of at most 107 bytes.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ft", dir="/tmp"))
    try:
        check_affinity()
        single = Server(options.binary, FLAGS)
        texts = references(single.url)
        single.stop(30)
        print(f"       {time.monotonic() - started:5.0f} s  {len(texts)} texts of a single server", flush=True)
        app = Ray(options, folder)
        with contextlib.ExitStack() as stack:
            if "ray" in options.parts:
                # It takes its time, so it starts beside what comes first.
                app.process = stack.enter_context(app.run())
            if "routers" in options.parts:
                test_routers(options, folder, texts)
            if "ray" in options.parts:
                test_ray(app, texts)
        wait_for("the end of the replicas", lambda: not app.processes(), 60)
        check("no foretoken is left at the end", True)
    finally:
        if not (failures or options.keep or sys.exc_info()[0]):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"logs: {folder}")
    print(f"{'all well' if not failures else f'{len(failures)} FAILED'} after {time.monotonic() - started:.0f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
