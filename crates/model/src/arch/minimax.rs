//! MiniMax M2.

use super::experts::{self, experts_by};
use super::parts::{further_layers, plain};
use super::rope::{default_theta, partial_rope};
use crate::config::keys::{Keys, ModelShape};
use crate::layers::rope::RopeSpec;
use crate::spec::{ExpertsSpec, LayerSpec, MlpSpec, ModelSpec, QkNorm, RouterScores};

/// Keys of earlier models, which the class does not read.
const UNREAD: &str = "
    layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
    mlp_intermediate_size mtp_transformer_layers shared_moe_mode use_mtp";

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    experts::defaults(keys, 256, 8);
    default_theta(keys, 5e6);
    keys.rename("num_mtp_modules", "num_nextn_predict_layers");
    keys.ignore(UNREAD);
}

/// A Llama with norms of all heads together, a position embedding of a part of each head, and experts by the sigmoids of
/// their logits, to which a correction is added where they are compared. Its layers for further tokens are not read.
pub fn minimax_m2(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    let key = "attn_type_list";
    let given = keys.peek(key);
    let kinds = keys.sizes(key)?.unwrap_or_default();
    // The others were linear attention.
    if kinds.iter().any(|&kind| kind != 1) {
        return Err(keys.refused(key, &given, "only 1, full attention, is"));
    }
    keys.only("attention_bias", false)?;
    keys.only("qk_norm_type", "per_layer")?;
    keys.only("scoring_func", "sigmoid")?;
    keys.only("use_qk_norm", true)?;
    let rope = partial_rope(keys, shape, 0.5)?;
    let rope = RopeSpec {
        width: keys.size("rotary_dim")?.unwrap_or(rope.width),
        ..rope
    };
    let layer = LayerSpec {
        qk_norm: Some(QkNorm::Whole),
        ..plain(keys, shape, rope)?
    };
    // In GGUF files they have a key of their own.
    let width = keys.size("moe_intermediate_size")?;
    let width = width.unwrap_or(shape.intermediate_size);
    let experts = experts_by(keys, layer.mlp, width, (RouterScores::Sigmoid, true))?;
    let has_correction = keys.flag("use_routing_bias")?.unwrap_or(true);
    let layer = LayerSpec {
        mlp: MlpSpec::Experts(ExpertsSpec {
            correction: has_correction.then_some("mlp.e_score_correction_bias"),
            ..experts
        }),
        ..layer
    };
    Ok(ModelSpec {
        unread: further_layers(keys, shape)?,
        ..vec![layer; shape.num_layers].into()
    })
}
