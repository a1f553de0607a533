//! One layer of a decoder: attention over a paged pool, and an MLP, as a [`LayerSpec`] says.

use super::block_conv::{BlockConv, BlockPlaces, ConvShape};
use super::config::ModelConfig;
use super::feed_forward::FeedForward;
use super::layer_input::LayerInput;
use super::layer_products::LayerProducts;
use super::layer_spec::{KvSource, LayerSpec, QkNorm};
pub(super) use super::layer_step::Step;
use super::linear::Linear;
use super::lora::AdapterRows;
use super::mixer::Mixer;
use super::norm::Norm;
use super::rope::RopeTables;
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::kernels::{
    AttentionBatch, AttentionParams, HeadNorms, Pools, add_norm, paged_attention, rope,
    rope_kv_write,
};
use crate::kv::{KvHeads, LayerPool};
use candle_core::{DType, Tensor};
use candle_nn::ops::sigmoid;

/// A layer of a decoder.
#[derive(Clone)]
pub(super) struct Layer {
    /// Of the input of attention.
    norm: Option<Norm>,
    block: LayerBody,
}

/// A layer without the norm of its input. Its attention may read wider rows than it writes.
#[derive(Clone)]
pub(super) struct LayerBody {
    spec: LayerSpec,
    /// The place of its position embedding in [`RopeTables`].
    rope: Option<usize>,
    /// Of K and V; `dim` is that of queries, too.
    kv_heads: KvHeads,
    /// q, k and v; not those that are of another layer, nor v that is k. Before them the gates of q, if it has some. Of a
    /// mixer its inputs.
    qkv: Linear,
    o: Linear,
    /// In place of attention, between `qkv` and `o`.
    mixer: Option<Mixer>,
    head_norms: Option<HeadNorms>,
    /// `[head_dim]`: ones, if heads of v have a norm.
    v_norm: Option<Tensor>,
    /// `[num_heads]` f32.
    sinks: Option<Tensor>,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: FeedForward,
    after_mlp: Option<Norm>,
    input: Option<LayerInput>,
    /// Factor of the residual stream after the layer.
    scalar: Option<f64>,
    /// Around attention and around the MLP.
    convs: Option<(BlockConv, BlockConv)>,
}

/// The sum of `x` and `delta`, and its norm, if there is one.
fn add(x: &Tensor, delta: &Tensor, norm: Option<&Norm>, eps: f32) -> Result<(Tensor, Tensor)> {
    match norm {
        Some(norm) => norm.add(x, delta, eps),
        None => {
            let sum = (x + delta)?;
            Ok((sum.clone(), sum))
        }
    }
}

