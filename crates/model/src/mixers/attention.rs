//! Attention over K and V of heads, which a paged pool keeps.

use super::mixer::{AttentionParts, Mixer, MixerLayer, MixerParts, MixerRows};
use crate::layers::linear::Linear;
use crate::layers::rope::halves_from_pairs;
use crate::layers::step::{Angles, Step};
use crate::spec::{AttentionGate, KvSource, LayerSpec, QkNorm, RopeRows};
use crate::weights::Weights;
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvHeads;
use foretoken_kernels::{
    AttentionParams, HeadNorms, Pools, ValueHeads, ValueNorm, paged_attention, rope_attention,
    rope_kv_write, rope_queries, sigmoid_gate,
};

/// What attention has besides its products.
#[derive(Clone)]
pub(crate) struct Attention {
    spec: LayerSpec,
    /// The place of its position embedding in [`RopeTables`](crate::layers::rope::RopeTables).
    rope: Option<usize>,
    /// The heads of K and V. The heads of queries have the same `dim`.
    kv_heads: KvHeads,
    head_norms: Option<HeadNorms>,
    values: ValueHeads,
    /// `[num_heads]` f32.
    sinks: Option<Tensor>,
}

impl Attention {
    /// Reads such a layer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(parts: &MixerParts<'_>, weights: &mut Weights) -> Result<MixerLayer> {
        let (config, spec) = (parts.config, parts.spec);
        let kv_heads = spec.kv_heads.unwrap_or(config.kv_heads());
        let (d, heads) = (kv_heads.dim, config.num_heads);
        weights.dtypes().check_kv(Some(kv_heads))?;
        if matches!(spec.kv, KvSource::Layer(_)) {
            // Trained checkpoints have them nevertheless.
            for part in ["k_proj", "v_proj", "k_norm"] {
                weights.skip(&parts.at(&format!("self_attn.{part}.weight")));
            }
        }
        let sinks = (spec.sinks).then(|| -> Result<Tensor> {
            let sinks = weights.tensor(&parts.at("self_attn.sinks"), &[heads])?;
            Ok(sinks.to_dtype(DType::F32)?)
        });
        let sinks = sinks.transpose()?;
        let v_norm = (spec.v_norm).then(|| -> Result<ValueNorm> {
            Ok(ValueNorm {
                ones: Tensor::ones(d, weights.dtypes().activations, weights.device())?,
                eps: config.rms_norm_eps as f32,
            })
        });
        let mixer = Self {
            values: ValueHeads {
                are_keys: spec.kv == KvSource::Keys,
                norm: v_norm.transpose()?,
            },
            kv_heads,
            spec: spec.clone(),
            rope: parts.rope()?,
            head_norms: head_norms(parts, weights, kv_heads)?,
            sinks,
        };
        let in_proj = products(parts, weights, kv_heads)?;
        let out_proj = ("self_attn.o_proj", heads * d, spec.o_bias);
        parts.layer(weights, (in_proj, mixer), out_proj)
    }

    /// The heads of all rows, `[rows, heads, head_dim]`, and the gates of the queries, if there are any,
    /// `[rows, num_heads * head_dim]`.
    fn heads(&self, rows: &MixerRows<'_>) -> Result<(Tensor, Option<Tensor>)> {
        let (products, heads) = (&rows.products, rows.step.config.num_heads);
        let dim = self.kv_heads.dim;
        let gates = if self.spec.gate.is_some() { heads } else { 0 };
        let all = products.reshape((products.dim(0)?, (), dim))?;
        let qkv = all.narrow(1, gates, all.dim(1)? - gates)?;
        let gate = (gates > 0).then(|| products.narrow(1, 0, gates * dim));
        Ok((qkv, gate.transpose()?))
    }

    /// The angles of the rows, if there is a position embedding.
    fn angles<'a>(&self, step: &'a Step<'_>) -> Option<&'a Angles> {
        self.rope.map(|rope| &step.angles[rope])
    }

    /// Writes K and V of all rows, whose heads are `qkv`; returns the queries, `[rows, num_heads, head_dim]`.
    fn write(&self, qkv: &Tensor, rows: &MixerRows<'_>) -> Result<Tensor> {
        let heads = rows.step.config.num_heads;
        let own_angles = self.angles(rows.step);
        let angles = own_angles.map(|angles| (&angles.cos, &angles.sin));
        let norms = self.head_norms.as_ref();
        let q = match self.spec.kv {
            KvSource::Layer(_) => rope_queries(qkv, angles, norms)?,
            KvSource::Own | KvSource::Keys => {
                let pools = pools(rows)?;
                rope_kv_write(qkv, heads, angles, norms, &self.values, pools)?
            }
        };
        match own_angles.and_then(|rope| rope.query_scale.as_ref()) {
            Some(scale) => Ok(q.broadcast_mul(scale)?),
            None => Ok(q),
        }
    }

    /// What the rows that attend read of K and V. Writes those of all rows, whose heads are `qkv`.
    fn attend_to(&self, qkv: &Tensor, rows: &MixerRows<'_>) -> Result<Tensor> {
        let step = rows.step;
        let params = params(&self.spec, self.sinks.as_ref());
        let own_angles = self.angles(step);
        let is_scaled = own_angles.is_some_and(|angles| angles.query_scale.is_some());
        let all_attend = step.attending.is_none() && rows.attending == qkv.dim(0)?;
        if matches!(self.spec.kv, KvSource::Layer(_)) || is_scaled || !all_attend {
            let q = rows.pick(&self.write(qkv, rows)?)?;
            let (k, v) = rows.pool.tokens()?;
            return Ok(paged_attention(&q, k, v, step.spans, params)?);
        }
        let angles = own_angles.map(|angles| (&angles.cos, &angles.sin));
        Ok(rope_attention(
            qkv,
            step.config.num_heads,
            (angles, self.head_norms.as_ref()),
            &self.values,
            pools(rows)?,
            step.spans,
            params,
        )?)
    }
}

