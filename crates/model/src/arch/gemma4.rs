//! Gemma 4: text.

use super::experts::experts;
use super::gemma::{AROUND, layer};
use super::parts::{windows, with_ropes};
use super::rope::ropes_by_kind;
use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::{LongFactors, LongScaling, RopeScaling, RopeSpec};
use crate::spec::{
    ExpertsSpec, KvSource, LayerSpec, MlpSpec, ModelSpec, Norms, QkNorm, SharedExpert,
};
use foretoken_core::kv::KvHeads;
use serde_json::{Value, json};

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    keys.default("max_position_embeddings", 131_072);
    keys.default("sliding_window", 512);
    keys.default("hidden_size_per_layer_input", 256);
    unified_defaults(keys);
}

/// Sets what the class of the 12B model assumes.
pub fn unified_defaults(keys: &mut Keys) {
    keys.default("vocab_size", 262_144);
    keys.default("num_key_value_heads", 4);
    keys.default("head_dim", 256);
    keys.default("global_head_dim", 512);
    keys.default("max_position_embeddings", 262_144);
    keys.default("sliding_window", 1024);
    keys.default("tie_word_embeddings", true);
    if keys.peek("rope_parameters").is_null() && !keys.is_gguf() {
        keys.set(
            "rope_parameters",
            json!({
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }),
        );
    }
    if keys.is_gguf() {
        keys.rename("head_dim", "global_head_dim");
        for (from, to) in [
            ("attention.key_length_swa", "head_dim"),
            ("attention.shared_kv_layers", "num_kv_shared_layers"),
            (
                "embedding_length_per_layer_input",
                "hidden_size_per_layer_input",
            ),
        ] {
            keys.rename(from, to);
        }
        for key in ["num_key_value_heads", "intermediate_size"] {
            if let Value::Array(of_layers) = keys.peek(key) {
                keys.set(key, of_layers.first().cloned());
                keys.set(&of_each_layer(key), of_layers);
            }
        }
    }
}

/// Where `defaults` puts what a GGUF file has for each layer.
fn of_each_layer(key: &str) -> String {
    format!("{key} of each layer")
}

/// A Gemma 4 model. It differs from Gemma 3 as follows. Layers without a window have wider heads and rotate only a part
/// of them. Values have norms, and a factor follows each layer. In small models, each layer has an input of its own,
/// and the last layers share the K and V of others. In large models, the values of some layers are their keys. In the
/// 26B-A4B, experts stand beside the MLP of each layer.
pub fn gemma4(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.rename("top_k_experts", "num_experts_per_tok");
    let has_experts = if keys.is_gguf() {
        let count = keys.peek("num_experts");
        count.as_u64().is_some_and(|count| count > 0)
    } else {
        keys.flag("enable_moe_block")?.unwrap_or(false)
    };
    // Only of images.
    let bidirectional = keys.text("use_bidirectional_attention")?;
    if let Some(other) = bidirectional.filter(|of| of != "vision") {
        let accepted = "only vision and null are";
        return Err(keys.refused("use_bidirectional_attention", &other.into(), accepted));
    }
    let (mut full, sliding) = ropes_by_kind(keys, shape, 1e6, Some(1e4))?;
    if keys.is_gguf() {
        if full.scaling.is_some() {
            return Err(
                "a rope scaling of Gemma 4 other than rope_freqs.weight is not supported".into(),
            );
        }
        full.scaling = Some(RopeScaling::Long(LongScaling {
            factors: LongFactors::Tensor("rope_freqs.weight"),
            attention_factor: 1.,
        }));
    }
    let layer = LayerSpec {
        norms: AROUND,
        qk_norm: Some(QkNorm::Head),
        v_norm: true,
        attention_scale: 1.,
        has_scalar: (keys.has_tensor("layer_output_scale.weight")).unwrap_or(true),
        ..layer(keys, shape, full.clone())?
    };
    let layer = if has_experts {
        with_experts(keys, layer)?
    } else {
        keys.ignore("num_experts num_experts_per_tok moe_intermediate_size");
        layer
    };
    let mut windows = windows(keys, shape, true, |i| !(i + 1).is_multiple_of(6))?;
    if let Some(last) = windows.last_mut() {
        *last = None;
    }
    let slides: Vec<bool> = windows.iter().map(Option::is_some).collect();
    let rope = |_, slides| Some(if slides { &sliding } else { &full });
    let mut layers = with_ropes(&layer, windows, shape, rope);
    let keys_are_values = keys.flag("attention_k_eq_v")?.unwrap_or(false);
    let heads = kv_heads(keys, shape, keys_are_values, &slides)?;
    let owners = owners(keys, &slides)?;
    let doubles = keys.flag("use_double_wide_mlp")?.unwrap_or(false);
    let widths = keys.sizes(&of_each_layer("intermediate_size"))?;
    for (i, layer) in layers.iter_mut().enumerate() {
        layer.kv_heads = Some(heads[i]);
        layer.rope = layer.rope.take().map(|rope| RopeSpec {
            width: heads[i].dim,
            ..rope
        });
        let no_values = keys.has_tensor_in(i, "attn_v.weight").map(|has| !has);
        layer.kv = match owners[i] {
            Some(owner) => KvSource::Layer(owner),
            None if no_values.unwrap_or(keys_are_values && !slides[i]) => KvSource::Keys,
            None => KvSource::Own,
        };
        layer.mlp_width = match &widths {
            Some(widths) => widths.get(i).copied(),
            None if doubles && owners[i].is_some() => Some(2 * shape.intermediate_size),
            None => None,
        };
        let width = layer.mlp_width.unwrap_or(shape.intermediate_size);
        if let MlpSpec::Experts(experts) = &mut layer.mlp {
            experts.shared = Some(SharedExpert::new("mlp", width));
        }
    }
    let layer_input_width = keys.size("hidden_size_per_layer_input")?;
    let layer_input_width = layer_input_width.filter(|&width| width > 0);
    match layer_input_width {
        Some(_) => keys.only("vocab_size_per_layer_input", shape.vocab_size)?,
        None => keys.ignore("vocab_size_per_layer_input"),
    }
    Ok(ModelSpec {
        layers,
        layer_input_width,
        embedding_scale: Some((shape.hidden_size as f32).sqrt()),
        logit_soft_cap: keys.float("final_logit_softcapping")?,
        ..ModelSpec::default()
    })
}

