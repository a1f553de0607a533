//! One decoder for all architectures, which differ by the layers of [`ModelConfig`].

pub(crate) mod graphs;
mod one_launch;
mod stages;
#[cfg(test)]
mod tests;

use crate::config::ModelConfig;
use crate::layers::input::LayerInputs;
use crate::layers::inputs::Inputs;
use crate::layers::linear::{Embedding, Linear};
use crate::layers::norm::Norm;
use crate::layers::output::OutputLayer;
use crate::layers::rope::RopeTables;
use crate::layers::{Layer, Step};
use crate::lora::{LinearPart, LoraTarget};
use crate::spec::LayerSpec;
use crate::split::LayerSplit;
use crate::weights::Weights;
use crate::weights::dtypes::Dtypes;
use crate::{Ends, Layers, LoadedModel, names};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::{Batch, ForwardOutput, GiveUp, Model, ModelInfo, Taps};
use foretoken_kernels::{AttentionBatch, Span, StateBatch, StateRows, Writes, copy_to};
use stages::{Stage, stage};

/// A loaded model. All activations are `[rows, width]`: rows of many sequences, side by side.
pub struct Decoder {
    config: ModelConfig,
    info: ModelInfo,
    embedding: Embedding,
    layer_inputs: Option<LayerInputs>,
    layers: Vec<Layer>,
    norm: Norm,
    /// `None` of a checkpoint that was saved without it, for embeddings, and of a model that has no next token.
    output: Option<OutputLayer>,
    ropes: RopeTables,
    dtypes: Dtypes,
    /// Of all that is no layer.
    device: Device,
    split: LayerSplit,
    /// Whether a GPU adds in the same order for any number of rows.
    batch_invariant: bool,
    lora: LoraTarget,
}

