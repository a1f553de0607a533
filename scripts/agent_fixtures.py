#!/usr/bin/env python3
"""Cuts what agents have sent to its shape: fields, types of items and tools, schemas, headers.

    scripts/agents.sh --record target/recorded && scripts/agent_fixtures.py target/recorded tests/fixtures/agents

tests/it/recorded.rs plays the requests. Prose becomes `Text.`, places become `/project`, and ids that name a machine or
a session become zeros. Uses only the standard library.
"""

import json
import pathlib
import re
import sys

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ZEROS = "00000000-0000-4000-8000-000000000000"
# What depends on the connection.
DROPPED = {"host", "connection", "content-length", "accept-encoding", "transfer-encoding"}
# Of a text that is a name, a number or a place, and no sentence.
MAX_WORDS, MAX_CHARS = 2, 60
SHARED = "shared"


def cut(value):
    """A value with the same shape."""
    if isinstance(value, dict):
        return {text(key): cut(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cut(item) for item in value]
    return text(value) if isinstance(value, str) else value


def text(value):
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        return json.dumps(cut(parsed))
    if value.startswith("/") and " " not in value:
        return "/project/" + pathlib.PurePath(value).name
    if len(value.split()) > MAX_WORDS or len(value) > MAX_CHARS or "\n" in value:
        return "Text."
    return UUID.sub(ZEROS, value)


def header(value):
    return "{}" if value.startswith("{") else UUID.sub(ZEROS, value)


def fixture(exchanges):
    """The requests of one agent, with the tools that all of them have in one place."""
    bodies = [exchange["body"] for exchange in exchanges]
    tools = next((body["tools"] for body in bodies if body and body.get("tools")), [])
    turns = []
    for exchange, body in zip(exchanges, bodies):
        headers = {name: header(value) for name, value in exchange["headers"].items() if name.lower() not in DROPPED}
        turn = {"method": exchange["method"], "path": exchange["path"], "headers": headers}
        if body:
            turn["body"] = cut(body)
            if body.get("tools") == tools and tools:
                turn["body"]["tools"] = SHARED
        turns.append(turn)
    return {"tools": cut(tools), "turns": turns}


def written(found):
    """JSON with a line for each tool and each request."""
    line = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    parts = (f'"{key}": [\n' + ",\n".join(map(line, found[key])) + "\n]" for key in ("tools", "turns"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main():
    recorded, out = map(pathlib.Path, sys.argv[1:])
    files = {}
    for file in recorded.glob("*.json"):
        name, number = file.stem.rsplit("-", 1)
        files.setdefault(name, []).append((int(number), file))
    out.mkdir(parents=True, exist_ok=True)
    for name, numbered in sorted(files.items()):
        exchanges = [json.loads(file.read_text()) for _, file in sorted(numbered)]
        (out / f"{name}.json").write_text(written(fixture(exchanges)))


if __name__ == "__main__":
    main()
