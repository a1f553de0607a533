//! Reads the two products of a layer's first half: what is done with its input, and what makes its output.

use super::latent::LatentAttention;
use super::layer_spec::{KvSource, LayerSpec, MixerSpec, RopeRows};
use super::linear::Linear;
use super::recurrent::Recurrent;
use super::rope::halves_from_pairs;
use super::weights::Weights;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvHeads;

/// What decides how the two products are read.
pub(super) struct LayerProducts<'a, At> {
    pub spec: &'a LayerSpec,
    /// Number of heads of queries.
    pub heads: usize,
    /// The heads of K and V. The heads of queries have the same `dim`.
    pub kv_heads: KvHeads,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the layer's input.
    pub inputs: usize,
    /// Names the parts of the layer.
    pub at: At,
}

impl<At: Fn(&str) -> String> LayerProducts<'_, At> {
    /// Reads the product with the layer's input. Attention gets q, k and v of it, after the gates of q, if there are
    /// any. A convolution gets B, C and x, a layer with a state its inputs, and latent attention the queries and what
    /// is kept.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn inner(&self, weights: &mut Weights) -> Result<Linear> {
        let Self {
            spec, hidden, at, ..
        } = self;
        let inputs = self.inputs;
        if let Some(products) = Recurrent::products(weights, at, &spec.mixer, inputs)? {
            return Ok(products);
        }
        if let MixerSpec::ShortConv(conv) = spec.mixer {
            return weights.linear(&at("conv.in_proj"), (3 * hidden, inputs), conv.has_bias);
        }
        if let MixerSpec::Latent(latent) = spec.mixer {
            let shape = (*spec, latent);
            return LatentAttention::products(weights, at, shape, self.heads, inputs);
        }
        let KvHeads { count, dim, .. } = self.kv_heads;
        let (q, kv, bias) = (self.heads * dim, count * dim, spec.qkv_bias);
        // The width of a rope whose pairs are neighbours. The conversion reorders all layers, those without one, too.
        let interleaved = spec.rope.as_ref().map(|rope| rope.width);
        let interleaved = match spec.rope_rows {
            RopeRows::Halves => None,
            RopeRows::Neighbours => interleaved,
            RopeRows::NeighboursInGguf => interleaved.or(Some(dim)).filter(|_| weights.are_gguf()),
        };
        // Adapters are trained for Hugging Face's rows.
        let adapted = |linear: Linear| match spec.rope_rows {
            RopeRows::NeighboursInGguf => linear.with_plain_rows(),
            _ => linear,
        };
        let halves = |heads: usize| interleaved.map(|width| halves_from_pairs(heads, dim, width));
        if spec.fused_qkv {
            let order = halves(self.heads)
                .zip(halves(count))
                .map(|(mut order, of_k)| {
                    let (q, kv) = (q as u32, kv as u32);
                    order.extend(of_k.into_iter().map(|row| q + row));
                    order.extend(q + kv..q + 2 * kv);
                    order
                });
            let shape = (q + 2 * kv, inputs);
            let name = at("self_attn.qkv_proj");
            let linear = weights.linear_in_order(&name, shape, bias, order.as_deref())?;
            return Ok(adapted(linear));
        }
        let (order, rows) = if spec.has_gate {
            (Some(gates_first(self.heads, dim)), 2 * q)
        } else {
            (halves(self.heads), q)
        };
        let mut read = |part: &str, rows: usize, order: Option<&[u32]>| {
            let linear = weights.linear_in_order(&at(part), (rows, inputs), bias, order)?;
            Ok::<_, Error>(adapted(linear))
        };
        let mut parts = vec![read("self_attn.q_proj", rows, order.as_deref())?];
        if !matches!(spec.kv, KvSource::Layer(_)) {
            parts.push(read("self_attn.k_proj", kv, halves(count).as_deref())?);
        }
        if spec.kv == KvSource::Own {
            parts.push(read("self_attn.v_proj", kv, None)?);
        }
        Linear::join(parts)
    }

    /// Reads the product that makes the output.
    ///
    /// # Errors
    /// Returns the errors of [`LayerProducts::inner`].
    pub fn outer(&self, weights: &mut Weights) -> Result<Linear> {
        let (hidden, spec) = (self.hidden, self.spec);
        let (part, inputs, bias) = match spec.mixer {
            MixerSpec::Delta(delta) => ("linear_attn.out_proj", delta.shape.values(), false),
            MixerSpec::Mamba(mamba) => ("mamba.out_proj", mamba.shape.values(), mamba.has_bias),
            MixerSpec::ShortConv(conv) => ("conv.out_proj", hidden, conv.has_bias),
            MixerSpec::Latent(latent) => {
                let width = self.heads * latent.value;
                ("self_attn.o_proj", width, spec.o_bias)
            }
            MixerSpec::Attention | MixerSpec::None => {
                let width = self.heads * self.kv_heads.dim;
                ("self_attn.o_proj", width, spec.o_bias)
            }
        };
        weights.linear(&(self.at)(part), (hidden, inputs), bias)
    }
}

/// The order in which the gates of all heads come before their queries, if each head of `dim` values is followed by its
/// gate.
fn gates_first(heads: usize, dim: usize) -> Vec<u32> {
    let part = |first: usize| {
        (0..heads).flat_map(move |head| (0..dim).map(move |i| (2 * head * dim + first + i) as u32))
    };
    part(dim).chain(part(0)).collect()
}
