"""The configurations of make-arch-fixtures.py: the classes of transformers, small."""

VOCAB = 256
WINDOW = 9
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=None,
)

GEMMA4_ROPES = dict(
    full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)

# A rope whose pairs between fast and slow ones would be others if they were whole.
GPT_OSS = dict(
    head_dim=16, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
    rope_parameters=dict(
        rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16, beta_fast=32.0,
        beta_slow=1.0, truncate=False,
    ),
)

# Two heads of values for each of keys, all of other widths.
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6, head_dim=16,
)
DELTA_ROPE = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25, mrope_section=[1, 1, 0])

# Heads of another width than their state.
MAMBA = dict(mamba_n_heads=4, mamba_expand=1, mamba_d_state=6)
GRANITE4 = MAMBA | dict(
    embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.7,
    position_embedding_type="nope",
)
# Each factor is another one.
FALCON_H1 = dict(
    mamba_n_heads=4, mamba_d_head=10, mamba_d_ssm=40, mamba_d_state=6, embedding_multiplier=1.7, lm_head_multiplier=0.6,
    attention_in_multiplier=0.8, attention_out_multiplier=0.7, key_multiplier=1.5, ssm_in_multiplier=1.3,
    ssm_out_multiplier=0.9, ssm_multipliers=[1.4, 0.75, 0.95, 1.2, 0.85], mlp_multipliers=[1.6, 0.65],
)
NEMOTRON_H = dict(ssm_state_size=6, mamba_num_heads=4, mamba_head_dim=10, n_groups=1)

# Multi-head latent attention, of which each width is another one.
LATENT = dict(
    num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, head_dim=4,
    v_head_dim=6, n_routed_experts=8, moe_intermediate_size=16, rms_norm_eps=1e-3,
)
LATENT_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0,
)

