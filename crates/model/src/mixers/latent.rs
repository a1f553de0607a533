//! Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1): the pool keeps one
//! latent vector of each token and one rotated key, which all heads share, instead of the keys and values of each head.
//!
//! The products that would make these of a latent vector are computed with queries and outputs instead, as in the
//! paper: a head's score is `q (W_uk c) = (W_uk^T q) c`, and its output `W_uv (sum of weights times c)`. So all heads
//! attend over the same rows, and values are the first part of keys. On a GPU the same is computed by [`DeviceLatent`].

use super::attention::params;
use super::mixer::{Mixer, MixerLayer, MixerParts, MixerRows};
use crate::layers::linear::Linear;
use crate::layers::norm::Norm;
use crate::layers::rope::halves_from_pairs;
use crate::matrix::{Matrix, forward_chosen};
use crate::spec::latent::LatentSpec;
use crate::spec::{LayerSpec, RopeRows};
use crate::weights::{Stack, StackForm, Weights};
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::{
    DeviceLatent, LatentRows, LatentShape, LatentWeights, kv_write_to, norm_part, paged_attention,
    rope,
};
use std::iter::repeat_n;
use std::sync::Arc;

/// The epsilon of the norms of latent vectors. The classes have this value, whatever the epsilon of the other norms is.
const EPS: f32 = 1e-6;

/// The weights of latent attention between the two products with the input and the output of the layer.
#[derive(Clone)]
pub(crate) struct LatentAttention {
    spec: LatentSpec,
    layer: LayerSpec,
    /// The place of its position embedding in [`RopeTables`](crate::layers::rope::RopeTables).
    rope: usize,
    /// The norm of latent queries, and the product that makes queries of them.
    queries: Option<(Norm, Linear)>,
    /// Number of query heads.
    heads: usize,
    of_heads: OfHeads,
}

/// What has weights of single heads, and the norm of latent vectors.
#[derive(Clone)]
enum OfHeads {
    /// On the CPU. On a GPU if only headers were read, which nothing is multiplied with.
    Host(HostHeads),
    /// On a GPU.
    Device(DeviceLatent),
}

/// The weights as they are read.
#[derive(Clone)]
struct HostHeads {
    /// The norm of latent vectors.
    norm: Norm,
    /// For each head, the matrix that makes `[rank]` of a query without position.
    keys: Vec<Arc<dyn Matrix>>,
    /// For each head, the matrix that makes values of a latent vector.
    values: Vec<Arc<dyn Matrix>>,
}

