//! Bamba: Mamba 2 in most layers, attention in the others.

use super::mamba;
use super::parts::{eps_5, plain, with_attention_bias};
use super::rope::partial_rope;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{LayerSpec, MlpSpec, ModelSpec};
use foretoken_kernels::Activation;

/// Parts of the names of tensors: ours, and those of the class and of Falcon-H1.
pub const NAMES: &[(&str, &str)] = &[
    ("model.norm.", "model.final_layernorm."),
    (".post_attention_layernorm.", ".pre_ff_layernorm."),
    (".mlp.", ".feed_forward."),
];

/// Share of a head that is rotated, whatever a configuration says.
const ROTATED: f64 = 0.5;

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    eps_5(keys);
    mamba::defaults(keys);
    keys.default("intermediate_size", 14_336);
    keys.default("num_key_value_heads", 8);
    keys.default("max_position_embeddings", 262_144);
    // Keys of training and of other programs. The last one is what is rotated of a head.
    keys.ignore("z_loss_coefficient num_logits_to_keep attn_rotary_emb");
}

/// Layers of a Llama, of which all but `attn_layer_indices` have Mamba in place of attention.
pub fn bamba(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let rope = partial_rope(keys, shape, ROTATED)?;
    let attending = keys.sizes("attn_layer_indices")?.unwrap_or_default();
    let layer = plain(keys, shape, rope)?;
    let activation = match layer.mlp {
        MlpSpec::Gated(activation) => activation,
        _ => Activation::Silu,
    };
    let layer = LayerSpec {
        mlp_bias: keys.flag("mlp_bias")?.unwrap_or(false),
        ..with_attention_bias(keys, layer, false)?
    };
    let recurrent = LayerSpec {
        mixer: mamba::mixer(keys, shape, activation)?,
        rope: None,
        ..layer.clone()
    };
    let of_layer = |i: usize| {
        if attending.contains(&i) {
            layer.clone()
        } else {
            recurrent.clone()
        }
    };
    Ok(ModelSpec {
        layers: (0..shape.num_layers).map(of_layer).collect(),
        names: NAMES,
        ..ModelSpec::default()
    })
}
