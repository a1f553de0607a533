//! The gated delta rule that a layer has in place of attention (Qwen3-Next, Qwen3.5).

use super::mixer::{Mixer, MixerLayer, MixerParts, MixerRows};
use crate::layers::linear::Linear;
use crate::spec::delta::{DeltaLayout, DeltaSpec};
use crate::weights::Weights;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_kernels::{DeltaShape, DeltaWeights, delta_net};
use std::sync::Arc;

/// Reads such a layer.
///
/// # Errors
/// A setup error that names a tensor that is missing or has a wrong shape.
pub fn load(parts: &MixerParts<'_>, weights: &mut Weights, spec: DeltaSpec) -> Result<MixerLayer> {
    let shape = spec.shape;
    let (channels, heads) = (shape.channels(), shape.value_heads);
    let at = |part: &str| parts.at(&format!("linear_attn.{part}"));
    let conv = weights.convolution(&at("conv1d"), channels, shape.taps)?;
    let mixer = DeltaWeights {
        shape,
        conv: conv.flatten_all()?.to_vec1()?,
        decay: weights.decay(&at("A_log"), heads)?,
        dt_bias: weights.vector(&at("dt_bias"), heads)?,
        norm: weights.vector(&at("norm.weight"), shape.value_dim)?,
        eps: parts.config.rms_norm_eps as f32,
        on_device: None,
    };
    let mixer = Arc::new(mixer.on(weights.device())?);
    let in_proj = products(weights, at, &spec, parts.inputs)?;
    let out_proj = ("linear_attn.out_proj", shape.values(), false);
    parts.layer(weights, (in_proj, mixer), out_proj)
}

impl Mixer for Arc<DeltaWeights> {
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        let states = &mut rows.pool.states()?;
        let y = delta_net(&rows.products, self, rows.step.states, states)?;
        Ok(rows.pick(&y)?.contiguous()?)
    }

    /// Its parts have an order of their own.
    fn takes_adapters(&self) -> bool {
        false
    }
}

/// Reads the products of rows of `inputs` values, in the order that [`delta_net`] takes.
///
/// # Errors
/// Returns the errors of [`load`].
fn products(
    weights: &mut Weights,
    at: impl Fn(&str) -> String,
    spec: &DeltaSpec,
    inputs: usize,
) -> Result<Linear> {
    let shape = spec.shape;
    let mut read = |part: &str, outputs: usize, order: Option<&[u32]>| {
        weights.linear_in_order(&at(part), (outputs, inputs), false, order)
    };
    let (channels, heads) = (shape.channels(), shape.value_heads);
    let (order, gates) = orders(&shape);
    Linear::join(match spec.layout {
        DeltaLayout::Apart | DeltaLayout::ApartTiled => vec![
            read("in_proj_z", shape.values(), None)?,
            read("in_proj_qkv", channels, None)?,
            read("in_proj_b", heads, None)?,
            read("in_proj_a", heads, None)?,
        ],
        DeltaLayout::ByHead => vec![
            read("in_proj_qkvz", shape.values() + channels, Some(&order))?,
            read("in_proj_ba", 2 * heads, Some(&gates))?,
        ],
        DeltaLayout::GatesByHead => vec![
            read("in_proj_z", shape.values(), None)?,
            read("in_proj_qkv", channels, None)?,
            read("in_proj_ba", 2 * heads, Some(&gates))?,
        ],
    })
}

/// The order in which z, q, k and v of all heads follow one another, of rows that have q, k, v and z of one head of
/// keys after the other; and that of b and a.
fn orders(shape: &DeltaShape) -> (Vec<u32>, Vec<u32>) {
    let values = shape.values() / shape.key_heads;
    let per_key = shape.value_heads / shape.key_heads;
    let of = |width: usize, first: usize, count: usize| {
        let heads = 0..shape.key_heads;
        heads.flat_map(move |head| (0..count).map(move |i| (head * width + first + i) as u32))
    };
    let (keys, width) = (shape.key_dim, 2 * shape.key_dim + 2 * values);
    let order = of(width, 2 * keys + values, values)
        .chain(of(width, 0, keys))
        .chain(of(width, keys, keys))
        .chain(of(width, 2 * keys, values));
    let gates = of(2 * per_key, 0, per_key).chain(of(2 * per_key, per_key, per_key));
    (order.collect(), gates.collect())
}
