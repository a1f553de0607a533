//! Muse Glimmer: norms around attention and MLP as in Gemma 2, gates of attention, and norms of queries, keys and the
//! embedding's rows without weights.

use super::gemma::AROUND;
use super::parts::{eps_5, windows, with_ropes};
use super::rope::rope;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::{AttentionGate, LayerSpec, ModelSpec, NormSpec, QkNorm};

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    eps_5(keys);
    keys.default("final_logit_softcapping", 20.);
    keys.default("head_dim", 128);
    keys.default("max_position_embeddings", 131_072);
    keys.default("num_key_value_heads", 2);
    keys.default("output_multiplier", 0.196_116_135_138_184_04);
    keys.default("post_norm_eps", 1e-8);
    keys.default("qk_scale_factor", 3.87);
    keys.default("sliding_window", 2048);
}

/// Every fourth layer, counted from the last, has neither a window nor a position embedding. The stored weights of norms
/// are less by 1, except that of the last norm.
pub fn muse_glimmer(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("attention_bias", false)?;
    keys.only("hidden_activation", "silu")?;
    let rope = rope(keys, shape)?;
    let rotates = rotating(keys, shape, rope.theta)?;
    let layer = LayerSpec::llama(rope, shape.head_dim);
    let factor = keys.float("qk_scale_factor")?.unwrap_or(1.);
    let layer = LayerSpec {
        qk_norm: Some(QkNorm::HeadWithoutWeights),
        attention_scale: layer.attention_scale * factor,
        gate: Some(AttentionGate::Apart),
        norms: AROUND,
        ..layer
    };
    let windows = windows(keys, shape, true, |i| !is_fourth(shape, i))?;
    let rope = |i: usize, _| layer.rope.as_ref().filter(|_| rotates[i]);
    let layers = with_ropes(&layer, windows, shape, rope);
    let norm = NormSpec {
        offset: 1.,
        ..NormSpec::default()
    };
    let output_norm = NormSpec {
        eps: output_eps(keys)?,
        ..norm
    };
    Ok(ModelSpec {
        norm,
        output_norm: Some(output_norm),
        final_norm: Some(NormSpec::default()),
        has_embedding_norm: true,
        logit_scale: keys.float("output_multiplier")?,
        logit_soft_cap: keys.float("final_logit_softcapping")?,
        ..layers.into()
    })
}

fn is_fourth(shape: &ModelShape, layer: usize) -> bool {
    (shape.num_layers - 1 - layer).is_multiple_of(4)
}

/// Which layers have a position embedding: those with a base. The class rotates all of them by `theta`, whatever their
/// own base is.
fn rotating(keys: &mut Keys, shape: &ModelShape, theta: f32) -> Result<Vec<bool>, String> {
    let (key, layers) = ("layer_rope_theta", shape.num_layers);
    let Some(thetas) = keys.numbers(key)? else {
        return Ok((0..layers).map(|i| !is_fourth(shape, i)).collect());
    };
    if thetas.len() < layers {
        let count = thetas.len();
        return Err(format!("{key} has {count} entries for {layers} layers"));
    }
    let is_other = |own: &&f64| **own != 0. && **own as f32 != theta;
    if let Some(&other) = thetas.iter().find(is_other) {
        let accepted = format!("only 0 and the rope_theta {theta} are");
        return Err(keys.refused(key, &other.into(), &accepted));
    }
    Ok(thetas.into_iter().map(|own| own != 0.).collect())
}

/// What the norms of the outputs of attention and MLP add to the mean square.
fn output_eps(keys: &mut Keys) -> Result<Option<f32>, String> {
    let key = "post_norm_eps";
    let eps = keys.float(key)?;
    match eps.filter(|eps| !(0. ..1.).contains(eps)) {
        None => Ok(eps),
        Some(eps) => Err(keys.refused(key, &eps.into(), "only a number from 0 to below 1 is")),
    }
}
