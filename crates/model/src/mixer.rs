//! The first half of a layer: attention over a paged pool, or what the layer has in its place.

use super::config::ModelConfig;
use super::latent::LatentAttention;
use super::layer_products::LayerProducts;
use super::layer_spec::{KvSource, LayerSpec, MixerSpec, QkNorm};
use super::layer_step::Step;
use super::linear::Linear;
use super::recurrent::Recurrent;
use super::rope::RopeTables;
use super::short_conv::ShortConv;
use super::weights::Weights;
use candle_core::{DType, Tensor};
use candle_nn::ops::sigmoid;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvHeads, LayerPool};
use foretoken_kernels::{
    AttentionParams, HeadNorms, Pools, add_norm, paged_attention, rope, rope_kv_write,
};

/// Attention, or what a layer has in its place, between two products.
#[derive(Clone)]
pub(super) struct Mixer {
    spec: LayerSpec,
    /// The place of its position embedding in [`RopeTables`].
    rope: Option<usize>,
    /// The heads of K and V. The heads of queries have the same `dim`.
    kv_heads: KvHeads,
    /// The product with the layer's input. Attention gets q, k and v of it, except those that are of another layer, and
    /// v that is k. The gates of q come first, if there are any. A convolution gets B, C and x, a layer with a state
    /// its inputs, and latent attention the queries and what is kept.
    qkv: Linear,
    o: Linear,
    kind: Kind,
    head_norms: Option<HeadNorms>,
    /// `[head_dim]`: ones, if heads of v have a norm.
    v_norm: Option<Tensor>,
    /// `[num_heads]` f32.
    sinks: Option<Tensor>,
}

/// What a mixer computes between its two products.
#[derive(Clone)]
enum Kind {
    Attention,
    Latent(LatentAttention),
    Conv(ShortConv),
    Recurrent(Recurrent),
}

impl Kind {
    /// Reads the weights for a layer like `spec`; `at` names the layer's parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    fn load(
        (config, spec): (&ModelConfig, &LayerSpec),
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let eps = config.rms_norm_eps as f32;
        if let Some(recurrent) = Recurrent::load(weights, &at, &spec.mixer, eps)? {
            return Ok(Self::Recurrent(recurrent));
        }
        Ok(match spec.mixer {
            MixerSpec::ShortConv(conv) => {
                let (name, channels) = (at("conv.conv"), config.hidden_size);
                Self::Conv(ShortConv::load(weights, &name, channels, conv)?)
            }
            MixerSpec::Latent(latent) => {
                let shape = (spec, latent);
                Self::Latent(LatentAttention::load(weights, at, shape, config.num_heads)?)
            }
            _ => Self::Attention,
        })
    }
}

