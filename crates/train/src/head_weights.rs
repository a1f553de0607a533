//! The parts that the heads in training have in common: their variables and the values that these begin with, the
//! target's embedding, the ids that they predict, and the angles of RoPE.

use super::heads::Heads;
use super::model::{INITIAL_DEVIATION, fresh};
use super::ops::{Products, linear, rms_norm, swiglu};
use super::optimizer::ByName;
use super::spec::{EAGLE_LAYER, TrainSpec};
use candle_core::{DType, Device, Tensor, Var};
use foretoken_core::error::{Error, Result};
use foretoken_model::{HeadConfig, HeadTarget, ModelConfig, RopeRows, Weights, names};
use std::sync::Arc;

/// Standard deviation of the noise beside what is taken from the target. Larger noise in `fc` would drown
/// the one layer that the first step can use.
const FC_NOISE: f64 = 0.002;
const EMBEDDING_NOISE: f64 = 0.01;

/// Parts of a layer that have the same input.
pub const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
pub const GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];

/// Returns the prefix of the tensor names of the first layer of a head with `weights`.
pub fn first_layer(weights: &Weights) -> &'static str {
    if weights.has(&format!("{EAGLE_LAYER}.self_attn.q_proj.weight")) {
        EAGLE_LAYER
    } else {
        "layers.0"
    }
}

/// `weight`, if it has the shape `dims` that training gives the weight `name`.
///
/// # Errors
/// `Setup`, if it has another shape.
pub fn of_shape(weight: Tensor, name: &str, dims: &[usize]) -> Result<Tensor> {
    if weight.dims() == dims {
        Ok(weight)
    } else {
        Err(Error::wrong_shape(name, weight.dims(), dims))
    }
}

/// The ids that a head of configuration `head` predicts.
///
/// # Errors
/// If the `weights` cannot be read, or name ids that the target does not have.
pub fn output_ids(head: &HeadConfig, weights: &mut Weights) -> Result<Vec<u32>> {
    Ok(match weights.output_ids(&head.shape)? {
        Some(ids) => ids.to_vec1()?,
        None => (0..head.shape.vocab_size as u32).collect(),
    })
}

/// Names a feature of a head of configuration `head` that training does not know, so that weights learned from there
/// would mean something else. `None` = there is no such feature.
///
/// # Errors
/// If the `weights` cannot be read.
pub fn untrained(head: &HeadConfig, weights: &mut Weights) -> Result<Option<String>> {
    let odd = head.shape.spec.layers.iter().any(|layer| {
        layer.rope_rows == RopeRows::Neighbours
            || layer.qkv_bias
            || layer.o_bias
            || layer.mlp_bias
            || layer.window.is_some()
    });
    if head.norm_before_residual {
        return Ok(Some("norm_before_residual".into()));
    }
    if let Some(key) = head.extra() {
        return Ok(Some(key.into()));
    }
    if odd || head.shape.plain_rope().is_err() {
        return Ok(Some(
            "layers that are not like a Llama's without biases".into(),
        ));
    }
    if weights.rope_factors()?.is_some() {
        return Ok(Some("divisors of RoPE's frequencies".into()));
    }
    let of_layer = |part: &str| format!("{}.self_attn.{part}", first_layer(weights));
    let tensors = [
        "embed_tokens.weight".into(),
        of_layer("q_norm.weight"),
        of_layer("q_proj.bias"),
    ];
    let found = tensors.into_iter().find(|name| weights.has(name));
    Ok(found.map(|name| format!("a tensor {name}")))
}

/// Variables that begin with a copy of `weights`.
///
/// # Errors
/// If there is no memory for them.
pub fn variables(weights: &ByName<Tensor>) -> Result<ByName<Var>> {
    let all = weights.iter();
    all.map(|(name, weight)| Ok((name.clone(), Var::from_tensor(weight)?)))
        .collect()
}

/// The target's embedding, which is not trained.
#[derive(Clone)]
pub enum TargetEmbedding {
    /// `[vocab_size, hidden]`, f32.
    Dense(Tensor),
    /// The embedding of a target that runs beside the training.
    Shared(Arc<HeadTarget>),
}

