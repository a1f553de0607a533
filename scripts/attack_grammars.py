"""Attacks by schemas, tools and grammars, for `attack-http.py`: what a stranger may ask a server to compile, and to keep.

Each has a name, what it does, and the statuses that it may get. Two of them ask for formats and places that not every server
has: the tools of a model that writes calls as Qwen3-Coder does (`--tool-call-parser qwen3_coder`), and 400 places to wait.
"""

import collections
import json
import random

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# What is wrong with a request is told, and a request that is too much for now is told to come back.
REFUSED = {"400", "503"}
# How long a text under a grammar may take beside others.
MINUTES = 600


def completion(schema, **fields):
    """A completion that follows `schema`."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"prompt": "Once", "max_tokens": 16, "response_format": form} | fields


def call_of(parameters, **fields):
    """A chat that must call a tool with `parameters`."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"} | fields


def long_pointer(size):
    """A property whose name is long as a JSON pointer, with many children: a path for each would be their product."""
    name, children = "/" * (size * 11 // 20), [{}] * (size * 3 // 20)
    return {"type": "object", "properties": {name: {"anyOf": children}}}


def with_definitions(definitions, properties):
    """The schema of a tool with `definitions` bytes of `$defs` that each of its properties may use."""
    names = [f"d{i}" for i in range(definitions // 64)]
    some = {name: {"type": "string", "enum": ["red", "green", "blue"]} for name in names}
    of = {f"p{i}": {"$ref": f"#/$defs/{names[i % len(names)]}"} for i in range(properties)}
    return {"type": "object", "$defs": some, "properties": of, "required": [], "additionalProperties": False}


def wide(size, salt):
    """A schema of about `size` bytes that no other request has, with as many properties as fit."""
    count = size // 34
    names = [f"{salt}_{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names[:1]}


def words(size, salt):
    """About `size` bytes of words that no other request has."""
    rng = random.Random(salt)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(rng.choices(letters, k=12)) for _ in range(size // 15)]


def one_expression(at_once, context):
    """Long texts of one regular expression, each in another branch of it: alone each is a text, so together they are."""
    branches = "ABCDEFGHIJKLMNOP"
    expression = "(" + "|".join(f"{letter}[a-z .,']{{3500,3900}}{letter}" for letter in branches) + ")"

    def attack(target):
        def text(letter):
            ids = json.loads(target.ask("/tokenize", {"prompt": letter, "add_special_tokens": False})[1])["tokens"]
            body = {
                "prompt": "Once", "max_tokens": min(context - 8, 2000), "temperature": 1, "seed": ord(letter),
                "guided_regex": expression, "logit_bias": {str(ids[0]): 100},
            }
            return target.ask(COMPLETIONS, body, timeout=MINUTES)[0]

        alone = text(branches[0])
        together = at_once(len(branches), lambda index: text(branches[index]))
        return collections.Counter({f"alone {alone}": 1}) + collections.Counter(together)

    return attack


def each(at_once, count, path, body):
    """`count` requests at once, each with a body of its own."""
    return lambda target: at_once(count, lambda index: target.ask(path, body(index), timeout=MINUTES)[0])


def grammar_attacks(at_once, context):
    """For a server whose context has `context` tokens."""
    salts = random.Random()
    salt = lambda index: f"x{salts.randrange(10**9):09}{index:03}"
    small = {"200"} | REFUSED
    return [
        ("50 KB of long pointers", each(at_once, 2, COMPLETIONS, lambda _: completion(long_pointer(50_000))), small),
        ("200 KB of long pointers", each(at_once, 2, COMPLETIONS, lambda _: completion(long_pointer(200_000))), small),
        ("tools, 125 KB of $defs", each(at_once, 1, CHATS, lambda _: call_of(with_definitions(125_000, 7000), max_tokens=16)), small),
        ("honest tools with $defs", each(at_once, 1, CHATS, lambda _: call_of(with_definitions(min(context // 2, 40_000), 6), max_tokens=context // 10)), {"200"}),
        ("16 texts, one expression", one_expression(at_once, context), {"200", "alone 200"}),
        ("16 x 62 KB schemas", each(at_once, 16, COMPLETIONS, lambda i: completion(wide(62_000, salt(i)))), small),
        ("400 waiting grammars", each(at_once, 400, COMPLETIONS, lambda i: {
            "prompt": "Once", "max_tokens": 64, "guided_choice": words(60_000, salt(i))}), small),
    ]


def fresh_choice():
    """A small request with a grammar that was not asked for before."""
    return {"prompt": "Once upon a time", "max_tokens": 1, "guided_choice": words(60, random.random())}
