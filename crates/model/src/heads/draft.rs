//! Draft heads of decoder layers that read hidden states of their target. A [`HeadConfig`] says how.
//!
//! An EAGLE head reads them beside tokens. Row `i` has the token at position `i + 1` and the features of position `i`,
//! and predicts the token at position `i + 2`. The features of a committed token come from the target; those of a token
//! that the head itself drafted are the head's own output for the row before (EAGLE, Li et al. 2024, section 3.1;
//! EAGLE-3, Li et al. 2025, arXiv 2503.01840, sections 3.1 and 3.2). In a P-EAGLE head, rows after the last token have
//! a mask token and learned features instead, so that one forward predicts all depths. The layer for further tokens of
//! a target's own checkpoint is such a head, too.
//!
//! A parallel head reads them as its context and predicts a block of tokens in one forward (DFlash, arXiv 2602.06036):
//! every layer has the K and V of one vector per committed position, the fused hidden states of some of the target's
//! layers there. The block is the embedding of the last token, whose hidden states do not exist yet, and of a mask
//! token for each position after it. Its rows see the context and one another; row `i`, from 1 on, gives the
//! distribution of the token at its own position. In the layout of DSpark (arXiv 2607.05147) row `i`, from 0 on, gives
//! that of the token after its position, and a [`PathHead`] goes along the path of the drawn tokens, as it does in the
//! layouts of Domino and DFlash 2.

mod blocks;

use super::HeadKind;
use super::config::HeadConfig;
use super::input::{Fusion, TokenInput, features_of};
use super::mtp::{self, MtpNames};
use super::path::{self, PathHead};
use super::states;
use crate::layers;
use crate::layers::linear::Embedding;
use crate::layers::norm::Norm;
use crate::layers::output::OutputLayer;
use crate::layers::rope::RopeTables;
use crate::layers::{Layer, Step};
use crate::weights::Weights;
use crate::weights::dtypes::Dtypes;
use crate::{Ends, ModelConfig};
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvShape, KvStore, LayerPool};
use foretoken_core::model::{
    Batch, DepthRates, Draw, ForwardOutput, Head, MaskedBlock, Model, ModelInfo, PathOutput,
    PathRows,
};
use std::sync::Arc;

/// A loaded head.
pub struct DraftHead {
    /// Its shape is that of the layers.
    pub(super) head: HeadConfig,
    info: ModelInfo,
    reads: Vec<usize>,
    embedding: Embedding,
    fusion: Fusion,
    /// How features become rows beside tokens; `None` = they are the context of rows that are tokens alone.
    input: Option<TokenInput>,
    layers: Vec<Layer>,
    /// The norm before the output layer; EAGLE-1 has none.
    norm: Option<Norm>,
    output: OutputLayer,
    /// The hidden states of masks, `[1, reads * target's hidden]`; only of a P-EAGLE head.
    mask_hidden: Option<Tensor>,
    path: Option<PathHead>,
    layout: String,
    pub(super) ropes: RopeTables,
    pub(super) dtypes: Dtypes,
    device: Device,
}

