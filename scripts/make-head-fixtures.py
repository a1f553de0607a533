#!/usr/bin/env python3
"""Makes tests/fixtures/heads: tiny random draft heads of the classes of the speculators library, and what they draft.

    pip install speculators torch transformers safetensors
    scripts/make-head-fixtures.py [NAME...]

The target is tests/fixtures/architectures/qwen3. A folder has the `config.json` and `model.safetensors` that the library
writes (values that bf16 holds, stored as bf16), and `expected.safetensors`, computed in f32: a `prompt`, of whose tokens
but the last the target's hidden states are known; the `drafted` tokens of a greedy draft after it; `logprobs`, the head's
log-probabilities over the target's vocabulary before each of them (-inf = no output); and `confidence`, the probability
that each stands, of a head that says so.

Parallel heads are run by the library's own forward, of which one block is kept. EAGLE's is run row by row as it is served,
with the library's layers: for its first rows this script checks that the library's forward agrees.

No released version of the library (0.9.0 is the newest) has Domino. Its correction is composed here of torch's GRU, as
SpecForge defines it, on the library's DFlash, and written in the layouts of both: see DOMINO.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle.attention import create_peagle_mask_mod
from speculators.models.attention import create_float_mask
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures"
TARGET = FIXTURES / "architectures/qwen3"
FOLDER = FIXTURES / "heads"
VOCAB = 256
HIDDEN = 32
DRAFTED = 6
MASK = 255
SIZES = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
)
SLIDING, FULL = "sliding_attention", "full_attention"


def llama(**more):
    return LlamaConfig(**SIZES | dict(num_hidden_layers=1) | more)


def qwen3(**more):
    return Qwen3Config(**SIZES | dict(num_hidden_layers=2) | more)


EAGLE3 = (Eagle3DraftModel, Eagle3SpeculatorConfig)
PEAGLE = (PEagleDraftModel, PEagleSpeculatorConfig)
DFLASH = (DFlashDraftModel, DFlashSpeculatorConfig)
DFLASH2 = (DFlash2DraftModel, DFlash2SpeculatorConfig)
DSPARK = (DSparkDraftModel, DSparkSpeculatorConfig)
EAGLE_TAPS = dict(eagle_aux_hidden_state_layer_ids=[0, 1, 2])
TAPS = dict(aux_hidden_state_layer_ids=[1, 2], mask_token_id=MASK)
# The classes, the shape of the layers, what the configuration has besides; the prompt's length, and the draft's.
HEADS = {
    # As published for gpt-oss.
    "eagle3_norm_before_fc": (EAGLE3, llama(), dict(norm_before_fc=True, norm_before_residual=True, draft_vocab_size=96, **EAGLE_TAPS), 20, DRAFTED),
    "eagle31": (EAGLE3, llama(), dict(fc_norm=True, norm_output=True, draft_vocab_size=96, **EAGLE_TAPS), 20, DRAFTED),
    "eagle3_layers": (EAGLE3, qwen3(num_hidden_layers=3), dict(draft_vocab_size=VOCAB, **EAGLE_TAPS), 20, DRAFTED),
    "eagle3_windows": (EAGLE3, qwen3(
        layer_types=[FULL, SLIDING], sliding_window=9, use_sliding_window=True,
    ), dict(draft_vocab_size=96, norm_output=True, **EAGLE_TAPS), 20, DRAFTED),
    "peagle": (PEAGLE, llama(num_hidden_layers=2), dict(mask_token_id=MASK, norm_before_residual=True, draft_vocab_size=96, **EAGLE_TAPS), 20, 5),
    "peagle_norms": (PEAGLE, qwen3(), dict(mask_token_id=MASK, norm_before_fc=True, draft_vocab_size=VOCAB, **EAGLE_TAPS), 20, 5),
    "dspark": (DSPARK, qwen3(), dict(markov_rank=8, block_size=5, draft_vocab_size=VOCAB, **TAPS), 20, 5),
    "dspark_gated": (DSPARK, qwen3(), dict(
        markov_rank=8, markov_head_type="gated", confidence_head_with_markov=False, block_size=5, draft_vocab_size=96, **TAPS,
    ), 20, 5),
    "dspark_rnn": (DSPARK, qwen3(), dict(markov_rank=8, markov_head_type="rnn", block_size=5, draft_vocab_size=96, **TAPS), 20, 5),
    "dspark_filled": (DSPARK, qwen3(), dict(
        markov_rank=8, sample_from_anchor=False, enable_confidence_head=False, block_size=5, draft_vocab_size=96, **TAPS,
    ), 20, 4),
    "dflash": (DFLASH, qwen3(
        num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING], sliding_window=64, use_sliding_window=True,
    ), dict(block_size=16, draft_vocab_size=VOCAB, **TAPS), 20, 15),
    "dflash2": (DFLASH2, qwen3(), dict(
        block_size=8, conv_kernel_size=3, conv_group_size=8, selector_rank=8, selector_top_k=6, draft_vocab_size=VOCAB, **TAPS,
    ), 20, 7),
    # As published for Muse Glimmer.
    "dflash2_scaled": (DFLASH2, qwen3(layer_types=[SLIDING, SLIDING], sliding_window=12, use_sliding_window=True), dict(
        block_size=8, conv_kernel_size=2, conv_group_size=8, selector_rank=8, selector_top_k=6, draft_vocab_size=VOCAB, **TAPS,
    ), 20, 7),
    "domino": (DFLASH, qwen3(), dict(block_size=5, sample_from_anchor=True, draft_vocab_size=96, **TAPS), 20, 5),
    "domino_specforge": (DFLASH, qwen3(), dict(block_size=6, draft_vocab_size=VOCAB, **TAPS), 20, 5),
    "dflash_windows": (DFLASH, qwen3(
        num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING], sliding_window=20, use_sliding_window=True,
    ), dict(block_size=16, draft_vocab_size=VOCAB, sliding_window_non_causal=True, **TAPS), 30, 15),
}
# Factor of the embedding, factor of the logits and their cap, in the layout of DFlash's authors.
SCALES = {"dflash2_scaled": (1.7, 0.6, 2.5)}
# Width of the GRU, rank of the correction, tokens without one, whether the layout is SpecForge's.
DOMINO = {"domino": (12, 10, 1, False), "domino_specforge": (20, 6, 2, True)}


class Correction(torch.nn.Module):
    """Domino's correction of the logits (arXiv 2605.29707)."""

    def __init__(self, outputs, width, rank, prefix):
        super().__init__()
        self.prefix = prefix
        self.prefix_gru = torch.nn.GRU(HIDDEN, width, bias=False, batch_first=True)
        down = torch.nn.Linear(HIDDEN + width, rank, bias=False)
        self.embed_proj = torch.nn.Sequential(down, torch.nn.SiLU(), torch.nn.Linear(rank, outputs, bias=False))

    def bias(self, hidden, tokens_before):
        states, _ = self.prefix_gru(tokens_before)
        return self.embed_proj(torch.cat([hidden, states[:, -1]], dim=-1))


