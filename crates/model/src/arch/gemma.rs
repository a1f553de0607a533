//! Gemma 1, 2 and 3: text.

use super::parts::{windows, with_attention_bias, with_ropes, with_windows};
use super::rope::{rope, ropes_by_kind};
use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::RopeSpec;
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, NormSpec, Norms, QkNorm};
use foretoken_kernels::Activation;

/// Norms of the inputs and of the outputs of attention and MLP.
pub const AROUND: Norms = Norms {
    before_attention: Some("input_layernorm"),
    after_attention: Some("post_attention_layernorm"),
    before_mlp: Some("pre_feedforward_layernorm"),
    after_mlp: Some("post_feedforward_layernorm"),
};

/// Sets what the classes assume.
pub fn defaults(keys: &mut Keys) {
    keys.default("tie_word_embeddings", true);
    keys.default("head_dim", 256);
    keys.default("max_position_embeddings", 8192);
}

pub fn defaults2(keys: &mut Keys) {
    defaults(keys);
    keys.default("query_pre_attn_scalar", 256);
    keys.default_of_both("sliding_window", 4096);
    keys.default_of_both("attn_logit_softcapping", 50.);
    keys.default_of_both("final_logit_softcapping", 30.);
}

pub fn defaults3(keys: &mut Keys) {
    keys.default("vocab_size", 262_208);
    keys.default("num_attention_heads", 8);
    keys.default("num_key_value_heads", 4);
    keys.default("max_position_embeddings", 131_072);
    keys.default("query_pre_attn_scalar", 256);
    keys.default("sliding_window", 4096);
    defaults(keys);
}

/// EmbeddingGemma is a Gemma 3. Its GGUF files do not say what makes it another one.
pub fn embedding_defaults(keys: &mut Keys) {
    defaults3(keys);
    if keys.is_gguf() {
        keys.set("use_bidirectional_attention", true);
        // The tensors tell it, too.
        keys.ignore("dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out");
    }
}

pub fn gemma(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = layer(keys, shape, rope)?;
    Ok(model(keys, shape, vec![layer; shape.num_layers]))
}

/// A Gemma 2 model has windows on every second layer, norms before and after attention and MLP, and soft caps.
pub fn gemma2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = rope(keys, shape)?;
    let layer = LayerSpec {
        norms: AROUND,
        attention_scale: attention_scale(keys, shape, 46)?,
        soft_cap: keys.float("attn_logit_softcapping")?,
        ..layer(keys, shape, rope)?
    };
    let windows = windows(keys, shape, true, |i| i.is_multiple_of(2))?;
    let layers = with_windows(&layer, windows, shape);
    Ok(ModelSpec {
        logit_soft_cap: keys.float("final_logit_softcapping")?,
        ..model(keys, shape, layers)
    })
}

/// A Gemma 3 model has windows on five of six layers, which have their own position embedding. It has norms before and
/// after attention and MLP, and norms of heads. In EmbeddingGemma, a window has half of its tokens on either side.
pub fn gemma3(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let (full, sliding) = ropes_by_kind(keys, shape, 1e6, Some(1e4))?;
    let is_bidirectional = keys.flag("use_bidirectional_attention")?.unwrap_or(false);
    let window = keys.peek("sliding_window").as_u64();
    if let Some(window) = window.filter(|&window| is_bidirectional && window > 0) {
        keys.set("sliding_window", window / 2 + 1);
    }
    let layer = LayerSpec {
        norms: AROUND,
        qk_norm: Some(QkNorm::Head),
        is_bidirectional,
        attention_scale: attention_scale(keys, shape, 62)?,
        ..layer(keys, shape, full.clone())?
    };
    let pattern = keys.size("sliding_window_pattern")?.unwrap_or(6).max(1);
    let windows = windows(keys, shape, true, |i| !(i + 1).is_multiple_of(pattern))?;
    let rope = |_, slides| Some(if slides { &sliding } else { &full });
    let layers = with_ropes(&layer, windows, shape, rope);
    Ok(ModelSpec {
        logit_soft_cap: keys.float("final_logit_softcapping")?,
        ..model(keys, shape, layers)
    })
}

/// The layer of a Gemma 1.
pub fn layer(keys: &mut Keys, shape: &ModelShape, rope: RopeSpec) -> Result<LayerSpec, String> {
    for key in ["hidden_act", "hidden_activation"] {
        let name = keys.text(key)?;
        // transformers takes the first of them, which old files have, for the second.
        if let Some(other) = name.filter(|name| name != "gelu" && name != "gelu_pytorch_tanh") {
            let accepted = "only gelu_pytorch_tanh is";
            return Err(keys.refused(key, &other.into(), accepted));
        }
    }
    let layer = LayerSpec {
        mlp: MlpSpec::Gated(Activation::GeluTanh),
        ..LayerSpec::llama(rope, shape.head_dim)
    };
    with_attention_bias(keys, layer, false)
}

/// GGUF files do not say it; in them, only models with so many layers do not scale by the width of a head.
fn attention_scale(keys: &mut Keys, shape: &ModelShape, layers: usize) -> Result<f32, String> {
    let width = match keys.float("query_pre_attn_scalar")? {
        Some(width) => width,
        None if keys.is_gguf() && shape.num_layers == layers => {
            shape.hidden_size as f32 / shape.num_heads as f32
        }
        None => shape.head_dim as f32,
    };
    Ok(1. / width.sqrt())
}

/// The parts that all Gemma models share: a scaled embedding, and norms. The stored weights of norms are less by 1,
/// except in GGUF files.
fn model(keys: &Keys, shape: &ModelShape, layers: Vec<LayerSpec>) -> ModelSpec {
    ModelSpec {
        layers,
        norm: NormSpec {
            offset: if keys.is_gguf() { 0. } else { 1. },
            ..NormSpec::default()
        },
        embedding_scale: Some((shape.hidden_size as f32).sqrt()),
        ..ModelSpec::default()
    }
}
