//! What architectures with experts have in common.

use crate::config::keys::Keys;
use crate::spec::{ExpertGroups, ExpertsSpec, LayerSpec, MlpSpec, RouterScores, SharedExpert};

/// Keys of the training of routers.
const OF_TRAINING: &str = "output_router_logits router_aux_loss_coef router_jitter_noise";

/// Gives the number of experts one name, and sets what a class assumes.
pub fn defaults(keys: &mut Keys, count: usize, per_token: usize) {
    keys.rename("num_local_experts", "num_experts");
    keys.default("num_experts", count);
    keys.default("num_experts_per_tok", per_token);
    keys.ignore(OF_TRAINING);
}

/// Gives all `layers` the experts that `keys` describe. Their width is `width`, if a GGUF file does not say otherwise.
pub fn with_experts(
    keys: &mut Keys,
    mut layers: Vec<LayerSpec>,
    width: usize,
    is_normalized: bool,
) -> Result<Vec<LayerSpec>, String> {
    let given = if keys.is_gguf() {
        keys.size("moe_intermediate_size")?
    } else {
        None
    };
    if let Some(layer) = layers.first() {
        let experts = experts(keys, layer.mlp, given.unwrap_or(width), is_normalized)?;
        set(&mut layers, experts, |_| true);
    }
    Ok(layers)
}

/// Gives the layers for whose number `has` holds these experts.
pub fn set(layers: &mut [LayerSpec], experts: ExpertsSpec, has: impl Fn(usize) -> bool) {
    for (_, layer) in layers.iter_mut().enumerate().filter(|(i, _)| has(*i)) {
        layer.mlp = MlpSpec::Experts(experts);
    }
}

/// The experts that `keys` describe, of this width, with the activation of `mlp`. What else they have, their class
/// says.
pub fn experts(
    keys: &mut Keys,
    mlp: MlpSpec,
    width: usize,
    is_normalized: bool,
) -> Result<ExpertsSpec, String> {
    experts_by(keys, mlp, width, (RouterScores::Softmax, is_normalized))
}

/// As [`experts`], with these `scores` of the router. `is_normalized` says whether the weights of a row's experts are
/// divided by their sum.
pub fn experts_by(
    keys: &mut Keys,
    mlp: MlpSpec,
    width: usize,
    (scores, is_normalized): (RouterScores, bool),
) -> Result<ExpertsSpec, String> {
    let (activation, is_gated) = match mlp {
        MlpSpec::Gated(activation) => (activation, true),
        MlpSpec::Plain { activation, .. } => (activation, false),
        _ => return Err("experts of this kind are not supported".into()),
    };
    if keys.is_gguf() {
        // Of these architectures, llama.cpp knows no other.
        keys.only("expert_weights_norm", is_normalized)?;
        let number = match scores {
            RouterScores::Softmax => 1,
            RouterScores::Sigmoid => 2,
        };
        keys.only("expert_gating_func", number)?;
    }
    Ok(ExpertsSpec {
        activation,
        is_gated,
        count: keys.needed_size("num_experts")?,
        per_token: keys.needed_size("num_experts_per_tok")?,
        width,
        scores,
        correction: None,
        groups: None,
        is_normalized,
        min_sum: 0.,
        scale: 1.,
        has_bias: false,
        is_transposed: false,
        is_mxfp4: false,
        has_norms: false,
        shared: None,
    })
}

/// The expert of all rows of classes that have `count` of `width` in one; `None` = there is none.
pub fn shared(count: usize, width: usize) -> Result<Option<SharedExpert>, String> {
    let product = count.checked_mul(width);
    let width = product.ok_or_else(|| format!("{count} shared experts are not supported"))?;
    Ok((count > 0).then_some(SharedExpert::new("mlp.shared_experts", width)))
}

/// Experts by the sigmoids of their logits, to which a correction is added where they are compared, and one of all rows
/// (DeepSeek-V3, GLM-4.5).
pub fn corrected(keys: &mut Keys, mlp: MlpSpec) -> Result<ExpertsSpec, String> {
    let is_normalized = match keys.flag("norm_topk_prob")? {
        Some(given) => given,
        None => keys.flag("expert_weights_norm")?.unwrap_or(true),
    };
    let width = keys.needed_size("moe_intermediate_size")?;
    let kind = (RouterScores::Sigmoid, is_normalized);
    keys.only("topk_method", "noaux_tc")?;
    let experts = experts_by(keys, mlp, width, kind)?;
    let (count, per_token) = (keys.size("n_group")?, keys.size("topk_group")?);
    let groups = ExpertGroups {
        count: count.unwrap_or(1),
        per_token: per_token.unwrap_or(1),
        best: 2,
    };
    let scale = keys.number("routed_scaling_factor")?;
    let count = keys.size("n_shared_experts")?.unwrap_or(0);
    Ok(ExpertsSpec {
        correction: Some("mlp.gate.e_score_correction_bias"),
        groups: Some(groups).filter(|groups| groups.count != 1 || groups.per_token != 1),
        min_sum: 1e-20,
        scale: scale.unwrap_or(1.) as f32,
        shared: shared(count, width)?,
        ..experts
    })
}
