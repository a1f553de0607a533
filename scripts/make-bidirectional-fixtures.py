#!/usr/bin/env python3
"""Makes tests/fixtures/embedding_gemma and tests/fixtures/embeddings/bidirectional.json.

    pip install numpy torch transformers safetensors
    scripts/make-bidirectional-fixtures.py

`embedding_gemma` is a tiny random model as EmbeddingGemma is published: a `Gemma3TextModel` whose tokens see those after
them, two dense layers after the mean of its hidden states, the tokenizer of tests/fixtures/embeddings, and `gguf.json`, by
which the tests write it as llama.cpp's conversion would. `expected.json` is a list of texts or token ids with the `mean` of
the hidden states that transformers computes, and the `embedding`: that mean after the dense layers, normalized.

`bidirectional.json` is a list of token ids and the `mean` of the model of tests/fixtures/embeddings, if its tokens see
those after them, too.

All is computed in f64.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures"
QWEN = FIXTURES / "embeddings"
GEMMA = FIXTURES / "embedding_gemma"
CONFIG = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": 256,
    "final_logit_softcapping": None,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 48,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 256,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "pad_token_id": 256,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 12,
    "transformers_version": "4.57.0.dev0",
    "use_bidirectional_attention": True,
    "use_cache": True,
    "vocab_size": 257,
}
# Inputs and outputs of the dense layers.
DENSE = {"2_Dense": (48, 80), "3_Dense": (80, 40)}


def noise_of(seed):
    """Random values that bf16 holds."""
    generator = np.random.default_rng(seed)

    def noise(shape, scale, middle=0.0):
        values = (middle + scale * generator.standard_normal(shape)).astype("<f4")
        return torch.from_numpy((values.view("<u4") & 0xFFFF0000).view("<f4"))

    return noise


def random_tensors():
    noise = noise_of(30)
    hidden, mlp, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    q, kv = (CONFIG[key] * dim for key in ["num_attention_heads", "num_key_value_heads"])
    linear = lambda outputs, inputs: noise((outputs, inputs), 1.3 / inputs**0.5)
    tensors = {"embed_tokens.weight": noise((CONFIG["vocab_size"], hidden), 0.15), "norm.weight": noise(hidden, 0.3)}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, tensor in {
            "self_attn.q_proj": linear(q, hidden),
            "self_attn.k_proj": linear(kv, hidden),
            "self_attn.v_proj": linear(kv, hidden),
            "self_attn.o_proj": linear(hidden, q),
            "self_attn.q_norm": noise(dim, 0.3),
            "self_attn.k_norm": noise(dim, 0.3),
            "mlp.gate_proj": linear(mlp, hidden),
            "mlp.up_proj": linear(mlp, hidden),
            "mlp.down_proj": linear(hidden, mlp),
            "input_layernorm": noise(hidden, 0.3),
            "post_attention_layernorm": noise(hidden, 0.3),
            "pre_feedforward_layernorm": noise(hidden, 0.3),
            "post_feedforward_layernorm": noise(hidden, 0.3),
        }.items():
            tensors[f"layers.{layer}.{name}.weight"] = tensor
    dense = {name: linear(outputs, inputs) for name, (inputs, outputs) in DENSE.items()}
    return tensors, dense


def means(folder, all_ids, **mask):
    """The means of the hidden states of the model in `folder`."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([ids]), **mask).last_hidden_state[0].mean(0) for ids in all_ids]


def gguf():
    """What `gguf.json` of EmbeddingGemma has."""
    metadata = {
        "block_count": CONFIG["num_hidden_layers"],
        "context_length": CONFIG["max_position_embeddings"],
        "embedding_length": CONFIG["hidden_size"],
        "feed_forward_length": CONFIG["intermediate_size"],
        "attention.head_count": CONFIG["num_attention_heads"],
        "attention.head_count_kv": CONFIG["num_key_value_heads"],
        "attention.key_length": CONFIG["head_dim"],
        "attention.value_length": CONFIG["head_dim"],
        "attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
        "attention.sliding_window": CONFIG["sliding_window"],
        # llama.cpp assumes 6. Here the last of three layers sees all.
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": CONFIG["rope_theta"],
        "pooling_type": 1,
        "dense_2_feat_in": 48,
        "dense_2_feat_out": 80,
        "dense_3_feat_in": 80,
        "dense_3_feat_out": 40,
    }
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    how = lambda name: {"name": f"{name}.weight", "interleaved_heads": 0, "offset": int("norm" in name)}
    tensors = {"embed_tokens.weight": how("token_embd"), "norm.weight": how("output_norm")}
    for layer in range(CONFIG["num_hidden_layers"]):
        for ours, theirs in names.items():
            tensors[f"layers.{layer}.{ours}.weight"] = how(f"blk.{layer}.{theirs}")
    metadata = {f"gemma-embedding.{key}": value for key, value in metadata.items()}
    return {"architecture": "gemma-embedding", "metadata": metadata, "tensors": tensors, "extra": {}}


def rounded(values):
    return [round(float(x), 7) for x in values]


def save(file, value):
    file.write_text(json.dumps(value, indent=1) + "\n")


def save_lines(file, values):
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in values)
    file.write_text(f"[\n{lines}\n]\n")


def main():
    texts = json.loads((QWEN / "expected.json").read_text())
    all_ids = [one["ids"] for one in texts]
    for one, causal in zip(texts, means(QWEN, all_ids)):
        assert (causal - torch.tensor(one["mean"])).abs().max() < 1e-5, "another model"
    both_ways = [
        means(QWEN, [ids], attention_mask={"full_attention": torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)})[0]
        for ids in all_ids
    ]
    save_lines(QWEN / "bidirectional.json", [{"ids": ids, "mean": rounded(mean)} for ids, mean in zip(all_ids, both_ways)])

    shutil.rmtree(GEMMA, ignore_errors=True)
    tensors, dense = random_tensors()
    classes = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    modules = []
    for i, name in enumerate(classes):
        path = f"{i}_{name}" if i else ""
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"})
    for path in ["1_Pooling", *DENSE]:
        (GEMMA / path).mkdir(parents=True)
    save(GEMMA / "config.json", CONFIG)
    save(GEMMA / "modules.json", modules)
    save(GEMMA / "gguf.json", gguf())
    save(GEMMA / "1_Pooling/config.json", {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "include_prompt": True})
    for name, (inputs, outputs) in DENSE.items():
        activation = "torch.nn.modules.linear.Identity"
        save(GEMMA / name / "config.json", {"in_features": inputs, "out_features": outputs, "bias": False, "activation_function": activation})
        save_file({"linear.weight": dense[name]}, GEMMA / name / "model.safetensors", {"format": "pt"})
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors, GEMMA / "model.safetensors", {"format": "pt"})
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(QWEN / name, GEMMA / name)
    expected = []
    for one, mean in zip(texts, means(GEMMA, all_ids)):
        embedding = mean
        for layer in dense.values():
            embedding = layer.double() @ embedding
        embedding = embedding / embedding.norm()
        made = {"ids": one["ids"], "mean": rounded(mean), "embedding": rounded(embedding)}
        expected.append(made | ({"text": one["text"]} if "text" in one else {}))
    save_lines(GEMMA / "expected.json", expected)
    size = sum(file.stat().st_size for file in GEMMA.rglob("*") if file.is_file())
    print(f"{GEMMA}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
