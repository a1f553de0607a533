#!/usr/bin/env python3
"""Compares foretoken with the peers that it finds, on one GGUF file and the same prompts. Uses only the standard library.

Peers are llama.cpp's and ik_llama.cpp's llama-server, OpenVINO GenAI behind openvino_server.py, and whatever else answers
/v1/completions (--peer). Each round starts one server after another, never two at once, with as many threads: plainly, and
if it can draft without a second model once more with drafts. All requests are greedy and cache no prompt. Measures decoding
of one stream without its prefill, of new text and of text that repeats; prompts by length; streams at once. Prints medians
and ranges over the rounds, and ratios within a round. Needs an idle machine; see benches/README.md.
"""

import argparse
import html
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys

from serving import FORETOKEN, Failed, at_once, cell, flags, foretoken, running, sentences

ADAPTER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "openvino_server.py")
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b"]


class Program:
    """A server: its command, the fields of its requests, and what is added to either for drafts, None if it has none."""

    def __init__(self, name, command, fields, draft_flags=None, draft_fields=None):
        self.name, self.modes = name, [("", command, fields)]
        if draft_flags is not None:
            self.modes.append((", with drafts", command + draft_flags, fields if draft_fields is None else draft_fields))


def llama(name, program, options):
    threads, known, most = str(options.threads), flags(program), max(options.streams)
    context = max(1024, max(options.prefill) + 16, 4 * options.prompt_tokens + options.tokens + 16)
    command = [program, "--model", options.model, "--threads", threads, "--threads-batch", threads]
    command += ["--parallel", str(most), "--ctx-size", str(context * most)]
    # Otherwise it saves the caches of idle slots for prompts that might come again.
    command += ["--cache-ram", "0"] if "--cache-ram" in known else []
    command += ["--no-webui"] if "--no-webui" in known else []
    drafts = ["--spec-type", "ngram-simple"] if "--spec-type" in known else None
    return Program(name, command, {"cache_prompt": False}, drafts)


def openvino(options):
    command = [options.openvino, ADAPTER, "--model", options.model, "--threads", str(options.threads)]
    command += ["--max-num-seqs", str(max(options.streams)), "--max-num-batched-tokens", str(max(options.prefill))]
    return Program("OpenVINO", [*command, "--properties", options.openvino_properties], {}, ["--prompt-lookup"])


def programs(options):
    """foretoken, and the peers that are there; says which are not."""
    yield Program(*foretoken(options), draft_flags=[], draft_fields={})
    for name, program in [("llama.cpp", options.llama_server), ("ik_llama.cpp", options.ik_llama_server)]:
        if program and shutil.which(program):
            yield llama(name, program, options)
        else:
            print(f"not here: {name}", file=sys.stderr)
    if subprocess.run([options.openvino, "-c", "import openvino_genai"], capture_output=True).returncode == 0:
        yield openvino(options)
    else:
        print("not here: OpenVINO GenAI", file=sys.stderr)
    for name, command in (peer.split("=", 1) for peer in options.peer):
        yield Program(name, shlex.split(command), {})


def measure(server, take, options, drafts):
    """The figures of one server; `take` makes a prompt of so many tokens, of new text or of text that repeats."""
    server.ask(take(min(512, *options.prefill)), 8)
    found, texts = {}, []
    for _ in range(options.repeats):
        for kind, repeats in [("new text", False), ("text that repeats", True)]:
            answer = server.ask(take(options.prompt_tokens * (4 if repeats else 1), repeats), options.tokens)
            # The first token belongs to the prefill.
            rate = (options.tokens - 1) / (answer["last"] - answer["first"])
            found.setdefault(f"{kind}, 1 stream{drafts}, tokens/s", []).append(rate)
            texts.append(answer["text"])
        for length in [] if drafts else options.prefill:
            answer = server.ask(take(length), 1)
            rate = length / (answer["first"] - answer["asked"])
            found.setdefault(f"prompt of {length}, tokens/s to the first token", []).append(rate)
    for streams in options.streams:
        answers = at_once(server, [take(options.prompt_tokens) for _ in range(streams)], options.tokens)
        seconds = max(a["last"] for a in answers) - min(a["asked"] for a in answers)
        label = f"streams with their prefill, {streams} at once{drafts}, tokens/s"
        found[label] = [streams * options.tokens / seconds]
    return {label: statistics.median(rates) for label, rates in found.items()}, texts


