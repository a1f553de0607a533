#!/usr/bin/env python3
"""Asks two running servers of the same model the same random requests, and says which answers differ. Uses only the
standard library.

One server has drafts, a prefix cache and few blocks, the other has not: their answers must be equal, with log-probabilities,
ends and counts. The requests are those of every API, greedy and sampled, whole and streamed, in several choices, with
penalties, stop strings, beams, structured output and tools. Prompts share beginnings, some requests come again, and some
clients leave half-way. Models that both servers list, adapters among them, take turns.

    foretoken serve MODEL --port 8001 --num-blocks 128 --max-model-len 1024
    foretoken serve MODEL --port 8002 --max-model-len 1024 --speculative-decoding=false --no-prefix-caching
    scripts/compare-servers.py http://127.0.0.1:8001 http://127.0.0.1:8002

A difference is asked again alone and made smaller, and printed as commands of curl with their answers. Exits with 0 if
nothing differs, with 1 if something does, and with 2 if a server cannot be asked.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import shlex
import sys
import time
import urllib.parse

WORDS = "river clock the baker found a garden letter beside old mountains seven Zürich 日本 🙂 def {} [1,2] \n -".split(" ")
LENGTHS = [1, 2, 7, 20, 40, 64]
PERSON = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}
SCHEMAS = [
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 6},
    {"type": "object", "properties": {"xs": {"type": "array", "items": {"type": "number"}, "maxItems": 4}}, "required": ["xs"]},
    {"type": "object", "properties": PERSON, "required": ["name", "age"], "additionalProperties": False},
]
FUNCTIONS = {"find": SCHEMAS[3], "add": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
# What may differ: names, times, and what was drafted or cached. Anthropic's input_tokens leave out what was cached.
DROPPED = set(
    "id item_id call_id tool_call_id request_id created created_at completed_at model system_fingerprint sequence_number "
    "obfuscation timings speculative_decoding prompt_tokens_details completion_tokens_details input_tokens cached_tokens "
    "cache_read_input_tokens cache_creation_input_tokens prompt_eval_cached_count tokens_cached generation_settings "
    "total_duration load_duration prompt_eval_duration eval_duration".split()
)
# Strings that a stream sends in pieces.
JOINED = {"text", "content", "reasoning", "reasoning_content", "thinking", "arguments", "partial_json", "delta", "response"}
# Without these a request would be another, sampled with a random seed, or long.
KEPT = set("model options seed use_beam_search stream role type function name".split())
KEPT |= {"max_tokens", "max_output_tokens", "num_predict", "n_predict"}
SAMPLERS = ["temperature", "top_p", "top_k", "min_p", "seed"]
METRICS = ["num_preemptions_total", "prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total"]
BUSY = (429, 503)


def comparable(value):
    """A value without what may differ.

    >>> comparable({"id": "a", "choices": [{"text": "b", "timings": {}}]})
    {'choices': [{'text': 'b'}]}
    """
    if isinstance(value, dict):
        return {key: comparable(part) for key, part in value.items() if key not in DROPPED}
    return [comparable(part) for part in value] if isinstance(value, list) else value


def merge(into, event):
    """Adds an event of a stream to those before it.

    >>> merge({"choices": {0: {"text": "a", "ids": [1]}}}, {"choices": [{"index": 0, "text": "b", "ids": [2]}]})
    {'choices': {0: {'text': 'ab', 'ids': [1, 2], 'index': 0}}}
    """
    for key, value in event.items():
        before = into.get(key)
        if isinstance(value, dict):
            into[key] = merge(before or {}, value)
        elif isinstance(value, list) and (isinstance(before, dict) or any(isinstance(v, dict) and "index" in v for v in value)):
            into[key] = before or {}
            for part in value:
                into[key][part["index"]] = merge(into[key].get(part["index"], {}), part)
        elif isinstance(value, list):
            into[key] = (before or []) + value
        elif isinstance(value, str) and key in JOINED:
            into[key] = (before or "") + value
        elif value is not None or key not in into:
            into[key] = value
    return into


def joined(lines):
    """The events of a stream, those of a kind and place together. Pings depend on the time.

    >>> joined(['event: x', 'data: {"type": "x", "delta": "a"}', 'data: {"type": "x", "delta": "b"}', 'data: [DONE]'])
    {"['x', None, None]": {'type': 'x', 'delta': 'ab'}, 'done': True}
    """
    stream = {}
    for data in (line.removeprefix("data: ") for line in lines):
        event = comparable(json.loads(data)) if data.startswith("{") else {}
        if event and event.get("type") != "ping":
            merge(stream.setdefault(str([event.get(key) for key in ("type", "output_index", "index")]), {}), event)
        elif data == "[DONE]":
            stream["done"] = True
    return stream


class Server:
    def __init__(self, url, options):
        self.url, self.headers = url, {"Content-Type": "application/json"}
        self.headers.update({"Authorization": f"Bearer {options.api_key}"} if options.api_key else {})
        self.models = [model["id"] for model in json.loads(self.send("GET", "/v1/models")[1])["data"]]
        self.before = self.metrics()

    def send(self, method, path, body=None, leave=None):
        """Status and body, of which a client that leaves reads only `leave` bytes."""
        with contextlib.closing(http.client.HTTPConnection(self.url.hostname, self.url.port, timeout=900)) as connection:
            connection.request(method, path, body and json.dumps(body), self.headers)
            response = connection.getresponse()
            return response.status, response.read(leave)

    def metrics(self):
        """Counts of a server that has vLLM's metrics, with any prefix."""
        lines = [line.rsplit(" ", 1) for line in self.send("GET", "/metrics")[1].decode().splitlines() if line[:1] != "#"]
        named = {line[0].split("{")[0].split(":")[-1]: line[-1] for line in lines}
        return {name: float(named[name]) for name in METRICS if name in named}

    def named(self, body):
        """The body with the server's own name of its only model."""
        return body if body["model"] in self.models else {**body, "model": self.models[0]}

    def ask(self, path, body):
        """Status and comparable answer. A full server is asked again."""
        while (answer := self.send("POST", path, self.named(body)))[0] in BUSY:
            time.sleep(0.2)
        status, data = answer
        is_stream = status == 200 and body.get("stream")
        return status, joined(data.decode().splitlines()) if is_stream else comparable(json.loads(data))

    def curl(self, path, body):
        key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if "Authorization" in self.headers else ""
        data = shlex.quote(json.dumps(self.named(body), ensure_ascii=False))
        return f"curl {self.url.geturl().rstrip('/')}{path} -H 'Content-Type: application/json'{key} -d {data}"


