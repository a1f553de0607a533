//! Names of tensors: Hugging Face's, which the code uses everywhere, and llama.cpp's.

use std::borrow::Cow;

/// The token embedding, without `.weight`.
pub const EMBEDDING: &str = "model.embed_tokens";
/// The norm before the output layer, without `.weight`.
pub const NORM: &str = "model.norm";
/// The output layer, without `.weight`.
pub const HEAD: &str = "lm_head";
/// The embedding, projection and norm of layers' own inputs, without `.weight`.
pub(crate) const LAYER_EMBEDDING: &str = "model.embed_tokens_per_layer";
/// The projection of layers' own inputs, without `.weight`.
pub(crate) const LAYER_PROJECTION: &str = "model.per_layer_model_projection";
/// The norm of layers' own inputs, without `.weight`.
pub(crate) const LAYER_NORM: &str = "model.per_layer_projection_norm";
/// The id of each row of the output layer, minus the row's number, as in EAGLE-3.
pub const OUTPUT_IDS: &str = "d2t";
/// The ids of groups of ids, group after group, of an assistant of Gemma 4.
pub(crate) const GROUPED_IDS: &str = "masked_embedding.token_ordering";

/// The layer of an EAGLE-3 head.
const HEAD_LAYER: &str = "midlayer.";
/// The layers of other heads.
const HEAD_LAYERS: &str = "layers.";
const LAYERS: &str = "model.layers.";

/// How a checkpoint names the decoder, which the code calls `model`, and the output layer, `lm_head`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The names of the code.
    Model,
    /// The names of the code without `model.`, as classes like `Qwen3Model` save themselves.
    Bare,
    /// `model.language_model.` and `lm_head`, of classes for images and texts.
    Inside,
    /// `language_model.model.` and `language_model.lm_head`: the same before transformers 5.
    Outside,
}

impl Layout {
    /// The layout of a checkpoint. `has` says whether the checkpoint has a tensor.
    pub fn of(has: impl Fn(&str) -> bool) -> Self {
        let embedding = format!("{EMBEDDING}.weight");
        let all = [Self::Model, Self::Inside, Self::Outside, Self::Bare];
        let found = all.into_iter().find(|layout| has(&layout.name(&embedding)));
        found.unwrap_or(Self::Model)
    }

    /// The name in the checkpoint of the tensor that the code calls `name`.
    pub fn name<'n>(self, name: &'n str) -> Cow<'n, str> {
        let part = name.strip_prefix("model.");
        match (self, part) {
            (Self::Bare, Some(part)) => part.into(),
            (Self::Inside, Some(part)) => format!("model.language_model.{part}").into(),
            (Self::Outside, _) => format!("language_model.{name}").into(),
            _ => name.into(),
        }
    }
}

/// `part` of layer `index`.
pub fn layer(index: usize, part: &str) -> String {
    format!("{LAYERS}{index}.{part}")
}

/// The prefix of the names of the tensors of layer `index` in a GGUF file.
pub(crate) fn gguf_layer(index: usize) -> String {
    format!("blk.{index}.")
}

/// A tensor's layer, and its name within the layer.
pub fn layer_of(name: &str) -> Option<(usize, &str)> {
    numbered(name, LAYERS)
}

/// The layer of a draft head's tensor, and the tensor's name within the layer.
pub fn layer_of_head(name: &str) -> Option<(usize, &str)> {
    match name.strip_prefix(HEAD_LAYER) {
        Some(part) => Some((0, part)),
        None => numbered(name, HEAD_LAYERS),
    }
}