# The class, and what its configuration has besides SIZES.
FIXTURES = {
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "ministral": ("Ministral", dict(
        sliding_window=WINDOW, num_hidden_layers=3, head_dim=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    )),
    "ministral3": ("Ministral3", dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0,
        beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3,
    ))),
    "llama": ("Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=dict(
        rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ))),
    "qwen2": ("Qwen2", dict(
        sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
    )),
    "qwen3": ("Qwen3", dict(head_dim=16, rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
    ))),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)),
    "qwen2_moe": ("Qwen2Moe", dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
    )),
    # Windows on every second layer, which is the one without experts.
    "qwen2_moe_mixed": ("Qwen2Moe", dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        qkv_bias=False, norm_topk_prob=True, mlp_only_layers=[0], use_sliding_window=True, sliding_window=WINDOW,
    )),
    "qwen3_moe": ("Qwen3Moe", dict(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True,
    )),
    # One layer of four has experts, whose weights are not divided by their sum.
    "qwen3_moe_mixed": ("Qwen3Moe", dict(
        num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2,
        mlp_only_layers=[1],
    )),
    "gpt_oss": ("GptOss", GPT_OSS),
    "gpt_oss_mxfp4": ("GptOss", GPT_OSS),
    "phi3": ("Phi3", dict(
        sliding_window=WINDOW, original_max_position_embeddings=16, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, rope_parameters=dict(
            rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
        ),
    )),
    "gemma": ("Gemma", dict(head_dim=16)),
    "gemma2": ("Gemma2", dict(
        sliding_window=WINDOW, num_hidden_layers=3, query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
        final_logit_softcapping=6.0,
    )),
    "gemma3": ("Gemma3Text", dict(
        sliding_window=WINDOW, num_hidden_layers=3, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    )),
    # Small: inputs of each layer, last layers that share K and V.
    "gemma4": ("Gemma4Text", dict(
        sliding_window=WINDOW, num_hidden_layers=6, num_kv_shared_layers=2, use_double_wide_mlp=True,
        global_head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "full_attention"] * 3, rope_parameters=GEMMA4_ROPES,
    )),
    # Large: full layers have fewer heads, whose values are their keys.
    "gemma4_large": ("Gemma4Text", dict(
        sliding_window=WINDOW, num_hidden_layers=3, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], rope_parameters=GEMMA4_ROPES,
    )),
    # The same with experts beside the MLP of each layer.
    "gemma4_moe": ("Gemma4Text", dict(
        sliding_window=WINDOW, num_hidden_layers=3, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, final_logit_softcapping=6.0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], rope_parameters=GEMMA4_ROPES,
        enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=16,
    )),
    "gemma4_unified": ("Gemma4UnifiedText", dict(
        sliding_window=WINDOW, num_hidden_layers=2, global_head_dim=16, num_global_key_value_heads=1,
        attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA4_ROPES,
    )),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4)),
    "arcee": ("Arcee", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))),
    "granite": ("Granite", dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.7,
        rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0),
    )),
    "granite_moe": ("GraniteMoe", dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.7,
        num_local_experts=6, num_experts_per_tok=2,
    )),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", dict(
        sliding_window=WINDOW, num_hidden_layers=4, rope_parameters=dict(
            full_attention=dict(
                rope_type="yarn", rope_theta=5e5, factor=8.0, original_max_position_embeddings=16, beta_fast=32.0,
                beta_slow=1.0, attention_factor=1.2,
            ),
            sliding_attention=dict(rope_type="default", rope_theta=5e5),
        ),
    )),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=2, attention_bias=True)),
    "seed_oss": ("SeedOss", dict(attention_out_bias=True)),
    "ernie4_5": ("Ernie4_5", dict(use_bias=True)),
    "exaone4": ("Exaone4", dict(sliding_window=WINDOW, num_hidden_layers=4)),
    "cohere": ("Cohere", dict(logit_scale=0.6, attention_bias=True)),
    "cohere2": ("Cohere2", dict(logit_scale=0.6, sliding_window=WINDOW, num_hidden_layers=4)),
    "stablelm": ("StableLm", dict(use_qkv_bias=True, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
    ))),
    "stablelm_parallel": ("StableLm", dict(use_parallel_residual=True, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
    ))),
    "starcoder2": ("Starcoder2", dict(sliding_window=WINDOW)),
    "nemotron": ("Nemotron", dict(mlp_bias=True)),
    "hunyuan": ("HunYuanDenseV1", dict(head_dim=16, attention_bias=True, rope_parameters=dict(
        rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0,
        mscale_all_dim=0.0,
    ))),
    "apertus": ("Apertus", dict(head_dim=16, rope_parameters=dict(
        rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ))),
    "granite4": ("GraniteMoeHybrid", dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=1.7,
        layer_types=["attention", "attention"], num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=48, position_embedding_type="rope", mamba_n_heads=2, time_step_limit=(0.0, 1.0), tie_word_embeddings=True,
    )),
    # Two groups of heads; the last layer has a state.
    "granite4_hybrid": ("GraniteMoeHybrid", GRANITE4 | dict(
        num_hidden_layers=4, layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=48, mamba_n_groups=2,
        tie_word_embeddings=True,
    )),
    # As published: with experts, an MLP of all tokens, one group of heads, and steps without limits.
    "granite4_hybrid_moe": ("GraniteMoeHybrid", GRANITE4 | dict(
        num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"], intermediate_size=16,
        num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=24,
    )),
    # Limits that some steps reach.
    "bamba": ("Bamba", MAMBA | dict(
        num_hidden_layers=3, attn_layer_indices=[1], time_step_limit=(0.2, 0.8), tie_word_embeddings=True, head_dim=8,
    )),
    "falcon_h1": ("FalconH1", FALCON_H1),
    # As the 34B, with norms of two groups of heads.
    "falcon_h1_norm": ("FalconH1", FALCON_H1 | dict(
        mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False,
    )),
    # Two groups of heads, biases, and a least step that some reach.
    "nemotron_h": ("NemotronH", NEMOTRON_H | dict(
        hybrid_override_pattern="M-M*-M-", n_groups=2, mlp_bias=True, use_bias=True, time_step_min=0.2,
    )),
    "nemotron_h_plain": ("NemotronH", NEMOTRON_H | dict(n_groups=2, hybrid_override_pattern="M*-M-")),
    # As Nemotron 3 Nano: experts without gates.
    "nemotron_h_moe": ("NemotronH", NEMOTRON_H | dict(
        hybrid_override_pattern="MEM*E", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=24, n_group=4, topk_group=2, routed_scaling_factor=1.7,
    )),
    "glm": ("Glm", dict(head_dim=16, eos_token_id=[255])),
    "glm4": ("Glm4", dict(head_dim=16, eos_token_id=[255])),
    "glm4_moe": ("Glm4Moe", dict(
        num_hidden_layers=3, head_dim=16, attention_bias=True, use_qk_norm=True, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=2, n_group=4, topk_group=2,
        routed_scaling_factor=1.7,
    )),
    # All layers have experts, whose weights are not divided by their sum, in one group.
    "glm4_moe_plain": ("Glm4Moe", dict(
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=0,
        norm_topk_prob=False, num_mtp_layers=0,
    )),
    # Queries of one product, and a YaRN that changes the scale of attention.
    "deepseek_v2": ("DeepseekV2", LATENT | dict(
        q_lora_rank=None, n_shared_experts=2, num_experts_per_tok=2, first_k_dense_replace=1,
        rope_parameters=LATENT_YARN | dict(mscale=0.707, mscale_all_dim=0.707),
    )),
    # Groups by their best expert, and biases.
    "deepseek_v2_groups": ("DeepseekV2", LATENT | dict(
        num_hidden_layers=2, q_lora_rank=12, n_shared_experts=1, num_experts_per_tok=2, n_routed_experts=6,
        topk_method="group_limited_greedy", n_group=3, topk_group=2, routed_scaling_factor=1.7, attention_bias=True,
        mlp_bias=True,
    )),
    "deepseek_v3": ("DeepseekV3", LATENT | dict(
        q_lora_rank=12, kv_lora_rank=24, qk_rope_head_dim=8, head_dim=8, num_experts_per_tok=3, n_group=4,
        topk_group=2, routed_scaling_factor=1.7, first_k_dense_replace=1,
        rope_parameters=LATENT_YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    )),
    # As Moonlight, with a rope whose pairs are halves, and angles that YaRN scales, too.
    "deepseek_v3_plain": ("DeepseekV3", LATENT | dict(
        num_hidden_layers=2, q_lora_rank=None, num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=False,
        first_k_dense_replace=0, num_mtp_layers=0, attention_bias=True, rope_interleave=False,
        rope_parameters=LATENT_YARN | dict(mscale=1.0, mscale_all_dim=0.6),
    )),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | dict(
        q_lora_rank=12, v_head_dim=16, num_experts_per_tok=2, routed_scaling_factor=1.8,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    )),
    "mellum": ("Mellum", dict(
        num_hidden_layers=3, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], mlp_layer_types=["sparse"] * 3, num_mtp_layers=1,
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=5e5),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    )),
    "solar_open": ("SolarOpen", dict(
        head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
        routed_scaling_factor=1.7, n_group=1, topk_group=1,
    )),
    "youtu": ("Youtu", dict(
        q_lora_rank=12, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, head_dim=8,
        num_key_value_heads=4, tie_word_embeddings=True,
    )),
    "ernie4_5_moe": ("Ernie4_5_Moe", dict(
        num_hidden_layers=3, moe_num_experts=6, moe_k=2, moe_intermediate_size=16, tie_word_embeddings=True,
    )),
    # Of the layers from 2 to 4, the one at 3 has experts, and none of all tokens.
    "ernie4_5_moe_mixed": ("Ernie4_5_Moe", dict(
        num_hidden_layers=6, intermediate_size=32, moe_num_experts=4, moe_k=2, moe_intermediate_size=16,
        moe_num_shared_experts=0, moe_layer_start_index=2, moe_layer_end_index=4, moe_layer_interval=2,
    )),
    "minimax_m2": ("MiniMaxM2", dict(
        head_dim=8, intermediate_size=16, num_local_experts=8, num_experts_per_tok=3, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
    )),
    "dots1": ("Dots1", dict(
        num_hidden_layers=3, head_dim=8, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
        moe_intermediate_size=16, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        max_window_layers=3, sliding_window=None, rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=1e7),
    )),
    "lfm2": ("Lfm2", dict(
        num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"], block_multiple_of=16,
    )),
    # Wider convolutions with biases, attention last, and an MLP of the given width.
    "lfm2_bias": ("Lfm2", dict(
        num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"], conv_L_cache=4, conv_bias=True,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
    )),
    "lfm2_moe": ("Lfm2Moe", dict(
        num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=16, routed_scaling_factor=1.4,
    )),
    # The last layer has a state.
    "qwen3_next": ("Qwen3Next", DELTA | dict(
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_hidden_layers=4, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    )),
    # Of two layers, one has experts.
    "qwen3_next_mixed": ("Qwen3Next", DELTA | dict(
        layer_types=["full_attention", "linear_attention"], num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=24, mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True,
    )),
    "qwen3_5": ("Qwen3_5Text", DELTA | dict(
        num_hidden_layers=4, rope_parameters=DELTA_ROPE, tie_word_embeddings=True,
    )),
    # As many heads of values as of keys, and a convolution of two tokens.
    "qwen3_5_moe": ("Qwen3_5MoeText", DELTA | dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
        linear_num_value_heads=2, linear_conv_kernel_dim=2, rope_parameters=DELTA_ROPE,
        layer_types=["linear_attention", "full_attention"],
    )),
}

