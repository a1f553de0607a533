#!/usr/bin/env python3
"""Makes tests/fixtures/packed: tiny random checkpoints with a `quantization_config`, and what transformers computes in
f32 with the weights that they mean.

    pip install torch transformers safetensors gguf compressed-tensors
    scripts/make-packed-fixtures.py [NAME...]

A folder has what one of make-arch-fixtures.py has. Besides, `expected.safetensors` has for each packed matrix NAME the
tensor `NAME.check`: its product, in f64, with the vector whose entry `i` is `(37 i + 11) mod 101 - 50`."""

import importlib.util
import json
import sys
from pathlib import Path

import packed_formats as formats
import torch
import transformers
from arch_fixtures import SIZES
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "tests/fixtures/packed"
spec = importlib.util.spec_from_file_location("make_arch_fixtures", HERE / "make-arch-fixtures.py")
arch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(arch)
arch.VOCAB = 128

WIDE = dict(intermediate_size=96, tie_word_embeddings=True)
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, tie_word_embeddings=True,
)


def grouped(weights, format, ignore=("lm_head",), activations=None):
    """The configuration of compressed-tensors."""
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, output_activations=None)
    return dict(
        quant_method="compressed-tensors", format=format, config_groups=dict(group_0=group), ignore=list(ignore),
        kv_cache_scheme=None, quantization_status="compressed", global_compression_ratio=None, version="0.9.0",
        sparsity_config={}, transform_config={},
    )


def compressed(kind, weights, format, activations=None, more=WIDE, **how):
    """A fixture of compressed-tensors."""
    pack = lambda weight: formats.compressed(weight, weights, format, **how)
    return kind, more, grouped(weights, format, ("lm_head", "re:.*mlp.gate$"), activations), pack


INT4 = dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
INT8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
FLOAT8 = dict(num_bits=8, type="float", symmetric=True)
FLOAT4 = dict(num_bits=4, type="float", symmetric=True)
TOKENS = dict(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
GPTQ = dict(quant_method="gptq", bits=4, group_size=32, desc_act=False, sym=True, checkpoint_format="gptq")
BITS_AND_BYTES = dict(
    quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, _load_in_4bit=True, _load_in_8bit=False,
    bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="bfloat16",
    bnb_4bit_quant_storage="uint8", llm_int8_enable_fp32_cpu_offload=False, llm_int8_has_fp16_weight=False,
    llm_int8_skip_modules=["lm_head"], llm_int8_threshold=6.0,
)
AWQ = dict(
    quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm", backend="autoawq", do_fuse=False,
    modules_to_not_convert=None,
)

# The class, what its configuration has besides SIZES, `quantization_config`, and what packs a matrix.
FIXTURES = {
    "fp8_tensor": (
        "Llama", WIDE, dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"]),
        lambda weight: formats.fp8(weight, static=True),
    ),
    "fp8_blocks": (
        "Qwen3", WIDE, dict(
            quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[24, 20],
            modules_to_not_convert=["lm_head"],
        ),
        lambda weight: formats.fp8(weight, (24, 20), "weight_scale_inv"),
    ),
    "fp8_experts": (
        "Qwen3Moe", EXPERTS | dict(num_experts=3),
        dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[128, 128]),
        lambda weight: formats.fp8(weight, (128, 128), "weight_scale_inv"),
    ),
    "awq": ("Llama", WIDE, AWQ, formats.awq),
    "awq_experts": ("Qwen3Moe", EXPERTS, AWQ, formats.awq),
    # Groups that end within a block.
    "awq_groups_of_16": ("Llama", WIDE, AWQ | dict(group_size=16), lambda weight: formats.awq(weight, 16)),
    # With biases of zeros that the class does not have.
    "gptq": ("Qwen2", WIDE, GPTQ, lambda weight: formats.gptq(weight, bias=True)),
    "gptq_asymmetric": ("Llama", WIDE, GPTQ | dict(sym=False), lambda weight: formats.gptq(weight, symmetric=False)),
    "gptq_ordered": ("Llama", WIDE, GPTQ | dict(desc_act=True), lambda weight: formats.gptq(weight, ordered=True)),
    "gptq_ordered_by_16": (
        "Llama", WIDE, GPTQ | dict(desc_act=True, group_size=16),
        lambda weight: formats.gptq(weight, group=16, ordered=True),
    ),
    "gptq_8_bits": (
        "Llama", WIDE, GPTQ | dict(bits=8, group_size=-1, checkpoint_format="gptq_v2"),
        lambda weight: formats.gptq(weight, 8, -1, version=2),
    ),
    "w4a16": compressed("Llama", INT4, "pack-quantized"),
    "w4a16_asymmetric": compressed("Qwen3", INT4 | dict(symmetric=False), "pack-quantized"),
    "w4a16_ordered": compressed(
        "Llama", INT4 | dict(actorder="group"), "pack-quantized", ordered=True,
    ),
    "w4a16_experts": compressed("Qwen3Moe", INT4, "pack-quantized", more=EXPERTS),
    "w8a16": compressed("Llama", INT8, "pack-quantized"),
    "w8a16_asymmetric": compressed("Llama", INT8 | dict(symmetric=False), "pack-quantized"),
    "w8a8": compressed("Llama", INT8, "int-quantized", TOKENS),
    "nvfp4": compressed(
        "Llama", FLOAT4 | dict(strategy="tensor_group", group_size=16), "nvfp4-pack-quantized", dtype=torch.float32,
    ),
    "mxfp4": compressed("Llama", FLOAT4 | dict(strategy="group", group_size=32), "mxfp4-pack-quantized"),
    "nf4": ("Llama", WIDE | dict(intermediate_size=64), BITS_AND_BYTES, formats.nf4),
    "nf4_plain": (
        "Llama", WIDE, BITS_AND_BYTES | dict(bnb_4bit_use_double_quant=False),
        lambda weight: formats.nf4(weight, nested=False),
    ),
    "float8_tensor": compressed("Llama", FLOAT8 | dict(strategy="tensor"), "float-quantized"),
    "float8_channel": compressed(
        "Llama", FLOAT8 | dict(strategy="channel"), "float-quantized", TOKENS | dict(type="float"),
    ),
    "float8_blocks": compressed(
        "Llama", FLOAT8 | dict(strategy="block", block_structure=[16, 32]), "float-quantized",
    ),
}
# Matrices of layers that stay as they are.
PLAIN = ("mlp.gate.weight", "norm.weight")


