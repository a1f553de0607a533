#!/usr/bin/env python3
"""Starts a program on a free port, asks its demonstration model for a completion, and ends it: answers.py [--end stdin]
PROGRAM [ARGUMENT...]. A signal ends it, or with `--end stdin` the end of its stdin, which Windows has, too. What comes before
the command `serve` may be another program that runs it.

Prints the milliseconds from the start to the answer, and the text as JSON. What the program logs goes to stderr.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request

PATIENCE_SECONDS = 120
REQUEST = {"model": "foretoken-demo", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


def completion(address):
    body = json.dumps(REQUEST).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
        return json.load(reply)["choices"][0]["text"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--end", choices=["signal", "stdin"], default="signal")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = [*args.command, "--host", "127.0.0.1", "--port", "0", "--threads", "2"]
    if args.end == "stdin":
        command.append("--exit-on-stdin-end")
    start = time.monotonic()
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    late = threading.Timer(PATIENCE_SECONDS, program.kill)
    late.start()
    try:
        found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in program.stdout)
        address = next((match[0] for match in found if match), None)
        if address is None:
            sys.exit("it does not serve")
        text = completion(address)
        milliseconds = int((time.monotonic() - start) * 1000)
        if args.end == "stdin":
            program.stdin.close()
        else:
            program.terminate()
        status = program.wait()
    finally:
        late.cancel()
        program.kill()
    if status != 0:
        sys.exit(f"it ended with status {status}")
    if not text:
        sys.exit("its text is empty")
    print(milliseconds, json.dumps(text))


if __name__ == "__main__":
    main()