def write_flat(folder, scales):
    """Makes the stored head one of the layout of DFlash's authors."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    keys = ("block_size", "conv_kernel_size", "conv_group_size", "mask_token_id", "selector_rank", "selector_top_k")
    names = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    nested = {key: config[key] for key in keys} | dict(zip(names, scales))
    nested["target_layer_ids"] = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    config = config["transformer_layer_config"] | dict(
        architectures=config["architectures"], is_causal=False, num_target_layers=2, dflash_config=nested,
    )
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_domino(folder, width, rank, prefix, is_specforge):
    """Makes the stored DFlash head with a correction one of Domino's."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if not is_specforge:
        config |= dict(
            architectures=["DominoDraftModel"], speculators_model_type="domino", gru_hidden_dim=width,
            logits_correction_emb_dim=rank, pure_draft_prefix_len=prefix, lambda_base_start=1.0, lambda_base_decay_ratio=0.5,
        )
        config["speculators_config"]["algorithm"] = "domino"
        del config["auto_map"]
    else:
        config = config["transformer_layer_config"] | dict(
            architectures=["DominoDraftModel"], auto_map=dict(AutoModel="domino.DominoDraftModel"),
            block_size=config["block_size"], emb_dim=rank, num_target_layers=2,
            dflash_config=dict(
                mask_token_id=MASK, target_layer_ids=[tap - 1 for tap in config["aux_hidden_state_layer_ids"]],
                projector_type="domino", pure_draft_prefix_len=prefix, emb_dim=rank, gru_hidden_dim=width,
                shift_label=config["sample_from_anchor"],
            ),
        )
        weights = folder / "model.safetensors"
        stored = {key.removeprefix("logits_correction."): value for key, value in load_file(weights).items()}
        save_file(stored, weights, metadata={"format": "pt"})
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def randomize(model, seed, target):
    """Values that bf16 holds: of norms near 1, of matrices such that activations keep their size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "embed_tokens.weight":
                noise = target.model.embed_tokens.weight
            elif name == "lm_head.weight" and parameter.shape[0] == VOCAB:
                noise = target.lm_head.weight
            elif "markov_w1" in name or name == "mask_hidden" or "codebook" in name:
                pass
            elif "base_kernel" in name:
                noise = 0.5 * noise + parameter
            elif "embed_proj.2" in name:
                noise *= 2.5 / parameter.shape[-1] ** 0.5
            elif parameter.dim() >= 2:
                noise *= 1.3 / parameter.shape[-1] ** 0.5
            elif "norm" in name:
                noise = 1 + 0.3 * noise
            else:
                noise *= 0.3
            parameter.copy_(noise.to(torch.bfloat16).float())
        if model.d2t is not None:
            ids = torch.randperm(VOCAB, generator=generator)[: model.draft_vocab_size].sort().values
            known = torch.zeros(VOCAB, dtype=torch.bool)
            known[ids] = True
            model.load_vocab_mappings(known, ids - torch.arange(len(ids)))


def hidden_states(target, ids, layers):
    """Of all layers side by side; the last one before the final norm."""
    found = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    states = target(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    states = [*states[:-1], found[0]]
    return torch.cat([states[layer] for layer in layers], dim=-1)


def over_all(model, logits):
    """Log-probabilities over the target's vocabulary."""
    if model.d2t is None:
        return torch.log_softmax(logits, -1)
    every = torch.full((*logits.shape[:-1], VOCAB), float("-inf"))
    every[..., torch.arange(len(model.d2t)) + model.d2t] = torch.log_softmax(logits, -1)
    return every