/// The weights of a head in f32. Clones share them.
#[derive(Clone)]
pub struct HeadWeights {
    pub config: ModelConfig,
    pub vars: ByName<Var>,
    pub embedding: TargetEmbedding,
    /// The target's ids of the head's output rows.
    pub ids: Vec<u32>,
    pub heads: Heads,
    /// The precision of products with weights.
    pub products: Products,
}

impl HeadWeights {
    /// The weights of the head `spec` that predicts `ids`, on `device`. They begin with what they can take of the
    /// target: layers, the last ones first, its final norm, and its output layer; the rest is noise.
    ///
    /// # Errors
    /// `Setup`, if the target does not have the tensors of a decoder.
    pub fn new(
        spec: &TrainSpec,
        (target, weights): (&ModelConfig, &mut Weights),
        ids: Vec<u32>,
        device: &Device,
    ) -> Result<Self> {
        let mut start = Start {
            target,
            spec,
            weights,
            ids: &ids,
        };
        let first = |(name, dims): (String, Vec<usize>)| {
            let weight = start.weight(&name, &dims)?.to_device(device)?;
            Ok((name, Var::from_tensor(&weight)?))
        };
        let vars = (spec.shapes().into_iter().map(first)).collect::<Result<_>>()?;
        let embedding = start.tensor(&format!("{}.weight", names::EMBEDDING))?;
        let embedding = TargetEmbedding::Dense(embedding.to_device(device)?);
        Ok(Self {
            products: spec.products,
            ..Self::of(spec.config.clone(), vars, embedding, ids, spec.positions())?
        })
    }

    /// The weights `vars` of a head of shape `config` that predicts `ids` and rotates to positions below `positions`;
    /// `embedding` is the target's.
    ///
    /// # Errors
    /// If the layers are not like Llama's.
    pub fn of(
        config: ModelConfig,
        vars: ByName<Var>,
        embedding: TargetEmbedding,
        ids: Vec<u32>,
        positions: usize,
    ) -> Result<Self> {
        Ok(Self {
            heads: Heads::of(&config, positions)?,
            config,
            vars,
            embedding,
            ids,
            products: Products::default(),
        })
    }

    /// The weight of this name, without `.weight`.
    pub fn var(&self, name: &str) -> &Tensor {
        self.vars[&format!("{name}.weight")].as_tensor()
    }

    /// The norm of this name of `x`, `[rows, hidden]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        Ok(rms_norm(x, self.var(name), self.config.rms_norm_eps)?)
    }

    /// The weights of `parts` of `layer`, which have the same input, one below the other.
    ///
    /// # Errors
    /// If the device fails.
    pub fn joined(&self, layer: &str, parts: &[&str]) -> Result<Tensor> {
        let var = |part| self.var(&format!("{layer}.{part}"));
        Ok(Tensor::cat(&parts.iter().map(var).collect::<Vec<_>>(), 0)?)
    }

    /// `x @ weight^T`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn linear(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        Ok(linear(x, weight, self.products)?)
    }

    /// The residual stream after `layer`, for the stream `x` before it and the output `y` of its attention. The gate
    /// and the up matrix of its MLP are joined.
    ///
    /// # Errors
    /// If the device fails.
    pub fn after(&self, x: Tensor, y: &Tensor, layer: &str, gate_up: &Tensor) -> Result<Tensor> {
        let o = self.var(&format!("{layer}.self_attn.o_proj"));
        let residual = (x + self.linear(y, o)?)?;
        let normed = self.norm(&residual, &format!("{layer}.post_attention_layernorm"))?;
        let wide = swiglu(&self.linear(&normed, gate_up)?)?;
        let down = self.var(&format!("{layer}.mlp.down_proj"));
        Ok((residual + self.linear(&wide, down)?)?)
    }

    /// The embeddings of `ids`, `[ids, hidden]`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn embed(&self, ids: Vec<u32>) -> Result<Tensor> {
        match &self.embedding {
            TargetEmbedding::Dense(embedding) => {
                let ids = Tensor::new(ids, embedding.device())?;
                Ok(embedding.index_select(&ids, 0)?)
            }
            TargetEmbedding::Shared(target) => target.embed(&Tensor::new(ids, &Device::Cpu)?),
        }
    }
}

