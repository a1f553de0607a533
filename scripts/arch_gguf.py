"""What llama.cpp's conversion makes of the checkpoints of make-arch-fixtures.py: their `gguf.json`."""

import math
import re

import gguf
import torch
import transformers

# Architectures whose rows of q and k llama.cpp reorders.
PERMUTED = {"llama", "arcee", "granite", "granitehybrid", "granitemoe", "smollm3", "mistral3"}
GGUF = {
    "llama": "llama", "mistral": "llama", "qwen3": "qwen3", "phi3": "phi3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3", "gemma4": "gemma4", "gemma4_large": "gemma4", "gemma4_moe": "gemma4", "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4",
    "ernie4_5": "ernie4_5", "exaone4": "exaone4", "cohere": "command-r", "cohere2": "cohere2", "stablelm": "stablelm",
    "stablelm_parallel": "stablelm", "starcoder2": "starcoder2", "nemotron": "nemotron", "hunyuan": "hunyuan-dense",
    "apertus": "apertus", "granite4": "granite", "seed_oss": "seed_oss", "ministral3": "mistral3", "glm": "chatglm",
    "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl",
    "mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "granite_moe": "granitemoe", "qwen3_moe": "qwen3moe",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "glm4_moe_plain": "glm4moe", "ernie4_5_moe": "ernie4_5-moe",
    "arcee": "arcee", "minimax_m2": "minimax-m2", "dots1": "dots1", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe",
    "granite4_hybrid": "granitehybrid", "granite4_hybrid_moe": "granitehybrid", "nemotron_h_plain": "nemotron_h",
    "nemotron_h_moe": "nemotron_h_moe", "mellum": "mellum", "falcon_h1": "falcon-h1",
    "falcon_h1_norm": "falcon-h1",
}


DELTA_NETS = {"qwen3next", "qwen35", "qwen35moe"}
MAMBAS = {"granitehybrid", "nemotron_h", "nemotron_h_moe"}
# Architectures that llama.cpp has and its package does not, and those that have the same tensors.
LIKE = {"mellum": "qwen3moe"}
# Architectures whose norms are stored less 1.
OFFSET_NORMS = {"gemma", "gemma2", "gemma3", "nemotron"} | DELTA_NETS
# Parts of a layer with experts beside its MLP, as in Gemma 4.
BESIDE_MLP = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    "router.proj.weight": "ffn_gate_inp.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}


