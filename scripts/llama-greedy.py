#!/usr/bin/env python3
"""Writes greedy texts of llama.cpp on a GGUF file, as ids, with which tests compare ours.

    scripts/llama-greedy.py --llama-server PATH/llama-server --model models/gemma-3-270m.Q4_K_M.gguf \\
        > tests/data/gemma3-greedy.jsonl

Each line has the ids of a prompt, those of llama.cpp's greedy text after it, and by how much the logarithm of each
token's probability exceeds that of the second. benches/README.md says how to build llama.cpp. Uses only the standard
library.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))
from serving import running  # noqa: E402

PROMPTS = [
    "The capital of France is",
    "The three states of matter are",
    "Water boils at 100 degrees Celsius because",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "Ingredients for a simple tomato soup:\n-",
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders",
    "English: Good morning, how are you?\nFrench:",
    "Die Hauptstadt von Deutschland ist",
    "El perro corre por el parque y",
    "Q: What is the largest planet of the solar system?\nA:",
    "Monday, Tuesday, Wednesday,",
    "1, 1, 2, 3, 5, 8,",
    "The main causes of the First World War were",
    "Photosynthesis is the process by which plants",
    "To change a flat tyre, first",
    "In machine learning, overfitting means that",
    "\"I have never seen anything like it,\" she said, and",
]
# Longer than a window of 512 tokens, and than two of them.
LONG = [("README.md", 3_000), ("docs/models.md", 6_000)]


def texts():
    yield from PROMPTS
    for name, length in LONG:
        yield (ROOT / name).read_text()[:length]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=64, help="of each text (default %(default)s)")
    options = parser.parse_args()
    command = [options.llama_server, "--model", options.model, "--threads", "2", "--ctx-size", "4096", "--parallel", "1"]
    with running("llama.cpp", command, {}, 2) as server:
        for text in texts():
            prompt = server.tokenize(text, special=True)
            body = {"prompt": prompt, "n_predict": options.tokens, "temperature": 0, "n_probs": 2}
            with server.call("POST", "/completion", body | {"cache_prompt": False}) as response:
                probs = json.loads(response.read())["completion_probabilities"]
            margins = []
            for prob in probs:
                first, second = prob["top_logprobs"]
                assert prob["id"] == first["id"], "it is greedy"
                margins.append(round(first["logprob"] - second["logprob"], 4))
            print(json.dumps({"prompt": prompt, "text": [prob["id"] for prob in probs], "margins": margins}))


if __name__ == "__main__":
    main()
