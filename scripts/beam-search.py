#!/usr/bin/env python3
"""Beam search as `generate(num_beams=...)` of transformers has it. Needs torch and transformers 5.

    beam-search.py fixture              writes tests/data/beams.json, which tests/it/beams.rs compares
    beam-search.py compare URL GGUF     compares a running server of that file, and prints what it found

A server that quantizes activations has other log-probabilities than the float32 reference, so `compare` reports how many
beams agree, and fails only if the best one mostly does not.
"""
import json
import sys
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent.parent
FIXTURES = HERE / "tests/fixtures/architectures"
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a small boat",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The quick brown fox",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,",
    "The three primary colours are",
]


def beams(model, ids, width, max_tokens, penalty, early, eos):
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        num_beams=width, num_return_sequences=width, max_new_tokens=max_tokens, length_penalty=penalty,
        early_stopping=early, eos_token_id=eos or None, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True)
    found = []
    for text, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        text = text[len(ids):]
        ends = [i + 1 for i, id in enumerate(text) if id in eos]
        found.append({"ids": text[:ends[0]] if ends else text, "score": score})
    return found


def fixture():
    cases = []
    for name in ["llama", "qwen3"]:
        model = AutoModelForCausalLM.from_pretrained(FIXTURES / name, dtype=torch.float32).eval()
        prompt = [1, 7, 42, 99, 3, 250, 17]
        # Ids at which its beams end: some of those that they have.
        free = [id for beam in beams(model, prompt, 4, 12, 1.0, False, []) for id in beam["ids"][4:]]
        often = sorted(set(free), key=free.count)[-4:]
        first = model(torch.tensor([prompt])).logits[0, -1].topk(12).indices.tolist()
        for width, max_tokens, penalty, early, eos in [
            (2, 8, 1.0, False, []), (4, 12, 1.0, False, []), (4, 16, 1.0, False, first[2:4]),
            (4, 16, 1.0, True, first[1:6]), (3, 16, 2.0, "never", first[1:4]), (5, 10, 0.0, False, first[:3]),
            (8, 20, -1.0, False, first[2:8]),
            (4, 16, 1.0, False, often[:2]), (4, 16, 1.0, True, often[2:]), (4, 16, 1.5, "never", often[1:3]),
            (4, 24, 0.5, False, often),
        ]:
            cases.append({
                "model": name, "prompt": prompt, "width": width, "max_tokens": max_tokens, "length_penalty": penalty,
                "early_stopping": early, "eos": eos,
                "beams": beams(model, prompt, width, max_tokens, penalty, early, eos)})
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / "tests/data/beams.json").write_text(f"[\n{lines}\n]\n")
    print(len(cases), "cases")


def compare(url, gguf):
    gguf = Path(gguf)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    best = beams_equal = total = 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        body = {"prompt": ids, "max_tokens": 16, "use_beam_search": True, "n": 4, "return_token_ids": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        choices = json.load(urllib.request.urlopen(request))["choices"]
        ours = [choice["token_ids"] for choice in choices]
        with torch.no_grad():
            found = beams(model, ids, 4, 16, 1.0, False, [2])
        theirs = [beam["ids"] for beam in found]
        same = sum(text in theirs for text in ours)
        best += ours[0] == theirs[0]
        beams_equal += same
        total += 4
        print(f"{prompt!r}: best {'equal' if ours[0] == theirs[0] else 'differs'}, {same} of 4 beams among the reference's; "
              f"reference scores {[round(beam['score'], 3) for beam in found]}")
        if ours[0] != theirs[0]:
            print("   ours  ", repr(tokenizer.decode(ours[0])), "\n   theirs", repr(tokenizer.decode(theirs[0])))
    print(f"{best} of {len(PROMPTS)} best beams and {beams_equal} of {total} beams are equal")
    return best * 2 > len(PROMPTS)


if __name__ == "__main__":
    if sys.argv[1:] == ["fixture"]:
        fixture()
    elif len(sys.argv) == 4 and sys.argv[1] == "compare":
        sys.exit(0 if compare(sys.argv[2].rstrip("/"), sys.argv[3]) else 1)
    else:
        sys.exit(__doc__)
