//! The architectures: each is a function that takes the keys of a configuration and says what the layers are.

use super::keys::{Keys, Shape};
use super::layer_spec::{LayerSpec, MlpSpec, QkNorm};
use super::rope::{Llama3Scaling, Rope};
use crate::kernels::Activation;
use serde_json::Value;

/// An architecture of decoders.
pub struct Architecture {
    /// Its `model_type`, and its name in GGUF files.
    pub name: &'static str,
    /// Its Hugging Face class.
    pub class: &'static str,
    /// The layers of a model with these keys.
    pub layers: fn(&mut Keys, &Shape) -> Result<Vec<LayerSpec>, String>,
}

pub const ARCHITECTURES: [Architecture; 3] = [
    Architecture {
        name: "llama",
        class: "LlamaForCausalLM",
        layers: llama,
    },
    Architecture {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        layers: qwen2,
    },
    Architecture {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        layers: qwen3,
    },
];

/// Llama, and the draft heads whose layers are like its layers.
pub fn llama(keys: &mut Keys, shape: &Shape) -> Result<Vec<LayerSpec>, String> {
    let attention_bias = keys.flag("attention_bias")?.unwrap_or(false);
    let mlp_bias = keys.flag("mlp_bias")?.unwrap_or(false);
    let has_norms = keys.has_tensor("attn_q_norm.weight").unwrap_or(false);
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(attention_bias),
        o_bias: keys
            .has_tensor("attn_output.bias")
            .unwrap_or(attention_bias),
        mlp_bias: keys.has_tensor("ffn_gate.bias").unwrap_or(mlp_bias),
        qk_norm: has_norms.then_some(QkNorm::Head),
        ..plain(keys, shape)?
    };
    let windows = windows(keys, shape, true, |_| true)?;
    match windows.into_iter().flatten().next() {
        None => Ok(vec![layer; shape.num_layers]),
        Some(window) => Err(keys.refused(
            "sliding_window",
            &window.into(),
            "a window that is used must be as long as max_position_embeddings",
        )),
    }
}

fn qwen2(keys: &mut Keys, shape: &Shape) -> Result<Vec<LayerSpec>, String> {
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(true),
        ..plain(keys, shape)?
    };
    qwen_windows(keys, shape, layer)
}

fn qwen3(keys: &mut Keys, shape: &Shape) -> Result<Vec<LayerSpec>, String> {
    let bias = keys.flag("attention_bias")?.unwrap_or(false);
    let layer = LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(bias),
        o_bias: keys.has_tensor("attn_output.bias").unwrap_or(bias),
        qk_norm: Some(QkNorm::Head),
        ..plain(keys, shape)?
    };
    qwen_windows(keys, shape, layer)
}

/// Layers like `layer`, of which those from `max_window_layers` on may have a window.
fn qwen_windows(
    keys: &mut Keys,
    shape: &Shape,
    layer: LayerSpec,
) -> Result<Vec<LayerSpec>, String> {
    // Of transformers' `Qwen2Config`.
    let full = keys.size("max_window_layers")?.unwrap_or(28);
    let windows = windows(keys, shape, false, |layer| layer >= full)?;
    let with = |window| LayerSpec {
        window,
        ..layer.clone()
    };
    Ok(windows.into_iter().map(with).collect())
}

/// What most architectures share: the layer of a Llama with the position embedding and the activation of `keys`.
fn plain(keys: &mut Keys, shape: &Shape) -> Result<LayerSpec, String> {
    let rope = rope(keys, shape)?;
    Ok(LayerSpec {
        mlp: MlpSpec::Gated(activation(keys)?),
        ..LayerSpec::llama(rope, shape.head_dim)
    })
}

fn activation(keys: &mut Keys) -> Result<Activation, String> {
    let key = "hidden_act";
    let name = keys.text(key)?;
    match name.as_deref() {
        None | Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(keys.refused(
            key,
            &other.into(),
            "only silu, gelu and gelu_pytorch_tanh are",
        )),
    }
}