impl DraftHead {
    /// Reads the weights of a head that reads the layers `taps` of `target`, whose first and last layers are
    /// `ends`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub(crate) fn load(
        mut head: HeadConfig,
        taps: Vec<usize>,
        mut weights: Weights,
        target: &ModelConfig,
        ends: &Ends,
    ) -> Result<Self> {
        path::check(&head).map_err(Error::setup)?;
        let is_eagle1 = head.kind == HeadKind::Eagle;
        let is_block = head.kind == HeadKind::Parallel;
        let mut first = "layers.0";
        if is_block {
            let names = path::names_in(&weights);
            weights = weights.with_names(names);
        } else if weights.has("midlayer.hidden_norm.weight") {
            first = "midlayer";
        }
        let has_norms = weights.has(&format!("{first}.self_attn.q_norm.weight"));
        head.set_inputs(has_norms);
        let mut embedding = weights.embedding_of_head(&head.shape, &ends.embedding)?;
        if head.scales.embedding.is_some() {
            embedding = embedding.scaled(head.scales.embedding);
        }
        let reads = taps.len() * target.hidden_size;
        let fusion = if is_eagle1 {
            Fusion::of_last(&weights, target, ends)
        } else {
            Fusion::load(&head, &mut weights, (taps.len(), target.hidden_size))?
        };
        let input = (!is_block).then(|| TokenInput::of_eagle(&head, &mut weights, first, reads));
        let input = input.transpose()?;
        let ropes = RopeTables::new(head.shape.ropes(), weights.rope_factors()?.as_deref());
        let layers = load_layers(&head, first, &ropes, &mut weights)?;
        let (norm, output) = if is_eagle1 {
            (None, ends.output.clone())
        } else {
            let norm = Norm::rms(&mut weights, "norm", head.shape.hidden_size)?;
            let output = OutputLayer::of_head(&mut weights, &head.shape, &ends.output)?;
            (Some(norm), output.scaled(head.scales))
        };
        let sizes = (
            output.size(),
            head.block.map_or(0, |block| block.max_depth()),
        );
        let path = PathHead::load(head.path, &head.shape, &mut weights, sizes, &embedding)?;
        let has_masks = head.kind == HeadKind::PEagle;
        let mask_hidden = has_masks.then(|| weights.tensor("mask_hidden", &[1, 1, reads]));
        let mask_hidden = mask_hidden.transpose()?;
        weights.finish(|_| false)?;
        weights.device().synchronize()?;
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            info: head.shape.info(),
            layout: head.layout(taps.len(), output.ids.is_some()),
            reads: taps,
            head,
            embedding,
            fusion,
            input,
            layers,
            norm,
            output,
            mask_hidden: mask_hidden.map(|of| of.reshape((1, reads))).transpose()?,
            path,
            ropes,
        })
    }

    /// Reads the first layer for further tokens of a checkpoint like `target`. Its parts are called `names`. The parts
    /// that the layer lacks are shared with the target: they are those of the target's `ends`. It predicts the ids
    /// `output_ids`; `None` = all.
    ///
    /// # Errors
    /// Returns the errors of [`DraftHead::load`]. A tensor of the layer that is not read is an error, too.
    pub(crate) fn load_mtp(
        names: &MtpNames,
        mut weights: Weights,
        target: &ModelConfig,
        ends: &Ends,
        output_ids: Option<&Arc<[u32]>>,
    ) -> Result<Self> {
        let mtp = (target.spec.mtp.as_ref())
            .ok_or_else(|| Error::internal("a named layer for further tokens has a spec"))?;
        let mut head = mtp::config(target, mtp);
        if let Some(ids) = output_ids {
            head.shape = head.shape.with_output_ids(ids).map_err(Error::setup)?;
        }
        let config = &head.shape;
        let shape = (config.vocab_size, config.hidden_size);
        let norm = match &names.norm {
            Some(name) => Norm::load(&mut weights, name, shape.1, config.spec.norm)?,
            None => ends.norm.clone(),
        };
        let input = TokenInput::of_mtp(names, &mut weights, config)?;
        let ropes = RopeTables::new(config.ropes(), weights.rope_factors()?.as_deref());
        let at = |part: &str| format!("{}{part}", names.layer);
        let layer = Layer::load(config, 0, &ropes, &mut weights, at)?;
        let embedding = match &names.embedding {
            Some(name) => weights.embedding(name, shape)?,
            None => ends.embedding.clone(),
        };
        let mut output = ends.output.clone();
        if let Some(name) = &names.head {
            let linear = weights.output_linear(name, config)?;
            output = output.cut_to(linear, &mut weights, config)?;
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
            info: config.info(),
            layout: match mtp.count {
                1 => "a layer for further tokens (MTP)".into(),
                count => format!("the first of {count} layers for further tokens (MTP)"),
            },
            reads: vec![target.num_layers()],
            fusion: Fusion::of_last(&weights, target, ends),
            head,
            embedding,
            input: Some(input),
            layers: vec![layer],
            norm: Some(norm),
            output,
            mask_hidden: None,
            path: None,
            ropes,
        })
    }

    fn eps(&self) -> f32 {
        self.head.shape.rms_norm_eps as f32
    }

    /// The residual stream of the rows with `features` and `tokens`, `[rows, hidden]`, and what the attention of the first layer reads
    /// of them; `None` = what that layer makes of the stream.
    pub(super) fn rows(
        &self,
        features: Option<&Tensor>,
        tokens: &Tensor,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let embedded = self.embedding.forward(tokens)?;
        let Some(input) = &self.input else {
            return Ok((embedded, None));
        };
        let dims = [tokens.dim(0)?, self.info.hidden_size];
        let features = features_of(features, dims, self.dtypes.activations, &self.device)?;
        input.forward(&embedded, &features, self.eps())
    }

    /// The residual stream after all layers and what is still to be added to it; `None` if no row is wanted: of the
    /// last layer, only K and V are then computed. The attention of all layers also reads `context`, rows before those
    /// of [`DraftHead::rows`] of which only K and V are computed. `windowed` is the step of layers with a window, if it
    /// is another one.
    pub(super) fn run(
        &self,
        (mut x, mut first): (Tensor, Option<Tensor>),
        context: Option<&Tensor>,
        is_wanted: bool,
        (step, windowed): (&Step<'_>, Option<&Step<'_>>),
        kv: &KvStore,
    ) -> Result<Option<(Tensor, Tensor)>> {
        let mut delta = None;
        let layers = self
            .layers
            .iter()
            .zip(&self.head.shape.spec.layers)
            .zip(&kv.layers);
        for (i, ((layer, spec), pool)) in layers.enumerate() {
            let pool = LayerPool::Tokens(pool);
            let windowed = windowed.filter(|_| spec.window.is_some());
            let step = windowed.unwrap_or(step);
            let (sum, own) = match first.take() {
                Some(read) => (x, read),
                None => {
                    let delta = delta.map_or_else(|| x.zeros_like(), Ok)?;
                    layer.attention_input(&x, &delta, step)?
                }
            };
            let read = match context {
                Some(context) => Tensor::cat(&[context, &own], 0)?,
                None => own,
            };
            if !is_wanted && i + 1 == self.layers.len() {
                layer.write(&read, step, pool)?;
                return Ok(None);
            }
            let (stream, added) = layer.forward_read(&sum, &read, step, pool)?;
            (x, delta) = (stream, Some(added));
        }
        Ok(delta.map(|delta| (x, delta)))
    }

    /// The output of the rows whose residual stream is `x`, with `delta` still to be added to it.
    pub(super) fn tail(&self, x: &Tensor, delta: &Tensor) -> Result<ForwardOutput> {
        let (hidden, normed) = layers::add(x, delta, self.norm.as_ref(), self.eps())?;
        let logits = self.output.forward(&normed)?;
        let features = if self.head.norm_output {
            &normed
        } else {
            &hidden
        };
        Ok(ForwardOutput {
            features: self.input.is_some().then(|| features.clone()),
            path_hidden: self.path.is_some().then_some(normed),
            ..ForwardOutput::of(logits)
        })
    }
}

