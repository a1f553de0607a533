//! What architectures with Mamba 2 have in common.

use crate::config::keys::{Keys, ModelShape};
use crate::spec::MixerSpec;
use crate::spec::mamba::MambaSpec;
use foretoken_kernels::{Activation, MambaShape};
use serde_json::Value;

/// llama.cpp's names of sizes, and ours.
const GGUF_SIZES: [(&str, &str); 4] = [
    ("ssm.conv_kernel", "mamba_d_conv"),
    ("ssm.group_count", "mamba_n_groups"),
    ("ssm.state_size", "mamba_d_state"),
    ("ssm.time_step_rank", "mamba_n_heads"),
];

/// Gives the sizes of a GGUF file the names of `config.json`.
pub fn gguf_sizes(keys: &mut Keys) {
    for (theirs, ours) in GGUF_SIZES {
        keys.rename(theirs, ours);
    }
    head_width(keys, "mamba_n_heads", "mamba_d_head");
}

/// llama.cpp has the width of all `heads` of a state: gives that of one the name `width`.
pub fn head_width(keys: &mut Keys, heads: &str, width: &str) {
    let heads = keys.peek(heads).as_u64();
    let inner = keys.peek("ssm.inner_size").as_u64();
    if let (Some(heads), Some(inner)) = (heads.filter(|&heads| heads > 0), inner)
        && inner.is_multiple_of(heads)
    {
        keys.ignore("ssm.inner_size");
        keys.set(width, inner / heads);
    }
}

/// Sets what such classes assume.
pub fn defaults(keys: &mut Keys) {
    for (key, by_default) in [
        ("mamba_n_heads", 128),
        ("mamba_n_groups", 1),
        ("mamba_d_state", 256),
        ("mamba_d_conv", 4),
        ("mamba_expand", 2),
    ] {
        keys.default(key, by_default);
    }
    keys.default("mamba_d_head", "auto");
    keys.ignore("mamba_chunk_size");
}

/// The mixer that layers with Mamba have in place of attention, in classes that name its keys as Granite 4 does.
pub fn mixer(
    keys: &mut Keys,
    shape: &ModelShape,
    activation: Activation,
) -> Result<MixerSpec, String> {
    let limits = step_limits(keys)?;
    let expand = keys.size("mamba_expand")?;
    let inner = expand.map(|expand| expand.checked_mul(shape.hidden_size));
    if keys.peek("mamba_d_head") == "auto" {
        let heads = keys.peek("mamba_n_heads").as_u64().unwrap_or(0);
        let dim = inner.flatten().map(|inner| inner as u64);
        keys.set(
            "mamba_d_head",
            dim.and_then(|inner| inner.checked_div(heads)),
        );
    }
    let spec = spec(keys, limits)?;
    let values = spec.shape.values();
    if inner.is_some_and(|inner| inner != Some(values)) {
        return Err(format!(
            "mamba_n_heads times mamba_d_head is {values}: it must be mamba_expand times hidden_size"
        ));
    }
    if activation != Activation::Silu {
        return Err("only hidden_act silu is supported beside Mamba layers".into());
    }
    Ok(MixerSpec::Mamba(spec))
}

/// The layers that `keys` describe under the names of Granite 4, with steps within these limits.
pub fn spec(keys: &mut Keys, step_limits: (f32, f32)) -> Result<MambaSpec, String> {
    let spec = MambaSpec {
        shape: MambaShape {
            heads: keys.needed_size("mamba_n_heads")?,
            head_dim: keys.needed_size("mamba_d_head")?,
            groups: keys.needed_size("mamba_n_groups")?,
            state_dim: keys.needed_size("mamba_d_state")?,
            taps: keys.needed_size("mamba_d_conv")?,
        },
        step_limits,
        has_conv_bias: keys.flag("mamba_conv_bias")?.unwrap_or(true),
        has_bias: keys.flag("mamba_proj_bias")?.unwrap_or(false),
        scales: [1.; 5],
        has_norm: true,
    };
    spec.check()?;
    Ok(spec)
}

/// `time_step_limit`: the least and the largest step.
pub fn step_limits(keys: &mut Keys) -> Result<(f32, f32), String> {
    let key = "time_step_limit";
    let value = keys.take(key);
    if value.is_null() {
        return Ok((0., f32::INFINITY));
    }
    let both = value.as_array().and_then(|list| match &list[..] {
        [least, most] => Some((limit(least)?, limit(most)?)),
        _ => None,
    });
    both.ok_or_else(|| keys.refused(key, &value, "it must be a list of two numbers"))
}

/// A number, which may be infinite.
fn limit(value: &Value) -> Option<f32> {
    if value["__float__"] == "Infinity" {
        return Some(f32::INFINITY);
    }
    value.as_f64().map(|x| x as f32)
}
