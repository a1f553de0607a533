//! Falcon-H1: Mamba 2 and attention beside each other in each layer, and factors of what they read and add.

use super::bamba::NAMES;
use super::mamba;
use super::parts::eps_5;
use super::rope::rope;
use crate::config::keys::{Keys, ModelShape};
use crate::spec::mamba::MambaSpec;
use crate::spec::{LayerSpec, MixerSpec, MlpSpec, ModelSpec, Norms};

/// Sets what the class assumes.
pub fn defaults(keys: &mut Keys) {
    eps_5(keys);
    if keys.is_gguf() {
        mamba::gguf_sizes(keys);
        return;
    }
    mamba::defaults(keys);
    keys.default("mamba_d_ssm", 1024);
    keys.default("num_key_value_heads", 8);
    keys.default("max_position_embeddings", 8192);
    // The MLP has `intermediate_size`, whatever this says.
    keys.ignore("mlp_expansion_factor num_logits_to_keep");
}

/// Two layers for each of the checkpoint: one of Mamba, and a Llama's beside it. The conversion to GGUF files multiplies
/// the weights by all factors.
pub fn falcon_h1(keys: &mut Keys, shape: &ModelShape) -> Result<ModelSpec, String> {
    keys.only("hidden_act", "silu")?;
    keys.only("mamba_use_mlp", true)?;
    // Factors of inputs do not multiply biases.
    for bias in [
        "attention_bias",
        "mamba_proj_bias",
        "mlp_bias",
        "projectors_bias",
    ] {
        keys.only(bias, false)?;
    }
    let attention_in = factor(keys, "attention_in_multiplier")?;
    // That of the input multiplies values, too.
    let attention_out = attention_in * factor(keys, "attention_out_multiplier")?;
    let key = factor(keys, "key_multiplier")?;
    let mamba_out = factor(keys, "ssm_out_multiplier")?;
    let [gate, down] = factors(keys, "mlp_multipliers")?;
    let rope = rope(keys, shape)?;
    let layer = LayerSpec::llama(rope, shape.head_dim);
    let attending = LayerSpec {
        is_beside_last: true,
        attention_scale: layer.attention_scale * attention_in * attention_in * key,
        residual_scale: attention_out,
        // `residual_scale` multiplies what the MLP adds, too, in place of its own factor.
        mlp_scales: [gate, down / attention_out],
        ..layer.clone()
    };
    let recurrent = LayerSpec {
        mixer: MixerSpec::Mamba(mixer(keys, shape)?),
        rope: None,
        norms: Norms::FIRST,
        parallel: true,
        mlp: MlpSpec::None,
        residual_scale: mamba_out,
        ..layer
    };
    let pairs = (0..shape.num_layers).flat_map(|_| [recurrent.clone(), attending.clone()]);
    Ok(ModelSpec {
        embedding_scale: Some(factor(keys, "embedding_multiplier")?).filter(|&by| by != 1.),
        logit_scale: Some(factor(keys, "lm_head_multiplier")?).filter(|&by| by != 1.),
        names: NAMES,
        ..pairs.collect::<Vec<_>>().into()
    })
}

fn mixer(keys: &mut Keys, shape: &ModelShape) -> Result<MambaSpec, String> {
    let has_norm = keys.flag("mamba_rms_norm")?.unwrap_or(false);
    let has_norm = keys.has_tensor("ssm_norm.weight").unwrap_or(has_norm);
    let gates_last = keys.flag("mamba_norm_before_gate")?;
    if has_norm && gates_last.unwrap_or(!keys.is_gguf()) {
        let accepted = "only false is, where mamba_rms_norm is true";
        return Err(keys.refused("mamba_norm_before_gate", &true.into(), accepted));
    }
    let expand = keys.size("mamba_expand")?;
    let width = match keys.size("mamba_d_ssm")? {
        None => expand.and_then(|expand| expand.checked_mul(shape.hidden_size)),
        width => width,
    };
    if keys.peek("mamba_d_head") == "auto" {
        let heads = keys.peek("mamba_n_heads").as_u64().unwrap_or(0);
        let dim = width.and_then(|width| (width as u64).checked_div(heads));
        keys.set("mamba_d_head", dim);
    }
    let limits = mamba::step_limits(keys)?;
    let spec = mamba::spec(keys, limits)?;
    let values = spec.shape.values();
    if !keys.is_gguf() && width != Some(values) {
        return Err(format!(
            "mamba_n_heads times mamba_d_head is {values}: it must be mamba_d_ssm, or mamba_expand times hidden_size without it"
        ));
    }
    let input = factor(keys, "ssm_in_multiplier")?;
    let scales = factors(keys, "ssm_multipliers")?.map(|scale| scale * input);
    if let Some(scale) = scales.into_iter().find(|&scale| !is_factor(scale)) {
        return Err(format!(
            "ssm_in_multiplier times one of ssm_multipliers is {scale}: it must be finite and more than 0"
        ));
    }
    Ok(MambaSpec {
        scales,
        has_norm,
        ..spec
    })
}

/// The factor `key`, or 1.
fn factor(keys: &mut Keys, key: &str) -> Result<f32, String> {
    let factor = keys.float(key)?.unwrap_or(1.);
    if is_factor(factor) {
        return Ok(factor);
    }
    Err(keys.refused(key, &factor.into(), "only a number above 0 is"))
}

/// The factors that the list `key` has, or ones.
fn factors<const N: usize>(keys: &mut Keys, key: &str) -> Result<[f32; N], String> {
    let list = keys.numbers(key)?.unwrap_or_else(|| vec![1.; N]);
    let factors: Vec<f32> = list.iter().map(|&factor| factor as f32).collect();
    let are_factors = factors.iter().all(|&factor| is_factor(factor));
    match <[f32; N]>::try_from(factors) {
        Ok(factors) if are_factors => Ok(factors),
        _ => {
            let accepted = format!("only a list of {N} numbers above 0 is");
            Err(keys.refused(key, &list.into(), &accepted))
        }
    }
}

fn is_factor(factor: f32) -> bool {
    factor.is_finite() && factor > 0.
}
