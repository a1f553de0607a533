#!/usr/bin/env python3
"""Compares foretoken with OpenVINO GenAI on one GGUF file.

Needs openvino-genai (on PyPI) in the Python that runs this. In each round foretoken's server and OpenVINO's
continuous batching pipeline, with each of the settings below, run in turn with the same number of threads,
greedy, without speculation and without a prompt cache. Measures decoding of one stream, without its prefill;
time to first token by length of the prompt; tokens per second of several streams at once, with their prefill.
foretoken is asked over HTTP, OpenVINO in its own process. Prints medians and ranges over the rounds. Needs an
idle machine; see benches/README.md.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from serving import FORETOKEN, Failed, at_once, cell, foretoken, running, sentences

# Properties of the pipeline. Its defaults compute in bf16 where the CPU can, with activations of 8 bits in groups of
# 32 and a cache of 8 bits; those of "f16 cache" are the closest to foretoken's.
SETTINGS = {
    "OpenVINO": {},
    "OpenVINO, f32, f16 cache": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"},
    "OpenVINO, f32, f32 cache": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
}
CACHE_GB = 4


def work():
    """The process that has a pipeline: reads jobs, one a line, and writes their times."""
    import numpy
    import openvino
    import openvino_genai

    setup = json.loads(sys.stdin.readline())
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = max(setup["streams"])
    scheduler.max_num_batched_tokens = max(setup["prefill"])
    properties = {"INFERENCE_NUM_THREADS": setup["threads"], **setup["properties"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(setup["model"], scheduler, "CPU", properties)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = job["tokens"], True
        prompts = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in job["prompts"]]
        asked = time.monotonic()
        streams = [pipeline.add_request(number, ids, config) for number, ids in enumerate(prompts)]
        answers = [{"asked": asked, "first": None, "last": None, "count": 0} for _ in streams]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.monotonic()
            for stream, answer in zip(streams, answers):
                if stream.can_read():
                    new = stream.read().values()
                    answer["count"] += sum(len(part.generated_ids) for part in new)
                    answer["first"], answer["last"] = answer["first"] or now, now
        print(json.dumps(answers), flush=True)


class Pipeline:
    """A process with a pipeline, as its client sees it."""

    def __init__(self, process):
        self.process = process

    def say(self, message):
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self):
        # OpenVINO may print lines of its own.
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise Failed(f"OpenVINO's process ended with {self.process.wait()}")

    def ask_all(self, prompts, tokens):
        self.say({"prompts": prompts, "tokens": tokens})
        answers = self.hear()
        if counts := [a["count"] for a in answers if a["count"] != tokens]:
            raise Failed(f"OpenVINO generated {counts[0]} tokens, not {tokens}")
        return answers


@contextlib.contextmanager
def openvino_pipeline(properties, options):
    command = [sys.executable, __file__, "--worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            pipeline = Pipeline(process)
            wanted = {name: vars(options)[name] for name in ("model", "threads", "streams", "prefill")}
            pipeline.say({**wanted, "properties": properties})
            pipeline.hear()
            yield lambda prompts, tokens: pipeline.ask_all(prompts, tokens)
        finally:
            process.kill()


@contextlib.contextmanager
def foretoken_server(options):
    options.prefill_tokens, most = max(options.prefill), max(options.streams)
    name, command, extra = foretoken(argparse.Namespace(**{**vars(options), "streams": most}))
    with running(name, command, extra, options.threads) as server:
        yield lambda prompts, tokens: at_once(server, prompts, tokens), server.tokenize


def measure(ask, ids, options):
    """All figures of one program in one round; each prompt is a different part of `ids`."""
    rest = itertools.cycle(ids)
    take = lambda count: list(itertools.islice(rest, count))
    ask([take(max(options.prefill))], 8)
    found = {}
    for _ in range(options.repeats):
        [answer] = ask([take(options.prompt_tokens)], options.tokens)
        # The first token belongs to the prefill.
        rate = (options.tokens - 1) / (answer["last"] - answer["first"])
        found.setdefault("decode, 1 stream, tokens/s", []).append(rate)
        for length in options.prefill:
            [answer] = ask([take(length)], 1)
            rate = length / (answer["first"] - answer["asked"])
            found.setdefault(f"prompt of {length}, tokens/s to the first token", []).append(rate)
    for streams in options.streams:
        answers = ask([take(options.prompt_tokens) for _ in range(streams)], options.tokens)
        seconds = max(a["last"] for a in answers) - min(a["asked"] for a in answers)
        found[f"streams with their prefill, {streams} at once, tokens/s"] = [streams * options.tokens / seconds]
    return {label: statistics.median(rates) for label, rates in found.items()}


def one_round(number, options):
    said = lambda name: print(f"round {number} of {options.rounds}: {name}", file=sys.stderr)
    said(FORETOKEN)
    with foretoken_server(options) as (ask, tokenize):
        count = max(options.prefill) * 2 + options.prompt_tokens * max(options.streams)
        ids = tokenize(sentences(count, seed=number))
        found = {FORETOKEN: measure(ask, ids, options)}
    for name in options.settings:
        said(name)
        with openvino_pipeline(SETTINGS[name], options) as ask:
            found[name] = measure(ask, ids, options)
    return found


def table(rounds, options):
    yield f"| measure | {FORETOKEN} | " + " | ".join(f"{name} | ratio" for name in options.settings) + " |"
    yield "| --- " * (2 + 2 * len(options.settings)) + "|"
    for label in rounds[0][FORETOKEN]:
        ours = [r[FORETOKEN][label] for r in rounds]
        cells = [cell(ours, 0)]
        for name in options.settings:
            theirs = [r[name][label] for r in rounds]
            cells += [cell(theirs, 0), cell([a / b for a, b in zip(ours, theirs)])]
        yield f"| {label} | " + " | ".join(cells) + " |"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--foretoken", default="target/release/foretoken", help="default: %(default)s")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    count = lambda flag, default, text, **more: parser.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{text} (default {default})", **more
    )
    count("--threads", 2, "threads of each")
    count("--rounds", 3, "rounds, each of which starts all")
    count("--repeats", 2, "requests of each kind per round; their median is the round's figure")
    count("--streams", [1, 4, 16, 32], "streams at once", nargs="+")
    count("--prefill", [512, 2048, 6000], "tokens of the long prompts", nargs="+")
    count("--tokens", 128, "tokens to generate, at least 2: the first belongs to the prefill")
    count("--prompt-tokens", 32, "tokens of the prompts of decoding and of streams")
    options = parser.parse_args()
    numbers = [options.threads, options.rounds, options.repeats, *options.streams, *options.prefill]
    if min([*numbers, options.prompt_tokens]) < 1 or options.tokens < 2:
        parser.error("each number must be at least 1, --tokens at least 2")
    for path, is_there in [(options.model, os.path.isfile), (options.foretoken, shutil.which)]:
        if not is_there(path):
            parser.error(f"no file {path}")
    return options


def main():
    if sys.argv[1:] == ["--worker"]:
        return work()
    options = parse_arguments()
    try:
        rounds = [one_round(number + 1, options) for number in range(options.rounds)]
    except (Failed, OSError) as e:
        sys.exit(f"error: {e}")
    print(f"{os.path.basename(options.model)}, {options.threads} threads\n", *table(rounds, options), sep="\n")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rounds, file, indent=1)


if __name__ == "__main__":
    main()