/// Where K and V of rows go.
fn pools<'a>(rows: &MixerRows<'a>) -> Result<Pools<'a>> {
    let (k, v) = rows.pool.tokens()?;
    let slots = rows.step.slots;
    Ok(Pools { k, v, slots })
}

impl Mixer for Attention {
    fn attend(&self, rows: &MixerRows<'_>) -> Result<Tensor> {
        let (qkv, gate) = self.heads(rows)?;
        let y = self.attend_to(&qkv, rows)?.flatten_from(1)?;
        Ok(match gate {
            None => y,
            Some(gate) => sigmoid_gate(&rows.pick(&gate)?, &y)?,
        })
    }

    fn write_kv(&self, rows: &MixerRows<'_>) -> Result<()> {
        let (qkv, _) = self.heads(rows)?;
        self.write(&qkv, rows).map(drop)
    }

    fn attention(&self) -> Option<AttentionParts<'_>> {
        let spec = &self.spec;
        let is_plain = spec.kv == KvSource::Own && spec.gate.is_none() && !spec.v_norm;
        is_plain.then(|| AttentionParts {
            kv_heads: self.kv_heads,
            rope: self.rope,
            head_norms: self.head_norms.as_ref(),
            params: params(spec, self.sinks.as_ref()),
        })
    }
}

/// How a layer like `spec` attends, with these `sinks`.
pub fn params<'a>(spec: &LayerSpec, sinks: Option<&'a Tensor>) -> AttentionParams<'a> {
    AttentionParams {
        scale: spec.attention_scale,
        window: spec.window,
        bidirectional: spec.is_bidirectional,
        soft_cap: spec.soft_cap,
        sinks,
    }
}

