//! Keys that no layer acts on, and that yet change nothing.

use serde_json::Value;

/// The parts of a model's shape on which the meaning of other keys depends.
#[derive(Debug, Clone, Copy, Default)]
pub struct ModelShape {
    pub num_layers: usize,
    pub head_dim: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
}

/// Keys that never change what the decoder computes, besides private ones: about training, the
/// tokenizer, sampling, or other programs. `mrope_section`, `mrope_interleaved` and `rope.dimension_sections` are about
/// the three positions of a token in an image; those of a token in a text are equal. `n_deepstack_layers` are layers to
/// which images add values.
const HARMLESS: &str = "
    attention_softmax_in_fp32 auto_map bad_words_ids begin_suppress_tokens cache_implementation
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype
    dual_chunk_attention_config early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initializer_range is_decoder is_llama_config label2id
    layer_norm_eps layer_norm_epsilon length_penalty max_length max_seq_len max_sequence_length
    max_window_layers min_length model_max_length mrope_interleaved mrope_section n_deepstack_layers
    name_or_path no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate rope.dimension_sections rope.scaling.finetuned
    rope.scaling.original_context_length rope.scaling.yarn_ext_factor
    scale_attention_softmax_in_fp32 scale_attn_weights sep_token_id suppress_tokens
    task_specific_params temperature tensor_data_layout tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_cache";

/// Whether the key never changes what the decoder computes.
pub(super) fn is_harmless(key: &str) -> bool {
    let is_private = key.starts_with('_') || key.ends_with("dropout") || key.ends_with("_pdrop");
    is_private || super::is_one_of(key, HARMLESS)
}

/// Whether the key asks with this value for nothing that a plain layer does not do.
pub(super) fn is_neutral(key: &str, value: &Value, shape: &ModelShape, is_gguf: bool) -> bool {
    let d = shape.head_dim as f64;
    let number = |wanted: f64| {
        let fits = |x: f64| (x - wanted).abs() <= 1e-6 * wanted;
        // In llama.cpp, 0 means "none".
        let is_none = |x: f64| x == 0. && is_gguf;
        value.is_null() || value.as_f64().is_some_and(|x| fits(x) || is_none(x))
    };
    match key {
        // Keys of Phi-4. What another number would mean is not published.
        "full_attn_mod"
        | "interpolate_factor"
        | "embedding_multiplier"
        | "lm_head_multiplier"
        | "logit_scale"
        | "logits_scaling"
        | "partial_rotary_factor"
        | "residual_multiplier"
        | "rotary_scaling_factor"
        | "rope.scale_linear"
        | "rope.scaling.attn_factor"
        | "rope.scaling.factor"
        | "rotary_pct" => number(1.),
        "attention_multiplier" => number(1. / d.sqrt()),
        "attention.value_length"
        | "query_pre_attn_scalar"
        | "rope.dimension_count"
        | "rotary_dim"
        | "v_head_dim" => number(d),
        "attention.causal" | "is_causal" => value.is_null() || value == true,
        "sliding_window" if is_gguf => {
            let longest = shape.max_position_embeddings as f64;
            is_off(value) || value.as_f64() >= Some(longest)
        }
        "activation" | "activation_function" | "hidden_activation" => {
            value.is_null() || ["silu", "swish", "swiglu"].iter().any(|name| value == name)
        }
        "no_rope_layers" => {
            let mut layers = value.as_array().into_iter().flatten();
            is_off(value) || (value.is_array() && layers.all(|has_rope| has_rope == 1))
        }
        // None, mean and last; see `EmbeddingSpec`.
        "pooling_type" if is_gguf => matches!(value.as_u64(), Some(0 | 1 | 3)),
        "rope.scaling.type" => value == "none",
        _ => is_off(value),
    }
}

/// Whether a value means "none" or "no" for a key that is not known.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(n) => n.as_f64() == Some(0.),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(entries) => entries.is_empty(),
    }
}