def fused(model, states):
    """The features that an EAGLE head makes of hidden states."""
    if model.input_norm is not None:
        states = model.input_norm(states)
    if model.fc_norm is not None:
        parts = states.chunk(len(model.fc_norm), dim=-1)
        states = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts)], dim=-1)
    return model.fc(states)


def rows_of(model, tokens, features, mask_of):
    """The outputs of an EAGLE head's rows with these tokens and features; `mask_of` makes a mask for a window."""
    embedded = model.embed_tokens(torch.tensor([tokens]))
    x = torch.cat([embedded, features], dim=-1)
    positions = torch.arange(len(tokens)).unsqueeze(0)
    rope = model.rotary_emb(x, positions)
    for i, layer in enumerate(model.layers):
        window = model.sliding_window if i in model.sliding_window_indices else None
        x = layer(x, attention_mask=mask_of(window), position_ids=positions, position_embeddings=rope)
    return x


def causal(rows):
    def mask_of(window):
        at = torch.arange(rows)
        seen = at[:, None] >= at
        if window is not None:
            seen &= at > at[:, None] - window
        return torch.zeros(1, 1, rows, rows).masked_fill(~seen, float("-inf"))
    return mask_of


def draft_eagle(model, prompt, states, depth):
    """Token by token: a row has the token after the position of its features."""
    tokens, features = list(prompt[1:]), fused(model, states)
    logprobs = []
    for step in range(depth):
        x = rows_of(model, tokens, features, causal(len(tokens)))
        normed = model.norm(x)
        logits = model.lm_head(normed)
        if step == 0:
            library = model(states, torch.tensor([tokens]), torch.zeros(1, len(tokens), dtype=torch.long), ttt_steps=1)
            assert torch.equal(library[0], logits.argmax(-1)), "the library's forward differs"
        logprobs.append(over_all(model, logits)[0, -1])
        output = normed if model.config.norm_output else x
        tokens.append(logprobs[-1].argmax().item())
        features = torch.cat([features, output[:, -1:]], dim=1)
    return tokens[-depth:], logprobs, None


def draft_peagle(model, prompt, states, depth):
    """All at once: after the last token, rows with masks, which belong to the last anchor."""
    known = len(prompt) - 1
    tokens = [*prompt[1:], *[MASK] * (depth - 1)]
    features = fused(model, torch.cat([states, model.mask_hidden.expand(1, depth - 1, -1)], dim=1))
    anchors = torch.tensor([*range(known), *[known - 1] * (depth - 1)])
    depths = torch.tensor([*[0] * known, *range(1, depth)])

    def mask_of(window):
        mask = create_peagle_mask_mod(anchors, depths, torch.zeros(known, dtype=torch.long), window)
        return create_float_mask(mask, Q_LEN=len(tokens), KV_LEN=len(tokens), device="cpu", dtype=torch.float32)

    logits = model.lm_head(model.norm(rows_of(model, tokens, features, mask_of)))
    logprobs = over_all(model, logits)[0, known - 1:]
    return logprobs.argmax(-1).tolist(), list(logprobs), None