/// Reads the norms of queries and keys, if there are any.
fn head_norms(
    parts: &MixerParts<'_>,
    weights: &mut Weights,
    KvHeads { count, dim, .. }: KvHeads,
) -> Result<Option<HeadNorms>> {
    let (config, spec) = (parts.config, parts.spec);
    let Some(norm) = spec.qk_norm else {
        return Ok(None);
    };
    let eps = config.rms_norm_eps as f32;
    let (q, k) = match norm {
        QkNorm::HeadWithoutWeights => {
            let ones = Tensor::ones(dim, weights.dtypes().activations, weights.device())?;
            return Ok(Some(HeadNorms {
                k: ones.clone(),
                q: ones,
                eps,
                after_rotation: false,
            }));
        }
        QkNorm::Head | QkNorm::RotatedHead => (dim, dim),
        QkNorm::Whole => (config.num_heads * dim, count * dim),
    };
    let (q_name, k_name) = match norm {
        QkNorm::RotatedHead => ("self_attn.query_layernorm", "self_attn.key_layernorm"),
        _ => ("self_attn.q_norm", "self_attn.k_norm"),
    };
    let mut read = |name, width| weights.norm(&parts.at(name), width, config.spec.norm.offset);
    let q = read(q_name, q)?;
    Ok(Some(HeadNorms {
        k: match spec.kv {
            KvSource::Layer(_) => q.clone(),
            KvSource::Own | KvSource::Keys => read(k_name, k)?,
        },
        q,
        eps,
        after_rotation: norm == QkNorm::RotatedHead,
    }))
}

/// Reads the product with the layer's input: q, k and v, except those that are of another layer, and v that is k. The
/// gates of q come first, if there are any.
fn products(
    parts: &MixerParts<'_>,
    weights: &mut Weights,
    KvHeads { count, dim, .. }: KvHeads,
) -> Result<Linear> {
    let (spec, heads, inputs) = (parts.spec, parts.config.num_heads, parts.inputs);
    let (q, kv, bias) = (heads * dim, count * dim, spec.qkv_bias);
    // The widths of ropes whose pairs are neighbours, in the checkpoint and in Hugging Face's rows, for which adapters are
    // trained. llama.cpp's conversion reorders all layers, those without a rope, too.
    let width = spec.rope.as_ref().map(|rope| rope.width);
    let is_gguf = weights.are_gguf();
    let widths = match spec.rope_rows {
        RopeRows::Halves => [None; 2],
        RopeRows::Neighbours => [width; 2],
        RopeRows::NeighboursInGguf => [width.or(Some(dim)).filter(|_| is_gguf), None],
        RopeRows::HalvesInGguf => [width.filter(|_| !is_gguf), width],
    };
    let halves = |heads: usize, width: Option<usize>| {
        width.map(|width| halves_from_pairs(heads, dim, width))
    };
    let mut read = |part: &str, rows: usize, [order, of_adapters]: [Option<Vec<u32>>; 2]| {
        let (name, shape) = (parts.at(part), (rows, inputs));
        let linear = weights.linear_in_order(&name, shape, bias, order.as_deref())?;
        Ok::<_, Error>(linear.with_rows_of_adapters(of_adapters.as_deref()))
    };
    if spec.fused_qkv {
        let of_all = |width: Option<usize>| {
            let (mut order, of_k) = (halves(heads, width)?, halves(count, width)?);
            let (q, kv) = (q as u32, kv as u32);
            order.extend(of_k.into_iter().map(|row| q + row));
            order.extend(q + kv..q + 2 * kv);
            Some(order)
        };
        return read("self_attn.qkv_proj", q + 2 * kv, widths.map(of_all));
    }
    let mut linears = Vec::new();
    if spec.gate == Some(AttentionGate::Apart) {
        linears.push(read("self_attn.gate_proj", q, [None, None])?);
    }
    linears.push(if spec.gate == Some(AttentionGate::InQueries) {
        let order = gates_first(heads, dim);
        read(
            "self_attn.q_proj",
            2 * q,
            [Some(order.clone()), Some(order)],
        )?
    } else {
        let orders = widths.map(|width| halves(heads, width));
        read("self_attn.q_proj", q, orders)?
    });
    if !matches!(spec.kv, KvSource::Layer(_)) {
        let orders = widths.map(|width| halves(count, width));
        linears.push(read("self_attn.k_proj", kv, orders)?);
    }
    if spec.kv == KvSource::Own {
        linears.push(read("self_attn.v_proj", kv, [None, None])?);
    }
    Linear::join(linears)
}

/// The order in which the gates of all heads come before their queries, if each head of `dim` values is followed by its
/// gate.
fn gates_first(heads: usize, dim: usize) -> Vec<u32> {
    let part = |first: usize| {
        (0..heads).flat_map(move |head| (0..dim).map(move |i| (2 * head * dim + first + i) as u32))
    };
    part(dim).chain(part(0)).collect()
}
