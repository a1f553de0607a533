#!/usr/bin/env python3
"""Runs foretoken.conf in a real nginx: test.py FORETOKEN. Needs nginx (Debian: nginx-light) and openssl.

The server is started with ../systemd/foretoken.toml, on a free port. The nginx block is used as it is, but for ports,
certificates and, where a check says so, one directive. With systemd-analyze, the unit is checked, too.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SYSTEMD = HERE.parent / "systemd"
NAME = "llm.example.com"
KEY = "secret"
QUESTION = {"model": "foretoken-demo", "messages": [{"role": "user", "content": "Tell me a long story."}]}
# Processes that end with this one.
RUNNING = []


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def send(port, method, path, body=None, host=NAME, key=KEY, tls=True):
    """Sends a request; returns its socket."""
    stream = socket.create_connection(("127.0.0.1", port), timeout=60)
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        stream = context.wrap_socket(stream, server_hostname=NAME)
    body = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"]
    if key:
        head.append(f"Authorization: Bearer {key}")
    stream.sendall("\r\n".join([*head, "Content-Type: application/json", "", ""]).encode() + body)
    return stream


def parts(stream):
    """What arrives, piece by piece."""
    while True:
        # nginx ends the connection without TLS's farewell.
        try:
            data = stream.recv(1 << 20)
        except ssl.SSLEOFError:
            return
        if not data:
            return
        yield data


def ask(*args, **more):
    """The status and the text of an answer."""
    with send(*args, **more) as stream:
        answer = b"".join(parts(stream)).decode()
    return int(answer.split(" ")[1]), answer


def nginx_with(folder, port, edit=lambda block: block):
    """Starts nginx with the block, before the server on `port`; returns the process and its port."""
    own = free_port()
    block = (HERE / "foretoken.conf").read_text()
    for old, new in [
        ("127.0.0.1:8000", f"127.0.0.1:{port}"),
        ("listen 443 ssl", f"listen 127.0.0.1:{own} ssl"),
        (f"/etc/letsencrypt/live/{NAME}/fullchain.pem", f"{folder}/cert.pem"),
        (f"/etc/letsencrypt/live/{NAME}/privkey.pem", f"{folder}/key.pem"),
    ]:
        assert old in block, old
        block = block.replace(old, new)
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"])
    config = folder / f"{own}.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/{own}.pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{edit(block)}\n}}\n"
    )
    command = ["nginx", "-p", str(folder), "-e", f"{folder}/error.log", "-c", str(config)]
    subprocess.run([*command, "-t", "-q"], check=True)
    process = subprocess.Popen(command)
    RUNNING.append(process)

    def listens():
        assert process.poll() is None, (folder / "error.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", own)) == 0

    wait(listens, "nginx")
    return process, own


def first_event(port):
    """Of a stream of 300 tokens: the events that are there with the first piece, all events, and the pieces."""
    body = {**QUESTION, "stream": True, "max_tokens": 300, "ignore_eos": True, "temperature": 0, "seed": 1}
    with send(port, "POST", "/v1/chat/completions", body) as stream:
        text, arrived = b"", []
        for data in parts(stream):
            text += data
            arrived.append(text.count(b"data: "))
    assert text.startswith(b"HTTP/1.1 200 "), text[:500]
    assert b"data: [DONE]" in text
    with_events = [events for events in arrived if events]
    return with_events[0], with_events[-1], len(with_events)


def check_unit(binary):
    if not shutil.which("systemd-analyze"):
        print("the unit: not checked, there is no systemd-analyze")
        return
    unit = (SYSTEMD / "foretoken.service").read_text().replace("/usr/local/bin/foretoken", binary)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "foretoken.service"
        path.write_text(unit)
        told = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    ours = [line for line in told.stderr.splitlines() if "foretoken.service" in line]
    assert told.returncode == 0 and not ours, told.stderr
    print("the unit: systemd-analyze verify finds nothing")
    config = (SYSTEMD / "foretoken.toml").read_text()
    assert re.search(rf'^allowed-hosts = "{NAME}"$', config, re.MULTILINE)
    stop = int(re.search(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)[1])
    assert stop > 30, "less than the default of --shutdown-timeout"


def check(folder, server, port):
    nginx, own = nginx_with(folder, port)
    status, _ = ask(own, "GET", "/v1/models")
    assert status == 200, status
    status, _ = ask(own, "GET", "/v1/models", key=None)
    assert status == 401, status
    print("a known host is served with a key, and not without")

    status, text = ask(own, "POST", "/v1/chat/completions", QUESTION, host="evil.example.com")
    assert status == 403 and "--allowed-hosts" in text, text
    print("a foreign Host is refused: 403")

    first, events, pieces = first_event(own)
    # On a busy machine some events wait for this process.
    assert first < events / 10 and pieces > events / 8, (first, events, pieces)
    print(f"a stream is not buffered: {events} events came in {pieces} pieces, {first} with the first")
    # The same without the header that foretoken sends.
    ignoring, other = nginx_with(
        folder, port, lambda block: block.replace("proxy_pass", "proxy_ignore_headers X-Accel-Buffering;\n        proxy_pass")
    )
    held, _, held_pieces = first_event(other)
    assert held > first and held_pieces < pieces / 3, (held, held_pieces)
    print(f"without X-Accel-Buffering it would be: {held_pieces} pieces, {held} events with the first")
    ignoring.terminate()
    ignoring.wait()

    def load():
        return json.loads(ask(port, "GET", "/load", tls=False)[1].split("\r\n\r\n", 1)[1])["server_load"]

    body = {**QUESTION, "stream": True, "n": 8, "ignore_eos": True}
    with send(own, "POST", "/v1/chat/completions", body) as stream:
        assert stream.recv(1).startswith(b"H")
        assert load() == 1
    wait(lambda: load() == 0, "the server computes for a client that went", 5)
    print("a client that goes ends its request")

    status, _ = ask(own, "POST", "/v1/chat/completions", {"pad": "x" * (3 << 20)})
    assert status == 413, status
    status, text = ask(own, "GET", "/metrics")
    assert status == 200 and "foretoken:" in text
    print("large bodies are refused, and metrics are there for this machine")
    # To this nginx, a client of this machine is a stranger.
    strict, stranger = nginx_with(folder, port, lambda block: block.replace("allow 127.0.0.1;", ""))
    for name in ["metrics", "load", "server_info", "reset_prefix_cache"]:
        for path in [f"/{name}", f"/{name}/", f"/{name}//", f"//{name}", f"/{name}?a=b"]:
            status, text = ask(stranger, "POST" if name.startswith("reset") else "GET", path)
            assert status == 403, (path, text)
    status, _ = ask(stranger, "GET", "/v1/models")
    assert status == 200, status
    strict.terminate()
    strict.wait()
    print("operators' routes are not there for others, in any form")

    server.terminate()
    assert server.wait(30) == 0
    status, _ = ask(own, "GET", "/v1/models")
    assert status == 502, status
    nginx.terminate()
    nginx.wait()
    print("a server that ended is a 502")


def main():
    binary = os.path.realpath(sys.argv[1])
    check_unit(binary)
    environment = {"FORETOKEN_API_KEY": KEY, "PATH": os.environ["PATH"], "RUST_LOG": "warn"}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        certificate = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={NAME}", "-days", "1"]
        files = ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
        subprocess.run([*certificate, *files], check=True, capture_output=True)
        port = free_port()
        flags = ["serve", "--config", SYSTEMD / "foretoken.toml", "--port", str(port)]
        server = subprocess.Popen([binary, *flags], env=environment, stdout=subprocess.PIPE, text=True)
        RUNNING.append(server)
        try:
            while "foretoken serves" not in (line := server.stdout.readline()):
                assert line, "the server did not start"
            check(folder, server, port)
        finally:
            for process in RUNNING:
                process.kill()


if __name__ == "__main__":
    main()