impl LatentAttention {
    /// Reads such a layer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        parts: &MixerParts<'_>,
        weights: &mut Weights,
        spec: LatentSpec,
    ) -> Result<MixerLayer> {
        let (layer, heads) = (parts.spec, parts.config.num_heads);
        weights.dtypes().check_kv(None)?;
        let queries = spec.q_rank.map(|rank| -> Result<_> {
            let shape = (heads * spec.key(), rank);
            let order = order(layer, heads, (spec.nope, spec.rope));
            let name = parts.at("self_attn.q_b_proj");
            let linear = weights.linear_in_order(&name, shape, false, order.as_deref())?;
            let norm = Norm::rms(weights, &parts.at("self_attn.q_a_layernorm"), rank)?;
            Ok((norm, linear))
        });
        let queries = queries.transpose()?;
        let norm = Norm::rms(weights, &parts.at("self_attn.kv_a_layernorm"), spec.rank)?;
        let host = HostHeads::load(parts, weights, spec, norm)?;
        let of_heads = if weights.device().is_cuda() && !weights.are_headers() {
            OfHeads::Device(host.on_device(spec, weights.dtypes().activations)?)
        } else {
            OfHeads::Host(host)
        };
        let rope = parts.rope()?;
        let mixer = Self {
            spec,
            layer: layer.clone(),
            rope: rope.ok_or_else(|| Error::internal("latent attention without a RoPE"))?,
            queries,
            heads,
            of_heads,
        };
        let in_proj = products(parts, weights, spec)?;
        let out_proj = ("self_attn.o_proj", heads * spec.value, layer.o_bias);
        parts.layer(weights, (in_proj, mixer), out_proj)
    }

    /// The queries of all rows, as parts of rows that may be longer: `[rows, width]`, of which a row begins with `[heads,
    /// nope + rope]`.
    fn queries(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        match &self.queries {
            None => Ok(rows.products.clone()),
            Some((norm, linear)) => {
                let weight = norm.plain();
                let weight = weight.ok_or_else(|| Error::internal("a latent norm has a bias"))?;
                let latents = norm_part(&rows.products, 0, weight, EPS)?;
                linear.forward_adapted(&latents, rows.step.adapters)
            }
        }
    }

    /// Writes what is kept of all rows on a GPU; returns their queries, and what [`DeviceLatent::attend`] takes beside them.
    fn write_on_device(
        &self,
        latent: &DeviceLatent,
        rows: &MixerRows<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let q = self.queries(rows)?;
        let angles = &rows.step.angles[self.rope];
        let rotated = latent.write(&LatentRows {
            products: &rows.products,
            first: self.first_latent(&rows.products)?,
            q: &q,
            angles: (&angles.cos, &angles.sin),
            slots: rows.step.slots,
            pool: &rows.pool.tokens()?.0,
        })?;
        Ok((q, rotated))
    }

    /// The place of the latent vector in a row of the layer's products.
    fn first_latent(&self, products: &Tensor) -> Result<usize> {
        Ok(products.dim(1)? - self.spec.kept())
    }

    /// Writes what is kept of all rows; returns their queries, `[rows, heads, nope + rope]`.
    fn write_on_host(&self, host: &HostHeads, rows: &MixerRows<'_>) -> Result<Tensor> {
        let LatentSpec { rank, nope, .. } = self.spec;
        let (products, step, heads) = (&rows.products, rows.step, self.heads);
        let angles = &step.angles[self.rope];
        let own = self.first_latent(products)?;
        let q = self.queries(rows)?.narrow(1, 0, heads * self.spec.key())?;
        let q = q.contiguous()?.reshape(((), heads, self.spec.key()))?;
        let latent = products.narrow(1, own, rank)?.contiguous()?;
        let latent = host.norm.forward(&latent, EPS)?.unsqueeze(1)?;
        let key = products.narrow(1, own + rank, self.spec.rope)?;
        let rotated = [&q.narrow(2, nope, self.spec.rope)?, &key.unsqueeze(1)?];
        let rotated = Tensor::cat(&rotated, 1)?.contiguous()?;
        rope(&rotated, heads + 1, Some((&angles.cos, &angles.sin)), None)?;
        let kept = Tensor::cat(&[&latent, &rotated.narrow(1, heads, 1)?], 2)?;
        kv_write_to(&rows.pool.tokens()?.0, &kept.contiguous()?, step.slots)?;
        let turned = rotated.narrow(1, 0, heads)?;
        Ok(Tensor::cat(&[&q.narrow(2, 0, nope)?, &turned], 2)?.contiguous()?)
    }

    /// The outputs of the heads of the rows that attend, `[attending, heads * value]`.
    fn attend_on_host(&self, host: &HostHeads, rows: &MixerRows<'_>) -> Result<Tensor> {
        let LatentSpec {
            rank, nope, rope, ..
        } = self.spec;
        let q = rows.pick(&self.write_on_host(host, rows)?)?;
        let absorbed = of_each_head(&host.keys, &q.narrow(2, 0, nope)?)?;
        let q = Tensor::cat(&[&absorbed, &q.narrow(2, nope, rope)?], 2)?.contiguous()?;
        let (pool, _) = rows.pool.tokens()?;
        // What it computes of the rotated key as a value is left out.
        let y = paged_attention(&q, pool, pool, rows.step.spans, params(&self.layer, None))?;
        let y = of_each_head(&host.values, &y.narrow(2, 0, rank)?)?;
        Ok(y.flatten_from(1)?)
    }
}

impl HostHeads {
    /// Reads the two halves of `kv_b_proj` for each head.
    fn load(
        parts: &MixerParts<'_>,
        weights: &mut Weights,
        spec: LatentSpec,
        norm: Norm,
    ) -> Result<Self> {
        let heads = parts.config.num_heads;
        let (keys, values) = if weights.are_gguf() {
            let mut read = |part: &str, shape| {
                weights.matrices(&Stack {
                    name: &parts.at(&format!("self_attn.{part}.weight")),
                    count: heads,
                    shape,
                    form: StackForm::Rows,
                    order: None,
                })
            };
            let keys = read("k_b_proj", (spec.rank, spec.nope))?;
            (keys, read("v_b_proj", (spec.value, spec.rank))?)
        } else {
            let widths = (spec.nope, spec.value);
            weights.matrices_of_heads(&parts.at("self_attn.kv_b_proj"), heads, widths, spec.rank)?
        };
        Ok(Self { norm, keys, values })
    }

