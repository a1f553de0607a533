#!/usr/bin/env python3
"""Runs an image of Containerfile's: test-image.py [--engine podman] [IMAGE]    (default: docker and foretoken)

Each server has a read-only root, no capability and no way to get one, as in kubernetes/. What is checked: the user, and that
there is no shell; the demonstration model on a new volume, with a prefix cache on it, which the next container finds; a model in
a folder of another user; that a folder it cannot write is one readable line; and that SIGTERM ends it while it loads, while it
waits and while it streams. The image needs no network.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parent / "models" / "default" / "foretoken-demo.Q5_1.gguf"
USER = 65532
START_SECONDS = 120
# What an engine waits between SIGTERM and SIGKILL: more than --shutdown-timeout and what the server writes at its end.
GRACE_SECONDS = 60
# The status of a program that SIGTERM ends.
TERMINATED = 143
PROMPT = "Once upon a time there was a little dog who lived in a house by the sea with a girl and her mother. " * 3
REQUEST = {"model": "foretoken-demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
RESTRICTIONS = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]


class Engine:
    """A container engine with the command line of docker."""

    def __init__(self, command, options):
        self.command = [command]
        self.options = options

    def __call__(self, *args, status=0):
        """What a command of the engine says; it is to end with `status`."""
        done = subprocess.run([*self.command, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == status, f"{args} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout.strip()

    @contextlib.contextmanager
    def server(self, image, *flags, mounts=()):
        """The name of a started container, which is removed afterwards."""
        options = [*RESTRICTIONS, *self.options, *(f"--volume={mount}" for mount in mounts)]
        name = self("run", "--detach", "--publish=127.0.0.1::8000", *options, image, *flags).splitlines()[-1]
        try:
            yield name
        except BaseException:
            print(self("logs", name))
            raise
        finally:
            self("rm", "--force", "--volumes", name)

    def address(self, name):
        """Where a server answers, once it does."""
        end = time.monotonic() + START_SECONDS
        while True:
            assert self("inspect", "--format={{.State.Running}}", name) == "true", "the server has ended"
            assert time.monotonic() < end, f"no answer within {START_SECONDS} s"
            port = re.search(r":(\d+)$", self("port", name, "8000"), re.M)
            address = f"http://127.0.0.1:{port[1]}"
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                return address
            time.sleep(0.1)

    def stop(self, name, status=0):
        """Sends SIGTERM, and returns the seconds until the server has ended by itself, with `status`."""
        start = time.monotonic()
        self("stop", f"--time={GRACE_SECONDS}", name)
        seconds = time.monotonic() - start
        ended = int(self("inspect", "--format={{.State.ExitCode}}", name))
        assert ended == status and seconds < GRACE_SECONDS, f"status {ended} after {seconds:.1f} s"
        return seconds


def post(address, body):
    """The reply to a completion, as a stream of lines."""
    data = json.dumps(body).encode()
    return urllib.request.urlopen(
        urllib.request.Request(f"{address}/v1/completions", data, {"Content-Type": "application/json"}), timeout=START_SECONDS
    )


def complete(address, **more):
    """The text of a completion, and how many of its prompt's tokens were cached."""
    with post(address, {**REQUEST, **more}) as reply:
        answer = json.load(reply)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def image_itself(engine, image):
    """Says its version, has the user that the manifests have, and no shell."""
    print(engine("run", "--rm", *RESTRICTIONS, *engine.options, image, "--version"))
    user = engine("image", "inspect", "--format={{.Config.User}}", image)
    assert user in ("nonroot", str(USER), f"{USER}:{USER}", "nonroot:nonroot"), user
    assert engine("image", "inspect", "--format={{.Config.ExposedPorts}}", image) == "map[8000/tcp:{}]"
    engine("run", "--rm", *engine.options, "--entrypoint=/bin/sh", image, "-c", "true", status=127)