impl Decoder {
    /// Reads all weights; calls `done` after each layer.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        mut config: ModelConfig,
        mut weights: Weights,
        mut done: impl FnMut(),
    ) -> Result<Self> {
        weights = weights.with_names(config.spec.names);
        // Of classes for images and texts, the outer and the inner configuration may disagree.
        if let Some(has_head) = weights.have_head().filter(|_| config.is_part()) {
            config.tie_word_embeddings = !has_head;
        }
        let hidden = config.hidden_size;
        let embedding = weights.embedding(names::EMBEDDING, (config.vocab_size, hidden))?;
        let mut embedding = embedding.scaled(config.spec.embedding_scale);
        if config.spec.has_embedding_norm {
            let eps = config.rms_norm_eps as f32;
            embedding = embedding.normed(hidden, eps, weights.device())?;
        }
        let layer_inputs = (config.spec.layer_input_width)
            .map(|width| LayerInputs::load(&config, width, &mut weights))
            .transpose()?;
        let ropes = RopeTables::new(config.ropes(), weights.rope_factors()?.as_deref());
        let mut layers = Vec::with_capacity(config.num_layers());
        for i in 0..config.num_layers() {
            let at = |part: &str| names::layer(config.spec.stored_layer(i), part);
            weights.begin_layer(Some(i));
            layers.push(Layer::load(&config, i, &ropes, &mut weights, at)?);
            done();
        }
        weights.begin_layer(None);
        let split = weights.split_of(config.num_layers());
        let activations = weights.dtypes().activations;
        let lora = number_sites(&mut layers, &config, (&split, activations));
        let norm = config.spec.final_norm.unwrap_or(config.spec.norm);
        let norm = Norm::load(&mut weights, names::NORM, hidden, norm)?;
        let linear = if config.spec.is_bidirectional() {
            weights.skip(&format!("{}.weight", names::HEAD));
            None
        } else if config.tie_word_embeddings && config.draft_vocab_size.is_none() {
            Some(embedding.tied_head())
        } else if weights.are_without_head() && output_name(&config) == names::HEAD {
            None
        } else {
            Some(weights.output_linear(output_name(&config), &config)?)
        };
        let output = linear.map(|linear| OutputLayer::new(linear, &mut weights, &config));
        let output = output.transpose()?;
        let unread = config.spec.unread.iter();
        let unread: Vec<String> = unread.map(|start| weights.stored_start(start)).collect();
        let unread = unread.iter().map(String::as_str);
        let skipped: Vec<&str> = unread
            .chain(config.skipped_tensors.iter().copied())
            .collect();
        weights.finish(|name| skipped.iter().any(|start| name.starts_with(start)))?;
        // Each thread has its own GPU queue, and another thread may use the weights.
        for device in split.devices() {
            device.synchronize()?;
        }
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            split,
            info: config.info(),
            config,
            embedding,
            layer_inputs,
            layers,
            norm,
            output,
            ropes,
            batch_invariant: false,
            lora,
        })
    }

    /// Makes a GPU add in the same order for any number of rows and any chunks of a prompt, which is
    /// slower.
    ///
    /// # Errors
    /// A setup error if a weight has no kernel for that, or the device fails.
    pub fn with_batch_invariance(mut self) -> Result<Self> {
        self.linears().try_for_each(Linear::set_batch_invariant)?;
        self.batch_invariant = true;
        Ok(self)
    }

    fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        let layers = self.layers.iter_mut().flat_map(Layer::linears);
        let inputs = self.layer_inputs.iter_mut().map(LayerInputs::projection);
        let output = self.output.iter_mut().map(|output| &mut output.linear);
        inputs.chain(layers).chain(output)
    }

    /// A model of these `layers` of this one (ascending indices), with the same embedding and output
    /// layer: the residual stream goes past the others. It shares the weights and has its own, smaller
    /// KV pool. It is the draft of self-speculative decoding (Zhang et al. 2023, arXiv 2309.08168).
    ///
    /// # Errors
    /// A setup error if `layers` is empty, not ascending, or names a layer that does not exist, or one reads K and V
    /// of a layer that is not among them.
    pub fn subset(&self, layers: &[usize]) -> Result<Self> {
        let count = self.layers.len();
        let ascending = layers.is_sorted_by(|a, b| a < b);
        if !ascending || layers.last().is_none_or(|&last| last >= count) {
            return Err(Error::setup(format!(
                "a draft cannot have the layers {layers:?} of a model with {count} layers"
            )));
        }
        let config = ModelConfig {
            spec: self.config.spec.subset(layers).map_err(Error::setup)?,
            ..self.config.clone()
        };
        Ok(Self {
            info: config.info(),
            config,
            embedding: self.embedding.clone(),
            layer_inputs: self.layer_inputs.clone(),
            layers: layers.iter().map(|&i| self.layers[i].clone()).collect(),
            norm: self.norm.clone(),
            output: self.output.clone(),
            ropes: self.ropes.clone(),
            dtypes: self.dtypes,
            device: self.device.clone(),
            split: self.split.subset(layers),
            batch_invariant: self.batch_invariant,
            lora: self.lora.clone(),
        })
    }

    /// The dtype of activations.
    pub(crate) fn activations(&self) -> DType {
        self.dtypes.activations
    }

    /// Query heads per key head, of the layer with the most.
    pub(crate) fn query_heads_a_key(&self) -> usize {
        self.config.max_query_heads_a_key()
    }

    /// The batch's spans in the form that attention takes, checked.
    ///
    /// # Errors
    /// If a span reaches outside the pool.
    pub(crate) fn spans<'a>(&self, batch: &'a Batch, kv: &KvStore) -> Result<AttentionBatch<'a>> {
        let spans = AttentionBatch::new(&batch.spans, kv.block_size, kv.num_slots())?;
        let spans = spans.with_max_group(self.query_heads_a_key());
        Ok(spans.with_batch_invariance(self.batch_invariant))
    }

    /// The rest of the batch, in device memory, checked.
    ///
    /// # Errors
    /// See [`Inputs::new`].
    pub(crate) fn inputs(&self, batch: &Batch, kv: &KvStore) -> Result<Inputs> {
        self.lora.free_unused();
        self.inputs_on(&self.device, batch, kv)
    }

    /// The same, in the memory of one of the devices of layers.
    fn inputs_on(&self, device: &Device, batch: &Batch, kv: &KvStore) -> Result<Inputs> {
        let vocab_size = self.config.vocab_size;
        let slots = kv.num_slots();
        let ropes = (self.ropes.tables(), self.dtypes.activations);
        let mut inputs = Inputs::new(batch, ropes, vocab_size, slots, device)?;
        inputs.states = StateBatch::new(self.state_rows(batch)?);
        inputs.with_taps(batch.taps.as_ref(), self.layers.len())
    }

    /// The rows of `batch` by sequence, if layers have states.
    ///
    /// # Errors
    /// If a sequence goes on and nobody said with which state.
    pub(crate) fn state_rows(&self, batch: &Batch) -> Result<Vec<StateRows>> {
        match self.config.spec.is_recurrent() {
            true => batch.state_rows(),
            false => Ok(Vec::new()),
        }
    }

    /// Adds to `writes` another batch of the same size, in the place of `inputs`; see [`Inputs::replace`].
    ///
    /// # Errors
    /// See there.
    pub(crate) fn replace_inputs(
        &self,
        inputs: &Inputs,
        batch: &Batch,
        writes: &mut Writes,
    ) -> Result<()> {
        self.lora.free_unused();
        inputs.replace(batch, self.ropes.tables(), writes)
    }

    /// The last layer that writes K and V, or a state. Of later ones only rows with logits are needed.
    fn last_with_kv(&self) -> usize {
        let mut layers = self.config.spec.layers.iter();
        let last = layers.rposition(LayerSpec::keeps);
        last.unwrap_or_default()
    }

    /// The spans of the rows with logits, if the last layers need not compute the others: of a prompt these are
    /// most. A GPU computes all, with the tables that it has.
    fn spans_with_logits(&self, batch: &Batch) -> Option<Vec<Span>> {
        let last = self.last_with_kv();
        let tapped = |taps: &Taps| taps.layers.iter().any(|&layer| layer > last);
        let reads_last = !batch.last_hidden.is_empty() || batch.taps.as_ref().is_some_and(tapped);
        if !self.device.is_cpu() || self.split.count() > 1 || reads_last {
            return None;
        }
        Span::of_rows(&batch.spans, &batch.logits)
    }

    /// Logits, `[inputs.wanted, vocab_size]` f32, and tapped hidden states. `few` are the spans of the wanted
    /// rows, if the last layers compute no others. Copies nothing between host and device if the tables of
    /// `spans` were already sent.
    ///
    /// # Errors
    /// If the shape of the pool is not the model's, or the device fails.
    pub(crate) fn run(
        &self,
        inputs: &Inputs,
        spans: &AttentionBatch<'_>,
        few: Option<&AttentionBatch<'_>>,
        kv: &KvStore,
    ) -> Result<ForwardOutput> {
        completed(self.run_unless(inputs, (spans, few), &[], kv, &|_| false)?)
    }

    /// As [`Decoder::run`] with `spans` and `few`, but asks `gives_up` before each layer with all rows but the first; `None` = it was
    /// given up. `stages` are those of the layers that are on other GPUs than the first.
    fn run_unless(
        &self,
        inputs: &Inputs,
        (spans, few): (&AttentionBatch<'_>, Option<&AttentionBatch<'_>>),
        stages: &[Stage<'_>],
        kv: &KvStore,
        gives_up: &GiveUp<'_>,
    ) -> Result<Option<ForwardOutput>> {
        let config = &self.config;
        let mut x = self.embedding.forward(&inputs.tokens)?;
        let own = self.layer_inputs.as_ref().map(|own| {
            let eps = config.rms_norm_eps as f32;
            own.forward(&inputs.tokens, &x, eps)
        });
        let step = Step::new(config, inputs, spans)?;
        let mut step = step.with_layer_inputs(own.transpose()?);
        // Made after `x` in each forward: the first norm may read `x` while the kernel before it still runs.
        let mut delta = x.zeros_like()?;
        let (mut inputs, mut gpu) = (inputs, 0);
        let mut tapped = Vec::new();
        let last_with_kv = self.last_with_kv();
        // Layers after the last with K/V have few rows, if any.
        let most = few.map_or(self.layers.len(), |_| last_with_kv + 1);
        let layers = self.layers.iter().zip(config.spec.pool_places());
        for (i, (layer, place)) in layers.enumerate() {
            if (1..most).contains(&i) && gives_up(i as f64 / most as f64) {
                return Ok(None);
            }
            if self.split.gpu(i) != gpu {
                gpu = self.split.gpu(i);
                let stage = stage(stages, gpu)?;
                inputs = &stage.inputs;
                step = self.next_step(stage, &step)?;
                let device = self.split.device(i);
                (x, delta) = (copy_to(&x, device)?, copy_to(&delta, device)?);
            }
            inputs.tap(i, &x, &delta, &mut tapped)?;
            let pool = kv.pool(place)?;
            let few = few.filter(|_| i == last_with_kv);
            match (few, &inputs.wanted) {
                (None, _) => (x, delta) = layer.forward(&x, &delta, &step, pool)?,
                (Some(_), None) => {
                    layer.forward_none((&x, &delta), &step, pool)?;
                    break;
                }
                (Some(few), Some(wanted)) => {
                    let rows = (wanted, few, &inputs.wanted_adapters);
                    (x, delta) = layer.forward_rows(rows, (&x, &delta), &step, pool)?;
                    if i + 1 < self.layers.len() {
                        step = step.only(wanted, few, &inputs.wanted_adapters)?;
                    }
                }
            }
        }
        inputs.tap(self.layers.len(), &x, &delta, &mut tapped)?;
        let to = inputs.logits.as_ref();
        let logits = match &inputs.wanted {
            None => ForwardOutput::none(config.vocab_size)?.logits,
            Some(_) if few.is_some() => self.logits(&x, &delta, to)?,
            Some(wanted) => {
                let (x, delta) = self.picked(wanted, &x, &delta)?;
                self.logits(&x, &delta, to)?
            }
        };
        let tapped = self.together(&tapped)?;
        let last_hidden = inputs.last_hidden.as_ref().map(|rows| -> Result<Tensor> {
            let (x, delta) = self.picked(rows, &x, &delta)?;
            Ok(self.normed(&x, &delta)?.to_dtype(DType::F32)?)
        });
        Ok(Some(ForwardOutput {
            tapped,
            last_hidden: last_hidden.transpose()?,
            experts_read: inputs.experts_read.take(),
            ..ForwardOutput::of(logits)
        }))
    }

    /// What the output layer reads of the rows whose residual stream is `x`, with `delta` still to be added
    /// to it.
    fn normed(&self, x: &Tensor, delta: &Tensor) -> Result<Tensor> {
        let eps = self.config.rms_norm_eps as f32;
        Ok(self.norm.add(x, delta, eps)?.1)
    }

    /// Logits of such rows, in the memory `to`, if there is any.
    fn logits(&self, x: &Tensor, delta: &Tensor, to: Option<&Tensor>) -> Result<Tensor> {
        let output = self.output.as_ref();
        let output = output.ok_or_else(|| Error::internal("the model has no output layer"))?;
        output.forward_to(&self.normed(x, delta)?, to)
    }
}

