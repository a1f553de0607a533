#!/usr/bin/env python3
"""Makes tests/fixtures/embedding_gemma, tests/fixtures/embeddings/bidirectional.json and
tests/fixtures/architectures/mellum, with numpy alone.

    pip install numpy
    scripts/make-numpy-fixtures.py

`embedding_gemma` is a tiny random model as EmbeddingGemma is published: a `Gemma3TextModel` whose tokens see those after
them, two dense layers after the mean of its hidden states, the tokenizer of tests/fixtures/embeddings, and `gguf.json`, by
which the tests write it as llama.cpp's conversion would. `expected.json` is a list of texts or token ids with the `mean` of
the hidden states, and the `embedding`: that mean after the dense layers, normalized.

`bidirectional.json` is a list of token ids and the `mean` of the model of tests/fixtures/embeddings, if its configuration
says `is_causal` false. The same code computes the causal means, which must be those of transformers in `expected.json`.

`mellum` is a tiny random Mellum 2, in the form of scripts/make-arch-fixtures.py.

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
MELLUM = FIXTURES / "architectures/mellum"
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
MELLUM_CONFIG = {
    "architectures": ["MellumForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": None,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 128,
    "mlp_layer_types": ["sparse", "sparse", "sparse"],
    "model_type": "mellum",
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "router_aux_loss_coef": 0.001,
    "sliding_window": 9,
    "tie_word_embeddings": False,
    "transformers_version": "5.10.0",
    "use_cache": True,
    "vocab_size": 256,
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
    """Writes values that `kind` holds, and integers."""
    header, parts, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in sorted(tensors.items()):
        own = "I64" if tensor.dtype == np.int64 else kind
        data = np.ascontiguousarray(tensor, "<i8" if own == "I64" else "<f4").tobytes()
        if own == "BF16":
            data = (np.frombuffer(data, "<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": own, "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def noise_of(seed):
    """Random values that bf16 holds."""
    generator = np.random.default_rng(seed)

    def noise(shape, scale, middle=0.0):
        values = (middle + scale * generator.standard_normal(shape)).astype("<f4")
        return (values.view("<u4") & 0xFFFF0000).astype("<u4").view("<f4").astype(np.float64)

    return noise


def random_mellum():
    noise, config = noise_of(31), MELLUM_CONFIG
    hidden, mlp, dim, vocab = (config[k] for k in ["hidden_size", "moe_intermediate_size", "head_dim", "vocab_size"])
    q, kv = (config[key] * dim for key in ["num_attention_heads", "num_key_value_heads"])
    linear = lambda outputs, inputs: noise((outputs, inputs), 1.3 / inputs**0.5)
    tensors = {"embed_tokens": noise((vocab, hidden), 0.7), "norm": noise(hidden, 0.3, 1.0)}
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": linear(q, hidden),
            "self_attn.k_proj": linear(kv, hidden),
            "self_attn.v_proj": linear(kv, hidden),
            "self_attn.o_proj": linear(hidden, q),
            "self_attn.q_norm": noise(dim, 0.3, 1.0),
            "self_attn.k_norm": noise(dim, 0.3, 1.0),
            "mlp.gate": linear(config["num_experts"], hidden),
            "input_layernorm": noise(hidden, 0.3, 1.0),
            "post_attention_layernorm": noise(hidden, 0.3, 1.0),
        }
        for expert in range(config["num_experts"]):
            at = f"mlp.experts.{expert}"
            shapes = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
            parts |= {f"{at}.{part}": linear(*shape) for part, shape in shapes.items()}
        tensors |= {f"layers.{layer}.{part}": tensor for part, tensor in parts.items()}
    tensors = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    return tensors, linear(vocab, hidden)


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
        rope = config.get("rope_parameters", config)
        rope = rope.get("sliding_attention" if slides else "full_attention", rope)
        theta = rope["rope_local_base_freq" if slides and is_gemma else "rope_theta"]
        q = rotated(norm(of("q", heads), f"{at}.q_norm"), theta)
        k = rotated(norm(of("k", kv_heads), f"{at}.k_norm"), theta).repeat(heads // kv_heads, 1)
        v = of("v", kv_heads).repeat(heads // kv_heads, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / config.get("query_pre_attn_scalar", dim) ** 0.5
        # transformers has `sliding_window // 2 + 1` for both directions. Neither bound is reached.
        window = config["sliding_window"] if slides else None
        reach = len(ids) if window is None else window // 2 if sees_all else window - 1
        hidden = abs(distance) > reach
        if not sees_all:
            hidden = hidden | (distance < 0)
        scores = np.where(hidden, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, v).reshape(len(ids), -1) @ tensors[f"{at}.o_proj.weight"].T

    def experts(x, at):
        logits = x @ tensors[f"{at}.gate.weight"].T
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for row, of_row in enumerate(scores):
            chosen = np.argsort(-of_row, kind="stable")[: config["num_experts_per_tok"]]
            for expert in chosen:
                made = mlp(x[row], f"{at}.experts.{expert}")
                y[row] += of_row[expert] / of_row[chosen].sum() * made
        return y

    def mlp(x, at):
        if f"{at}.gate.weight" in tensors:
            return experts(x, at)
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


def logprobs(tensors, head, ids):
    logits = states(MELLUM_CONFIG, tensors, ids, False) @ head.T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def gguf_of_mellum():
    config = MELLUM_CONFIG
    metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate": "ffn_gate_inp",
    }
    how = lambda name: {"name": f"{name}.weight", "interleaved_heads": 0, "offset": 0}
    tensors = {
        "lm_head.weight": how("output"),
        "model.embed_tokens.weight": how("token_embd"),
        "model.norm.weight": how("output_norm"),
    }
    stacked = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{ours}.weight": how(f"blk.{layer}.{theirs}") for ours, theirs in names.items()}
        for part in ["gate", "up", "down"]:
            experts = range(config["num_experts"])
            own = [f"{at}.mlp.experts.{expert}.{part}_proj.weight" for expert in experts]
            stacked[f"blk.{layer}.ffn_{part}_exps.weight"] = own
    metadata = {f"mellum.{key}": value for key, value in metadata.items()}
    return {"architecture": "mellum", "metadata": metadata, "tensors": tensors, "stacked": stacked, "extra": {}}


def make_mellum():
    shutil.rmtree(MELLUM, ignore_errors=True)
    MELLUM.mkdir(parents=True)
    tensors, head = random_mellum()
    prompt = np.random.default_rng(32).integers(0, MELLUM_CONFIG["vocab_size"], 48)
    rows = np.arange(3, 48, 4)
    ids, greedy = prompt.tolist(), []
    for _ in range(24):
        last = np.sort(logprobs(tensors, head, ids)[-1])
        assert last[-1] - last[-2] > 1e-3, "a near tie"
        greedy.append(int(logprobs(tensors, head, ids)[-1].argmax()))
        ids.append(greedy[-1])
    expected = {
        "prompt": prompt.astype(np.int64),
        "rows": rows.astype(np.int64),
        "greedy": np.array(greedy, np.int64),
        "logprobs": logprobs(tensors, head, prompt.tolist())[rows],
    }
    write(MELLUM / "expected.safetensors", expected, "F32")
    named = {f"model.{name}": tensor for name, tensor in tensors.items()} | {"lm_head.weight": head}
    write(MELLUM / "model.safetensors", named, "BF16")
    save(MELLUM / "config.json", MELLUM_CONFIG)
    save(MELLUM / "gguf.json", gguf_of_mellum())


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
    make_mellum()
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
