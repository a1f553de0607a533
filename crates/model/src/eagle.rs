//! EAGLE heads: decoder layers, mostly one, that predict from the target's hidden states.
//!
//! Row `i` has the token at position `i + 1` and the features of position `i`, and predicts the token at
//! position `i + 2`. The features of a committed token come from the target; those of a token that the
//! head itself drafted are the head's own output for the row before (EAGLE, Li et al. 2024, section 3.1;
//! EAGLE-3, Li et al. 2025, arXiv 2503.01840, sections 3.1 and 3.2). In a P-EAGLE head, rows after the last
//! token have a mask token and learned features instead, so that one forward predicts all depths.

use super::dtypes::Dtypes;
use super::head_config::{FcNorm, HeadConfig};
use super::inputs::Inputs;
use super::layer::{Layer, LayerBody, Step};
use super::layer_spec::QkNorm;
use super::linear::{Embedding, Linear};
use super::mtp::{self, MtpNames};
use super::norm::Norm;
use super::output_layer::OutputLayer;
use super::rope::RopeTables;
use super::weights::Weights;
use super::{Ends, HeadKind, ModelConfig};
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvShape, KvStore, LayerPool};
use foretoken_core::model::{Batch, ForwardOutput, Head, MaskedBlock, Model, ModelInfo};
use foretoken_kernels::AttentionBatch;

/// A loaded head.
pub struct EagleHead {
    config: ModelConfig,
    info: ModelInfo,
    reads: Vec<usize>,
    embedding: Embedding,
    input: EagleInput,
    /// The first layer, whose attention reads what [`EagleInput`] says.
    first: LayerBody,
    /// The layers after it.
    others: Vec<Layer>,
    /// The norm before the output layer; EAGLE-1 has none.
    norm: Option<Norm>,
    /// Whether the features of the next rows are the outputs after the norm.
    norm_output: bool,
    output: OutputLayer,
    /// The block of a P-EAGLE head, and the hidden states of masks, `[1, reads * target's hidden]`. Other heads have
    /// neither.
    masked: Option<(MaskedBlock, Tensor)>,
    ropes: RopeTables,
    dtypes: Dtypes,
    device: Device,
}

/// How a row is made of the embedding and the features of a token.
enum EagleInput {
    /// EAGLE-1 and 2: the features are the target's normed last hidden states.
    Eagle {
        target_norm: Norm,
        target_eps: f32,
        /// Projects embedding and features to the hidden size.
        fc: Linear,
    },
    /// The layer for further tokens of the target's own checkpoint: the features are as in EAGLE.
    Mtp {
        target_norm: Norm,
        target_eps: f32,
        embedding_norm: Norm,
        feature_norm: Norm,
        /// Projects embedding and features, both normed, to the hidden size.
        fc: Linear,
        /// The norm of the attention's input.
        input_norm: Norm,
        /// Number of such layers in the checkpoint, of which this is the first.
        count: usize,
    },
    /// EAGLE-3: the attention reads both, normed, side by side.
    Eagle3 {
        /// The norms before `fc`: one of the hidden states of all layers side by side, or one of each layer. The first
        /// code has none.
        before_fc: Vec<Norm>,
        /// Projects the hidden states of some of the target's layers to the features.
        fc: Linear,
        embedding_norm: Norm,
        feature_norm: Norm,
        /// Whether the residual stream begins with the normed features.
        norm_before_residual: bool,
    },
}

