//! ERNIE 4.5.

use super::experts::{self, experts};
use super::llama::biased;
use super::parts::further_layers;
use super::rope::default_theta;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{ExpertsSpec, LayerSpec, ModelSpec, MtpLayout, MtpSpec, RopeRows, SharedExpert};

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    keys.default("tie_word_embeddings", true);
    keys.default("rms_norm_eps", 1e-5);
    default_theta(keys, 5e5);
}

/// A Llama with one flag for all biases, whose rotated pairs are neighbours.
pub fn ernie(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let layer = layer(keys, shape)?;
    Ok(vec![layer; shape.num_layers].into())
}

fn layer(keys: &mut Keys, shape: &ModelShape) -> Result<LayerSpec, String> {
    let bias = keys.flag("use_bias")?.unwrap_or(false);
    for key in ["attention_bias", "mlp_bias"] {
        keys.default(key, bias);
    }
    Ok(LayerSpec {
        rope_rows: RopeRows::Neighbours,
        ..biased(keys, shape)?
    })
}

/// Sets what the class assumes.
pub fn moe_defaults(keys: &mut Keys) {
    defaults(keys);
    keys.rename("moe_num_experts", "num_experts");
    keys.rename("moe_k", "num_experts_per_tok");
    keys.rename("moe_layer_start_index", "first_k_dense_replace");
    keys.rename("moe_num_shared_experts", "n_shared_experts");
    experts::defaults(keys, 64, 6);
    keys.default("first_k_dense_replace", 1);
    keys.default("max_position_embeddings", 131_072);
    keys.default("moe_intermediate_size", 1536);
    keys.default("n_shared_experts", 2);
    // Keys of the training, and whether there was a correction then: all published files have one.
    keys.ignore("moe_capacity moe_use_aux_free");
    keys.default("num_nextn_predict_layers", 1);
}

/// An ERNIE model with experts has them in some layers, and one expert of all tokens.
pub fn ernie_moe(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("moe_gate", "topk")?;
    // The output layer would have one, too.
    keys.only("use_bias", false)?;
    let layer = layer(keys, shape)?;
    let width = keys.needed_size("moe_intermediate_size")?;
    let count = keys.size("n_shared_experts")?.unwrap_or(0);
    let shared = experts::shared(count, width)?;
    // llama.cpp's conversion computes another width from other sizes, which is the same in the published files.
    let given = keys.size("shared_expert_intermediate_size")?;
    let shared = shared.map(|shared| SharedExpert {
        width: given.unwrap_or(shared.width),
        ..shared
    });
    let experts = ExpertsSpec {
        correction: Some("mlp.moe_statics.e_score_correction_bias"),
        min_sum: keys.number("moe_norm_min")?.unwrap_or(1e-12) as f32,
        shared,
        ..experts(keys, layer.mlp, width, true)?
    };
    let first = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let last = match keys.number("moe_layer_end_index")? {
        Some(last) if last >= 0. => last as usize,
        _ => shape.num_layers,
    };
    let step = keys.size("moe_layer_interval")?.unwrap_or(1);
    if step == 0 {
        return Err(keys.refused("moe_layer_interval", &0.into(), "it must be 1 or more"));
    }
    let further = further_layers(keys, shape)?.len();
    let mut layers = vec![layer.clone(); shape.num_layers];
    experts::set(&mut layers, experts, |i| {
        (i + 1).is_multiple_of(step) && (first..=last).contains(&i)
    });
    Ok(ModelSpec {
        layers,
        unread: vec!["model.mtp_".into()],
        // Their MLP is that of the layers without experts.
        mtp: (further > 0).then_some(MtpSpec {
            layer,
            layout: MtpLayout::Ernie,
            count: further,
        }),
        ..ModelSpec::default()
    })
}
