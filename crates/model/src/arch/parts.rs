//! What architectures have in common.

use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::RopeSpec;
use crate::names;
use crate::spec::{LayerSpec, MlpSpec, ModelSpec, MtpLayout, MtpSpec};
use foretoken_kernels::Activation;
use serde_json::Value;

/// Maximum number of layers that predict further tokens.
const MAX_FURTHER_LAYERS: usize = 16;

/// Leaves the layers that predict further tokens out of `num_hidden_layers`, which counts them in GGUF files.
pub fn drop_further_layers(keys: &mut Keys) {
    if keys.is_gguf() {
        let of = |key| keys.peek(key).as_u64().unwrap_or(0);
        let layers = of("num_hidden_layers").saturating_sub(of("num_nextn_predict_layers"));
        keys.set("num_hidden_layers", layers);
    }
}

/// Prefixes of the names of the tensors of layers for further tokens. The model does not read these tensors.
pub fn further_layers(keys: &mut Keys, shape: &ModelShape) -> Result<Vec<String>, String> {
    let key = "num_nextn_predict_layers";
    let further = keys.size(key)?.unwrap_or(0);
    if further > MAX_FURTHER_LAYERS {
        let accepted = format!("only up to {MAX_FURTHER_LAYERS} are");
        return Err(keys.refused(key, &further.into(), &accepted));
    }
    let after = shape.num_layers..shape.num_layers + further;
    Ok(after.map(|i| names::layer(i, "")).collect())
}

/// The model of `layers` with the layers for further tokens after them, if there are any, each like the last.
pub fn with_mtp_after(
    keys: &mut Keys,
    shape: &ModelShape,
    layers: Vec<LayerSpec>,
) -> Result<ModelSpec, String> {
    let unread = further_layers(keys, shape)?;
    let layer = layers.last().filter(|_| !unread.is_empty());
    let mtp = layer.map(|layer| MtpSpec {
        layer: layer.clone(),
        layout: MtpLayout::After,
        count: unread.len(),
    });
    Ok(ModelSpec {
        mtp,
        unread,
        ..layers.into()
    })
}

/// The prefixes of tensors that the model does not read, and the layers for further tokens, each like `layer`, of
/// checkpoints that have them apart (`mtp.`).
pub fn mtp_apart(
    keys: &mut Keys,
    shape: &ModelShape,
    layer: Option<LayerSpec>,
) -> Result<(Vec<String>, Option<MtpSpec>), String> {
    let mut unread = further_layers(keys, shape)?;
    let count = unread.len();
    let mut layout = MtpLayout::After;
    if !keys.is_gguf() {
        unread = vec!["mtp.".to_owned()];
        layout = MtpLayout::Apart;
    }
    let mtp = layer.filter(|_| count > 0).map(|layer| MtpSpec {
        layer,
        layout,
        count,
    });
    Ok((unread, mtp))
}

/// Sets what many classes assume.
pub fn eps_5(keys: &mut Keys) {
    keys.default("rms_norm_eps", 1e-5);
}

/// What most architectures share: the layer of a Llama with this position embedding and the activation of `keys`.
pub fn plain(keys: &mut Keys, shape: &ModelShape, rope: RopeSpec) -> Result<LayerSpec, String> {
    Ok(LayerSpec {
        mlp: MlpSpec::Gated(activation(keys)?),
        ..LayerSpec::llama(rope, shape.head_dim)
    })
}

/// `layer` with biases of attention, on q, k and v and on its output: those of a GGUF file, or else what
/// `attention_bias` says, or else `by_default`.
pub fn with_attention_bias(
    keys: &mut Keys,
    layer: LayerSpec,
    by_default: bool,
) -> Result<LayerSpec, String> {
    let bias = keys.flag("attention_bias")?.unwrap_or(by_default);
    Ok(LayerSpec {
        qkv_bias: keys.has_tensor("attn_q.bias").unwrap_or(bias),
        o_bias: keys.has_tensor("attn_output.bias").unwrap_or(bias),
        ..layer
    })
}

fn activation(keys: &mut Keys) -> Result<Activation, String> {
    activation_or(keys, Activation::Silu)
}

