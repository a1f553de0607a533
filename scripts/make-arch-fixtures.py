#!/usr/bin/env python3
"""Makes tests/fixtures/architectures: tiny random checkpoints of the classes of transformers, and what they compute.

    pip install torch transformers safetensors gguf
    scripts/make-arch-fixtures.py [NAME...]

A folder has the `config.json` and `model.safetensors` that transformers writes (weights in f32, of values that bf16
holds, stored as bf16), and `expected.safetensors`: the ids of a `prompt`, the `rows` of it of which `logprobs` are
log-probabilities over the vocabulary (f32, computed in f32), and the ids of its `greedy` continuation. Biases and norms
are away from 0 and 1, and prompts are longer than windows and than the original context of a scaled rope.

If llama.cpp has the architecture, `gguf.json` says what its conversion would write: metadata, the names of tensors (those
of llama.cpp's gguf package), and what is done with their values.
"""

import json
import math
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from arch_fixtures import FIXTURES, MULTIMODAL, SIZES, VOCAB
from arch_gguf import GGUF, gguf_of
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).resolve().parent.parent / "tests/fixtures/architectures"
PROMPT = 48
GREEDY = 24
# Before and after the ends of windows and of the original context of a scaled rope.
ROWS = [0, 1, 3, 8, 9, 10, 15, 16, 17, 32, 46, 47]


def randomize(model, seed):
    """Values that bf16 holds: of norms near those of the class, of matrices such that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:
                noise *= 0.7
            elif name.endswith("e_score_correction_bias"):
                noise *= 0.1
            elif name.endswith("conv.conv.weight"):
                noise *= 0.6
            elif name.endswith((".mamba.A_log", ".mixer.A_log")):
                # Decays of a few tokens up to some tens of them.
                noise = noise - 1.5
            elif name.endswith((".mamba.dt_bias", ".mixer.dt_bias")):
                noise = 0.7 * noise - 1
            elif name.endswith((".mamba.conv1d.weight", ".mixer.conv1d.weight")):
                noise *= 0.7
            elif parameter.dim() == 2 or ".experts." in name:
                noise *= 1.3 / parameter.shape[-1] ** 0.5
            else:
                noise = 0.3 * noise + parameter
            if name.endswith("router.scale"):
                # Scores that differ.
                noise *= 4
            if model.config.model_type == "gpt_oss" and name.endswith("experts.gate_up_proj"):
                # Some are over the limit of the gate.
                noise *= 4
            parameter.copy_(noise.to(torch.bfloat16).float())
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_((0.1 * torch.randn(buffer.shape, generator=generator)).to(torch.bfloat16).float())
            if name.endswith(("layer_scalar", "sinks")):
                buffer.copy_((0.3 * torch.randn(1, generator=generator) + 0.9).to(torch.bfloat16).float())


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def expected(model, seed, margin=1e-2):
    """The prompt, log-probabilities and the greedy text; None if two logits differ by less than `margin` or it ends."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB, (PROMPT,), generator=generator).tolist()
    logprobs = torch.log_softmax(logits(model, prompt), -1)
    tokens = list(prompt)
    for _ in range(GREEDY):
        best = logits(model, tokens)[-1].topk(2)
        if best.values[0] - best.values[1] < margin or best.indices[0] == VOCAB - 1:
            return None
        tokens.append(best.indices[0].item())
    return {
        "prompt": torch.tensor(prompt),
        "rows": torch.tensor(ROWS),
        "logprobs": logprobs[ROWS].contiguous(),
        "greedy": torch.tensor(tokens[PROMPT:]),
    }