/// The output of a forward that nobody could give up.
fn completed(output: Option<ForwardOutput>) -> Result<ForwardOutput> {
    output.ok_or_else(|| Error::internal("a forward was given up"))
}

/// The name of the weight of the output layer of a model like `config`, if it is not the loaded embedding itself.
pub(crate) fn output_name(config: &ModelConfig) -> &'static str {
    if config.tie_word_embeddings && config.output_ids.is_some() {
        names::EMBEDDING
    } else {
        names::HEAD
    }
}

/// Numbers the linear layers that adapters can change, and says which they are, by the names that Hugging Face has. They
/// are where `split` says, with activations in `dtype`.
fn number_sites(
    layers: &mut [Layer],
    config: &ModelConfig,
    (split, dtype): (&LayerSplit, DType),
) -> LoraTarget {
    let linears = layers.iter_mut().enumerate().flat_map(|(index, layer)| {
        let linears = layer.adapted_linears();
        linears.map(move |linear| (split.gpu(index), linear))
    });
    let sites = linears.enumerate().map(|(site, (gpu, linear))| {
        let parts = linear.set_site(site).iter().cloned();
        let named = parts.map(|part| LinearPart {
            name: config.spec.weight_name(&part.name),
            ..part
        });
        (gpu, named.collect())
    });
    LoraTarget::new(sites.collect(), split.devices(), dtype)
}

