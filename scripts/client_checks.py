"""What the scripts with stock clients share: the server's model, a tool, a type, and how checks are run."""

import argparse
import sys
import time

import pydantic

KEY = "secret"
PROMPT = "Name three colours."
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def user(content):
    return {"role": "user", "content": content}


def check_city(arguments):
    assert set(arguments) == {"city", "unit"}, arguments
    assert arguments["unit"] in ("celsius", "fahrenheit"), arguments


def options(*names):
    """The command line: the url of the server, and those that `names` names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--short", action="store_true", help="only the checks that take no long answers")
    for name in names:
        parser.add_argument(f"--{name}", required=True)
    return parser.parse_args()


def run(title, checks, short=False):
    """Calls each public method of `checks`, prints a line for it, and exits.

    A check that returns None has no place here: it returns what is printed. With `short`, those are left
    out whose doc string says that they are long.
    """
    print(title)
    names = [name for name in vars(type(checks)) if not name.startswith("_")]
    if short:
        names = [n for n in names if "Long." not in (getattr(type(checks), n).__doc__ or "")]
    failures = 0
    for name in names:
        started = time.monotonic()
        try:
            outcome, detail = "ok", getattr(checks, name)()
        except Exception as error:  # noqa: BLE001 (each check is reported)
            outcome, detail = "FAILED", f"{type(error).__name__}: {error}"
            failures += 1
        seconds = time.monotonic() - started
        print(f"{outcome:6} {name.replace('_', ' '):36} {seconds:5.1f} s  {detail}", flush=True)
    print(f"{len(names) - failures} of {len(names)} passed")
    sys.exit(failures > 0)