fn numbered<'a>(name: &'a str, prefix: &str) -> Option<(usize, &'a str)> {
    let (layer, part) = name.strip_prefix(prefix)?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

/// Whether a checkpoint may contain the tensor `name` although no model of ours reads it, because it
/// follows from the config or from other tensors.
pub(crate) fn is_redundant(name: &str) -> bool {
    let ends = [
        "rotary_emb.inv_freq",
        "attn_rot_embd.weight",
        // Model Optimizer's scales of K and V, for programs that quantize them.
        "k_proj.k_scale",
        "v_proj.v_scale",
    ];
    let names = [
        "lm_head.weight",
        "t2d",
        // Tensors of the target, as the speculators library trains with them.
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    ];
    names.contains(&name) || ends.iter().any(|end| name.ends_with(end))
}

/// llama.cpp's name for a Hugging Face tensor.
pub fn gguf(name: &str) -> Option<String> {
    let top = match name {
        "model.embed_tokens.weight" | "embed_tokens.weight" => Some("token_embd.weight"),
        "model.norm.weight" => Some("output_norm.weight"),
        "model.norm.bias" => Some("output_norm.bias"),
        "lm_head.weight" => Some("output.weight"),
        "model.embed_tokens_per_layer.weight" => Some("per_layer_token_embd.weight"),
        "model.per_layer_model_projection.weight" => Some("per_layer_model_proj.weight"),
        "model.per_layer_projection_norm.weight" => Some("per_layer_proj_norm.weight"),
        // Names of a draft head.
        "norm.weight" => Some("output_norm.weight"),
        "fc.weight" => Some("fc.weight"),
        "hidden_norm.weight" => Some("hidden_norm.weight"),
        "markov_head.markov_w1.weight" => Some("markov_embd.weight"),
        "markov_head.markov_w2.weight" => Some("markov_output.weight"),
        OUTPUT_IDS => Some(OUTPUT_IDS),
        _ => None,
    };
    if let Some(name) = top {
        return Some(name.to_owned());
    }
    let (layer, rest) = layer_of(name).or_else(|| layer_of_head(name))?;
    let unlike = match rest {
        "self_attn.sinks" => Some("attn_sinks.weight"),
        "linear_attn.A_log" | "mamba.A_log" => Some("ssm_a"),
        "linear_attn.dt_bias" | "mamba.dt_bias" => Some("ssm_dt.bias"),
        "mamba.D" => Some("ssm_d"),
        "router.scale" => Some("ffn_gate_inp.scale"),
        "router.per_expert_scale" => Some("ffn_down_exps.scale"),
        _ if rest.ends_with(".e_score_correction_bias") => Some("exp_probs_b.bias"),
        _ => None,
    };
    if let Some(part) = unlike {
        return Some(format!("blk.{layer}.{part}"));
    }
    let (part, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    let part = match part {
        "input_layernorm" => "attn_norm",
        "hidden_norm" => "hidden_norm",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_a_proj" => "attn_q_a",
        "self_attn.q_b_proj" => "attn_q_b",
        "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
        "self_attn.k_b_proj" => "attn_k_b",
        "self_attn.v_b_proj" => "attn_v_b",
        "self_attn.q_a_layernorm" => "attn_q_a_norm",
        "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
        "self_attn.q_norm" | "self_attn.query_layernorm" => "attn_q_norm",
        "self_attn.k_norm" | "self_attn.key_layernorm" => "attn_k_norm",
        "post_attention_layernorm" => "ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        // llama.cpp has the gate in the first half of this one.
        "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.c_fc" => "ffn_up",
        "mlp.down_proj" | "mlp.c_proj" => "ffn_down",
        "mlp.gate" | "router.proj" => "ffn_gate_inp",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" | "mlp.shared_experts.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" | "mlp.shared_experts.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" | "mlp.shared_experts.down_proj" => "ffn_down_shexp",
        "mlp.experts.gate_proj" | "experts.gate_proj" => "ffn_gate_exps",
        "mlp.experts.up_proj" | "experts.up_proj" => "ffn_up_exps",
        "mlp.experts.down_proj" | "experts.down_proj" => "ffn_down_exps",
        "experts.gate_up_proj" => "ffn_gate_up_exps",
        // Norms of experts, and of the MLP beside them.
        "pre_feedforward_layernorm" => "ffn_norm",
        "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
        "post_feedforward_layernorm_1" => "post_ffw_norm_1",
        "post_feedforward_layernorm_2" => "post_ffw_norm_2",
        "per_layer_input_gate" => "inp_gate",
        "per_layer_projection" => "proj",
        "post_per_layer_input_norm" => "post_norm",
        "layer_scalar" => "layer_output_scale",
        "eh_proj" => "nextn.eh_proj",
        "enorm" => "nextn.enorm",
        "hnorm" => "nextn.hnorm",
        "embed_tokens" => "nextn.embed_tokens",
        "shared_head.norm" => "nextn.shared_head_norm",
        "shared_head.head" => "nextn.shared_head_head",
        "linear_attn.in_proj_qkv" => "attn_qkv",
        "linear_attn.in_proj_z" => "attn_gate",
        "linear_attn.in_proj_b" => "ssm_beta",
        "linear_attn.in_proj_a" => "ssm_alpha",
        "linear_attn.in_proj_ba" => "ssm_ba",
        "mamba.in_proj" => "ssm_in",
        "linear_attn.conv1d" | "mamba.conv1d" => "ssm_conv1d",
        "linear_attn.norm" | "mamba.norm" => "ssm_norm",
        "linear_attn.out_proj" | "mamba.out_proj" => "ssm_out",
        "conv.in_proj" => "shortconv.in_proj",
        "conv.conv" => "shortconv.conv",
        "conv.out_proj" => "shortconv.out_proj",
        _ => return None,
    };
    Some(format!("blk.{layer}.{part}.{kind}"))
}