def maybe(r, share, **fields):
    """Each field, with one of its values, in a share of all requests."""
    return {name: r.choice(values) for name, values in fields.items() if r.random() < share}


class Requests:
    """Random requests. Request number i depends on --seed, i, and the ids that the model has for WORDS."""

    def __init__(self, options, server):
        self.seed, self.long_words = options.seed, options.long_words
        status, answer = server.ask("/tokenize", {"model": server.models[0], "prompt": " ".join(WORDS)})
        self.ids = answer["tokens"] if status == 200 else [1, 2, 3]
        self.beginnings = [self.text(random.Random(i), options.long_words // 2) + " " for i in range(4)]

    def text(self, r, words=None):
        return " ".join(r.choice(WORDS) for _ in range(words or r.choice([1, 3, 10, 30, 120, self.long_words])))

    def prompt(self, r):
        return (r.choice(self.beginnings) if r.random() < 0.3 else "") + self.text(r)

    def messages(self, r):
        messages = [{"role": "system", "content": r.choice(self.beginnings)}] if r.random() < 0.3 else []
        for _ in range(r.choice([0, 0, 1, 3])):
            messages.append({"role": "user", "content": self.text(r, 15)})
            messages.append({"role": "assistant", "content": self.text(r, 10)})
        return [*messages, {"role": "user", "content": self.prompt(r)}]

    def sampling(self, r, names=None):
        """Parameters that several APIs have; `names`: only these."""
        body = {"temperature": r.choice([0, 0, 0.2, 0.7, 1]), "seed": r.randrange(10**6)}
        body.update(maybe(r, 0.15, top_p=[0.5, 0.9, 0.99], top_k=[1, 5, 40], min_p=[0.02, 0.2], repetition_penalty=[1.1, 1.5]))
        body.update(maybe(r, 0.15, presence_penalty=[-0.5, 0.8], frequency_penalty=[-0.3, 0.6], bad_words=[["the", "river"]]))
        bias = {str(token): r.choice([-100, 5]) for token in r.sample(self.ids, 3)}
        body.update(maybe(r, 0.15, logit_bias=[bias], stop_token_ids=[r.sample(self.ids, 3)], min_tokens=[1]))
        body.update(maybe(r, 0.15, stop=[" the", ["\n"], ["a", "and"], [". "]], include_stop_str_in_output=[True]))
        body.update(maybe(r, 0.15, ignore_eos=[True], skip_special_tokens=[False], return_token_ids=[True]))
        return {name: value for name, value in body.items() if names is None or name in names}

    def completion(self, r):
        if r.random() < 0.2:
            beams = {"use_beam_search": True, "n": r.choice([2, 3]), "temperature": 0}
            return "/v1/completions", {"prompt": self.text(r, 10), "max_tokens": r.choice([2, 7, 12]), **beams}
        prompts = [*[self.prompt(r)] * 6, [self.text(r, 3), self.text(r, 5)], r.choices(self.ids, k=r.randrange(1, 200))]
        body = {"prompt": r.choice(prompts), "max_tokens": r.choice(LENGTHS), **self.sampling(r)}
        body.update(maybe(r, 0.25, n=[2, 3], logprobs=[0, 1, 5], echo=[True], stream=[True]))
        forms = [{"guided_regex": "[a-z ]{5,40}\\."}, {"guided_choice": WORDS}, {"guided_json": r.choice(SCHEMAS)}, {}, {}, {}]
        return "/v1/completions", {**body, **r.choice(forms)}

    def chat(self, r):
        body = {"messages": self.messages(r), "max_tokens": r.choice(LENGTHS), **self.sampling(r)}
        kind = r.choice(["text", "text", "schema", "tools", "tools", "continued"])
        if kind == "schema":
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": r.choice(SCHEMAS)}}
            body["response_format"] = r.choice([schema, schema, {"type": "json_object"}])
        elif kind == "tools":
            body["tools"] = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in FUNCTIONS.items()]
            body["tool_choice"] = r.choice(["auto", "required", "none", {"type": "function", "function": {"name": "add"}}])
        elif kind == "continued":
            body["messages"].append({"role": "assistant", "content": "The river"})
            body.update(continue_final_message=True, add_generation_prompt=False)
        body.update(maybe(r, 0.2, n=[2], prediction=[{"type": "content", "content": self.text(r, 20)}]))
        body.update({"logprobs": True, "top_logprobs": r.choice([0, 3])} if r.random() < 0.3 else {})
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return "/v1/chat/completions", {**body, **r.choice([stream, {}])}

    def response(self, r):
        body = {"input": self.messages(r), "max_output_tokens": r.choice([16, 64]), "store": False}
        body.update(self.sampling(r, ["temperature", "top_p", "seed"]), **maybe(r, 0.4, stream=[True]))
        form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": r.choice(SCHEMAS)}}}
        tools = [{"type": "function", "name": n, "parameters": s} for n, s in FUNCTIONS.items()]
        return "/v1/responses", {**body, **r.choice([{}, form, {"tools": tools, "tool_choice": r.choice(["auto", "required"])}])}

    def message(self, r):
        messages = [message for message in self.messages(r) if message["role"] != "system"]
        body = {"messages": messages, "max_tokens": r.choice(LENGTHS), **self.sampling(r, SAMPLERS)}
        body.update(maybe(r, 0.4, stream=[True], system=self.beginnings), **maybe(r, 0.2, stop_sequences=[[" the", "\n"]]))
        tools = [{"name": n, "input_schema": s} for n, s in FUNCTIONS.items()]
        body.update({"tools": tools, "tool_choice": {"type": r.choice(["auto", "any"])}} if r.random() < 0.3 else {})
        return "/v1/messages", body

    def ollama(self, r):
        options = {"num_predict": r.choice(LENGTHS), **self.sampling(r, [*SAMPLERS, "presence_penalty", "stop"])}
        body = {"options": options, "stream": r.random() < 0.5}
        return "/api/chat", {"messages": self.messages(r), **body, **maybe(r, 0.2, format=SCHEMAS)}

    def infill(self, r):
        body = {"input_prefix": self.text(r), "input_suffix": self.text(r, 10), "n_predict": r.choice(LENGTHS)}
        return "/infill", {**body, **self.sampling(r, SAMPLERS), **maybe(r, 0.3, stream=[True])}

    def embedding(self, r):
        inputs = [self.prompt(r) for _ in range(r.randrange(1, 4))]
        return "/v1/embeddings", {"input": inputs, "encoding_format": r.choice(["float", "base64"])}

    def number(self, i, models):
        """Request number i: path, body, and the rest of its randomness."""
        r, common = random.Random(f"{self.seed} {i}"), [self.chat, self.completion, self.response, self.message, self.ollama]
        path, body = r.choice([*common * 3, self.infill, self.embedding])(r)
        return path, {"model": r.choice(models), **body}, r


def smaller(value):
    """Values with one thing less: a key, or half of a list or of a text.

    >>> list(smaller({"model": "m", "prompt": "abc"}))
    [{'model': 'm'}, {'model': 'm', 'prompt': 'a'}, {'model': 'm', 'prompt': 'bc'}]
    """
    if isinstance(value, dict):
        yield from ({name: part for name, part in value.items() if name != key} for key in value if key not in KEPT)
        inner = (key for key in value if key not in KEPT or isinstance(value[key], dict))
        yield from ({**value, key: less} for key in inner for less in smaller(value[key]))
    if isinstance(value, (str, list)) and len(value) > 1:
        yield from (value[: len(value) // 2], value[len(value) // 2 :])
    if isinstance(value, list):
        yield from ([*value[:i], less, *value[i + 1 :]] for i, part in enumerate(value) for less in smaller(part))


def smallest(body, differs, tries=200):
    """The body with as little as possible that still differs.

    >>> smallest({"model": "m", "prompt": "a b c d", "n": 2}, lambda body: "c" in body.get("prompt", ""))
    {'model': 'm', 'prompt': 'c'}
    """
    tried = iter(range(tries))
    while less := next((less for less in smaller(body) if next(tried, None) is not None and differs(less)), None):
        body = less
    return body


class Comparison:
    def __init__(self, servers, options):
        self.servers, self.options, self.requests = servers, options, Requests(options, servers[0])
        self.models = [model for model in servers[0].models if model in servers[1].models] or servers[0].models[:1]
        self.statuses, self.refusals, self.differences = collections.Counter(), {}, []

    def compare(self, i):
        path, body, r = self.requests.number(i, self.models)
        if r.random() < 0.1:
            self.servers[0].send("POST", path, body, leave=r.choice([1, 300]))
        if r.random() < 0.15:
            self.servers[0].ask(path, body)
        return i, path, body, [server.ask(path, body) for server in self.servers]

    def differs(self, path, body):
        """Whether the answers to the request alone differ; those to a wrong request do not count."""
        answers = [server.ask(path, body) for server in self.servers]
        return answers[0] != answers[1] and any(status == 200 for status, _ in answers)

    def run(self):
        with concurrent.futures.ThreadPoolExecutor(self.options.concurrency) as pool:
            for i, path, body, answers in pool.map(self.compare, range(self.options.requests)):
                status, error = answers[0][0], str(answers[0][1].get("error"))
                self.statuses[path, status] += 1
                if answers[0] != answers[1]:
                    print(f"request {i} differs: {path}", file=sys.stderr)
                    self.differences.append((i, path, body, answers))
                elif status != 200:
                    # Errors of one kind have one beginning.
                    self.refusals.setdefault((path, error[:80]), f"request {i}: {error[:200]}")
        for difference in self.differences[:3]:
            self.show(*difference)

    def show(self, i, path, body, answers):
        if alone := self.differs(path, body):
            body = smallest(body, lambda less: self.differs(path, less))
            answers = [server.ask(path, body) for server in self.servers]
        print(f"\nRequest {i} differs{'' if alone else ' beside others, but not alone: run it with the same --seed'}:")
        for server, (status, answer) in zip(self.servers, answers):
            print(server.curl(path, body), f"{status} {json.dumps(answer, ensure_ascii=False)}", sep="\n")

    def report(self):
        print("", *(f"{path} {status}: {count}" for (path, status), count in sorted(self.statuses.items())), sep="\n")
        for (path, _), example in self.refusals.items():
            print(f"{path} was refused by both, for example {example}")
        for server in self.servers:
            metrics = server.metrics()
            print(server.url.geturl(), *(f"{name} {metrics[name] - count:.0f}" for name, count in server.before.items()))
        answered = sum(count for (_, status), count in self.statuses.items() if status == 200)
        print(f"{len(self.differences)} requests differ; {answered} of {self.options.requests} were answered")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": int, "metavar": "N"}
    parser.add_argument("urls", nargs=2, type=urllib.parse.urlsplit, metavar="URL", help="the two servers")
    parser.add_argument("--requests", **number, default=300, help="number of requests (default %(default)s)")
    parser.add_argument("--concurrency", **number, default=6, help="requests at a time (default %(default)s)")
    parser.add_argument("--seed", **number, default=0, help="another seed, other requests (default %(default)s)")
    parser.add_argument("--long-words", **number, default=300, help="words of the long prompts (default %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    options = parser.parse_args()
    if min(options.requests, options.concurrency, options.long_words - 1) < 1:
        parser.error("numbers must be positive, and --long-words at least 2")
    if any(url.scheme != "http" or not url.hostname or url.path.strip("/") for url in options.urls):
        parser.error("a URL must be http://HOST:PORT")
    try:
        comparison = Comparison([Server(url, options) for url in options.urls], options)
        comparison.run()
        comparison.report()
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as e:
        print(f"error: a server cannot be asked: {e!r}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if comparison.differences else 0)


if __name__ == "__main__":
    main()