/// The activation of the MLP, or else `by_default`.
pub fn activation_or(keys: &mut Keys, by_default: Activation) -> Result<Activation, String> {
    let key = "hidden_act";
    let name = keys.text(key)?;
    match name.as_deref() {
        None => Ok(by_default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("relu2") => Ok(Activation::Relu2),
        Some("gelu") => Ok(Activation::Gelu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(keys.refused(
            key,
            &other.into(),
            "only silu, gelu, gelu_pytorch_tanh and relu2 are",
        )),
    }
}

/// The window of each layer. `use_sliding_window` says whether there are any, or else `by_default`;
/// `layer_types` says which layers have it, or else `slides`. One that covers all positions is none.
pub fn windows(
    keys: &mut Keys,
    shape: &ModelShape,
    by_default: bool,
    slides: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, String> {
    // In llama.cpp, 0 means "none".
    let least = usize::from(keys.is_gguf());
    let window = keys.size("sliding_window")?;
    let window = window.filter(|&window| window >= least);
    let wanted = keys.flag("use_sliding_window")?;
    let used = wanted.unwrap_or(by_default);
    if wanted == Some(true) && window.is_none() {
        let accepted = "use_sliding_window true needs a window";
        return Err(keys.refused("sliding_window", &Value::Null, accepted));
    }
    let accepted = "only full_attention is, and sliding_attention with a sliding_window";
    let listed = by_kind(keys, shape, LAYER_TYPES, accepted, |kind| match kind {
        "full_attention" => Some(None),
        "sliding_attention" if used && window.is_some() => Some(window),
        _ => None,
    })?;
    let pattern = gguf_pattern(keys)?;
    let of_layer = |layer: usize| {
        let slides = |layer| match &pattern {
            Some(pattern) => pattern.slides(layer),
            None => slides(layer),
        };
        window.filter(|_| used && slides(layer))
    };
    Ok(listed.unwrap_or_else(|| (0..shape.num_layers).map(of_layer).collect()))
}

/// The key that lists the kinds of layers.
pub const LAYER_TYPES: &str = "layer_types";

/// The kind of each layer that the list `key` names, if it is there. Entries after them are of further layers.
pub fn layer_kinds(
    keys: &mut Keys,
    shape: &ModelShape,
    key: &str,
) -> Result<Option<Vec<String>>, String> {
    let (kinds, layers) = (keys.texts(key)?, shape.num_layers);
    match kinds.as_ref().map(Vec::len).filter(|&len| len < layers) {
        None => Ok(kinds),
        Some(len) => Err(format!("{key} has {len} entries for {layers} layers")),
    }
}

/// What `of` makes of the kind of each layer that the list `key` names, if it is there. It knows the `accepted` ones.
pub fn by_kind<T>(
    keys: &mut Keys,
    shape: &ModelShape,
    key: &str,
    accepted: &str,
    of: impl Fn(&str) -> Option<T>,
) -> Result<Option<Vec<T>>, String> {
    let Some(kinds) = layer_kinds(keys, shape, key)? else {
        return Ok(None);
    };
    let one = |kind: String| of(&kind).ok_or_else(|| keys.refused(key, &kind.into(), accepted));
    let kinds = kinds.into_iter().take(shape.num_layers).map(one);
    kinds.collect::<Result<_, _>>().map(Some)
}

/// Which layers of a GGUF file have attention, if it has a number of heads of keys for each: those with more than none.
/// `num_key_value_heads` becomes one number.
pub fn attending(keys: &mut Keys) -> Option<Vec<bool>> {
    let counts = keys.peek("num_key_value_heads");
    let counts = counts.as_array().filter(|_| keys.is_gguf())?;
    let most = counts.iter().filter_map(Value::as_u64).max();
    keys.set("num_key_value_heads", most.unwrap_or(0));
    let attend = counts.iter().map(|count| count.as_u64() != Some(0));
    Some(attend.collect())
}

/// Sets `layer_types`: those that attend, and the others, which are `other`.
pub fn set_kinds(keys: &mut Keys, attends: Vec<bool>, other: &str) {
    let kind = |attends: bool| {
        if attends { "full_attention" } else { other }
    };
    let kinds: Vec<&str> = attends.into_iter().map(kind).collect();
    keys.set("layer_types", kinds);
}

/// Which layers of a GGUF file have the window.
enum WindowPattern {
    /// All but every so many.
    Period(usize),
    Listed(Vec<bool>),
}

impl WindowPattern {
    fn slides(&self, layer: usize) -> bool {
        match self {
            Self::Period(period) => *period == 0 || !(layer + 1).is_multiple_of(*period),
            Self::Listed(listed) => listed.get(layer).copied().unwrap_or(false),
        }
    }
}

fn gguf_pattern(keys: &mut Keys) -> Result<Option<WindowPattern>, String> {
    let key = "attention.sliding_window_pattern";
    let value = keys.take(key);
    let read = match &value {
        Value::Null => return Ok(None),
        Value::Array(list) => {
            let listed: Option<Vec<bool>> = list.iter().map(Value::as_bool).collect();
            listed.map(WindowPattern::Listed)
        }
        one => one
            .as_u64()
            .and_then(|period| usize::try_from(period).ok())
            .map(WindowPattern::Period),
    };
    let accepted = "only a period and a list of true and false are";
    read.map(Some)
        .ok_or_else(|| keys.refused(key, &value, accepted))
}

/// Layers like `layer`, with these windows.
pub fn with_windows(
    layer: &LayerSpec,
    windows: Vec<Option<usize>>,
    shape: &ModelShape,
) -> Vec<LayerSpec> {
    with_ropes(layer, windows, shape, |_, _| layer.rope.as_ref())
}

/// As [`with_windows`], with the position embeddings that `rope` gives for a layer's number and whether the layer has a
/// window. A window that covers all positions is dropped after `rope` was asked.
pub fn with_ropes<'r>(
    layer: &LayerSpec,
    windows: Vec<Option<usize>>,
    shape: &ModelShape,
    rope: impl Fn(usize, bool) -> Option<&'r RopeSpec>,
) -> Vec<LayerSpec> {
    let of_layer = |(i, window): (usize, Option<usize>)| LayerSpec {
        rope: rope(i, window.is_some()).cloned(),
        window: window.filter(|&window| window < shape.max_position_embeddings),
        ..layer.clone()
    };
    windows.into_iter().enumerate().map(of_layer).collect()
}
