#!/usr/bin/env python3
"""Asks a running server for answers under many JSON schemas, and validates each of them.

    pip install jsonschema openai
    scripts/check-schemas.py --url http://127.0.0.1:8080 [--suite DIR] [--more FILE...]

The schemas are those of scripts/schemas.py, the groups of the JSON Schema Test Suite under DIR (for
instance `json/tests/draft2020-12` in the source distribution of the Python package jsonschema 4.23), and
FILEs. Each is asked for at temperature 0 and 1, with and without speculation; both texts must be equal.

A schema that the server refuses with 400 counts as unsupported, and the message must quote it. An answer
that was cut off by max_tokens counts apart; every other answer must parse and validate. Exits with 1 if
one does not, or if the server refuses one of scripts/schemas.py.
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import sys
import urllib.error
import urllib.request

import jsonschema
from schemas import SCHEMAS


# Formats are checked, but no grammar knows leap years, or which offsets a checker accepts.
FORMATS = jsonschema.FormatChecker(set(jsonschema.FormatChecker.checkers) - {"date", "date-time", "time"})


def ask(url, schema, temperature, seed, max_tokens, spec_length, prompt):
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": temperature, "seed": seed, "max_tokens": max_tokens,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }
    if spec_length is not None:
        body["spec_length"] = spec_length
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return 200, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def check(options, name, schema, draft):
    """The outcomes at both temperatures: (outcome, detail)."""
    outcomes = []
    for temperature in (0, 1):
        prompt = f"Answer with an example of `{name.split('/')[-1]}` as JSON."
        asked = (options.url, schema, temperature, 7, options.max_tokens)
        status, answer = ask(*asked, None, prompt)
        if status == 400:
            error = answer["error"]
            quotes = (error["param"] or "").startswith("response_format") and error["message"]
            outcomes.append(("refused" if quotes else "FAILED", error["message"]))
            break
        if status != 200:
            outcomes.append(("FAILED", f"{status}: {answer}"))
            continue
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        _, plain = ask(*asked, 0, prompt)
        if plain["choices"][0]["message"]["content"] != text:
            outcomes.append(("FAILED", f"with speculation {text!r}, without {plain}"))
            continue
        if choice["finish_reason"] == "length":
            outcomes.append(("cut off", text))
            continue
        try:
            value = json.loads(text)
            validator = jsonschema.validators.validator_for(schema, default=draft)
            validator(schema, format_checker=FORMATS).validate(value)
            outcomes.append(("valid", text))
        except (ValueError, jsonschema.ValidationError) as error:
            outcomes.append(("FAILED", f"{text!r}: {str(error).splitlines()[0]}"))
        except Exception as error:
            # The validator cannot judge, for instance without a remote schema.
            outcomes.append(("not judged", f"{type(error).__name__}"))
    return outcomes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--suite", type=pathlib.Path)
    parser.add_argument("--more", type=pathlib.Path, nargs="*", default=[])
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    todo = [("own", name, schema) for name, schema in SCHEMAS.items()]
    for file in sorted(options.suite.glob("*.json")) if options.suite else []:
        for group in json.loads(file.read_text()):
            todo.append((f"suite/{file.stem}", group["description"], group["schema"]))
    todo += [("more", file.name, json.loads(file.read_text())) for file in options.more]
    draft = jsonschema.Draft202012Validator
    counts = collections.defaultdict(collections.Counter)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda one: check(options, one[1], one[2], draft), todo)
        for (kind, name, _), outcomes in zip(todo, results):
            for outcome, detail in outcomes:
                counts[kind][outcome] += 1
                if outcome == "FAILED" or options.verbose or kind == "own" and outcome == "refused":
                    print(f"{kind}: {name}: {outcome}: {detail}", flush=True)
    kinds = ["valid", "cut off", "refused", "not judged", "FAILED"]
    print(f"{'':32}" + "".join(f"{kind:>12}" for kind in kinds))
    total = collections.Counter()
    for kind, count in counts.items():
        total.update(count)
        print(f"{kind:32}" + "".join(f"{count[kind]:12}" for kind in kinds))
    print(f"{'total':32}" + "".join(f"{total[kind]:12}" for kind in kinds))
    sys.exit(1 if total["FAILED"] or counts["own"]["refused"] else 0)


if __name__ == "__main__":
    main()