impl Layer {
    /// Reads layer `index` of `config`, with one of `ropes`; `at` names its parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        config: &ModelConfig,
        index: usize,
        ropes: &RopeTables,
        weights: &mut Weights,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let (spec, hidden) = (&config.spec.layers[index], config.hidden_size);
        let norm = spec.norms.before_attention;
        let norm = norm.map(|name| Norm::load(weights, &at(name), hidden, config.spec.norm));
        let mut block = LayerBody::load((config, spec), ropes, weights, hidden, &at)?;
        if let Some(width) = config.spec.layer_input_width {
            block.input = Some(LayerInput::load(config, (index, width), weights, &at)?);
        }
        Ok(Self {
            norm: norm.transpose()?,
            block,
        })
    }

    /// Reads the convolutions around its attention and its MLP, whose names begin with `name`.
    ///
    /// # Errors
    /// As [`Layer::load`].
    pub fn load_convs(
        &mut self,
        weights: &mut Weights,
        name: &str,
        hidden: usize,
        shape: ConvShape,
    ) -> Result<()> {
        let mut of =
            |part: &str| BlockConv::load(weights, &format!("{name}.{part}_conv"), hidden, shape);
        self.block.convs = Some((of("attention")?, of("mlp")?));
        Ok(())
    }

    /// All its products.
    pub fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let LayerBody {
            mixer,
            qkv,
            o,
            mlp,
            input,
            ..
        } = &mut self.block;
        let mixer = mixer.iter_mut().flat_map(Mixer::linears);
        let input = input.iter_mut().flat_map(LayerInput::linears);
        let attention = [qkv, o].into_iter().chain(mixer);
        attention.chain(mlp.linears()).chain(input)
    }

    /// Those of them that adapters can change: not those of a delta net, whose parts have an order of their own.
    pub fn adapted_linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let LayerBody {
            mixer, qkv, o, mlp, ..
        } = &mut self.block;
        let adapts = !matches!(mixer, Some(Mixer::Delta(_)));
        let attention = adapts.then_some([qkv, o]).into_iter().flatten();
        let mixer = mixer.iter_mut().flat_map(Mixer::linears);
        attention.chain(mixer).chain(mlp.adapted_linears())
    }

    /// Takes the residual stream and the `delta` still to be added to it, `[rows, hidden]` each;
    /// returns both as they are after the layer.
    pub fn forward(
        &self,
        x: &Tensor,
        delta: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        self.forward_after(None, x, delta, config, step, pool)
    }

    /// Like [`Layer::forward`], of rows after those of `context`, `[others, hidden]`: inputs of the
    /// attention for rows of which only K and V are computed. `step` has the slots and angles of all rows,
    /// and the spans of the last.
    pub fn forward_after(
        &self,
        context: Option<&Tensor>,
        x: &Tensor,
        delta: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let eps = config.rms_norm_eps as f32;
        let (x, normed) = add(x, delta, self.norm.as_ref(), eps)?;
        let read = match context {
            Some(context) => Tensor::cat(&[context, &normed], 0)?,
            None => normed,
        };
        self.block.forward(&x, &read, config, step, pool)
    }

    /// Like [`Layer::forward`], but returns only `rows`, u32, with these spans and adapters: of the others, only K and V
    /// are computed.
    pub fn forward_rows(
        &self,
        (rows, spans, adapters): (&Tensor, &AttentionBatch<'_>, &[AdapterRows]),
        (x, delta): (&Tensor, &Tensor),
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (x, normed) = add(x, delta, self.norm.as_ref(), config.rms_norm_eps as f32)?;
        let (x, step) = (
            x.index_select(rows, 0)?,
            step.of_rows(rows, spans, adapters),
        );
        self.block.forward(&x, &normed, config, &step, pool)
    }

    /// The part of [`Layer::forward`] that writes K and V.
    pub fn forward_none(
        &self,
        (x, delta): (&Tensor, &Tensor),
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<()> {
        let (_, normed) = add(x, delta, self.norm.as_ref(), config.rms_norm_eps as f32)?;
        self.write(&normed, config, step, pool)
    }

    /// Writes K and V of rows whose inputs of the attention are `context`, `[rows, hidden]`.
    pub fn write(
        &self,
        context: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<()> {
        self.block.write(context, config, step, pool).map(drop)
    }
}

impl LayerBody {
    /// Reads a block of the model `config` that is like `spec`, with one of `ropes`, whose attention has `inputs`
    /// inputs; `at` names its parts.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        (config, spec): (&ModelConfig, &LayerSpec),
        ropes: &RopeTables,
        weights: &mut Weights,
        inputs: usize,
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
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
        let scalar = if spec.has_scalar {
            Some(f64::from(weights.scalar(&at("layer_scalar"), &[1])?))
        } else {
            None
        };
        let ones = || Tensor::ones(d, weights.dtypes().activations, weights.device());
        let v_norm = spec.v_norm.then(ones).transpose()?;
        let mixer = Mixer::load((config, spec), weights, &at)?;
        let mut norm = |name: Option<&'static str>| {
            name.map(|name| Norm::load(weights, &at(name), hidden, config.spec.norm))
                .transpose()
        };
        let norms = &spec.norms;
        let products = LayerProducts {
            spec,
            heads,
            kv_heads,
            hidden,
            inputs,
            at: &at,
        };
        Ok(Self {
            v_norm,
            kv_heads,
            input: None,
            convs: None,
            scalar,
            spec: spec.clone(),
            rope: rope.transpose()?,
            head_norms,
            sinks,
            after_attention: norm(norms.after_attention)?,
            before_mlp: norm(norms.before_mlp)?,
            after_mlp: norm(norms.after_mlp)?,
            qkv: products.inner(weights)?,
            o: products.outer(weights)?,
            mixer,
            mlp: FeedForward::load(config, spec, weights, at)?,
        })
    }

    /// Takes the residual stream `x`, `[rows, hidden]`, and the attention's input `normed`,
    /// `[rows, inputs]`; returns the stream after the attention and the `delta` still to be added to it.
    /// `normed` may have more rows: of those that do not attend, only K and V are computed.
    pub fn forward(
        &self,
        x: &Tensor,
        normed: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        if let (Some(convs), Some(places)) = (&self.convs, step.places) {
            return self.forward_convs(convs, places, (x, normed), config, step, pool);
        }
        let eps = config.rms_norm_eps as f32;
        let rows = x.dim(0)?;
        let attended = self.attend(normed, rows, config, step, pool)?;
        let attended = self.delta(attended, self.after_attention.as_ref(), eps)?;
        if self.spec.parallel {
            let own = step.pick(normed, rows)?;
            let own = own.contiguous()?;
            let delta = self.mlp.forward(&own, step.attending_adapters)?;
            let delta = self.delta(delta, self.after_mlp.as_ref(), eps)?;
            return Ok((x.clone(), (attended + delta)?));
        }
        let (mut x, normed) = add(x, &attended, self.before_mlp.as_ref(), eps)?;
        let delta = self.mlp.forward(&normed, step.attending_adapters)?;
        let mut delta = self.delta(delta, self.after_mlp.as_ref(), eps)?;
        if let (Some(input), Some(all)) = (&self.input, &step.layer_inputs) {
            x = (x + delta)?;
            delta = input.forward(&x, &step.pick(&input.of(all)?, rows)?, eps)?;
        }
        match self.scalar {
            None => Ok((x, delta)),
            Some(scalar) => Ok(((x * scalar)?, (delta * scalar)?)),
        }
    }

    /// The same with convolutions of the inputs and outputs of attention and MLP; of a block's rows only.
    fn forward_convs(
        &self,
        (of_attention, of_mlp): &(BlockConv, BlockConv),
        places: &BlockPlaces,
        (x, normed): (&Tensor, &Tensor),
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let (rows, all) = (x.dim(0)?, normed.dim(0)?);
        let own = normed.narrow(0, all - rows, rows)?.contiguous()?;
        let (own, factors) = of_attention.prepare(&own, places)?;
        let read = Tensor::cat(&[&normed.narrow(0, 0, all - rows)?, &own], 0)?;
        let attended = self.attend(&read, rows, config, step, pool)?;
        let attended = of_attention.finish(&attended, &factors, places)?;
        let eps = config.rms_norm_eps as f32;
        let (x, normed) = add(x, &attended, self.before_mlp.as_ref(), eps)?;
        let (read, factors) = of_mlp.prepare(&normed, places)?;
        let delta = self.mlp.forward(&read, step.attending_adapters)?;
        Ok((x, of_mlp.finish(&delta, &factors, places)?))
    }

    /// What is added to the residual stream for the output `y` of attention or MLP, which may have a norm.
    fn delta(&self, y: Tensor, norm: Option<&Norm>, eps: f32) -> Result<Tensor> {
        let y = match norm {
            Some(norm) => norm.forward(&y, eps)?,
            None => y,
        };
        match self.spec.residual_scale {
            1. => Ok(y),
            scale => Ok((y * f64::from(scale))?),
        }
    }

    /// The attention of those rows of `x` that attend, `rows` of them.
    fn attend(
        &self,
        x: &Tensor,
        rows: usize,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<Tensor> {
        let (heads, d) = (config.num_heads, self.kv_heads.dim);
        let (q, gate) = self.write(x, config, step, pool)?;
        let o = |y: &Tensor| self.o.forward_adapted(y, step.attending_adapters);
        let q = step.pick(&q, rows)?;
        let params = AttentionParams {
            scale: self.spec.attention_scale,
            window: self.spec.window,
            soft_cap: self.spec.soft_cap,
            sinks: self.sinks.as_ref(),
        };
        if let Some(mixer) = &self.mixer {
            return o(&mixer.forward(&q, step, params, pool)?);
        }
        let (k_pool, v_pool) = pool.tokens()?;
        let y = paged_attention(&q, k_pool, v_pool, step.spans, params)?;
        let y = y.reshape((rows, heads * d))?;
        match gate {
            None => o(&y),
            Some(gate) => {
                let gate = step.pick(&gate, rows)?;
                o(&(y * sigmoid(&gate)?)?)
            }
        }
    }

    /// Writes K and V of all rows; returns the queries, `[rows, num_heads, head_dim]`, and their gates, if there are any,
    /// `[rows, num_heads * head_dim]`; or what a mixer takes of each row.
    pub fn write(
        &self,
        x: &Tensor,
        config: &ModelConfig,
        step: &Step<'_>,
        pool: LayerPool<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let products = self.qkv.forward_adapted(x, step.adapters)?;
        let own_angles = self.rope.map(|rope| &step.angles[rope]);
        if let Some(mixer) = &self.mixer {
            return Ok((mixer.write(&products, step, own_angles, pool)?, None));
        }
        let (k_pool, v_pool) = pool.tokens()?;
        let (rows, heads) = (x.dim(0)?, config.num_heads);
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