class Mtp(torch.nn.Module):
    """A layer for further tokens, which transformers does not have, made of its parts as vLLM and FastDeploy make it."""

    def __init__(self, model, like, owns=()):
        """Its decoder layer is of the kind of layer `like`; it has the parts `owns` besides, which are else the model's."""
        super().__init__()
        module, config = sys.modules[type(model).__module__], model.config
        part = lambda kind: getattr(module, type(model).__name__.removesuffix("ForCausalLM") + kind)
        norm = lambda: part("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        self.layers = torch.nn.ModuleList([part("DecoderLayer")(config, like)])
        if "norm" in owns:
            self.norm = norm()
        if "embed_tokens" in owns:
            self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        if "head" in owns:
            self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.config = config
        # Of ropes by kind.
        self.kind = config.layer_types[like] if config.model_type == "mellum" else None

    def forward(self, model, tokens, hidden):
        """What the output layer reads of the rows with these tokens, of which the last one's hidden states are missing."""
        embedded = getattr(self, "embed_tokens", model.model.embed_tokens)(torch.tensor([tokens]))
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        rows = len(tokens)
        kind = [self.kind] if self.kind else []
        angles = model.model.rotary_emb(x, torch.arange(rows)[None], *kind)
        mask = torch.full((1, 1, rows, rows), float("-inf")).triu(1)
        if self.kind == "sliding_attention":
            mask += torch.full((rows, rows), float("-inf")).tril(-self.config.sliding_window)
        x = self.layers[0](hidden_states=x, position_embeddings=angles, attention_mask=mask)
        return getattr(self, "norm", model.model.norm)(x)

    def drafts(self, model, prompt, depth=3):
        """The most probable tokens after the prompt and the one that follows it there, and their log-probabilities."""
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[:, :-1]
            tokens, drafted, logprobs = list(prompt[1:]), [], []
            for _ in range(depth):
                states = self(model, tokens, hidden)[:, -1:]
                logits = getattr(self, "head", model.lm_head)(states)[0, 0].float()
                logprobs.append(torch.log_softmax(logits, -1))
                drafted.append(logprobs[-1].argmax().item())
                # Its own output stands for the hidden states of a token that it drafted.
                hidden, tokens = torch.cat([hidden, states], 1), [*tokens, drafted[-1]]
        return {"mtp_drafted": torch.tensor(drafted), "mtp_logprobs": torch.stack(logprobs)}


# Parts of a layer for further tokens, and how checkpoints of DeepSeek and GLM, and of ERNIE, call them.
AFTER = {
    "fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "norm.": "shared_head.norm.",
    "head.": "shared_head.head.", "embed_tokens.": "embed_tokens.", "layers.0.": "",
}
ERNIE = {
    "fc.": "mtp_linear_proj.0.", "pre_fc_norm_embedding.": "mtp_emb_norm.0.", "pre_fc_norm_hidden.": "mtp_hidden_norm.0.",
    "layers.0.": "mtp_block.0.",
}
# Which fixtures have one, and its own parts besides those of all. Its embedding and output layer are others than the
# model's, which the published ones are not.
MTP = {
    "qwen3_5": ["norm"], "qwen3_5_moe": ["norm"], "glm4_moe": ["norm", "embed_tokens", "head"], "glm4_moe_lite": ["norm"],
    "deepseek_v3": ["norm", "embed_tokens", "head"], "ernie4_5_moe": [], "mellum": ["norm"],
}


def further_layer(name, model, seed, prompt):
    """The tensors of the layer for further tokens of a fixture, and what it drafts."""
    config = model.config
    kinds = getattr(config, "layer_types", None)
    like = 0 if name == "ernie4_5_moe" else config.num_hidden_layers - 1
    like = kinds.index("full_attention") if kinds else like
    like = 0 if name == "mellum" else like
    mtp = Mtp(model, like, MTP[name]).eval().float()
    mtp.config._attn_implementation = "eager"
    randomize(mtp, seed)
    state = {}
    for ours, tensor in mtp.state_dict().items():
        start, theirs = next(
            (start, theirs) for start, theirs in (ERNIE if name == "ernie4_5_moe" else AFTER).items() if ours.startswith(start)
        )
        full = f"model.layers.{config.num_hidden_layers}.{ours.replace(start, theirs, 1)}"
        if name == "ernie4_5_moe":
            full = f"model.{ours.replace(start, theirs, 1)}"
        if name.startswith(("qwen", "mellum")):
            full = f"mtp.{ours}"
        if ".experts." in ours and not name.startswith("qwen"):
            # As the published files have them.
            parts = {"up_proj": tensor} if "down" not in ours else {"down_proj": tensor}
            if "gate_up" in ours:
                parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1)))
            for part, all_experts in parts.items():
                for i, one in enumerate(all_experts):
                    state[f"{full.rsplit('.', 1)[0]}.{i}.{part}.weight"] = one
            continue
        state[full] = tensor
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    return state, mtp.drafts(model, prompt)


def by_tokens(model, prompt):
    """The log-probabilities if a state takes in one token after the other, instead of chunks."""
    module = sys.modules[type(model).__module__]
    if hasattr(module, "mamba2_chunk_scan"):
        scan = module.mamba2_chunk_scan
        module.mamba2_chunk_scan = scan_by_tokens
        computed = torch.log_softmax(logits(model, prompt), -1)[ROWS]
        module.mamba2_chunk_scan = scan
        return computed
    chunks = module.torch_chunk_gated_delta_rule
    module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule
    computed = torch.log_softmax(logits(model, prompt), -1)[ROWS]
    module.torch_chunk_gated_delta_rule = chunks
    return computed


