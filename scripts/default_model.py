#!/usr/bin/env python3
"""Helpers of scripts/make-default-model.sh. Uses only the standard library.

    default_model.py prompts train 20000      writes prompts to learn from, as JSON lines
    default_model.py prompts heldout 120      writes other prompts, none of which is among those
    default_model.py steer                    stdin to stdout: asks SmolLM2 for short answers
    default_model.py clean                    stdin to stdout: keeps only good answers
    default_model.py score URL                stdin: answers; prints the loss of the model at URL on them
"""

import collections
import itertools
import json
import random
import re
import sys
import urllib.request
import zlib

# The topics of the prompts.
ANIMALS = """cat dog rabbit fox bear mouse owl frog duck turtle squirrel hedgehog horse sheep cow
goat pig elephant lion monkey penguin bee butterfly ant fish whale""".split()
PEOPLE = ["girl", "boy", "farmer", "baker", "teacher", "fisherman", "gardener", "grandmother",
          "grandfather", "king", "queen", "painter", "sailor", "shepherd"]
NAMES = "Tom Lily Anna Ben Mia Sam Lucy Max Emma Jack Rosa Leo".split()
TRAITS = ["little", "brave", "kind", "curious", "shy", "old", "clever", "lonely", "happy", "lazy"]
PLACES = ["in the forest", "on a farm", "by the sea", "in a small village", "in the garden",
          "on a mountain", "by the river", "at school", "in the snow", "on an island"]
EVENTS = ["finds a lost key", "learns to share", "makes a new friend", "gets lost and finds the way home",
          "helps a stranger", "plants a tree", "is afraid of the dark", "loses a toy",
          "wants to learn to swim", "bakes a cake", "finds a treasure", "builds a house",
          "learns to tell the truth", "waits for the rain", "sees the sea for the first time",
          "saves a friend", "learns to be patient", "has a birthday", "goes on a long walk",
          "finds a small bird"]

HABITS = ["Where does a {} live?", "What does a {} eat?", "What does a {} look like?",
          "Why do people like the {}?", "What can we learn from a {}?", "How does a {} sleep?"]
THINGS = """sun moon sky rain snow wind river sea mountain forest tree flower garden house school
book bread milk apple honey water fire clock bicycle boat train bridge map lamp ball rainbow cloud
star island desert farm market winter spring summer autumn morning night music""".split()
THING_QUESTIONS = ["What is the {}?", "What is a {} for?", "Why is the {} important?",
                   "What can you tell me about the {}?"]
ADVICE = ["be a good friend", "sleep well", "stay healthy", "learn a new language", "cook rice",
          "make a cup of tea", "grow tomatoes", "take care of a dog", "take care of a cat",
          "save water", "say sorry", "make a paper boat", "bake bread", "learn to swim",
          "ride a bicycle", "plant a tree", "keep a room tidy", "make a simple soup",
          "write a letter", "find a lost key", "calm down", "read more books", "help at home",
          "make new friends", "prepare for a trip", "wash the dishes", "draw a house", "save money"]
ADVICE_QUESTIONS = ["How can I {}?", "Give me three tips to {}.", "What is the best way to {}?",
                    "Why is it good to {}?"]
TOPICS = ["why the sky is blue", "why leaves fall in autumn", "how rain is made", "how plants grow",
          "how bees make honey", "why we sleep", "why we need water", "how birds fly",
          "how fish breathe", "why it snows", "how the moon moves", "why we have day and night",
          "how bread is made", "how a boat floats", "why we brush our teeth", "how a seed grows",
          "how the wind blows", "why ice melts", "how a bicycle works", "why friends are important",
          "why we should tell the truth", "how to share with others", "what a family is",
          "what a volcano is", "what a desert is", "why the sea is salty", "how the heart works",
          "why trees are important", "how a clock works", "what a rainbow is", "why animals hide",
          "how the seasons change", "what electricity is", "how a lamp gives light",
          "why we go to school", "what money is for", "how a letter travels", "why we laugh",
          "how mountains are made", "what the stars are"]
EXPLANATIONS = ["Explain {} in simple words.", "Explain {} to a child.", "In a few sentences, explain {}.",
                "Can you explain {}?"]


def grammatical(text):
    """Replaces "a" by "an" before a vowel."""
    return re.sub(r"\ba (?=[aeio])", "an ", text)