def prompts(ids, begin):
    """Makes prompts of different parts of `ids`, after the ids with which every text begins."""
    rest = itertools.cycle(ids)

    def take(count, repeats=False):
        part = list(itertools.islice(rest, (count // 3 if repeats else count) - len(begin)))
        return (begin + part * 4)[:count]

    return take


def one_round(number, found_programs, options):
    figures, texts, ids = {}, {}, None
    for program in found_programs:
        for drafts, command, fields in program.modes:
            print(f"round {number} of {options.rounds}: {program.name}{drafts}", file=sys.stderr)
            with running(program.name, command, fields, options.threads) as server:
                # All get the ids into which foretoken, the first, encoded the text, so lengths are exact.
                if ids is None:
                    ids, begin = server.tokenize(sentences(4 * max(options.prefill), seed=number)), server.first_ids()
                now, said = measure(server, prompts(ids, begin), options, drafts)
            figures.setdefault(program.name, {}).update(now)
            texts.setdefault(program.name, said)
    return {"figures": figures, "texts": texts}


def ratios(rounds, peer, label):
    both = [(r["figures"][FORETOKEN], r["figures"][peer]) for r in rounds]
    return [ours[label] / theirs[label] for ours, theirs in both if label in theirs]


def table(rounds, peers):
    yield f"| | {FORETOKEN} | " + " | ".join(f"{peer} | ratio" for peer in peers) + " |"
    yield "| --- " * (2 + 2 * len(peers)) + "|"
    for label in rounds[0]["figures"][FORETOKEN]:
        cells = [cell([r["figures"][FORETOKEN][label] for r in rounds], 0)]
        for peer in peers:
            theirs = [r["figures"][peer][label] for r in rounds if label in r["figures"][peer]]
            cells += [cell(theirs, 0), cell(ratios(rounds, peer, label))] if theirs else ["", ""]
        yield f"| {label} | " + " | ".join(cells) + " |"


def same(rounds, peer):
    """How much of the greedy texts is the same: almost nothing would mean two different models."""
    pairs = [pair for r in rounds for pair in zip(r["texts"][FORETOKEN], r["texts"][peer])]
    share = statistics.median(len(os.path.commonprefix(pair)) / max(1, len(pair[0])) for pair in pairs)
    return f"The greedy texts of {peer} are the same as {FORETOKEN}'s for {share:.0%} of their length (median)."


def plot(rounds, peers):
    """An SVG of the ratios: a line of each figure, and on it the median and the range of each peer."""
    labels, left, width, row = list(rounds[0]["figures"][FORETOKEN]), 330, 400, 22
    points = [(i, j, found) for i, label in enumerate(labels) for j, peer in enumerate(peers)
              if (found := ratios(rounds, peer, label))]  # fmt: skip
    low = math.floor(math.log2(min([0.5, *(min(found) for *_, found in points)])))
    high = math.ceil(math.log2(max([2, *(max(found) for *_, found in points)])))
    x = lambda ratio: round(left + (math.log2(ratio) - low) / (high - low) * width, 1)
    top, bottom = 46, 46 + row * len(labels)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{bottom + 30}" '
    yield 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    yield f'<text x="8" y="18">{FORETOKEN} over its peers: to the right of 1 it is faster</text>'
    for power in range(low, high + 1):
        at, colour = x(2.0**power), "black" if power == 0 else "#ddd"
        yield f'<path d="M{at} {top - 6}V{bottom}" stroke="{colour}"/>'
        yield f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{2.0**power:g}</text>'
    for i, label in enumerate(labels):
        yield f'<text x="{left - 10}" y="{top + row * i + 14}" text-anchor="end">{label.removesuffix(", tokens/s")}</text>'
    for i, j, found in points:
        y, colour = top + row * i + row * (j + 1) / (len(peers) + 1), COLOURS[j % len(COLOURS)]
        yield f'<path d="M{x(min(found))} {y:.1f}H{x(max(found))}" stroke="{colour}"/>'
        yield f'<circle cx="{x(statistics.median(found))}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    for j, peer in enumerate(peers):
        yield f'<text x="{8 + 190 * j}" y="36" fill="{COLOURS[j % len(COLOURS)]}">● {html.escape(peer)}</text>'
    yield "</svg>"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--foretoken", default="target/release/foretoken", help="default: %(default)s")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's (default: that of the PATH)")
    parser.add_argument("--ik-llama-server", help="ik_llama.cpp's")
    parser.add_argument("--openvino", default=sys.executable, help="a Python with openvino-genai (default: this one)")
    parser.add_argument("--openvino-properties", default="{}", metavar="JSON", help="of its pipeline")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="as it is; gets --host and --port")
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--svg", metavar="FILE", help="also draw the ratios in FILE")
    count = lambda flag, default, text, **more: parser.add_argument(
        flag, type=int, default=default, metavar="N", help=f"{text} (default {default})", **more
    )
    count("--threads", 2, "threads of each server")
    count("--rounds", 3, "rounds, each of which starts all")
    count("--repeats", 2, "requests of each kind per round; their median is the round's figure")
    count("--streams", [1, 4, 16, 32], "streams at once", nargs="+")
    count("--prefill", [256, 512, 2048, 6000], "tokens of the long prompts", nargs="+")
    count("--tokens", 128, "tokens to generate, at least 2: the first belongs to the prefill")
    count("--prompt-tokens", 32, "tokens of the prompts of decoding and of streams")
    options = parser.parse_args()
    numbers = [options.threads, options.rounds, options.repeats, *options.streams, *options.prefill]
    if min(numbers) < 1 or options.prompt_tokens < 8 or options.tokens < 2:
        parser.error("each number must be at least 1, --tokens at least 2, --prompt-tokens at least 8")
    for path, is_there in [(options.model, os.path.isfile), (options.foretoken, shutil.which)]:
        if not is_there(path):
            parser.error(f"no file {path}")
    if not all("=" in peer for peer in options.peer):
        parser.error("--peer must be NAME=COMMAND")
    return options


def main():
    options = parse_arguments()
    # Raises an exception, so that the running server is killed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if os.getloadavg()[0] > 0.5:
        print("note: the machine is busy; this slows down llama.cpp most, because its threads spin", file=sys.stderr)
    try:
        found = list(programs(options))
        rounds = [one_round(number + 1, found, options) for number in range(options.rounds)]
    except (Failed, OSError) as e:
        sys.exit(f"error: {e}")
    peers = [program.name for program in found[1:]]
    model = os.path.basename(options.model)
    print(f"{model}, {options.threads} threads, {options.tokens} tokens after {options.prompt_tokens}, {options.rounds} rounds\n")
    print(*table(rounds, peers), "", *(same(rounds, peer) for peer in peers), sep="\n")
    for path, text in [(options.json, json.dumps(rounds, indent=1)), (options.svg, "\n".join(plot(rounds, peers)))]:
        if path:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