/// The window of each layer. `use_sliding_window` says whether there are any, or else `by_default`;
/// `layer_types` says which layers have it, or else `slides`. One that covers all positions is none.
fn windows(
    keys: &mut Keys,
    shape: &Shape,
    by_default: bool,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, String> {
    let window = keys.size("sliding_window")?;
    let wanted = keys.flag("use_sliding_window")?;
    let used = wanted.unwrap_or(by_default);
    if wanted == Some(true) && window.is_none() {
        let accepted = "use_sliding_window true needs a window";
        return Err(keys.refused("sliding_window", &Value::Null, accepted));
    }
    let kinds = keys.texts("layer_types")?;
    if let Some(kinds) = kinds
        .as_ref()
        .filter(|kinds| kinds.len() < shape.num_layers)
    {
        return Err(format!(
            "layer_types has {} entries for {} layers",
            kinds.len(),
            shape.num_layers
        ));
    }
    let of_layer = |layer: usize| {
        let window = match kinds.as_ref().map(|kinds| kinds[layer].as_str()) {
            None => window.filter(|_| used && slides(layer)),
            Some("full_attention") => None,
            Some("sliding_attention") if used && window.is_some() => window,
            Some(other) => {
                let accepted =
                    "only full_attention is, and sliding_attention with a sliding_window";
                return Err(keys.refused("layer_types", &other.into(), accepted));
            }
        };
        Ok(window.filter(|&window| window < shape.max_position_embeddings))
    };
    (0..shape.num_layers).map(of_layer).collect()
}

/// The position embedding that all layers share. transformers 5 stores it in `rope_parameters`, older versions in
/// `rope_theta` and `rope_scaling`; a file may have both.
fn rope(keys: &mut Keys, shape: &Shape) -> Result<Rope, String> {
    let mut thetas: Vec<f64> = keys.number("rope_theta")?.into_iter().collect();
    let mut scalings = Vec::new();
    for place in ["rope_parameters", "rope_scaling"] {
        if let Some(mut inner) = keys.nested(place)? {
            thetas.extend(inner.number("rope_theta")?);
            scalings.push(scaling(&mut inner)?);
            inner.finish(shape)?;
        }
    }
    if let Some(other) = thetas.iter().find(|&theta| *theta != thetas[0]) {
        return Err(format!(
            "rope_theta is both {} and {other}: they must be the same",
            thetas[0]
        ));
    }
    if scalings.iter().any(|scaling| *scaling != scalings[0]) {
        return Err("rope_parameters and rope_scaling must be the same".into());
    }
    Ok(Rope {
        width: shape.head_dim,
        theta: thetas.first().map_or(10_000., |&theta| theta as f32),
        scaling: scalings.pop().flatten(),
    })
}

/// The frequency scaling in `rope_scaling` or `rope_parameters`.
fn scaling(keys: &mut Keys) -> Result<Option<Llama3Scaling>, String> {
    for kind in ["full_attention", "sliding_attention", "chunked_attention"] {
        let own = keys.take(kind);
        if !own.is_null() {
            return Err(keys.refused(kind, &own, "all layers must have the same RoPE"));
        }
    }
    // transformers 5 may write both names.
    let (new, old) = (keys.text("rope_type")?, keys.text("type")?);
    if let (Some(new), Some(old)) = (&new, &old)
        && new != old
    {
        return Err(format!(
            "rope_type '{new}' and type '{old}' must be the same"
        ));
    }
    let factor = keys.number("factor")?;
    let low = keys.number("low_freq_factor")?;
    let high = keys.number("high_freq_factor")?;
    let original = keys.size("original_max_position_embeddings")?;
    let need = |value: Option<f64>, name: &str| match value {
        Some(value) => Ok(value as f32),
        None => Err(format!("rope_scaling lacks {name}")),
    };
    match new.or(old).as_deref() {
        None if factor.is_some() => Err("rope_scaling lacks rope_type".into()),
        None | Some("default") => Ok(None),
        Some("llama3") => Ok(Some(Llama3Scaling {
            factor: need(factor, "factor")?,
            low_freq_factor: need(low, "low_freq_factor")?,
            high_freq_factor: need(high, "high_freq_factor")?,
            original_max_position_embeddings: original
                .ok_or("rope_scaling lacks original_max_position_embeddings")?,
        })),
        Some(other) => Err(format!(
            "rope scaling '{other}' is not supported: only default and llama3 are"
        )),
    }
}