/// `layer` with experts beside its MLP, which is the expert of all rows. Both have norms of their own.
fn with_experts(keys: &mut Keys, layer: LayerSpec) -> Result<LayerSpec, String> {
    let width = keys.needed_size("moe_intermediate_size")?;
    let experts = ExpertsSpec {
        has_norms: true,
        ..experts(keys, layer.mlp, width, true)?
    };
    Ok(LayerSpec {
        norms: Norms {
            before_mlp: None,
            ..AROUND
        },
        mlp: MlpSpec::Experts(experts),
        ..layer
    })
}

/// The key/value heads of each layer: those of `per_layer_config`, or else of the two kinds of layers.
fn kv_heads(
    keys: &mut Keys,
    shape: &ModelShape,
    keys_are_values: bool,
    slides: &[bool],
) -> Result<Vec<KvHeads>, String> {
    let own = KvHeads::new(shape.num_kv_heads, shape.head_dim);
    let count = keys.size("num_global_key_value_heads")?;
    let count = count.filter(|_| keys_are_values).unwrap_or(own.count);
    let full = KvHeads::new(count, keys.needed_size("global_head_dim")?);
    for (of, swa) in [
        ("attention.value_length", "attention.value_length_swa"),
        ("rope.dimension_count", "rope.dimension_count_swa"),
    ] {
        keys.only(of, full.dim)?;
        keys.only(swa, own.dim)?;
    }
    let counts = keys.sizes(&of_each_layer("num_key_value_heads"))?;
    let mut given = keys.nested("per_layer_config")?;
    let of_layer = |(i, &slides): (usize, &bool)| {
        let mut heads = if slides || given.is_some() { own } else { full };
        if let Some(&count) = counts.as_ref().and_then(|counts| counts.get(i)) {
            heads.count = count;
        }
        if let Some(given) = &mut given
            && let Some(mut layer) = given.nested(&i.to_string())?
        {
            heads.count = (layer.size("num_key_value_heads")?).unwrap_or(heads.count);
            heads.dim = layer.size("head_dim")?.unwrap_or(heads.dim);
            layer.finish(shape)?;
        }
        Ok(heads)
    };
    let heads = slides.iter().enumerate().map(of_layer);
    let heads = heads.collect::<Result<_, String>>()?;
    given.map_or(Ok(()), |given| given.finish(shape))?;
    Ok(heads)
}

/// The layers whose K and V the last ones read: the last of the same kind that has its own.
fn owners(keys: &mut Keys, slides: &[bool]) -> Result<Vec<Option<usize>>, String> {
    let key = "num_kv_shared_layers";
    let shared = keys.size(key)?.unwrap_or(0);
    let first = slides.len().saturating_sub(shared);
    let of_layer = |i: usize| {
        if i < first {
            return Ok(None);
        }
        let owner = slides[..first].iter().rposition(|kind| *kind == slides[i]);
        let accepted = "each kind of layer must have one that does not share";
        owner.map_or_else(
            || Err(keys.refused(key, &shared.into(), accepted)),
            |owner| Ok(Some(owner)),
        )
    };
    (0..slides.len()).map(of_layer).collect()
}
