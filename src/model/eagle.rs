//! EAGLE heads: one decoder layer that predicts from the target's hidden states.
//!
//! Row `i` has the token at position `i + 1` and the features of position `i`, and predicts the token at
//! position `i + 2`. The features of a committed token come from the target; those of a token that the
//! head itself drafted are the head's own output for the row before (EAGLE, Li et al. 2024, section 3.1;
//! EAGLE-3, Li et al. 2025, arXiv 2503.01840, sections 3.1 and 3.2).

use super::dtypes::Dtypes;
use super::head::HeadConfig;
use super::inputs::Inputs;
use super::layer::{LayerBody, Step};
use super::linear::{Embedding, Linear};
use super::norm::Norm;
use super::output_layer::OutputLayer;
use super::rope::RopeTables;
use super::weights::Weights;
use super::{Batch, Ends, ForwardOutput, Head, HeadKind, Model, ModelConfig};
use crate::error::{Error, Result};
use crate::kernels::AttentionBatch;
use crate::kv::{KvShape, KvStore};
use candle_core::{Device, Tensor};

/// A loaded head.
pub struct EagleHead {
    config: ModelConfig,
    reads: Vec<usize>,
    embedding: Embedding,
    input: EagleInput,
    block: LayerBody,
    /// Before the output layer; EAGLE-1 has none.
    norm: Option<Norm>,
    output: OutputLayer,
    ropes: RopeTables,
    dtypes: Dtypes,
    device: Device,
}

/// How a row is made of a token's embedding and features.
enum EagleInput {
    /// EAGLE-1 and 2: the features are the target's normed last hidden states.
    Eagle {
        target_norm: Norm,
        target_eps: f32,
        /// From embedding and features to the hidden size.
        fc: Linear,
    },
    /// EAGLE-3: the attention reads both, normed, side by side.
    Eagle3 {
        /// From the hidden states of some of the target's layers to the features.
        fc: Linear,
        embedding_norm: Norm,
        feature_norm: Norm,
        /// Whether the residual stream begins with the normed features.
        norm_before_residual: bool,
    },
}

impl EagleHead {
    /// Reads the weights of a head that reads the layers `taps` of `target`, whose first and last layers are
    /// `ends`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub(super) fn load(
        head: HeadConfig,
        taps: Vec<usize>,
        mut weights: Weights,
        target: &ModelConfig,
        ends: &Ends,
    ) -> Result<Self> {
        let config = head.shape;
        let hidden = config.hidden_size;
        let reads = taps.len() * target.hidden_size;
        let layer = if weights.has("midlayer.self_attn.q_proj.weight") {
            "midlayer"
        } else {
            "layers.0"
        };
        let at = |part: &str| format!("{layer}.{part}");
        let embedding = weights.embedding_of_head(&config, &ends.embedding)?;
        let (input, inputs, norm) = if head.kind == HeadKind::Eagle3 {
            let input = EagleInput::Eagle3 {
                fc: weights.linear("fc", (hidden, reads), false)?,
                embedding_norm: Norm::rms(&mut weights, &at("input_layernorm"), hidden)?,
                feature_norm: Norm::rms(&mut weights, &at("hidden_norm"), hidden)?,
                norm_before_residual: head.norm_before_residual,
            };
            let norm = Norm::rms(&mut weights, "norm", hidden)?;
            (input, 2 * hidden, Some(norm))
        } else {
            let has_bias = weights.has("fc.bias");
            let input = EagleInput::Eagle {
                target_norm: ends.norm.clone(),
                target_eps: target.rms_norm_eps as f32,
                fc: weights.linear("fc", (hidden, hidden + reads), has_bias)?,
            };
            (input, hidden, None)
        };
        let ropes = RopeTables::new(config.ropes(), weights.rope_factors()?.as_deref());
        let spec = (config.spec.layers.first())
            .ok_or_else(|| Error::internal("an EAGLE head has a layer"))?;
        let block = LayerBody::load((&config, spec), &ropes, &mut weights, inputs, at)?;
        let output = if head.kind == HeadKind::Eagle3 {
            OutputLayer::of_head(&mut weights, &config, &ends.output)?
        } else {
            ends.output.clone()
        };
        weights.finish(&[])?;
        weights.device().synchronize()?;
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            reads: taps,
            embedding,
            input,
            block,
            norm,
            output,
            ropes,
            config,
        })
    }

    /// The residual stream, `[rows, hidden]`, and the attention's input of rows with these tokens and
    /// features.
    fn rows(&self, tokens: &Tensor, features: &Tensor) -> Result<(Tensor, Tensor)> {
        let embedded = self.embedding.forward(tokens)?;
        match &self.input {
            EagleInput::Eagle { fc, .. } => {
                let x = fc.forward(&Tensor::cat(&[&embedded, features], 1)?)?;
                Ok((x.clone(), x))
            }
            EagleInput::Eagle3 {
                embedding_norm,
                feature_norm,
                norm_before_residual,
                ..
            } => {
                let eps = self.config.rms_norm_eps as f32;
                let embedded = embedding_norm.forward(&embedded, eps)?;
                let normed = feature_norm.forward(features, eps)?;
                let both = Tensor::cat(&[&embedded, &normed], 1)?;
                Ok(if *norm_before_residual {
                    (normed, both)
                } else {
                    (features.clone(), both)
                })
            }
        }
    }
}

impl Model for EagleHead {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn kv_shape(&self) -> KvShape {
        self.config.kv_shape(self.dtypes.kv)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        let (vocab_size, slots) = (self.config.vocab_size, kv.num_slots());
        let ropes = self.ropes.tables();
        let inputs = Inputs::new(batch, ropes, vocab_size, slots, &self.device)?;
        let spans = AttentionBatch::new(&batch.spans, kv.block_size, slots)?;
        let dims = (inputs.slots.len(), self.config.hidden_size);
        let features = match &batch.features {
            Some(features) if features.dims() == [dims.0, dims.1] => features.contiguous()?,
            Some(other) => {
                return Err(Error::internal(format!("features {other:?} for {dims:?}")));
            }
            None => Tensor::zeros(dims, self.dtypes.activations, &self.device)?,
        };
        let pool = (kv.layers.first())
            .ok_or_else(|| Error::internal("the pool of a head has one layer"))?;
        let step = Step::new(&inputs, &spans, self.dtypes.activations)?;
        let (x, read) = self.rows(&inputs.tokens, &features)?;
        let Some(wanted) = &inputs.wanted else {
            self.block.write(&read, &self.config, &step, pool)?;
            return ForwardOutput::none(vocab_size);
        };
        let (x, delta) = self.block.forward(&x, &read, &self.config, &step, pool)?;
        let (x, delta) = (x.index_select(wanted, 0)?, delta.index_select(wanted, 0)?);
        let (hidden, normed) = match &self.norm {
            Some(norm) => norm.add(&x, &delta, self.config.rms_norm_eps as f32)?,
            None => {
                let sum = (x + delta)?;
                (sum.clone(), sum)
            }
        };
        Ok(ForwardOutput {
            logits: self.output.forward(&normed)?,
            hidden: Some(hidden),
            last_hidden: None,
        })
    }
}

impl Head for EagleHead {
    fn reads(&self) -> &[usize] {
        &self.reads
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        // Hidden states may be a view of the states of other sequences, too.
        let hidden = hidden.to_dtype(self.dtypes.activations)?.contiguous()?;
        match &self.input {
            EagleInput::Eagle3 { fc, .. } => fc.forward(&hidden),
            EagleInput::Eagle {
                target_norm,
                target_eps,
                ..
            } => target_norm.forward(&hidden, *target_eps),
        }
    }
}