def packed(state, pack):
    """The tensors of a checkpoint, the weights that they mean, and the products that tell."""
    stored, meant, checks = {}, {}, {}
    for name, tensor in state.items():
        if name.startswith("model.layers.") and tensor.dim() == 2 and not name.endswith(PLAIN):
            module = name.removesuffix(".weight")
            parts, meant[name] = pack(tensor.float())
            stored |= {f"{module}.{end}": part for end, part in parts.items()}
            vector = (torch.arange(tensor.shape[1]) * 37 + 11) % 101 - 50
            checks[f"{module}.check"] = meant[name].double() @ vector.double()
        else:
            stored.setdefault(name, tensor.to(torch.bfloat16))
            meant[name] = tensor.float()
    # Biases of the class have the last word.
    stored |= {name: state[name].to(torch.bfloat16) for name in state if name.endswith(".bias")}
    return {name: part.contiguous() for name, part in stored.items()}, meant, checks


def make(name):
    kind, more, config, pack = FIXTURES[name]
    own = getattr(transformers, f"{kind}Config")(**{**SIZES, **more, "vocab_size": arch.VOCAB})
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(own, attn_implementation="eager").eval().float()
    own.architectures = [f"{kind}ForCausalLM"]
    shown = own.to_diff_dict() | {"quantization_config": config, "dtype": "bfloat16"}
    for seed in range(1000):
        arch.randomize(model, seed)
        state = arch.saved(model)
        state.pop("lm_head.weight", None)
        stored, meant, checks = packed(state, pack)
        load(model, meant)
        found = arch.expected(model, seed, MARGIN)
        if found:
            break
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shown, indent=1) + "\n")
    save_file(stored, folder / "model.safetensors")
    save_file(found | checks, folder / "expected.safetensors")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, {size / 1024:.0f} KiB, logits up to {found['logprobs'].abs().max():.1f}")


# The smallest difference of the logits of the greedy text: activations of 8 bits change them.
MARGIN = 0.15


def load(model, meant):
    """Puts the weights into the model, whose experts may be in one tensor."""
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in meant.items():
            if name in own:
                own[name].copy_(tensor)
                continue
            at, expert, part = name.removesuffix(".weight").rsplit(".", 2)
            if part == "down_proj":
                own[f"{at}.down_proj"][int(expert)].copy_(tensor)
            else:
                start = 0 if part == "gate_proj" else tensor.shape[0]
                own[f"{at}.gate_up_proj"][int(expert), start : start + tensor.shape[0]].copy_(tensor)


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or FIXTURES:
        make(name)
