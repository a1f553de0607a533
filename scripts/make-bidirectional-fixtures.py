#!/usr/bin/env python3
"""Makes tests/fixtures/embedding_gemma and tests/fixtures/embeddings/bidirectional.json, with numpy alone.

    pip install numpy
    scripts/make-bidirectional-fixtures.py

`embedding_gemma` is a tiny random model as EmbeddingGemma is published: a `Gemma3TextModel` whose tokens see those after
them, two dense layers after the mean of its hidden states, the tokenizer of tests/fixtures/embeddings, and `gguf.json`, by
which the tests write it as llama.cpp's conversion would. `expected.json` is a list of texts or token ids with the `mean` of
the hidden states, and the `embedding`: that mean after the dense layers, normalized.

`bidirectional.json` is a list of token ids and the `mean` of the model of tests/fixtures/embeddings, if its configuration
says `is_causal` false. The same code computes the causal means, which must be those of transformers in `expected.json`.

All is computed in f64.
"""

import json
import shutil
import struct
from pathlib import Path

import numpy as np

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


def read(file):
    """The tensors of a file of safetensors in bf16 or f32."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, info in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + at for at in info["data_offsets"])
        if info["dtype"] == "BF16":
            bits = np.frombuffer(data[start:end], "<u2").astype("<u4") << 16
            values = bits.view("<f4")
        else:
            values = np.frombuffer(data[start:end], "<f4")
        tensors[name] = values.reshape(info["shape"]).astype(np.float64)
    return tensors


def write(file, tensors, kind):
    """Writes values that bf16 holds, as `kind`."""
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in sorted(tensors.items()):
        data = np.ascontiguousarray(tensor, "<f4").tobytes()
        if kind == "BF16":
            data = (np.frombuffer(data, "<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def random_tensors():
    generator = np.random.default_rng(30)

    def noise(shape, scale, middle=0.0):
        values = (middle + scale * generator.standard_normal(shape)).astype("<f4")
        return (values.view("<u4") & 0xFFFF0000).astype("<u4").view("<f4").astype(np.float64)

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


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def states(config, tensors, ids, sees_all):
    """The hidden states after the final norm, `[ids, hidden_size]`."""
    is_gemma = config["model_type"] == "gemma3_text"
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    offset, eps = (1.0 if is_gemma else 0.0), config["rms_norm_eps"]
    positions = np.arange(len(ids))
    distance = positions[:, None] - positions[None, :]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (tensors[f"{name}.weight"] + offset)

    def rotated(x, theta):
        angles = positions[:, None] / theta ** (np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(x, at, slides):
        of = lambda part, count: (x @ tensors[f"{at}.{part}_proj.weight"].T).reshape(len(ids), count, dim)
        theta = config.get("rope_parameters", config)["rope_theta"]
        theta = config["rope_local_base_freq"] if slides else theta
        q = rotated(norm(of("q", heads), f"{at}.q_norm"), theta)
        k = rotated(norm(of("k", kv_heads), f"{at}.k_norm"), theta).repeat(heads // kv_heads, 1)
        v = of("v", kv_heads).repeat(heads // kv_heads, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / config.get("query_pre_attn_scalar", dim) ** 0.5
        # transformers: `sliding_window // 2 + 1`, a bound that is not reached.
        hidden = abs(distance) > config["sliding_window"] // 2 if slides else distance != distance
        if not sees_all:
            hidden = hidden | (distance < 0)
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, v).reshape(len(ids), -1) @ tensors[f"{at}.o_proj.weight"].T

    def mlp(x, at):
        gate, up, down = (tensors[f"{at}.{part}_proj.weight"].T for part in ["gate", "up", "down"])
        return ((gelu if is_gemma else silu)(x @ gate) * (x @ up)) @ down

    x = tensors["embed_tokens.weight"][ids]
    if is_gemma:
        x = x * float(np.float32(config["hidden_size"] ** 0.5))
    for layer, kind in enumerate(config["layer_types"]):
        at = f"layers.{layer}"
        attended = attention(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn", kind == "sliding_attention")
        if is_gemma:
            x = x + norm(attended, f"{at}.post_attention_layernorm")
            made = mlp(norm(x, f"{at}.pre_feedforward_layernorm"), f"{at}.mlp")
            x = x + norm(made, f"{at}.post_feedforward_layernorm")
        else:
            x = x + attended
            x = x + mlp(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")
    return norm(x, "norm")


def gguf():
    """What `gguf.json` has."""
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
    config, tensors = json.loads((QWEN / "config.json").read_text()), read(QWEN / "model.safetensors")
    means = []
    for one in texts:
        causal = states(config, tensors, one["ids"], False)
        assert abs(causal.mean(0) - one["mean"]).max() < 1e-5, "not what transformers computes"
        mean = states(config, tensors, one["ids"], True).mean(0)
        means.append({"ids": one["ids"], "mean": rounded(mean)})
    save_lines(QWEN / "bidirectional.json", means)

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
        write(GEMMA / name / "model.safetensors", {"linear.weight": dense[name]}, "F32")
    write(GEMMA / "model.safetensors", tensors, "BF16")
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(QWEN / name, GEMMA / name)
    expected = []
    for one in texts:
        mean = states(CONFIG, tensors, one["ids"], True).mean(0)
        embedding = mean
        for layer in dense.values():
            embedding = layer @ embedding
        embedding = embedding / np.linalg.norm(embedding)
        made = {"ids": one["ids"], "mean": rounded(mean), "embedding": rounded(embedding)}
        expected.append(made | ({"text": one["text"]} if "text" in one else {}))
    save_lines(GEMMA / "expected.json", expected)
    size = sum(file.stat().st_size for file in GEMMA.rglob("*") if file.is_file())
    print(f"{GEMMA}: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