impl EagleInput {
    /// Reads the input of an EAGLE-3 head; `at` names the parts of its first layer.
    fn of_eagle3(
        head: &HeadConfig,
        weights: &mut Weights,
        (layers, width): (usize, usize),
        at: impl Fn(&str) -> String,
    ) -> Result<Self> {
        let hidden = head.shape.hidden_size;
        let reads = layers * width;
        let before_fc = match head.fc_norm {
            FcNorm::None => Vec::new(),
            FcNorm::Whole => vec![Norm::rms(weights, "input_norm", reads)?],
            FcNorm::EachLayer => (0..layers)
                .map(|layer| Norm::rms(weights, &format!("fc_norm.{layer}"), width))
                .collect::<Result<_>>()?,
        };
        Ok(Self::Eagle3 {
            before_fc,
            fc: weights.linear("fc", (hidden, reads), false)?,
            embedding_norm: Norm::rms(weights, &at("input_layernorm"), hidden)?,
            feature_norm: Norm::rms(weights, &at("hidden_norm"), hidden)?,
            norm_before_residual: head.norm_before_residual,
        })
    }
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
        let is_eagle3 = head.kind != HeadKind::Eagle;
        let hidden = head.shape.hidden_size;
        let reads = taps.len() * target.hidden_size;
        let layer = if weights.has("midlayer.self_attn.q_proj.weight") {
            "midlayer"
        } else {
            "layers.0"
        };
        let at = |part: &str| format!("{layer}.{part}");
        let embedding = weights.embedding_of_head(&head.shape, &ends.embedding)?;
        let (input, inputs, norm) = if is_eagle3 {
            let taps = (taps.len(), target.hidden_size);
            let input = EagleInput::of_eagle3(&head, &mut weights, taps, at)?;
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
        let mut config = head.shape;
        let has_norms = is_eagle3 && weights.has(&at("self_attn.q_norm.weight"));
        for layer in &mut config.spec.layers {
            layer.qk_norm = has_norms.then_some(QkNorm::Head);
        }
        let ropes = RopeTables::new(config.ropes(), weights.rope_factors()?.as_deref());
        let spec = (config.spec.layers.first())
            .ok_or_else(|| Error::internal("an EAGLE head has a layer"))?;
        let first = LayerBody::load((&config, spec), &ropes, &mut weights, inputs, at)?;
        let others = (1..config.num_layers()).map(|layer| {
            let at = |part: &str| format!("layers.{layer}.{part}");
            Layer::load(&config, layer, &ropes, &mut weights, at)
        });
        let others = others.collect::<Result<_>>()?;
        let output = if is_eagle3 {
            OutputLayer::of_head(&mut weights, &config, &ends.output)?
        } else {
            ends.output.clone()
        };
        let masked = match head.block {
            Some(block) => {
                let hidden = weights.tensor("mask_hidden", &[1, 1, reads])?;
                Some((block, hidden.reshape((1, reads))?))
            }
            None => None,
        };
        weights.finish(|_| false)?;
        weights.device().synchronize()?;
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            reads: taps,
            embedding,
            input,
            first,
            others,
            norm,
            norm_output: head.norm_output,
            output,
            masked,
            ropes,
            info: config.info(),
            config,
        })
    }

    /// Reads the first layer for further tokens of a checkpoint like `target`. Its parts are called `names`. The parts
    /// that the layer lacks are shared with the target: they are those of the target's `ends`.
    ///
    /// # Errors
    /// Returns the errors of [`EagleHead::load`]. A tensor of the layer that is not read is an error, too.
    pub(super) fn load_mtp(
        names: &MtpNames,
        mut weights: Weights,
        target: &ModelConfig,
        ends: &Ends,
    ) -> Result<Self> {
        let mtp = (target.spec.mtp.as_ref())
            .ok_or_else(|| Error::internal("a named layer for further tokens has a spec"))?;
        let config = mtp::config(target, mtp);
        let (hidden, spec) = (config.hidden_size, &mtp.layer);
        let at = |part: &str| format!("{}{part}", names.layer);
        let mut norm = |name: &str| Norm::load(&mut weights, name, hidden, config.spec.norm);
        let own = names.norm.as_ref().map(|name| norm(name)).transpose()?;
        let (embedding_norm, feature_norm) =
            (norm(&names.embedding_norm)?, norm(&names.hidden_norm)?);
        let input_norm = spec.norms.before_attention.map(|name| norm(&at(name)));
        let input_norm = input_norm.ok_or_else(|| {
            Error::setup("a layer for further tokens without a norm of its input is not supported")
        })??;
        let ropes = RopeTables::new(config.ropes(), weights.rope_factors()?.as_deref());
        let first = LayerBody::load((&config, spec), &ropes, &mut weights, hidden, at)?;
        let input = EagleInput::Mtp {
            target_norm: ends.norm.clone(),
            target_eps: target.rms_norm_eps as f32,
            embedding_norm,
            feature_norm,
            fc: weights.linear(&names.fc, (hidden, 2 * hidden), false)?,
            input_norm,
            count: mtp.count,
        };
        let shape = (config.vocab_size, hidden);
        let embedding = match &names.embedding {
            Some(name) => weights.embedding(name, shape)?,
            None => ends.embedding.clone(),
        };
        let mut output = ends.output.clone();
        if let Some(name) = &names.head {
            output.linear = weights.linear(name, shape, false)?;
        }
        let start = names.start(&weights);
        let is_own = |name: &str| {
            name.strip_prefix(&start)
                .is_some_and(|rest| names.owns(rest))
        };
        weights.finish(|name| !is_own(name))?;
        weights.device().synchronize()?;
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            reads: vec![target.num_layers()],
            embedding,
            input,
            first,
            others: Vec::new(),
            norm: Some(own.unwrap_or_else(|| ends.norm.clone())),
            // As those of other tokens, the features of a drafted one are what the output layer reads.
            norm_output: true,
            output,
            masked: None,
            ropes,
            info: config.info(),
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
            EagleInput::Mtp {
                embedding_norm,
                feature_norm,
                fc,
                input_norm,
                ..
            } => {
                let eps = self.config.rms_norm_eps as f32;
                let embedded = embedding_norm.forward(&embedded, eps)?;
                let normed = feature_norm.forward(features, eps)?;
                let x = fc.forward(&Tensor::cat(&[&embedded, &normed], 1)?)?;
                let read = input_norm.forward(&x, eps)?;
                Ok((x, read))
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

impl EagleHead {
    /// The residual stream after all layers and what is still to be added to it, of the rows with the stream
    /// and the first attention's input `(x, read)`; `None` if no row is wanted: of the last layer, only K and
    /// V are then computed.
    fn run(
        &self,
        (x, read): (&Tensor, &Tensor),
        is_wanted: bool,
        step: &Step<'_>,
        kv: &KvStore,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let pools = kv.layers.iter().map(LayerPool::Tokens);
        let pools: Vec<LayerPool<'_>> = pools.collect();
        let Some((&pool, pools)) = pools.split_first() else {
            return Err(Error::internal("the pool of a head has a layer"));
        };
        if !is_wanted && self.others.is_empty() {
            self.first.write(read, &self.config, step, pool)?;
            return Ok(None);
        }
        let (mut x, mut delta) = self.first.forward(x, read, &self.config, step, pool)?;
        let last = self.others.len();
        for ((i, layer), &pool) in (1..).zip(&self.others).zip(pools) {
            if !is_wanted && i == last {
                layer.forward_none((&x, &delta), &self.config, step, pool)?;
                return Ok(None);
            }
            (x, delta) = layer.forward(&x, &delta, &self.config, step, pool)?;
        }
        Ok(Some((x, delta)))
    }
}

impl Model for EagleHead {
    fn info(&self) -> &ModelInfo {
        &self.info
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
        let step = Step::new(&inputs, &spans, self.dtypes.activations)?;
        let (x, read) = self.rows(&inputs.tokens, &features)?;
        let is_wanted = inputs.wanted.is_some();
        let (Some((x, delta)), Some(wanted)) =
            (self.run((&x, &read), is_wanted, &step, kv)?, &inputs.wanted)
        else {
            return ForwardOutput::none(vocab_size);
        };
        let (x, delta) = (x.index_select(wanted, 0)?, delta.index_select(wanted, 0)?);
        let (hidden, normed) = match &self.norm {
            Some(norm) => norm.add(&x, &delta, self.config.rms_norm_eps as f32)?,
            None => {
                let sum = (x + delta)?;
                (sum.clone(), sum)
            }
        };
        let logits = self.output.forward(&normed)?;
        Ok(ForwardOutput {
            features: Some(if self.norm_output { normed } else { hidden }),
            ..ForwardOutput::of(logits)
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
            EagleInput::Eagle3 { before_fc, fc, .. } => {
                let eps = self.config.rms_norm_eps as f32;
                let hidden = match before_fc.as_slice() {
                    [] => hidden,
                    [whole] => whole.forward(&hidden, eps)?,
                    each => {
                        let parts = hidden.chunk(each.len(), 1)?;
                        let normed = each.iter().zip(&parts);
                        let normed =
                            normed.map(|(norm, part)| norm.forward(&part.contiguous()?, eps));
                        Tensor::cat(&normed.collect::<Result<Vec<_>>>()?, 1)?
                    }
                };
                fc.forward(&hidden)
            }
            EagleInput::Eagle {
                target_norm,
                target_eps,
                ..
            }
            | EagleInput::Mtp {
                target_norm,
                target_eps,
                ..
            } => target_norm.forward(&hidden, *target_eps),
        }
    }

    fn masked_block(&self) -> Option<MaskedBlock> {
        self.masked.as_ref().map(|(block, _)| *block)
    }

    fn mask_hidden(&self) -> Option<&Tensor> {
        self.masked.as_ref().map(|(_, hidden)| hidden)
    }

    fn layout(&self) -> String {
        let (before_fc, norm_before_residual) = match &self.input {
            EagleInput::Eagle { .. } => return "EAGLE-1".into(),
            EagleInput::Mtp { count: 1, .. } => return "a layer for further tokens (MTP)".into(),
            EagleInput::Mtp { count, .. } => {
                return format!("the first of {count} layers for further tokens (MTP)");
            }
            EagleInput::Eagle3 {
                before_fc,
                norm_before_residual,
                ..
            } => (before_fc, norm_before_residual),
        };
        let mut name = match &self.masked {
            Some((block, _)) => format!("P-EAGLE of {} depths", block.size),
            None if self.norm_output => "EAGLE-3.1".into(),
            None => "EAGLE-3".to_owned(),
        };
        let (layers, norms) = (self.config.num_layers(), before_fc.len());
        let notes = [
            (layers > 1).then(|| format!("{layers} layers")),
            (norms == 1).then(|| "a norm before fc".into()),
            (norms > 1).then(|| format!("{norms} norms before fc")),
            norm_before_residual.then(|| "the norm before the residual".into()),
            (self.output.ids.is_some())
                .then(|| format!("{} output ids", self.config.output_size())),
        ];
        for note in notes.into_iter().flatten() {
            name = format!("{name}, {note}");
        }
        name
    }
}