    /// The same on a GPU, with dense matrices in `dtype`, that of activations.
    fn on_device(&self, spec: LatentSpec, dtype: DType) -> Result<DeviceLatent> {
        let shape = LatentShape {
            heads: self.keys.len(),
            nope: spec.nope,
            rope: spec.rope,
            rank: spec.rank,
            value: spec.value,
        };
        let stacked = |matrices: &[Arc<dyn Matrix>]| -> Result<Tensor> {
            let dense = matrices.iter().map(|matrix| {
                let dense = matrix.dequantize()?.to_dtype(dtype)?;
                Ok::<_, Error>(dense)
            });
            Ok(Tensor::stack(&dense.collect::<Result<Vec<_>>>()?, 0)?)
        };
        let norm = self.norm.plain();
        let weights = LatentWeights {
            keys: &stacked(&self.keys)?,
            values: &stacked(&self.values)?,
            norm: norm.ok_or_else(|| Error::internal("a latent norm has a bias"))?,
            eps: EPS,
        };
        Ok(DeviceLatent::new(shape, &weights)?)
    }
}

impl Mixer for LatentAttention {
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        let latent = match &self.of_heads {
            OfHeads::Host(host) => return self.attend_on_host(host, rows),
            OfHeads::Device(latent) => latent,
        };
        let (q, rotated) = self.write_on_device(latent, rows)?;
        let queries = (&rows.pick(&q)?, &rows.pick(&rotated)?);
        let (pool, _) = rows.pool.tokens()?;
        let params = params(&self.layer, None);
        Ok(latent.attend(queries, pool, rows.step.spans, params)?)
    }

    fn write_kv(&self, rows: &MixerRows<'_>) -> Result<()> {
        match &self.of_heads {
            OfHeads::Host(host) => self.write_on_host(host, rows).map(drop),
            OfHeads::Device(latent) => self.write_on_device(latent, rows).map(drop),
        }
    }

    fn linears(&mut self) -> Vec<&mut Linear> {
        let queries = self.queries.iter_mut();
        queries.map(|(_, linear)| linear).collect()
    }
}

/// Reads the product with the layer's input: queries or latent queries, then latent vectors and rotated keys.
fn products(parts: &MixerParts<'_>, weights: &mut Weights, spec: LatentSpec) -> Result<Linear> {
    let (layer, heads, inputs) = (parts.spec, parts.config.num_heads, parts.inputs);
    let queries = match spec.q_rank {
        Some(rank) => {
            let name = parts.at("self_attn.q_a_proj");
            weights.linear(&name, (rank, inputs), layer.qkv_bias)?
        }
        None => {
            let order = order(layer, heads, (spec.nope, spec.rope));
            let (name, shape) = (parts.at("self_attn.q_proj"), (heads * spec.key(), inputs));
            weights.linear_in_order(&name, shape, false, order.as_deref())?
        }
    };
    let order = order(layer, 1, (spec.rank, spec.rope));
    let name = parts.at("self_attn.kv_a_proj_with_mqa");
    let shape = (spec.kept(), inputs);
    let kept = weights.linear_in_order(&name, shape, layer.qkv_bias, order.as_deref())?;
    Linear::join(vec![queries, kept])
}

/// The products of each head's part of `x`, `[rows, heads, inputs]`, with its matrix: `[rows, heads, outputs]`.
fn of_each_head(matrices: &[Arc<dyn Matrix>], x: &Tensor) -> Result<Tensor> {
    let (rows, heads, inputs) = x.dims3()?;
    let by_head = x.transpose(0, 1)?.contiguous()?;
    let by_head = by_head.reshape((heads * rows, inputs))?;
    let heads_of_rows = (0..heads as u32).flat_map(|head| repeat_n(head, rows));
    let y = forward_chosen(matrices, &by_head, &heads_of_rows.collect::<Vec<_>>())?;
    let y = y.reshape((heads, rows, ()))?;
    Ok(y.transpose(0, 1)?.contiguous()?)
}

/// The order of the outputs of heads with this many values before those that are rotated, if it is not that of the
/// checkpoint.
fn order(layer: &LayerSpec, heads: usize, (before, rotated): (usize, usize)) -> Option<Vec<u32>> {
    if layer.rope_rows == RopeRows::Halves {
        return None;
    }
    let halves = halves_from_pairs(1, rotated, rotated);
    let halves = halves.into_iter().map(|row| before + row as usize);
    let of_head: Vec<usize> = (0..before).chain(halves).collect();
    let width = before + rotated;
    let all = (0..heads).flat_map(|head| of_head.iter().map(move |row| head * width + row));
    Some(all.map(|row| row as u32).collect())
}
