#!/usr/bin/env python3
"""Writes the parts of the corpus that are whole checkpoints: a model of one layer in GGUF files and in folders.

    python3 fuzz/seeds.py

`config` also gets the config.json of every architecture of tests/fixtures, `pickle` the pickles of heads. Uses only the
standard library.
"""

import collections
import io
import json
import pathlib
import pickle
import struct
import sys
import types
import zipfile

FUZZ = pathlib.Path(__file__).resolve().parent
CORPUS = FUZZ / "corpus"
FIXTURES = FUZZ.parent / "tests/fixtures/architectures"

HIDDEN, VOCAB = 8, 16
# Tensors of one layer by Hugging Face's and llama.cpp's names; every matrix has as many rows as columns.
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def dims(name):
    return [HIDDEN] if "norm" in name else [HIDDEN, HIDDEN]


def tensors(layer="model.layers.0."):
    """Names and dims, with Hugging Face's names."""
    named = {f"{layer}{name}.weight": dims(name) for name in LAYER}
    return {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN], **named}


def safetensors(named):
    at, header, count = 0, {}, lambda shape: 4 * product(shape)
    for name, shape in named.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + count(shape)]}
        at += count(shape)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def product(shape):
    all_of = 1
    for dim in shape:
        all_of *= dim
    return all_of


class Tensor:
    """Pickled as PyTorch pickles one of zeros; `wrap` is what it is within."""

    def __init__(self, key, shape, wrap=None):
        self.key, self.shape, self.wrap = key, tuple(shape), wrap

    def __reduce_ex__(self, _):
        if self.wrap:
            inner = Tensor(self.key, self.shape)
            return stub("torch._utils", self.wrap), (inner, True, collections.OrderedDict())
        strides = tuple(product(self.shape[at + 1:]) for at in range(len(self.shape)))
        storage = Storage(self.key, product(self.shape))
        arguments = (storage, 0, self.shape, strides, False, collections.OrderedDict())
        return stub("torch._utils", "_rebuild_tensor_v2"), arguments


Storage = collections.namedtuple("Storage", ["key", "len"])


class TorchPickler(pickle.Pickler):
    def persistent_id(self, value):
        if isinstance(value, Storage):
            return "storage", stub("torch", "FloatStorage"), value.key, "cpu", value.len
        return None


def stub(module, name):
    """A class that is pickled under PyTorch's name."""
    for package in ("torch", module):
        found = sys.modules.setdefault(package, types.ModuleType(package))
    if not hasattr(found, name):
        setattr(found, name, type(name, (), {"__module__": module}))
    return getattr(found, name)


def torch_pickle(state):
    out = io.BytesIO()
    TorchPickler(out, protocol=2).dump(state)
    return out.getvalue()


def torch_file(named):
    """What torch.save writes."""
    out = io.BytesIO()
    state = {name: Tensor(str(at), shape) for at, (name, shape) in enumerate(named.items())}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        entry = lambda name, data: file.writestr(zipfile.ZipInfo(f"head/{name}"), data)
        entry("data.pkl", torch_pickle(state))
        entry("byteorder", b"little")
        for at, shape in enumerate(named.values()):
            entry(f"data/{at}", bytes(4 * product(shape)))
    return out.getvalue()


def pickles():
    state = {"fc.weight": Tensor("0", [8, 16]), "norm.weight": Tensor("1", [8], "_rebuild_parameter")}
    yield "plain", torch_pickle(state)
    ordered = collections.OrderedDict(state)
    ordered._metadata = {"": {"version": 1}}
    ordered |= {"version": 3, "large": 1 << 40, "scale": 0.5, "list": [1, 2, 3], "none": None, "tied": state["fc.weight"]}
    yield "ordered", torch_pickle(ordered)
    yield "doubled", b")" + b"q\0h\0\x86" * 40 + b"."
    yield "nested", b")" + b"\x85" * 4000 + b"."


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value):
    """Type and bytes."""
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, string(value)
    items = [gguf_value(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)


def gguf(metadata, named):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(named), len(metadata))
    for key, value in metadata.items():
        kind, data = gguf_value(value)
        out += string(key) + struct.pack("<I", kind) + data
    data = b""
    for name, shape in named.items():
        out += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", 0, len(data))
        data += bytes(4 * product(shape))
        data += bytes(-len(data) % 32)
    return out + bytes(-len(out) % 32) + data


