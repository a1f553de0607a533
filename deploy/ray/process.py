"""One foretoken process: started on a free port, watched, ended. Knows nothing of Ray."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|\[::1\]):\d+")

# Asks the kernel for a SIGTERM when the parent ends, however that happens, and becomes the program. (A preexec_fn could
# do the same without a second interpreter, but it makes subprocess use fork, which gRPC's threads do not survive.)
END_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM.value)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_binary(given=None):
    """The program: the given one, the one in PATH, the one that was built here, or one that is built now."""
    if given:
        path = shutil.which(os.path.expanduser(given))
        if path is None:
            raise FileNotFoundError(f"binary: {given} is no program on this machine")
        return os.path.abspath(path)
    built = REPOSITORY / "target/release/foretoken"
    found = shutil.which("foretoken") or (str(built) if built.exists() else None)
    if found is None:
        if not (REPOSITORY / "Cargo.toml").exists():
            raise FileNotFoundError("binary: no foretoken in PATH, and no sources to build it from: set args.binary")
        # cargo has its own lock: replicas that start together build once.
        subprocess.run(["cargo", "build", "--release", "--locked"], cwd=REPOSITORY, check=True)
        found = str(built)
    return found


def command_line(binary, flags, port=0):
    """A command line. `flags` are long names, with - or _, and their values; true is a flag without a value, and null
    and false leave one out."""
    command = [binary, "--host", "127.0.0.1", "--port", str(port)]
    for name, value in flags.items():
        name = "--" + name.lstrip("-").replace("_", "-")
        if name in ("--host", "--port"):
            raise ValueError(f"flags: {name} is chosen for each replica")
        if value is True:
            command.append(name)
        elif value is not None and value is not False:
            command += [name, str(value)]
    return command


class Server:
    """A running foretoken, on 127.0.0.1. It does not outlive this process."""

    def __init__(self, binary, flags, ready_timeout=600.0, env=None):
        """Returns when /health is 200; flags as for `command_line`."""
        self.command = command_line(binary, flags)
        self.url = None
        self._env = {**os.environ, **(env or {})}
        self._started = threading.Event()
        self._named = threading.Event()
        self._error = None
        # To the kernel, a child's parent is the thread that started it. This one lives as long as the child, or this
        # process.
        threading.Thread(target=self._run, name="foretoken", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        try:
            self._wait_until_ready(time.monotonic() + ready_timeout)
        except BaseException:
            self.process.kill()
            raise

    def _run(self):
        command = [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *self.command]
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._env)
        except OSError as e:
            self._error = e
            return
        finally:
            self._started.set()
        for line in self.process.stdout:
            sys.stderr.write(line)
            address = ADDRESS.search(line)
            if self.url is None and address:
                self.url = address[0]
                self._named.set()
        self.process.wait()
        self._named.set()

    def _wait_until_ready(self, deadline):
        self._named.wait(deadline - time.monotonic())
        while self.alive() and time.monotonic() < deadline:
            if self.healthy():
                return
            time.sleep(0.05)
        if self.alive():
            raise TimeoutError(f"{self.command[0]} is not ready yet: raise args.ready_timeout")
        raise RuntimeError(f"{' '.join(self.command)} ended with status {self.process.wait()}: see its log")

    def alive(self):
        return self.process.poll() is None

    def healthy(self, timeout=5.0):
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=timeout) as response:
                return response.status == 200
        except (OSError, urllib.error.URLError, TypeError):
            return False

    def stop(self, timeout):
        """SIGTERM, which lets running requests finish; SIGKILL after `timeout` seconds."""
        if not self.alive():
            return
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