def of_delta_net(arch, config, name):
    """What is done with a tensor of a gated delta net."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    per_key = values // keys

    def heads(width, start=0):
        """Of heads of values, the first of each head of keys first."""
        order = torch.arange(values * width).reshape(keys, per_key, width)
        return (start + (order if arch == "qwen3next" else order.transpose(0, 1)).reshape(-1)).tolist()

    start = 2 * keys * key_dim
    mixed = [*range(start), *heads(value_dim, start)]
    layer, part = f"blk.{name.split('.')[2 + ('language_model' in name)]}", name.split(".linear_attn.")[1]
    how = {"interleaved_heads": 0, "offset": 0}
    if part == "in_proj_qkvz.weight":
        # Of each head of keys q, k, v and z.
        width = 2 * key_dim + 2 * per_key * value_dim
        of = lambda first, count: [h * width + first + i for h in range(keys) for i in range(count)]
        v = 2 * key_dim, per_key * value_dim
        qkv = of(0, key_dim) + of(key_dim, key_dim) + of(*v)
        return [
            how | {"name": f"{layer}.attn_qkv.weight", "order": qkv},
            how | {"name": f"{layer}.attn_gate.weight", "order": of(v[0] + v[1], v[1])},
        ]
    return how | {
        "in_proj_qkv.weight": {"name": f"{layer}.attn_qkv.weight", "order": mixed},
        "in_proj_z.weight": {"name": f"{layer}.attn_gate.weight", "order": heads(value_dim)},
        "in_proj_b.weight": {"name": f"{layer}.ssm_beta.weight", "order": heads(1)},
        "in_proj_a.weight": {"name": f"{layer}.ssm_alpha.weight", "order": heads(1)},
        "in_proj_ba.weight": {"name": f"{layer}.ssm_ba.weight"},
        "conv1d.weight": {"name": f"{layer}.ssm_conv1d.weight", "squeezed": True, "order": mixed},
        "A_log": {"name": f"{layer}.ssm_a", "order": heads(1), "decay": True},
        "dt_bias": {"name": f"{layer}.ssm_dt.bias", "order": heads(1)},
        "norm.weight": {"name": f"{layer}.ssm_norm.weight"},
        "out_proj.weight": {"name": f"{layer}.ssm_out.weight", "column_order": heads(value_dim)},
    }[part]


def of_mamba(theirs, name, shape, groups):
    """What is done with a tensor of a Mamba layer, which llama.cpp calls `theirs`."""
    how = {"name": theirs, "interleaved_heads": 0, "offset": 0}
    if name.endswith("conv1d.weight"):
        return how | {"squeezed": True}
    if name.endswith(("A_log", ".D")):
        return how | {"decay": name.endswith("A_log"), "dims": [*shape, 1]}
    if name.endswith(".norm.weight"):
        return how | {"dims": [groups, shape[0] // groups]}
    return how


def factors_of_falcon_h1(config, name):
    """Runs of rows of a weight and their factor, which llama.cpp's conversion multiplies by it."""
    part, of_attention = name.split(".")[-2], config.attention_in_multiplier
    if part == "in_proj":
        shared = config.mamba_n_groups * config.mamba_d_state
        runs = zip([config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, config.mamba_n_heads], config.ssm_multipliers)
        return [[rows, factor * config.ssm_in_multiplier] for rows, factor in runs]
    factor = {
        "embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier,
        "q_proj": of_attention, "k_proj": of_attention * config.key_multiplier, "v_proj": of_attention,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "gate_proj": config.mlp_multipliers[0], "down_proj": config.mlp_multipliers[1],
    }.get(part)
    return None if factor is None else [[None, factor]]