def scan_by_tokens(x, dt, A, B, C, D, dt_bias, dt_limit, **_):
    """What `mamba2_chunk_scan` computes, one token after the other."""
    heads, groups = x.shape[2], B.shape[2]
    B, C = (y.repeat_interleave(heads // groups, 2) for y in (B, C))
    dt = torch.nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)
    state, outputs = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]), []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * A).exp()[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1)


def new_model(name):
    """The model, its `config.json`, and how its tensors are renamed."""
    if name in FIXTURES:
        kind, more = FIXTURES[name]
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
        kind, renamed = f"{kind.removesuffix('Text')}ForCausalLM", []
    else:
        kind, more, vision, renamed, *outer = MULTIMODAL[name]
        config = getattr(transformers, f"{kind}Config")(text_config={**SIZES, **more}, vision_config=vision, **dict(*outer))
        kind = f"{kind}ForConditionalGeneration"
    # Eager attention: the others leave out soft caps.
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval().float()
    config.architectures = [kind]
    shown = config.to_diff_dict()
    if "time_step_limit" in shown:
        # As transformers 5 writes what JSON does not have.
        shown["time_step_limit"] = [{"__float__": "Infinity"} if x == math.inf else x for x in shown["time_step_limit"]]
    if name in ("qwen2_vl", "qwen2_5_vl"):
        text = shown.pop("text_config")
        scaling = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
        shown = text | shown | {"rope_scaling": scaling, "rope_theta": 1e4}
    return model, shown, renamed


def saved(model):
    """The tensors as `save_pretrained` writes them, which has other names for experts and in Nemotron-H."""
    state = model.state_dict()
    if model.config.model_type != "nemotron_h" and not any(".experts." in name for name in state):
        return state
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def packed(weights):
    """Blocks and scales of MXFP4 for `[experts, inputs, outputs]`, of each the nearest value."""
    blocks = weights.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / exponents.exp2().unsqueeze(-1)
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = (scaled.unsqueeze(-1) - torch.cat([half, -half])).abs().argmin(-1).to(torch.uint8)
    return nearest[..., 0::2] | nearest[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def published(model, shown):
    """The tensors with experts in MXFP4, and the model that transformers makes of them."""
    state = {}
    for name, tensor in saved(model).items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            state[f"{name}_blocks"], state[f"{name}_scales"] = packed(tensor)
        else:
            state[name] = tensor.to(torch.bfloat16)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shown))
        save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
        dense = transformers.Mxfp4Config(dequantize=True)
        loaded = type(model).from_pretrained(folder, quantization_config=dense, attn_implementation="eager")
    return state, loaded.eval().float()


def make(name):
    model, shown, renamed = new_model(name)
    config = model.config
    state = None
    if name.endswith("_mxfp4"):
        shown["quantization_config"] = {"quant_method": "mxfp4"}
    for seed in range(100):
        randomize(model, seed)
        computed = model
        if name.endswith("_mxfp4"):
            state, computed = published(model, shown)
        found = expected(computed, seed)
        if found and name.startswith(("qwen3_next", "qwen3_5", "granite4_hybrid", "nemotron_h", "bamba", "falcon_h1")):
            # Some states magnify what f32 rounds.
            far = (by_tokens(computed, found["prompt"].tolist()) - found["logprobs"]).abs().max()
            found = found if far < 5e-5 else None
        if found:
            break
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shown, indent=1) + "\n")
    state = state or {k: v.to(torch.bfloat16).contiguous() for k, v in saved(model).items()}
    if getattr(config, "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    for i in range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers) if name == "gemma4" else ():
        # The published files have these, which no class reads.
        state[f"model.layers.{i}.self_attn.k_proj.weight"] = torch.ones(1, 1, dtype=torch.bfloat16)
    if name in MTP:
        further, drafts = further_layer(name, model, seed, found["prompt"].tolist())
        state, found = state | further, found | drafts
    stored = state
    for ours, theirs in renamed:
        stored = {k.replace(ours, theirs) if k.startswith(ours) else k: v for k, v in stored.items()}
    save_file(stored, folder / "model.safetensors")
    save_file(found, folder / "expected.safetensors")
    if name in GGUF:
        text = json.dumps(gguf_of(GGUF[name], config, stored), indent=1)
        (folder / "gguf.json").write_text(text + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, {size / 1024:.0f} KiB, logits up to {found['logprobs'].abs().max():.1f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or [*FIXTURES, *MULTIMODAL]:
        make(name)