def draft_block(model, prompt, states, depth, scales=None):
    """A block after an anchor, the last token; a Markov head is walked along the most probable tokens."""
    anchor, size = len(prompt) - 1, model.block_size
    length = anchor + size + 1
    # Whatever comes after the anchor is hidden from it.
    ids = torch.tensor([[*prompt, *[0] * size]])
    states = torch.cat([states, torch.full((1, length - anchor, states.shape[-1]), 9.0)], dim=1)
    loss_mask = torch.zeros(1, length)
    loss_mask[0, anchor] = 1
    if model.sliding_window_non_causal and model.uses_sliding_window_attn:
        # The library's window ends at the anchor, that of the authors and of servers at each row.
        library = model._build_attention_mask

        def build(loss_mask, *args):
            full, sliding, *rest = library(loss_mask, *args)
            at, keys = anchor + torch.arange(size)[:, None], torch.arange(length)
            seen = torch.cat([(keys > at - model.sliding_window) & (keys < anchor), torch.ones(size, size) > 0], dim=1)
            return full, torch.zeros_like(sliding).masked_fill(~seen, float("-inf")), *rest

        model._build_attention_mask = build
    hidden, logits, *_ = model._backbone_forward(
        states, ids, loss_mask, torch.zeros(1, length, HIDDEN), torch.zeros(1, length, dtype=torch.long), max_anchors=1,
    )
    if scales is not None:
        _, factor, cap = scales
        logits = torch.tanh(logits * factor / cap) * cap
    from_anchor = model.config.sample_from_anchor
    first = 0 if from_anchor else 1
    before = [prompt[-1]] * size
    drafted, logprobs, confidence = [], [], []
    for row in range(first, first + depth):
        before[row] = drafted[-1] if drafted else prompt[-1]
        row_logits = logits[:, row]
        previous = torch.tensor([before])
        if getattr(model, "markov_head", None) is not None:
            row_logits = row_logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)[:, row]
        if getattr(model, "logits_correction", None) is not None and len(drafted) >= model.logits_correction.prefix:
            tokens = model.embed_tokens(torch.tensor([[prompt[-1], *drafted]]))
            row_logits = row_logits + model.logits_correction.bias(hidden[:, row], tokens)
        if getattr(model, "candidate_selector", None) is not None:
            best, scores = model.candidate_selector.select(row_logits, hidden[:, row], previous[:, row])
            row_logits = torch.full_like(row_logits, float("-inf")).scatter(-1, best, scores)
        if getattr(model, "confidence_head", None) is not None:
            features = hidden
            if model.config.confidence_head_with_markov:
                features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)
            confidence.append(model.confidence_head(features)[0, row].sigmoid())
        logprobs.append(over_all(model, row_logits)[0])
        drafted.append(logprobs[-1].argmax().item())
    return drafted, logprobs, torch.stack(confidence) if confidence else None


def is_clear(logprobs):
    """Whether no two best tokens are almost equally likely."""
    return all(row.topk(2).values.diff().abs() > 1e-2 for row in logprobs)


def make(name, target, seed):
    (kind, config_kind), layers, more, length, depth = HEADS[name]
    layers._attn_implementation = "eager"
    config = config_kind(
        transformer_layer_config=layers,
        speculators_config=SpeculatorsConfig(
            algorithm=config_kind.model_fields["speculators_model_type"].default,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depth)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_config(target.config, name_or_path=None),
        ),
        **more,
    )
    model = kind(config).eval()
    if name in DOMINO:
        model.logits_correction = Correction(config.draft_vocab_size, *DOMINO[name][:3])
    randomize(model, seed, target)
    prompt = load_file(TARGET / "expected.safetensors")["prompt"][:length].tolist()
    draft = draft_peagle if kind is PEagleDraftModel else draft_eagle if kind is Eagle3DraftModel else draft_block
    if name in SCALES:
        draft = partial(draft_block, scales=SCALES[name])
        model.embed_tokens.weight.data *= SCALES[name][0]
    with torch.no_grad():
        states = hidden_states(target, prompt[:-1], model.target_layer_ids)
        drafted, logprobs, confidence = draft(model, prompt, states, depth)
    if not is_clear(logprobs) or name in DOMINO and len(set(drafted)) < 4:
        return False
    folder = FOLDER / name
    model.save_pretrained(folder)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    weights = folder / "model.safetensors"
    stored = load_file(weights)
    # What is the target's is left out, as the library does where it can.
    for shared in ("embed_tokens.weight", "lm_head.weight"):
        if shared in stored and stored[shared].shape[0] == VOCAB:
            del stored[shared]
    kept = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in stored.items()}
    save_file(kept, weights, metadata={"format": "pt"})
    if name in SCALES:
        write_flat(folder, SCALES[name])
    if name in DOMINO:
        write_domino(folder, *DOMINO[name])
    expected = {"prompt": torch.tensor(prompt), "drafted": torch.tensor(drafted), "logprobs": torch.stack(logprobs)}
    if confidence is not None:
        expected["confidence"] = confidence
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    return True


def main():
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="eager").eval()
    for name in sys.argv[1:] or HEADS:
        seed = next(seed for seed in range(100) if make(name, target, seed))
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(f"{name}: {size / 1000:.0f} kB, seed {seed}")


main()