/// The source of a head's first weights.
struct Start<'a> {
    target: &'a ModelConfig,
    spec: &'a TrainSpec,
    weights: &'a mut Weights,
    ids: &'a [u32],
}

impl Start<'_> {
    fn tensor(&mut self, name: &str) -> Result<Tensor> {
        self.weights.dense(name)
    }

    /// A tensor of the layer of the target that is as far from its last layer as `layer` from the head's, if
    /// that layer has it: some read keys and values of others.
    fn of_layer(&mut self, layer: usize, part: &str) -> Result<Option<Tensor>> {
        let layer =
            (self.target.num_layers() + layer).saturating_sub(self.spec.config.num_layers());
        let name = names::layer(layer, part);
        let has = self.weights.has(&name);
        has.then(|| self.tensor(&name)).transpose()
    }

    /// The first value of the weight `name`. A matrix of the target that does not have the head's shape
    /// is not taken.
    fn weight(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let noise = fresh(self.spec.seed, name, dims, &Device::Cpu)?;
        let quiet = |deviation: f64| &noise * (deviation / INITIAL_DEVIATION);
        let last = self.spec.config.num_layers().saturating_sub(1);
        let (layer, part) = names::layer_of_head(name).unwrap_or((last, name));
        let taken = match part {
            "fc.weight" => {
                let (hidden, all) = (dims[0], dims[1]);
                let identity = Tensor::eye(hidden, DType::F32, &Device::Cpu)?;
                let identity = identity.pad_with_zeros(1, all - hidden, 0)?;
                return Ok((identity + quiet(FC_NOISE)?)?);
            }
            // An EAGLE-3 head's norm of the embedding.
            "input_layernorm.weight" if name.starts_with(EAGLE_LAYER) => return Ok(noise),
            "hidden_norm.weight" => self.of_layer(last, "input_layernorm.weight")?,
            "norm.weight" => Some(self.tensor(&format!("{}.weight", names::NORM))?),
            "lm_head.weight" => {
                let output = if self.target.tie_word_embeddings {
                    names::EMBEDDING
                } else {
                    names::HEAD
                };
                let ids = Tensor::new(self.ids, &Device::Cpu)?;
                let output = self.tensor(&format!("{output}.weight"))?;
                Some(output.index_select(&ids, 0)?)
            }
            "self_attn.q_proj.weight" | "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => {
                let Some(own) = self.of_layer(layer, part)? else {
                    return Ok(noise);
                };
                let own = repeated(own, dims[0], self.spec.config.head_dim)?;
                // An EAGLE-3 head reads the embedding and then the hidden state.
                Some(if own.dims() == [dims[0], dims[1] / 2] {
                    let of_embedding = quiet(EMBEDDING_NOISE)?.narrow(1, 0, dims[1] / 2)?;
                    Tensor::cat(&[of_embedding, own], 1)?
                } else {
                    own
                })
            }
            _ => self.of_layer(layer, part)?,
        };
        let fits = |taken: &Tensor| taken.dims() == dims;
        Ok(taken.filter(fits).unwrap_or(noise))
    }
}

/// `weight` with each of its heads repeated so that it has `rows` rows, if that is possible: attention with
/// more heads of K and V that computes the same.
fn repeated(weight: Tensor, rows: usize, head_dim: usize) -> Result<Tensor> {
    let (own, inputs) = weight.dims2()?;
    if own == 0 || own == rows || !rows.is_multiple_of(own) || !own.is_multiple_of(head_dim) {
        return Ok(weight);
    }
    let heads = weight.reshape((own / head_dim, 1, head_dim, inputs))?;
    let heads = heads.repeat((1, rows / own, 1, 1))?;
    Ok(heads.reshape((rows, inputs))?)
}