def gguf_of(arch, config, state):
    """What `gguf.json` has."""
    config = config.get_text_config()
    if arch == "mellum":
        # The conversion leaves out the layer for further tokens.
        state = {name: tensor for name, tensor in state.items() if not name.startswith("mtp.")}
    sizes = config.to_dict()
    head_dim = sizes.get("head_dim") or config.hidden_size // config.num_attention_heads
    # Nemotron-H rotates nothing.
    rope = getattr(config, "rope_parameters", None) or dict(rope_type="default", rope_theta=1e4)
    rope = rope.get("full_attention", rope)
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": sizes["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": width,
        "rope.freq_base": rope["rope_theta"],
    }
    if arch in ("granite", "granitehybrid") and "shared_intermediate_size" in sizes:
        # What the conversion of hybrid models writes for those without state spaces, too.
        metadata |= {
            "attention.head_count_kv": [config.num_key_value_heads] * config.num_hidden_layers,
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": True,
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_n_heads,
        }
        del metadata["attention.key_length"], metadata["attention.value_length"]
    if arch in MAMBAS:
        attends = [kind == "full_attention" for kind in config.layer_types]
        metadata |= {
            "attention.head_count_kv": [config.num_key_value_heads * attends for attends in attends],
            "context_length": 2**20,
            "rope.scaling.finetuned": False,
        }
    if arch.startswith("nemotron_h"):
        width = config.moe_intermediate_size if arch.endswith("moe") else config.intermediate_size
        metadata |= {
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
            "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in config.layer_types],
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.state_size": config.ssm_state_size,
            "ssm.group_count": config.n_groups,
            "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
            "ssm.time_step_rank": config.mamba_num_heads,
        }
    if arch == "falcon-h1":
        metadata |= {
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.group_count": config.mamba_n_groups,
            "ssm.inner_size": config.mamba_d_ssm,
            "ssm.time_step_rank": config.mamba_n_heads,
            "vocab_size": config.vocab_size,
        }
        del metadata["rope.dimension_count"]
    if arch == "nemotron_h_moe":
        metadata |= {
            "expert_count": config.n_routed_experts,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_weights_norm": config.norm_topk_prob,
        }
    more = {
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "norm_epsilon": "attention.layer_norm_epsilon",
        "norm_eps": "attention.layer_norm_epsilon",
        "logit_scale": "logit_scale",
        "use_parallel_residual": "use_parallel_residual",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "first_k_dense_replace": "leading_dense_block_count",
        "n_shared_experts": "expert_shared_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "routed_scaling_factor": "expert_weights_scale",
    }
    for ours, theirs in more.items():
        if arch == "nemotron_h" and theirs.startswith("expert"):
            continue
        if arch == "falcon-h1" and theirs == "embedding_scale":
            # The embedding is multiplied by it.
            continue
        if getattr(config, ours, None) is not None:
            metadata[theirs] = getattr(config, ours)
    if "mrope_section" in rope:
        metadata["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if arch == "qwen3vl":
        metadata["n_deepstack_layers"] = 1
    if arch == "gemma3":
        metadata["attention.sliding_window_pattern"] = 2
    if arch in ("olmo2", "mellum") and hasattr(config, "layer_types"):
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        metadata["attention.sliding_window_pattern"] = pattern
    if arch == "mellum":
        metadata["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    extra = {}
    if arch == "gemma4":
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
        full = layers[kinds.index(False)].head_dim
        metadata |= {
            "attention.sliding_window_pattern": kinds,
            "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
            "attention.key_length": full,
            "attention.value_length": full,
            "attention.key_length_swa": head_dim,
            "attention.value_length_swa": head_dim,
            "attention.shared_kv_layers": config.num_kv_shared_layers,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "rope.dimension_count": full,
            "rope.dimension_count_swa": head_dim,
            "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        }
        if config.enable_moe_block:
            metadata |= {
                "expert_count": config.num_experts, "expert_used_count": config.top_k_experts,
                "expert_feed_forward_length": config.moe_intermediate_size,
            }
        if config.use_double_wide_mlp:
            shared = config.num_hidden_layers - config.num_kv_shared_layers
            widths = [config.intermediate_size * (1 if i < shared else 2) for i in range(config.num_hidden_layers)]
            metadata["feed_forward_length"] = widths
        rotated = int(rope["partial_rotary_factor"] * full / 2)
        extra["rope_freqs.weight"] = [1.0] * rotated + [1e30] * (full // 2 - rotated)
    if arch == "minimax-m2":
        metadata |= {"expert_feed_forward_length": config.intermediate_size, "expert_gating_func": 2}
    if arch == "gpt-oss":
        metadata["expert_feed_forward_length"] = config.intermediate_size
    after = f"model.layers.{config.num_hidden_layers}."
    # The conversion leaves out those of DeepSeek.
    further = any(name.startswith(after) for name in state) and config.model_type != "deepseek_v3"
    if arch == "glm4moe" or further:
        metadata |= {"block_count": config.num_hidden_layers + further, "nextn_predict_layers": int(further)}
    if arch in ("dots1", "glm4moe"):
        metadata |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    if arch == "deepseek2":
        metadata |= {
            # Of one head, whose keys and values are latent vectors.
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "expert_weights_norm": config.norm_topk_prob,
            "leading_dense_block_count": 1,
            "rope.dimension_count": config.qk_rope_head_dim,
            "vocab_size": config.vocab_size,
        }
        if config.q_lora_rank:
            metadata["attention.q_lora_rank"] = config.q_lora_rank
        if "mscale_all_dim" in rope:
            metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
        # Files of GLM-4.7-Flash do not say it.
        if kind := {"deepseek_v2": 1, "deepseek_v3": 2}.get(config.model_type):
            metadata["expert_gating_func"] = kind
    if arch == "ernie4_5-moe":
        metadata |= {
            "expert_shared_count": config.moe_num_shared_experts,
            "expert_shared_feed_forward_length": config.moe_intermediate_size * config.moe_num_shared_experts,
            "interleave_moe_layer_step": config.moe_layer_interval,
            "leading_dense_block_count": config.moe_layer_start_index,
        }
    if arch.startswith("lfm2"):
        metadata["shortconv.l_cache"] = config.conv_L_cache
        counts = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
        metadata["attention.head_count_kv"] = counts
        metadata["attention.layer_norm_rms_epsilon"] = metadata.pop("attention.layer_norm_epsilon")
        metadata["feed_forward_length"] = state["model.layers.0.feed_forward.w1.weight"].shape[0]
        del metadata["attention.key_length"], metadata["attention.value_length"], metadata["rope.dimension_count"]
    if arch == "lfm2moe":
        metadata |= {"leading_dense_block_count": config.num_dense_layers, "expert_gating_func": 2}
    if arch in DELTA_NETS:
        values = config.linear_num_value_heads
        metadata |= {
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": values,
            "ssm.inner_size": config.linear_value_head_dim * values,
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
        }
        if arch == "qwen35moe":
            del metadata["feed_forward_length"]
        if any(name.startswith("mtp.") for name in state):
            metadata |= {"block_count": config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    kind = rope["rope_type"]
    if "alpha" in rope:
        metadata["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
    for name in ("alpha_p", "alpha_n", "beta", "eps") if arch == "apertus" else ():
        values = [state[f"model.layers.{i}.mlp.act_fn.{name}"] for i in range(config.num_hidden_layers)]
        metadata[f"xielu.{name}"] = [value.item() for value in values]
    original = rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if arch == "mistral3":
        metadata |= {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if kind == "yarn":
        metadata["rope.scaling.original_context_length"] = original
        for ours in ("beta_fast", "beta_slow"):
            if rope.get(ours) is not None:
                metadata[f"rope.scaling.yarn_{ours}"] = rope[ours]
        if rope.get("attention_factor") is not None:
            metadata["rope.scaling.yarn_attn_factor"] = rope["attention_factor"]
    if kind == "longrope":
        stretch = math.log(config.max_position_embeddings / original)
        metadata |= {
            "rope.scaling.type": kind,
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": math.sqrt(1 + stretch / math.log(original)),
        }
        for name in ("long", "short"):
            extra[f"rope_factors_{name}.weight"] = rope[f"{name}_factor"]
    if kind == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config)
        extra["rope_freqs.weight"] = (plain / scaled).tolist()
    like = LIKE.get(arch, arch)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == like)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers + further)
    tensors, stacked = {}, {}
    for name in sorted(state):
        if name.startswith(after) and not further:
            continue
        if name.endswith(".kv_b_proj.weight"):
            how = {"interleaved_heads": 0, "offset": 0, "heads": config.num_attention_heads}
            layer, nope = f"blk.{name.split('.')[2]}", config.qk_nope_head_dim
            tensors[name] = [
                how | {"name": f"{layer}.attn_k_b.weight", "rows": [0, nope], "transposed": True},
                how | {"name": f"{layer}.attn_v_b.weight", "rows": [nope, config.v_head_dim]},
            ]
            continue
        part = name.split(".", 3)[-1]
        if arch == "gemma4" and part in BESIDE_MLP:
            theirs = f"blk.{name.split('.')[2]}.{BESIDE_MLP[part]}"
            tensors[name] = {"name": theirs, "interleaved_heads": 0, "offset": 0}
            continue
        part = name.removeprefix(after).removesuffix(".weight")
        if part in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens") and name != part:
            theirs = f"blk.{config.num_hidden_layers}.nextn.{part.replace('.', '_')}.weight"
            tensors[name] = {"name": theirs, "interleaved_heads": 0, "offset": 0}
            continue
        if name.startswith("mtp."):
            part = name.removeprefix("mtp.").removeprefix("layers.0.")
            nextn = {
                "fc.weight": "eh_proj", "pre_fc_norm_embedding.weight": "enorm", "pre_fc_norm_hidden.weight": "hnorm",
                "norm.weight": "shared_head_norm",
            }
            layer = f"blk.{config.num_hidden_layers}"
            how = {"interleaved_heads": 0, "offset": 0}
            if part == "mlp.experts.gate_up_proj":
                half = state[name].shape[1] // 2
                tensors[name] = [
                    how | {"name": f"{layer}.ffn_{part}_exps.weight", "rows": [start, half]}
                    for part, start in (("gate", 0), ("up", half))
                ]
                continue
            if part == "mlp.experts.down_proj":
                tensors[name] = how | {"name": f"{layer}.ffn_down_exps.weight"}
                continue
            if part in nextn:
                theirs = f"nextn.{nextn[part]}.weight"
            else:
                theirs = names.get_name(f"model.layers.0.{part}", try_suffixes=(".weight",)).removeprefix("blk.0.")
            tensors[name] = how | {"name": f"{layer}.{theirs}", "offset": int("norm" in part)}
            continue
        if arch in DELTA_NETS and ".linear_attn." in name:
            tensors[name] = of_delta_net(arch, config, name)
            continue
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(expert[3], expert[3])
            prefix = re.sub("feed_forward|mixer|block_sparse_moe", "mlp", expert[1]).replace("backbone", "model")
            theirs = names.get_name(f"{prefix}.{part}.weight", try_suffixes=(".weight",))
            assert theirs, name
            stacked.setdefault(theirs, {})[int(expert[2])] = name
            continue
        if ".act_fn." in name or "visual." in name or ".mtp_" in name:
            continue
        if name.endswith(".input_linear.weight"):
            # The gate, then what it multiplies.
            half = state[name].shape[-2] // 2
            kind = "_exps" if "block_sparse_moe" in name else "_shexp" if sizes["num_local_experts"] else ""
            layer = f"blk.{name.split('.')[2]}"
            tensors[name] = [
                {"name": f"{layer}.ffn_{part}{kind}.weight", "interleaved_heads": 0, "offset": 0, "rows": [start, half]}
                for part, start in (("gate", 0), ("up", half))
            ]
            continue
        if arch == "gpt-oss" and ".experts." in name:
            # Columns of gate and up take turns.
            layer, kind = f"blk.{name.split('.')[2]}", "bias" if name.endswith("bias") else "weight"
            parts = {"gate": [0, 2], "up": [1, 2]} if "gate_up" in name else {"down": [0, 1]}
            tensors[name] = [
                {
                    "name": f"{layer}.ffn_{part}_exps.{kind}", "interleaved_heads": 0, "offset": 0,
                    "columns": columns, "transposed": kind == "weight",
                }
                for part, columns in parts.items()
            ]
            continue
        ours = name.replace(".language_model.", ".").replace(".dt_bias", ".dt_proj.bias" if ".mamba." in name else ".dt.bias")
        if not sizes.get("num_local_experts"):
            ours = ours.replace("shared_mlp.output_linear", "mlp.down_proj")
        ours = ours.replace("e_score_correction_bias", "e_score_correction.bias")
        ours = ours.replace(".expert_bias", ".expert_bias.bias")
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        if name.endswith(("layer_scalar", "sinks")):
            theirs += ".weight"
        heads = 0
        if arch in PERMUTED and ".q_proj." in name:
            heads = config.num_attention_heads
        if arch in PERMUTED and ".k_proj." in name:
            heads = config.num_key_value_heads
        offset = int(arch in OFFSET_NORMS and name.endswith("norm.weight"))
        tensors[name] = {"name": theirs, "interleaved_heads": heads, "offset": offset}
        if name.endswith("conv.conv.weight"):
            tensors[name]["squeezed"] = True
        if ".ssm_" in theirs:
            groups = sizes.get("mamba_n_groups") or sizes["n_groups"]
            tensors[name] = of_mamba(theirs, name, state[name].shape, groups)
        if arch == "falcon-h1" and (factors := factors_of_falcon_h1(config, name)):
            tensors[name]["factors"] = [[rows or len(state[name]), factor] for rows, factor in factors]
    return {
        "architecture": arch,
        "metadata": {f"{arch}.{key}": value for key, value in metadata.items()},
        "tensors": tensors,
        "stacked": {theirs: [parts[i] for i in range(len(parts))] for theirs, parts in stacked.items()},
        "extra": extra,
    }