impl LoadedModel for Decoder {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn lora_target(&self) -> Option<&LoraTarget> {
        Some(&self.lora)
    }

    fn split(&self) -> &LayerSplit {
        &self.split
    }

    fn ends(&self) -> Option<Ends> {
        Some(Ends {
            embedding: self.embedding.clone(),
            norm: self.norm.clone(),
            output: self.output.clone()?,
        })
    }

    fn layers(&self) -> Layers {
        Layers {
            all: self.layers.clone(),
            ropes: self.ropes.clone(),
            split: self.split.clone(),
        }
    }

    fn subset(&self, layers: &[usize]) -> Result<Box<dyn LoadedModel>> {
        Ok(Box::new(self.subset(layers)?))
    }
}

impl Model for Decoder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn takes_adapters(&self) -> bool {
        true
    }

    fn kv_shape(&self) -> KvShape {
        let Dtypes { kv, kv_form, .. } = self.dtypes;
        KvShape {
            gpus: self.split.pools(&self.config.spec),
            ..self.config.kv_shape_in(kv_form, kv)
        }
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn generates(&self) -> bool {
        self.output.is_some()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        completed(self.forward_unless(batch, kv, &|_| false)?)
    }

    /// A GPU computes layers later than they are asked for, so it cannot be told to stop.
    fn is_interruptible(&self) -> bool {
        self.device.is_cpu()
    }

    fn forward_unless(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        gives_up: &GiveUp<'_>,
    ) -> Result<Option<ForwardOutput>> {
        let inputs = self.inputs(batch, kv)?;
        let spans = self.spans(batch, kv)?;
        let few = self.spans_with_logits(batch);
        let few = few
            .as_deref()
            .map(|few| AttentionBatch::new(few, kv.block_size, kv.num_slots()));
        let few = few.transpose()?;
        let stages = self.stages(batch, kv)?;
        kv.prepare_states(inputs.states.rows())?;
        let output = self.run_unless(&inputs, (&spans, few.as_ref()), &stages, kv, gives_up)?;
        self.wait_for_layers()?;
        Ok(output)
    }
}
