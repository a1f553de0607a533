#!/usr/bin/env python3
"""Makes tests/fixtures/adapters: LoRA adapters of checkpoints of tests/fixtures/architectures, written by PEFT, and what
transformers computes with them.

    pip install torch transformers safetensors gguf peft
    scripts/make-lora-fixtures.py [NAME...]

A folder is named BASE-NAME. It has the `adapter_config.json` and `adapter_model.safetensors` that PEFT writes, with
random values, and `expected.safetensors` as make-arch-fixtures.py writes it, in f32.
"""

import importlib.util
import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

SCRIPTS = Path(__file__).resolve().parent
BASES = SCRIPTS.parent / "tests/fixtures/architectures"
FOLDER = SCRIPTS.parent / "tests/fixtures/adapters"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "llama-all": dict(r=4, lora_alpha=8, target_modules=[*ATTENTION, *MLP]),
    # Not all products of a joined layer, and ranks and scales that differ.
    "llama-some": dict(
        r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "up_proj"], use_rslora=True,
        rank_pattern={"v_proj": 3}, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 9}, layers_to_transform=None,
    ),
    "qwen2-rslora": dict(r=4, lora_alpha=4, target_modules="all-linear", use_rslora=True),
    # Neighbours of a head are rotated together, gate and up are one product.
    "glm-fused": dict(r=2, lora_alpha=4, target_modules=[*ATTENTION, "gate_up_proj", "down_proj"]),
    # The products of Mamba layers.
    "granite4_hybrid-mamba": dict(r=2, lora_alpha=4, target_modules=[*ATTENTION, "in_proj", "out_proj"]),
    # The products before and after latent attention.
    "deepseek_v3-latent": dict(
        r=2, lora_alpha=4, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    ),
    # Shared experts are products of all rows.
    "qwen2_moe-shared": dict(r=2, lora_alpha=4, target_modules=r".*(self_attn\.[qv]_proj|shared_expert\.\w+_proj)"),
}


def arch_fixtures():
    spec = importlib.util.spec_from_file_location("fixtures", SCRIPTS / "make-arch-fixtures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(name, keys, fixtures):
    base = BASES / name.split("-")[0]
    for seed in range(1000):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
        model = peft.get_peft_model(model, peft.LoraConfig(**keys)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for part, parameter in sorted(model.named_parameters()):
                if "lora_" in part:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * 0.7 / parameter.shape[-1] ** 0.5)
        found = fixtures.expected(model, seed)
        if found is None:
            continue
        with model.disable_adapter():
            prompt = found["prompt"].tolist()
            plain = torch.log_softmax(fixtures.logits(model, prompt), -1)[fixtures.ROWS]
        assert (plain - found["logprobs"]).abs().max() > 0.5, "the adapter changes little"
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        (folder / "adapter_model.safetensors").chmod(0o644)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = base.name
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(found, folder / "expected.safetensors")
        print(name, "seed", seed)
        return
    raise SystemExit(f"{name}: no seed")


def main():
    fixtures = arch_fixtures()
    for name in sys.argv[1:] or ADAPTERS:
        make(name, ADAPTERS[name], fixtures)


main()