impl Mixer {
    /// Reads the mixer of a layer like `spec` of the model `config`, with one of `ropes`. The layer has `inputs`
    /// inputs; `at` names its parts. `None` = the layer has no mixer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        (config, spec): (&ModelConfig, &LayerSpec),
        ropes: &RopeTables,
        weights: &mut Weights,
        inputs: usize,
        at: impl Fn(&str) -> String,
    ) -> Result<Option<Self>> {
        if spec.mixer == MixerSpec::None {
            return Ok(None);
        }
        let kv_heads = spec.kv_heads.unwrap_or(config.kv_heads());
        let (hidden, d, heads) = (config.hidden_size, kv_heads.dim, config.num_heads);
        let (q, kv) = (heads * d, kv_heads.count * d);
        let rope = spec.rope.as_ref().map(|rope| {
            let index = ropes.index_of(rope);
            index.ok_or_else(|| Error::internal("a layer has a RoPE without a table"))
        });
        let shares = matches!(spec.kv, KvSource::Layer(_));
        if shares {
            // Trained checkpoints have them nevertheless.
            for part in ["k_proj", "v_proj", "k_norm"] {
                weights.skip(&at(&format!("self_attn.{part}.weight")));
            }
        }
        let head_norms = spec.qk_norm.map(|norm| -> Result<HeadNorms> {
            let (q, k) = match norm {
                QkNorm::Head | QkNorm::RotatedHead => (d, d),
                QkNorm::Whole => (q, kv),
            };
            let (q_name, k_name) = match norm {
                QkNorm::RotatedHead => ("self_attn.query_layernorm", "self_attn.key_layernorm"),
                _ => ("self_attn.q_norm", "self_attn.k_norm"),
            };
            let q = weights.norm(&at(q_name), q, config.spec.norm.offset)?;
            Ok(HeadNorms {
                k: if shares {
                    q.clone()
                } else {
                    weights.norm(&at(k_name), k, config.spec.norm.offset)?
                },
                q,
                eps: config.rms_norm_eps as f32,
                after_rotation: norm == QkNorm::RotatedHead,
            })
        });
        let head_norms = head_norms.transpose()?;
        let sinks = if spec.sinks {
            let sinks = weights.tensor(&at("self_attn.sinks"), &[heads])?;
            Some(sinks.to_dtype(DType::F32)?)
        } else {
            None
        };
        let ones = || Tensor::ones(d, weights.dtypes().activations, weights.device());
        let v_norm = spec.v_norm.then(ones).transpose()?;
        let kind = Kind::load((config, spec), weights, &at)?;
        let products = LayerProducts {
            spec,
            heads,
            kv_heads,
            hidden,
            inputs,
            at: &at,
        };
        Ok(Some(Self {
            v_norm,
            kv_heads,
            spec: spec.clone(),
            rope: rope.transpose()?,
            head_norms,
            sinks,
            qkv: products.inner(weights)?,
            o: products.outer(weights)?,
            kind,
        }))
    }

    /// The products of the mixer.
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let latent = match &mut self.kind {
            Kind::Latent(latent) => Some(latent),
            _ => None,
        };
        let others = latent.into_iter().flat_map(LatentAttention::linears);
        [&mut self.qkv, &mut self.o].into_iter().chain(others)
    }

    /// The products that adapters can change. A delta net has none, because its parts have an order of their own.
    pub fn adapted_linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let has_order = matches!(self.spec.mixer, MixerSpec::Delta(_));
        let linears = (!has_order).then(|| self.linears());
        linears.into_iter().flatten()
    }

    /// The output, `[rows, hidden]`, for those rows of `x` that attend, `rows` of them.
    ///
    /// # Errors
    /// If the device fails.
    pub fn attend(
        &self,
        x: &Tensor,
        rows: usize,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        let (heads, d) = (config.num_heads, self.kv_heads.dim);
        let (q, gate) = self.write(x, config, step, pool)?;
        let q = step.pick(&q, rows)?;
        let params = AttentionParams {
            scale: self.spec.attention_scale,
            window: self.spec.window,
            soft_cap: self.spec.soft_cap,
            sinks: self.sinks.as_ref(),
        };
        let y = match &self.kind {
            Kind::Attention => {
                let (k_pool, v_pool) = pool.tokens()?;
                let y = paged_attention(&q, k_pool, v_pool, step.spans, params)?;
                y.reshape((rows, heads * d))?
            }
            Kind::Latent(latent) => latent.forward(&q, step.spans, params, &pool.tokens()?.0)?,
            Kind::Conv(conv) => conv.forward(&q, step.spans, pool.tokens()?)?,
            Kind::Recurrent(_) => q.contiguous()?,
        };
        let y = match gate {
            None => y,
            Some(gate) => (y * sigmoid(&step.pick(&gate, rows)?)?)?,
        };
        self.o.forward_adapted(&y, step.attending_adapters)
    }

    /// Writes K and V of all rows; returns the queries, `[rows, num_heads, head_dim]`, and their gates, if there are
    /// any, `[rows, num_heads * head_dim]`; or C of a convolution, what a layer with a state gives, or queries of
    /// latent attention.
    ///
    /// # Errors
    /// If the device fails.
    pub fn write(
        &self,
        x: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let products = self.qkv.forward_adapted(x, step.adapters)?;
        let own_angles = self.rope.map(|rope| &step.angles[rope]);
        let written = match (&self.kind, own_angles) {
            (Kind::Attention, _) => return self.write_heads(products, config, step, pool),
            (Kind::Latent(latent), Some(angles)) => {
                latent.write(&products, step, angles, &pool.tokens()?.0)?
            }
            (Kind::Latent(_), None) => {
                return Err(Error::internal("latent attention without a RoPE"));
            }
            (Kind::Conv(conv), _) => conv.write(&products, step, pool.tokens()?)?,
            (Kind::Recurrent(recurrent), _) => recurrent.forward(&products, step, pool)?,
        };
        Ok((written, None))
    }

    /// As [`Mixer::write`], for attention over K and V of heads, and for rows with these `products`.
    fn write_heads(
        &self,
        products: Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (k_pool, v_pool) = pool.tokens()?;
        let (rows, heads) = (products.dim(0)?, config.num_heads);
        let KvHeads { count, dim, .. } = self.kv_heads;
        let (gate, qkv) = if self.spec.has_gate {
            let (width, gates) = (products.dim(1)?, heads * dim);
            let others = products.narrow(1, gates, width - gates)?.contiguous()?;
            (Some(products.narrow(1, 0, gates)?), others)
        } else {
            (None, products)
        };
        let qkv = qkv.reshape((rows, (), dim))?;
        let pools = Pools {
            k: k_pool,
            v: v_pool,
            slots: step.slots,
        };
        let own_angles = self.rope.map(|rope| &step.angles[rope]);
        let angles = own_angles.map(|angles| (&angles.cos, &angles.sin));
        let norms = self.head_norms.as_ref();
        let q = match (self.spec.kv, &self.v_norm) {
            (KvSource::Layer(_), _) => {
                rope(&qkv, heads, angles, norms)?;
                qkv
            }
            (KvSource::Own, None) => rope_kv_write(&qkv, heads, angles, norms, pools)?,
            (_, v_norm) => {
                let mut v = qkv.narrow(1, qkv.dim(1)? - count, count)?.contiguous()?;
                if let Some(ones) = v_norm {
                    let heads = v.reshape(((), dim))?;
                    let eps = config.rms_norm_eps as f32;
                    v = add_norm(&heads, &heads.zeros_like()?, ones, eps)?
                        .1
                        .reshape(v.dims())?;
                }
                let qkv = Tensor::cat(&[&qkv.narrow(1, 0, heads + count)?, &v], 1)?;
                rope_kv_write(&qkv, heads, angles, norms, pools)?
            }
        };
        match own_angles.and_then(|rope| rope.query_scale.as_ref()) {
            Some(scale) => Ok((q.broadcast_mul(scale)?, gate)),
            None => Ok((q, gate)),
        }
    }
}
