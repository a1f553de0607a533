"""Prefix affinity: which replica probably has a prompt's beginning in its KV cache.

Pure bookkeeping, without Ray: the router of `app.py` and `deploy/simulate.py` use the same code. A prompt is cut into
blocks of `BLOCK` characters, and a block's key is a hash of everything up to its end, as in the server's prefix cache.
The table remembers which replicas were given which blocks. It is bounded, and what was used least recently goes first.
"""

import collections
import hashlib
import itertools
import json

BLOCK = 64
"""Characters a block: about the 16 tokens of a block of the server."""
MAX_BLOCKS = 1024
"""Blocks of a prompt that are looked at; a longer prompt is told apart by its first 65,536 characters."""
MAX_HOLDERS = 4
"""Replicas remembered for a block: enough for a popular system prompt, which soon is everywhere."""

PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""Fields of a request that its prompt is made of, in the order in which chat templates write them."""


def prompt_of(body):
    """What stands for the prompt of a request with this JSON body (an object): a text that begins as another one does
    if the prompts begin alike."""
    parts = []
    for field in PROMPT_FIELDS:
        value = body.get(field)
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, list):
            # One text a message, so that a longer conversation begins with a shorter one's text.
            parts.extend(json.dumps(item, ensure_ascii=False) for item in itertools.islice(value, 4096))
    return "".join(parts)


def keys_of(text, secret=""):
    """The keys of a prompt's full blocks, in order. `secret` is what separates prefix caches (API key, cache salt):
    prompts of different owners have no key in common, so no one's routing tells what others have asked."""
    key = hashlib.blake2b(secret.encode(), digest_size=8).digest()
    keys = []
    for start in range(0, min(len(text) - BLOCK + 1, MAX_BLOCKS * BLOCK), BLOCK):
        block = text[start : start + BLOCK].encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(key + block, digest_size=8).digest()
        keys.append(key)
    return keys


class PrefixTable:
    """Which replicas were given which blocks."""

    def __init__(self, max_blocks=200_000):
        self.max_blocks = max_blocks
        self.holders = collections.OrderedDict()

    def matches(self, keys):
        """The replicas that were given the prompt's beginning, and how many blocks of it."""
        matched = {}
        for depth, key in enumerate(keys, 1):
            held = self.holders.get(key)
            if held is None:
                break
            # Who was given this block was given those before it, even if others are remembered for them now.
            matched.update(dict.fromkeys(held, depth))
        return matched

    def insert(self, keys, replica):
        """Notes that `replica` has been given a prompt."""
        # From the end, so that of a prompt's blocks the last ones are forgotten first.
        for key in reversed(keys):
            others = [other for other in self.holders.pop(key, ()) if other != replica]
            self.holders[key] = (*others[-(MAX_HOLDERS - 1) :], replica)
        while len(self.holders) > self.max_blocks:
            self.holders.popitem(last=False)

    def remove(self, replica):
        """Forgets a replica that is gone."""
        for key in [key for key, held in self.holders.items() if replica in held]:
            left = tuple(other for other in self.holders[key] if other != replica)
            if left:
                self.holders[key] = left
            else:
                del self.holders[key]


def cost(blocks, matched, load, load_blocks):
    """What it costs to send a prompt to a replica, in blocks to compute: those of the prompt that it does not have, and
    `load_blocks` for each request that it already has."""
    return blocks - matched + load_blocks * load


def by_cost(replicas, blocks, matched, loads, load_blocks):
    """Sorts replicas, the cheapest first; equal ones stay in their order."""
    return sorted(replicas, key=lambda r: cost(blocks, matched.get(r, 0), loads.get(r, 0), load_blocks))