def combinations():
    """All prompts, as (category, text)."""
    heroes = [grammatical(f"a {trait} {who}") for trait in TRAITS for who in ANIMALS + PEOPLE]
    for hero, place, event in itertools.product(heroes, PLACES, EVENTS):
        yield "story", f"Write a short story about {hero} {place} who {event}."
    for name, event in itertools.product(NAMES, EVENTS):
        yield "story", f"Write a short story about {name}, who {event}."
    for question, animal in itertools.product(HABITS, ANIMALS):
        yield "question", grammatical(question.format(animal))
    for question, thing in itertools.product(THING_QUESTIONS, THINGS):
        yield "question", grammatical(question.format(thing))
    for question, what in itertools.product(ADVICE_QUESTIONS, ADVICE):
        yield "advice", question.format(what)
    for question, topic in itertools.product(EXPLANATIONS, TOPICS):
        yield "explanation", question.format(topic)


def prompts(part, count):
    """Prints `count` prompts. One combination in ten is held out; a fixed seed chooses among the others."""
    held_out = {"train": False, "heldout": True}[part]
    by_category = {}
    for category, text in combinations():
        if (zlib.crc32(text.encode()) % 10 == 0) == held_out:
            by_category.setdefault(category, []).append(text)
    rng = random.Random(1)
    # Half are stories. The other categories have few prompts, which are repeated and get a new answer
    # each time.
    shares = {"story": 3, "question": 1, "advice": 1, "explanation": 1}
    bags = {category: [] for category in shares}
    for number in range(int(count)):
        category = rng.choices(list(shares), weights=shares.values())[0]
        if not bags[category]:
            bags[category] = rng.sample(by_category[category], len(by_category[category]))
        text = bags[category].pop()
        print(json.dumps({"id": f"{part}-{number}", "category": category, "prompt": text}))


# Makes SmolLM2's answers short. The pair does not learn this part of the prompt.
STEERING = " (Keep it very short and simple.)"
SENTENCE_END = re.compile(r"[.!?][\"'”’)]?(?=\s|$)")
UNWANTED = re.compile(r"chatbot|language model|\bAI\b|SmolLM|Hugging|\*\*|```|http|[^\x00-\x7f]")


def cleaned(text):
    """`text` up to its last complete sentence; None if it has none, repeats itself, mentions chatbots or
    is not plain English text."""
    text = text.translate(str.maketrans("“”‘’—–", "\"\"''--")).strip()
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    # The dot after a list number does not end a sentence.
    ends = [end for end in ends if not re.search(r"(^|\s)\d+\.$", text[:end])]
    if not ends:
        return None
    text = text[: ends[-1]].strip()
    words = text.lower().split()
    if len(words) < 6 or UNWANTED.search(text):
        return None
    runs = collections.Counter(zip(words, words[1:], words[2:]))
    if runs and (max(runs.values()) > 3 or len(runs) < 0.8 * sum(runs.values())):
        return None
    return re.sub(r"\n{2,}", "\n", text)


def steer():
    for line in sys.stdin:
        prompt = json.loads(line)
        prompt["prompt"] += STEERING
        print(json.dumps(prompt))


def clean():
    kept = read = 0
    for line in sys.stdin:
        answer = json.loads(line)
        read += 1
        text = cleaned(answer["text"])
        if text is not None:
            kept += 1
            prompt = answer["prompt"].removesuffix(STEERING)
            answer.update(text=text, prompt=prompt, finish_reason="stop", prompt_ids=[], ids=[])
            print(json.dumps(answer))
    print(f"{kept} of {read} texts kept", file=sys.stderr)


def score(url):
    """Prints the mean loss of the model at `url` over the tokens of the answers, each after its prompt
    in SmolLM2's chat template."""
    loss = tokens = 0
    for line in sys.stdin:
        answer = json.loads(line)
        prompt = answer["prompt"].removesuffix(STEERING) + STEERING
        head = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
            f"<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        )
        body = {"model": "smollm2", "prompt": head + answer["text"], "max_tokens": 0, "echo": True,
                "logprobs": 0, "temperature": 0}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            logprobs = json.load(reply)["choices"][0]["logprobs"]
        for offset, logprob in zip(logprobs["text_offset"], logprobs["token_logprobs"]):
            if offset >= len(head):
                loss -= logprob
                tokens += 1
    print(f"{loss / tokens:.3f} nats per token, {tokens} tokens")


if __name__ == "__main__":
    commands = {"prompts": prompts, "steer": steer, "clean": clean, "score": score}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