# Classes for images and texts, of which only the decoder of texts is served: the class, what its `text_config` has
# besides SIZES, its `vision_config`, how the Hub's files name the tensors, and what else its configuration has. Those of
# Qwen 2 have no `text_config`.
VISION = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
QWEN_VISION = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=4, out_hidden_size=SIZES["hidden_size"],
)
OUTSIDE = [
    ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."), ("model.multi_modal_projector.", "multi_modal_projector."),
]
INSIDE_QWEN2 = [("model.language_model.", "model."), ("model.visual.", "visual.")]
MULTIMODAL = {
    "gemma3_vision": ("Gemma3", FIXTURES["gemma3"][1] | dict(model_type="gemma3_text"), VISION | dict(
        model_type="siglip_vision_model", vision_use_head=False,
    ), OUTSIDE),
    "gemma4_vision": ("Gemma4", FIXTURES["gemma4"][1] | dict(
        num_hidden_layers=3, num_kv_shared_layers=1, pad_token_id=0,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ), VISION | dict(
        model_type="gemma4_vision", num_key_value_heads=2, head_dim=4, position_embedding_size=8,
    ), []),
    "mistral3_vision": (
        "Mistral3", FIXTURES["ministral3"][1] | dict(model_type="ministral3"),
        VISION | dict(model_type="pixtral", head_dim=4), OUTSIDE,
    ),
    "qwen2_vl": ("Qwen2VL", dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
    ), dict(
        depth=1, embed_dim=8, hidden_size=SIZES["hidden_size"], mlp_ratio=1, num_heads=2, patch_size=4,
    ), INSIDE_QWEN2),
    "qwen2_5_vl": ("Qwen2_5_VL", dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]),
    ), QWEN_VISION | dict(fullatt_block_indexes=[0]), INSIDE_QWEN2),
    "qwen3_vl": ("Qwen3VL", dict(
        head_dim=16, rope_parameters=dict(
            rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True,
        ),
    ), QWEN_VISION | dict(deepstack_visual_indexes=[0], num_position_embeddings=4), []),
    # The first and the last layer have neither a window nor a rope.
    "muse_glimmer": ("MuseGlimmer", dict(
        num_hidden_layers=5, sliding_window=WINDOW, qk_scale_factor=1.7, output_multiplier=0.6, final_logit_softcapping=6.0,
        rms_norm_eps=1e-2, post_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ), dict(
        patch_size=4, pos_emb_height=2, pos_emb_width=2, num_attention_heads=2, num_hidden_layers=1, hidden_size=8,
        intermediate_size=8,
    ), [], dict(out_hidden_size=32, projector_hidden_size=8)),
    "qwen3_5_vision": ("Qwen3_5", FIXTURES["qwen3_5"][1] | dict(
        num_hidden_layers=2, layer_types=["full_attention", "linear_attention"], tie_word_embeddings=False,
    ), QWEN_VISION | dict(num_position_embeddings=4), []),
}