def new_volume(engine, image):
    """On a new volume the cache of prefixes is written, and the next container finds it. Returns the text."""
    volume = f"foretoken-test-{os.getpid()}"
    engine("volume", "create", volume)
    flags = ["--host=0.0.0.0", "--prefix-cache-disk=/models/prefixes"]
    try:
        with engine.server(image, *flags, mounts=[f"{volume}:/models"]) as name:
            address = engine.address(name)
            process = int(engine("inspect", "--format={{.State.Pid}}", name))
            owner = os.stat(f"/proc/{process}").st_uid
            text, cached = complete(address)
            assert text and cached == 0, (text, cached)
            seconds = engine.stop(name)
        # Rootless engines map it to another one.
        assert owner == USER or os.geteuid() != 0, owner
        print(f"a new volume: an answer; SIGTERM ends the server after {seconds:.1f} s")
        with engine.server(image, *flags, mounts=[f"{volume}:/models"]) as name:
            again, cached = complete(engine.address(name))
            assert again == text and cached > 0, (again, text, cached)
            # What was learned of steps on this machine is on the volume, too.
            said = engine("logs", name)
            assert "learned anew" not in said, said
            engine.stop(name)
        print(f"the same volume again: the same text, with {cached} tokens from the prefix cache on disk")
    finally:
        engine("volume", "rm", "--force", volume)
    return text


def folder_of_another(engine, image, text):
    """Reads a model in a folder of another user; what it cannot write, it says in one line."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(MODEL, folder)
        os.chmod(f"{folder}/{MODEL.name}", 0o644)
        os.chmod(folder, 0o755)
        mount = f"{folder}:/models"
        flags = ["--host=0.0.0.0", f"--model=/models/{MODEL.name}"]
        with engine.server(image, *flags, "--served-model-name=foretoken-demo", mounts=[f"{mount}:ro"]) as name:
            own, _ = complete(engine.address(name))
            assert own == text, (own, text)
            engine.stop(name)
        print("a model in another user's folder, read-only: the same text")
        run = ["run", "--rm", *RESTRICTIONS, *engine.options, f"--volume={mount}", image, "--host=0.0.0.0"]
        said = engine(*run, "--prefix-cache-disk=/models/prefixes", status=2)
        assert "/models/prefixes" in said.splitlines()[-1], said
        print(f"a prefix cache there: {said.splitlines()[-1]}")
        os.chmod(f"{folder}/{MODEL.name}", 0o600)
        said = engine(*run, f"--model=/models/{MODEL.name}", status=2)
        assert MODEL.name in said.splitlines()[-1], said
        print(f"a model that only another user may read: {said.splitlines()[-1]}")


def signals(engine, image):
    """SIGTERM at the very start, and while a text streams, which comes to its end."""
    with engine.server(image, "--host=0.0.0.0") as name:
        print(f"SIGTERM while it loads: ended after {engine.stop(name, status=TERMINATED):.1f} s")
    with engine.server(image, "--host=0.0.0.0") as name:
        with post(engine.address(name), {**REQUEST, "max_tokens": 400, "ignore_eos": True, "stream": True}) as reply:
            reply.readline()
            stopping = subprocess.Popen([*engine.command, "stop", f"--time={GRACE_SECONDS}", name], stdout=subprocess.DEVNULL)
            lines = reply.read().decode().splitlines()
        assert stopping.wait() == 0 and lines[-2:].count("data: [DONE]") == 1, lines[-3:]
        assert engine("inspect", "--format={{.State.ExitCode}}", name) == "0"
        print("SIGTERM while it streams: the text comes to its end")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="?", default="foretoken")
    parser.add_argument("--engine", default="docker", help="a program with docker's command line [default: docker]")
    parser.add_argument("--option", action="append", default=[], help="an option of the engine's `run`, such as --device=...")
    args = parser.parse_args()
    engine = Engine(args.engine, args.option)
    image_itself(engine, args.image)
    text = new_volume(engine, args.image)
    folder_of_another(engine, args.image, text)
    signals(engine, args.image)
    print("all as it should be")


if __name__ == "__main__":
    main()
