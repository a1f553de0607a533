#!/usr/bin/env python3
"""Makes draft heads that the speculators library does not have: tiny random ones, and what transformers drafts with them.

    pip install torch transformers safetensors
    scripts/make-transformers-head-fixtures.py [NAME...]

tests/fixtures/assistants has Gemma 4's assistants and Muse Glimmer's, for the targets of the same names in
tests/fixtures/architectures. What they draft, transformers' own generators of candidates say.

tests/fixtures/heads/eagle3_latent has an EAGLE-3 head with latent attention, for the target qwen3. No library for the CPU
has the class (`Eagle3DeepseekV2ForCausalLM` of vLLM). It is composed here of the layers of DeepSeek-V3: the first products
of the attention read the norms of embedding and features, side by side.

tests/fixtures/heads/lilicorr and lilicorr_narrow are heads of LiLiCorr (arXiv 2608.20530), for qwen3. Servers have the class
(`LiLiCorrDraftModel`), for GPUs. They are composed here of the layers of Qwen3, as DFlash has them, and of PyTorch's layers.
tests/fixtures/heads/jetspec is a head of JetSpec (arXiv 2606.18394): DFlash whose rows see only those before them.

A folder has what scripts/make-head-fixtures.py writes.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, DeepseekV3Config, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM, GenerationConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel,
    MuseGlimmerForConditionalGeneration, Qwen3Config,
)
from transformers.generation.candidate_generator import (
    DFlashTokenCandidateGenerator, SinglePositionMultiTokenCandidateGenerator,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention, DeepseekV3MLP, DeepseekV3RMSNorm, DeepseekV3RotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb,
)

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures"
VOCAB = 256
DRAFTED = 6
PROMPT = 20
SLIDING, FULL = "sliding_attention", "full_attention"
ASSISTANT = (Gemma4AssistantConfig, Gemma4AssistantForCausalLM)
UNIFIED = (Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM)
# The classes, keys beside those of the layers, and keys of the layers that are not the target's.
ASSISTANTS = {
    # As published for E2B and E4B: groups of ids.
    "gemma4": (ASSISTANT, dict(use_ordered_embeddings=True, num_centroids=32, centroid_intermediate_top_k=4), dict(
        num_hidden_layers=3, layer_types=[SLIDING, SLIDING, FULL],
    )),
    # As published for 31B: logits of all ids.
    "gemma4_large": (ASSISTANT, dict(), dict(
        num_hidden_layers=2, layer_types=[SLIDING, FULL], num_global_key_value_heads=1,
    )),
    "gemma4_unified": (UNIFIED, dict(), dict(num_hidden_layers=2, layer_types=[SLIDING, FULL], num_global_key_value_heads=1)),
}
LATENT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1,
    q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, rms_norm_eps=1e-6,
    max_position_embeddings=128, rope_theta=1e4, bos_token_id=1, eos_token_id=None, hidden_act="silu", attention_bias=False,
    rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    ),
)
TAPS = [0, 1, 2]
MASK = 255
# Of DFlash's layers.
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    num_hidden_layers=2, max_position_embeddings=128, rms_norm_eps=1e-5,
)
# Rows of a block; width of the correction (0 = that of the head), candidates, layers, heads, factor of the width of MLPs, width
# of the vectors.
LILICORR = {"lilicorr": (6, 0, 4, 1, 2, 1.5, 12), "lilicorr_narrow": (5, 16, 8, 2, 4, 2.0, 20)}
VECTOR_EPS, LOGIT_SCALE = 1e-4, 8.0
# Those that have the names of the first versions of servers.
EARLY = ["lilicorr_narrow"]


def is_clear(logprobs):
    """Whether no two best tokens are almost equally likely."""
    return all(row.topk(2).values.diff().abs() > 1e-2 for row in logprobs)


def randomize(model, generator):
    """Values that bf16 holds: of norms near 1, of matrices such that activations keep their size."""
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                noise *= 1.3 / parameter.shape[-1] ** 0.5
            else:
                noise = 1 + 0.3 * noise
            parameter.copy_(noise.to(torch.bfloat16).float())


def load(name, kind=AutoModelForCausalLM):
    folder = FIXTURES / "architectures" / name
    target = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return target, load_file(folder / "expected.safetensors")["prompt"][:PROMPT].tolist()


def hidden_states(target, ids, taps):
    """The inputs of these layers side by side; after the last layer, that of the final norm."""
    found = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    states = target(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    states = [*states[:-1], found[0]]
    return torch.cat([states[tap] for tap in taps], dim=-1)


def write(folder, config, stored, prompt, drafted, logprobs):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    kept = {
        key: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous() for key, value in stored.items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    expected = {"prompt": torch.tensor(prompt), "drafted": torch.tensor(drafted), "logprobs": torch.stack(logprobs)}
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")


def make_assistant(name, seed):
    (config_kind, kind), more, layers = ASSISTANTS[name]
    target, prompt = load(name)
    of_target = json.loads((FIXTURES / "architectures" / name / "config.json").read_text())
    own = dict(
        hidden_size=16, intermediate_size=24, num_kv_shared_layers=layers["num_hidden_layers"], hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, use_double_wide_mlp=False, final_logit_softcapping=None, global_head_dim=16,
    )
    unused = ("architectures", "transformers_version", "per_layer_config")
    text = {key: value for key, value in of_target.items() if key not in unused} | own | layers
    config = config_kind(text_config=text, backbone_hidden_size=target.config.hidden_size, **more)
    config._attn_implementation = "eager"
    assistant = kind(config).eval()
    generator = torch.Generator().manual_seed(seed)
    randomize(assistant, generator)
    with torch.no_grad():
        for buffer_name, buffer in sorted(assistant.named_buffers()):
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_((0.3 * torch.randn(1, generator=generator) + 0.9).to(torch.bfloat16).float())
            if buffer_name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB, generator=generator))
        assistant.generation_config.num_assistant_tokens = DRAFTED
        candidates = SinglePositionMultiTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), GenerationConfig(max_length=1000),
        )
        # All but the last token, as after a prompt whose last token is the first of the text.
        outputs = target(
            input_ids=torch.tensor([prompt[:-1]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True,
        )
        drafted, logits = candidates.get_candidates(
            input_ids=torch.tensor([prompt]), model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0,
        )
    logits = logits[0].float()
    if more:
        # In the place of what has no logits, transformers has a number below all logits.
        logits = logits.masked_fill(logits == logits.amin(-1, keepdim=True), float("-inf"))
    logprobs = list(torch.log_softmax(logits, -1))
    drafted = drafted[0, len(prompt):].tolist()
    if not is_clear(logprobs) or len(set(drafted)) < 4:
        return False
    stored = assistant.state_dict()
    stored.pop("lm_head.weight")
    shown = config.to_dict()
    shown["architectures"] = [kind.__name__]
    write(FIXTURES / "assistants" / name, shown, stored, prompt, drafted, logprobs)
    return True


def make_muse_glimmer(seed):
    target, prompt = load("muse_glimmer", MuseGlimmerForConditionalGeneration)
    # A window that the prompt is longer than, and a layer without one.
    shape = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = MuseGlimmerAssistantConfig(**shape | dict(
        num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING], sliding_window=9, block_size=7, mask_token_id=MASK,
        target_layer_ids=[0, 2, 3], rope_parameters=dict(rope_type="default", rope_theta=1e4), bos_token_id=1,
        eos_token_id=None, pad_token_id=None,
    ))
    config._attn_implementation = "eager"
    assistant = MuseGlimmerAssistantModel(config).eval()
    randomize(assistant, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        candidates = DFlashTokenCandidateGenerator(
            assistant, target.get_input_embeddings(), target.get_output_embeddings(), GenerationConfig(max_length=1000),
        )
        outputs = target(input_ids=torch.tensor([prompt[:-1]]), use_cache=False, output_hidden_states=True)
        drafted, logits = candidates.get_candidates(
            input_ids=torch.tensor([prompt]), is_first_iteration=False, n_last_matches=0, model_outputs=outputs,
            model_kwargs=dict(position_ids=torch.arange(len(prompt))[None], attention_mask=None),
        )
    logprobs = list(torch.log_softmax(logits[0].float(), -1))
    drafted = drafted[0, len(prompt):].tolist()
    if not is_clear(logprobs) or len(set(drafted)) < 4:
        return False
    shown = config.to_diff_dict() | dict(architectures=["MuseGlimmerAssistantModel"])
    write(FIXTURES / "assistants/muse_glimmer", shown, assistant.state_dict(), prompt, drafted, logprobs)
    return True


class LatentHead(torch.nn.Module):
    def __init__(self, config, taps):
        super().__init__()
        hidden = config.hidden_size
        self.fc = torch.nn.Linear(taps * hidden, hidden, bias=False)
        layer = torch.nn.Module()
        layer.self_attn = DeepseekV3Attention(config, 0)
        for name in ("q_a_proj", "kv_a_proj_with_mqa"):
            outputs = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, torch.nn.Linear(2 * hidden, outputs, bias=False))
        layer.mlp = DeepseekV3MLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(layer, name, DeepseekV3RMSNorm(hidden, config.rms_norm_eps))
        self.midlayer = layer
        self.norm = DeepseekV3RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(hidden, 96, bias=False)
        self.rope = DeepseekV3RotaryEmbedding(config)

    def forward(self, embedded, features):
        """The output of the layer for rows with these embeddings and features."""
        layer, rows = self.midlayer, embedded.shape[1]
        read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(features)], dim=-1)
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        angles = self.rope(features, torch.arange(rows)[None])
        attended = layer.self_attn(hidden_states=read, position_embeddings=angles, attention_mask=mask)[0]
        x = features + attended
        return x + layer.mlp(layer.post_attention_layernorm(x))


def make_latent(seed):
    target, prompt = load("qwen3")
    config = DeepseekV3Config(**LATENT)
    config._attn_implementation = "eager"
    head = LatentHead(config, len(TAPS)).eval()
    generator = torch.Generator().manual_seed(seed)
    randomize(head, generator)
    ids = torch.randperm(VOCAB, generator=generator)[:96].sort().values
    with torch.no_grad():
        features = head.fc(hidden_states(target, prompt[:-1], TAPS))
        tokens, logprobs = list(prompt[1:]), []
        for _ in range(DRAFTED):
            x = head(target.model.embed_tokens(torch.tensor([tokens])), features)
            row = torch.full((VOCAB,), float("-inf"))
            row[ids] = torch.log_softmax(head.lm_head(head.norm(x))[0, -1], -1)
            logprobs.append(row)
            tokens.append(row.argmax().item())
            features = torch.cat([features, x[:, -1:]], dim=1)
    drafted = tokens[-DRAFTED:]
    if not is_clear(logprobs) or len(set(drafted)) < 4:
        return False
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    stored = head.state_dict() | {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    # With keys of experts, which no layer of a head has, as published.
    shown = LATENT | dict(
        architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", draft_vocab_size=96, tie_word_embeddings=False,
        torch_dtype="bfloat16", num_aux_hidden_states=len(TAPS), n_routed_experts=384, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=2048, moe_layer_freq=1, first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="noaux_tc",
        routed_scaling_factor=2.827, scoring_func="sigmoid", norm_topk_prob=True, num_nextn_predict_layers=0, seq_aux=True,
        aux_loss_alpha=0.001, ep_size=1,
        eagle_config=dict(eagle_aux_hidden_state_layer_ids=TAPS, use_aux_hidden_state=True, next_layer_regular=True),
    )
    write(FIXTURES / "heads/eagle3_latent", shown, stored, prompt, drafted, logprobs)
    return True


class Mlp(torch.nn.Module):
    def __init__(self, inputs, inner, outputs):
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear(inputs, inner), torch.nn.Linear(inner, outputs)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.up_proj(x)))


class Lattice(torch.nn.Module):
    """LiLiCorr's transformer over candidates."""

    def __init__(self, model_hidden, rows, width, top_k, layers, heads, ratio, factor):
        super().__init__()
        hidden = width or model_hidden
        linear = torch.nn.Linear
        if hidden != model_hidden:
            self.token_proj = linear(model_hidden, hidden)
        self.pass_hidden_proj = linear(model_hidden, hidden)
        self.context_proj = linear(model_hidden, hidden)
        self.feature_norm, self.feature_mlp = torch.nn.LayerNorm(5), Mlp(5, hidden, hidden)
        self.slot_embedding = torch.nn.Parameter(torch.zeros(1, 1, rows - 1, 1, hidden))
        self.rank_embedding = torch.nn.Parameter(torch.zeros(1, 1, 1, top_k, hidden))
        self.relative_slot_bias = torch.nn.Parameter(torch.zeros(heads, 2 * rows - 1))
        self.same_slot_bias = torch.nn.Parameter(torch.zeros(heads))
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(layers))
        for layer in self.layers:
            layer.attn_norm, layer.mlp_norm = (torch.nn.RMSNorm(hidden, eps=SIZES["rms_norm_eps"]) for _ in range(2))
            layer.attn = torch.nn.MultiheadAttention(hidden, heads, batch_first=True)
            layer.mlp = Mlp(hidden, int(hidden * ratio), hidden)
        self.output_norm, self.anchor_norm = (torch.nn.RMSNorm(hidden, eps=SIZES["rms_norm_eps"]) for _ in range(2))
        self.factor_input_proj = linear(3 * hidden, hidden)
        self.out_head, self.in_head, self.anchor_out_head = (linear(hidden, factor) for _ in range(3))

    def forward(self, embedded, logprobs, rows, anchor):
        """For each position the log-factors of its candidates after each candidate of the position before; those of the first
        position are all the same."""
        slots, top_k = logprobs.shape
        ranks = torch.arange(top_k).expand(slots, top_k)
        facts = [logprobs, logprobs.exp(), logprobs - logprobs[:, :1], ranks / max(top_k - 1, 1), (ranks == 0).float()]
        x = self.token_proj(embedded) if hasattr(self, "token_proj") else embedded
        x = x + self.pass_hidden_proj(rows)[:, None] + self.feature_mlp(self.feature_norm(torch.stack(facts, -1)))
        x = (x + self.slot_embedding[0, 0] + self.rank_embedding[0, 0]).flatten(0, 1)[None]
        slot = torch.arange(slots).repeat_interleave(top_k)
        distance = slot[:, None] - slot
        bias = self.relative_slot_bias[:, distance + self.relative_slot_bias.shape[1] // 2]
        bias = bias + (distance == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            normed = layer.attn_norm(x)
            x = x + layer.attn(normed, normed, normed, attn_mask=bias, need_weights=False)[0]
            x = x + layer.mlp(layer.mlp_norm(x))
        x, anchor = self.output_norm(x)[0], self.anchor_norm(self.context_proj(anchor))
        made = torch.nn.functional.silu(self.factor_input_proj(torch.cat([x, anchor.expand_as(x), x * anchor], -1)))

        def unit(vectors):
            return torch.nn.functional.normalize(vectors, dim=-1, eps=VECTOR_EPS)

        out, into = (unit(head(made)).unflatten(0, (slots, top_k)) for head in (self.out_head, self.in_head))
        first = (into[0] @ unit(self.anchor_out_head(anchor))[0]).expand(1, top_k, top_k)
        return LOGIT_SCALE * torch.cat([first, out[:-1] @ into[1:].transpose(1, 2)])


class Block(torch.nn.Module):
    """DFlash's layers: of Qwen3, with keys and values of the context, too."""

    def __init__(self, config, taps):
        super().__init__()
        hidden = config.hidden_size
        self.fc = torch.nn.Linear(taps * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(hidden, config.rms_norm_eps) for _ in range(2))
        self.layers = torch.nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, context, x, angles, is_causal):
        """The rows `x` after all layers and the norm; `is_causal` says of each layer whether rows see only those before them."""
        known, count = context.shape[1], x.shape[1]
        for layer, causal in zip(self.layers, is_causal):
            attention = layer.self_attn
            own = layer.input_layernorm(x)
            read = torch.cat([context, own], dim=1)

            def heads(product, rows, norm=None):
                split = product(rows).unflatten(-1, (-1, attention.head_dim))
                return (norm(split) if norm else split).transpose(1, 2)

            q, k = heads(attention.q_proj, own, attention.q_norm), heads(attention.k_proj, read, attention.k_norm)
            # Of the queries before the block there are none.
            q = torch.cat([torch.zeros_like(q[:, :, :1]).expand(-1, -1, known, -1), q], dim=2)
            (cos, sin) = angles
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            mask = torch.ones(count, known + count, dtype=torch.bool)
            mask = mask.tril(known) if causal else mask
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, known:], k, heads(attention.v_proj, read), attn_mask=mask, enable_gqa=True,
            )
            x = x + attention.o_proj(attended.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def run_block(block, config, target, prompt, taps, rows, is_causal):
    """The hidden states of a block after a prompt, and the features of the last position before it."""
    context = block.hidden_norm(block.fc(hidden_states(target, prompt[:-1], taps)))
    ids = torch.tensor([[prompt[-1], *[MASK] * (rows - 1)]])
    angles = Qwen3RotaryEmbedding(config)(context, torch.arange(len(prompt) - 1 + rows)[None])
    hidden = block(context, target.model.embed_tokens(ids), angles, is_causal)
    return hidden[0], context[:, -1]


def check_block(target):
    """That this DFlash is that of the speculators library, with which its fixture was made."""
    folder = FIXTURES / "heads/dflash"
    wanted, stored = load_file(folder / "expected.safetensors"), load_file(folder / "model.safetensors")
    config = Qwen3Config(**SIZES | dict(num_hidden_layers=3, rope_parameters=dict(rope_type="default", rope_theta=1e4)))
    config._attn_implementation = "eager"
    block = Block(config, 2).eval()
    block.load_state_dict({key: value.float() for key, value in stored.items()})
    taps = json.loads((folder / "config.json").read_text())["aux_hidden_state_layer_ids"]
    prompt = wanted["prompt"].tolist()
    hidden, _ = run_block(block, config, target, prompt, taps, 16, [True, False, True])
    far = (torch.log_softmax(target.lm_head(hidden[1:]), -1) - wanted["logprobs"]).abs().max()
    assert far < 1e-3, f"this DFlash differs from the library's by {far}"


def make_jetspec(seed):
    rows, taps = 8, [1, 2]
    target, prompt = load("qwen3")
    config = Qwen3Config(**SIZES | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)))
    block = Block(config, len(taps)).eval()
    randomize(block, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        if seed == 0:
            check_block(target)
        hidden, _ = run_block(block, config, target, prompt, taps, rows, [True] * config.num_hidden_layers)
        logprobs = list(torch.log_softmax(target.lm_head(hidden[1:]), -1))
    drafted = [row.argmax().item() for row in logprobs]
    if not is_clear(logprobs) or len(set(drafted)) < 4:
        return False
    shown = SIZES | dict(
        architectures=["DFlashDraftModel"], model_type="qwen3", rope_theta=1e4, num_target_layers=2, block_size=rows,
        dtype="bfloat16", dflash_config=dict(mask_token_id=MASK, target_layer_ids=[tap - 1 for tap in taps], causal_head=True),
    )
    write(FIXTURES / "heads/jetspec", shown, block.state_dict(), prompt, drafted, logprobs)
    return True


def make_lilicorr(name, seed):
    rows, *sizes = LILICORR[name]
    target, prompt = load("qwen3")
    config = Qwen3Config(**SIZES | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)))
    config._attn_implementation = "eager"
    taps, generator = [1, 2], torch.Generator().manual_seed(seed)
    block = Block(config, len(taps)).eval()
    block.lilicorr = Lattice(config.hidden_size, rows, *sizes).eval()
    randomize(block, generator)
    top_k = sizes[1]
    with torch.no_grad():
        if seed == 0:
            check_block(target)
        hidden, anchor = run_block(block, config, target, prompt, taps, rows, [False] * config.num_hidden_layers)
        hidden = hidden[1:]
        best, ids = torch.log_softmax(target.lm_head(hidden), -1).topk(top_k)
        factors = block.lilicorr(target.model.embed_tokens(ids), best, hidden, anchor)
        drafted, logprobs, rank = [], [], 0
        for slot in range(rows - 1):
            row = torch.full((VOCAB,), float("-inf"))
            row[ids[slot]] = torch.log_softmax(factors[slot, rank], -1)
            logprobs.append(row)
            rank = factors[slot, rank].argmax().item()
            drafted.append(ids[slot, rank].item())
    if not is_clear(logprobs) or len(set(drafted)) < 4:
        return False
    keys = ("hidden_size", "candidate_topk", "num_layers", "num_heads", "mlp_ratio", "factor_dim")
    shown = SIZES | dict(
        architectures=["LiLiCorrDraftModel"], model_type="qwen3", rope_theta=1e4, num_target_layers=2, block_size=rows,
        dtype="bfloat16", dflash_config=dict(
            mask_token_id=MASK, target_layer_ids=[tap - 1 for tap in taps], projector_type="lilicorr", lilicorr_enabled=True,
            lilicorr_vector_eps=VECTOR_EPS, lilicorr_logit_scale=LOGIT_SCALE,
        ) | {f"lilicorr_{key}": size for key, size in zip(keys, sizes)},
    )
    stored = block.state_dict()
    if name in EARLY:
        stored = {early_name(key): value for key, value in stored.items()}
    write(FIXTURES / "heads" / name, shown, stored, prompt, drafted, logprobs)
    return True


def early_name(name):
    if not name.startswith("lilicorr."):
        return name
    parts = {"feature_norm.": "feature_mlp.0.", "feature_mlp.up_proj.": "feature_mlp.1.", "feature_mlp.down_proj.": "feature_mlp.3."}
    for ours, theirs in (parts | {".mlp.up_proj.": ".mlp.0.", ".mlp.down_proj.": ".mlp.2."}).items():
        name = name.replace(ours, theirs)
    return name


def main():
    makers = {name: partial(make_assistant, name) for name in ASSISTANTS}
    makers |= {"muse_glimmer": make_muse_glimmer, "eagle3_latent": make_latent, "jetspec": make_jetspec}
    makers |= {name: partial(make_lilicorr, name) for name in LILICORR}
    for name in sys.argv[1:] or makers:
        make = makers[name]
        print(f"{name}: seed {next(seed for seed in range(100) if make(seed))}")


main()
