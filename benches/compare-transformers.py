#!/usr/bin/env python3
"""Compares foretoken with Hugging Face transformers: tokens per second of one greedy stream after its
prompt, without and with a draft model (transformers' `assistant_model`).

Needs torch and transformers. Both models are folders with weights, or with only a config.json. In the
latter case both programs use random weights of that shape, and hardly any draft token is accepted. In
each round transformers and foretoken run in turn on the same machine. Prints medians and ratios over
the rounds.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
import transformers


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="configs/llama-3.2-3b")
    parser.add_argument("--draft", default="configs/llama-3.2-1b")
    parser.add_argument("--foretoken", default="target/release/foretoken")
    parser.add_argument("--device", default="cuda", help="cuda or cpu, for both")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    parser.add_argument("--spec-length", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def has_weights(folder):
    return any(pathlib.Path(folder).glob("*.safetensors"))


def load(folder, options):
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[options.dtype]
    if has_weights(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    else:
        config = transformers.AutoConfig.from_pretrained(folder)
        # Random weights take minutes on a CPU.
        with torch.device(options.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(options.device).eval()


class Transformers:
    def __init__(self, options):
        self.options = options
        self.target, self.draft = load(options.target, options), load(options.draft, options)
        self.draft.generation_config.num_assistant_tokens = options.spec_length
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        # Drafts as long as foretoken's, even if the draft model is unsure.
        self.draft.generation_config.assistant_confidence_threshold = 0.0
        vocabulary = self.target.config.vocab_size
        self.inputs = [
            torch.randint(vocabulary, (1, options.prompt_tokens), generator=torch.Generator().manual_seed(i))
            for i in range(options.prompts)
        ]

    def seconds(self, inputs, tokens, assistant):
        inputs = inputs.to(self.options.device)
        synchronize = torch.cuda.synchronize if self.options.device != "cpu" else lambda: None
        synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            out = self.target.generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=False, assistant_model=assistant,
                max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
        synchronize()
        got = out.shape[1] - inputs.shape[1]
        assert got == tokens, f"{got} tokens, not {tokens}"
        return time.perf_counter() - started

    def rate(self, assistant):
        """Tokens per second after the first token, over all prompts."""
        tokens, seconds = 0, 0.0
        for inputs in self.inputs:
            first = self.seconds(inputs, 1, None)
            seconds += self.seconds(inputs, self.options.max_tokens, assistant) - first
            tokens += self.options.max_tokens - 1
        return tokens / seconds

    def round(self):
        return {"plain": self.rate(None), "speculative": self.rate(self.draft)}


def foretoken(options):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [
            options.foretoken, "bench", "--model", options.target, "--draft-model", options.draft,
            "--spec-budget", "fixed", "--spec-topk", 1, "--spec-length", options.spec_length,
            "--device", options.device, "--dtype", options.dtype, "--random-prompts", options.prompts,
            "--prompt-tokens", options.prompt_tokens, "--max-tokens", options.max_tokens, "--temperatures", 0,
            "--json", report.name,
        ]  # fmt: skip
        if not has_weights(options.target):
            command += ["--load-format", "dummy"]
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
        overall = json.load(report)["temperatures"][0]["overall"]
    return {
        "plain": overall["plain_tokens_per_second"],
        "speculative": overall["spec_tokens_per_second"],
        "alpha": overall["alpha"],
    }


def main():
    options = arguments()
    peer = Transformers(options)
    # The first texts of a process are slower.
    peer.seconds(peer.inputs[0], 8, None)
    peer.seconds(peer.inputs[0], 8, peer.draft)
    rounds = []
    for i in range(options.rounds):
        rounds.append({"transformers": peer.round(), "foretoken": foretoken(options)})
        print(f"round {i + 1}: {json.dumps(rounds[-1])}", flush=True)
    name = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {options.dtype}")
    print("| mode | transformers tok/s | foretoken tok/s | ratio |\n|---|---:|---:|---:|")
    for mode in ["plain", "speculative"]:
        theirs, ours = ([r[who][mode] for r in rounds] for who in ["transformers", "foretoken"])
        ratio = statistics.median(b / a for a, b in zip(theirs, ours))
        print(f"| {mode} | {statistics.median(theirs):.1f} | {statistics.median(ours):.1f} | {ratio:.2f} |")
    if options.json:
        options.json.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, "rounds": rounds}))


if __name__ == "__main__":
    main()