def gguf_model(kind, more):
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", *[f"<0x{byte:02X}>" for byte in range(8)]]
    metadata = {
        "general.architecture": kind, f"{kind}.embedding_length": HIDDEN, f"{kind}.feed_forward_length": HIDDEN,
        f"{kind}.block_count": 1, f"{kind}.context_length": 64, f"{kind}.attention.head_count": 2,
        f"{kind}.attention.head_count_kv": 2, f"{kind}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, *[6] * 8], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "general.sampling.temp": 0.7, **more,
    }
    named = {f"blk.0.{theirs}.weight": dims(theirs) for theirs in LAYER.values()}
    return metadata, {"token_embd.weight": [VOCAB, HIDDEN], "output_norm.weight": [HIDDEN], **named}


def gguf_files():
    metadata, named = gguf_model("llama", {})
    yield "llama", gguf(metadata, named)
    split = lambda number, some: {"split.no": number, "split.count": 2, "split.tensors.count": len(named)} | some
    names = list(named)
    first, second = ({name: named[name] for name in part} for part in (names[:4], names[4:]))
    yield "split", gguf(split(0, metadata), first) + gguf(split(1, {}), second)
    norms = {f"blk.0.{name}.weight": [HIDDEN] for name in ("post_attention_norm", "post_ffw_norm")}
    norms |= {f"blk.0.attn_{part}_norm.weight": [HIDDEN // 2] for part in "qk"}
    window = {"gemma3.attention.sliding_window": 4, "gemma3.attention.key_length": 4}
    metadata, named = gguf_model("gemma3", window | {"gemma3.attention.value_length": 4})
    yield "gemma3", gguf(metadata, named | norms)
    metadata, named = gguf_model("qwen3", {"qwen3.pooling_type": 3, "qwen3.attention.key_length": 4})
    head_norms = {f"blk.0.attn_{part}_norm.weight": [HIDDEN // 2] for part in "qk"}
    yield "pooling", gguf(metadata, named | head_norms)


def folder(files):
    parts = []
    for name, content in files.items():
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        parts.append(b"\n=== " + name.encode() + b"\n" + content)
    return b"".join(parts)


def folders():
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    vocab = {chr(97 + i): i for i in range(VOCAB)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    texts = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"bos_token": "a", "eos_token": {"content": "b"}, "chat_template": "{{ messages }}"},
        "generation_config.json": {"eos_token_id": [1, 2], "temperature": 0.6},
    }
    yield "llama", {"config.json": config, **texts, "model.safetensors": safetensors(tensors())}
    names = list(tensors().items())
    index = {name: f"model-0000{1 + (i > 3)}-of-00002.safetensors" for i, (name, _) in enumerate(names)}
    yield "shards", {
        "config.json": config,
        "model.safetensors.index.json": {"metadata": {"total_size": 1}, "weight_map": index},
        "model-00001-of-00002.safetensors": safetensors(dict(names[:4])),
        "model-00002-of-00002.safetensors": safetensors(dict(names[4:])),
    }
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{c}"} for i, (path, c) in enumerate(modules)]
    yield "embedding", {
        "config.json": config, "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
        "sentence_bert_config.json": {"max_seq_length": 32},
        "config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "default_prompt_name": "query"},
        "model.safetensors": safetensors(tensors()),
    }
    head = {f"midlayer.{name}.weight": dims(name) for name in LAYER}
    for part in "qkv":
        head[f"midlayer.self_attn.{part}_proj.weight"] = [HIDDEN, 2 * HIDDEN]
    head |= {"midlayer.hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN], "fc.weight": [HIDDEN, 2 * HIDDEN]}
    head |= {"lm_head.weight": [VOCAB, HIDDEN]}
    eagle = config | {"architectures": ["LlamaForCausalLMEagle3"]}
    yield "eagle3", {"config.json": eagle, "model.safetensors": safetensors(head)}
    medusa = {"medusa_num_heads": 1, "medusa_num_layers": 1}
    linear = {"0.0.linear.weight": [HIDDEN, HIDDEN], "0.0.linear.bias": [HIDDEN], "0.1.weight": [VOCAB, HIDDEN]}
    yield "medusa", {"config.json": medusa, "medusa_lm_head.safetensors": safetensors(linear)}
    yield "medusa_pt", {"config.json": medusa, "medusa_lm_head.pt": torch_file(linear)}


def main():
    for target in ("gguf_files", "folder", "pickle"):
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
    for name, content in gguf_files():
        (CORPUS / "gguf_files" / f"{name}.gguf").write_bytes(content)
    for name, files in folders():
        (CORPUS / "folder" / f"{name}.folder").write_bytes(folder(files))
    for name, content in pickles():
        (CORPUS / "pickle" / f"{name}.pkl").write_bytes(content)
    for file in sorted(FIXTURES.glob("*/config.json")):
        config = json.dumps(json.loads(file.read_text()), separators=(",", ":"))
        (CORPUS / "config" / f"architecture-{file.parent.name}.json").write_text(config)


if __name__ == "__main__":
    main()