/// Reads the layers of `head`; the names of the first one begin with `first`.
fn load_layers(
    head: &HeadConfig,
    first: &str,
    ropes: &RopeTables,
    weights: &mut Weights,
) -> Result<Vec<Layer>> {
    let shape = &head.shape;
    let layers = (0..shape.num_layers()).map(|layer| {
        let name = match layer {
            0 => first.to_owned(),
            layer => format!("layers.{layer}"),
        };
        let at = |part: &str| format!("{name}.{part}");
        let mut layer = Layer::load(shape, layer, ropes, weights, at)?;
        if let Some(convs) = head.convs {
            layer.load_convs(weights, &name, shape.hidden_size, convs)?;
        }
        Ok(layer)
    });
    layers.collect()
}

impl Model for DraftHead {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn kv_shape(&self) -> KvShape {
        let Dtypes { kv, kv_form, .. } = self.dtypes;
        let mut shape = self.head.shape.kv_shape_in(kv_form, kv);
        if self.head.path.lilicorr.is_some() {
            shape.layers.push(states::shape(self.info.hidden_size));
        }
        shape
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        if self.input.is_some() {
            self.forward_tokens(batch, kv)
        } else {
            self.forward_blocks(batch, kv)
        }
    }

    fn forward_chain(
        &mut self,
        batches: &mut [Batch],
        kv: &mut KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        self.run_chain(batches, kv, draw)
    }
}

impl Head for DraftHead {
    fn reads(&self) -> &[usize] {
        &self.reads
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        self.fusion.forward(hidden)
    }

    fn masked_block(&self) -> Option<MaskedBlock> {
        self.head.block
    }

    fn mask_hidden(&self) -> Option<&Tensor> {
        self.mask_hidden.as_ref()
    }

    fn follows_paths(&self) -> bool {
        self.path.is_some()
    }

    fn follow(&self, rows: &PathRows<'_>) -> Result<PathOutput> {
        let path = self.path.as_ref();
        let path = path.ok_or_else(|| Error::internal("this head follows no paths"))?;
        path.step(rows, &self.output)
    }

    fn rates(&self) -> Option<&DepthRates> {
        self.head.rates.as_ref()
    }

    fn layout(&self) -> String {
        self.layout.clone()
    }
}
