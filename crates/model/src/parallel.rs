//! Parallel heads: a few layers that predict a block of tokens in one forward (DFlash, arXiv 2602.06036).
//!
//! The context of a block is what the target made of the tokens before it: every layer has the K and V of
//! one vector per committed position, the fused hidden states of some of the target's layers there. The
//! block is the embedding of the last token, whose hidden states do not exist yet, and of a mask token for
//! each position after it. Its rows see the context and one another; row `i`, from 1 on, gives the
//! distribution of the token at its own position. In the layout of DSpark (arXiv 2607.05147) row `i`, from 0
//! on, gives that of the token after its position, and a [`PathHead`] goes along the path of the drawn tokens, as it
//! does in the layouts of Domino and DFlash 2.

use super::block_conv::{BlockPlaces, ConvShape};
use super::dtypes::Dtypes;
use super::head_config::{EndScales, HeadConfig};
use super::inputs::Inputs;
use super::layer::{Layer, Step};
use super::layer_spec::QkNorm;
use super::linear::{Embedding, Linear};
use super::norm::Norm;
use super::output_layer::OutputLayer;
use super::path::{self, PathHead};
use super::rope::RopeTables;
use super::weights::Weights;
use super::{Ends, ModelConfig};
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvShape, KvStore, LayerPool};
use foretoken_core::model::{
    Batch, ForwardOutput, Head, MaskedBlock, Model, ModelInfo, PathOutput, PathRows, Span,
};
use foretoken_kernels::AttentionBatch;

/// A loaded head.
pub struct ParallelHead {
    config: ModelConfig,
    info: ModelInfo,
    reads: Vec<usize>,
    block: MaskedBlock,
    /// Whether rows of a block see only those before them in layers with a window.
    causal_windows: bool,
    convs: Option<ConvShape>,
    path: Option<PathHead>,
    embedding: Embedding,
    /// Projects the hidden states of some of the target's layers to the context, which is then normed.
    fc: Linear,
    context_norm: Norm,
    layers: Vec<Layer>,
    /// The norm before the output layer.
    norm: Norm,
    output: OutputLayer,
    ropes: RopeTables,
    dtypes: Dtypes,
    device: Device,
}

impl ParallelHead {
    /// Reads the weights of a head that reads the layers `taps` of `target`, whose first and last layers are
    /// `ends`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub(super) fn load(
        head: HeadConfig,
        taps: Vec<usize>,
        weights: Weights,
        target: &ModelConfig,
        ends: &Ends,
    ) -> Result<Self> {
        path::check(&head).map_err(Error::setup)?;
        let names = path::names_in(&weights);
        let mut weights = weights.with_names(names);
        let mut config = head.shape;
        let hidden = config.hidden_size;
        let reads = taps.len() * target.hidden_size;
        let has_norms = weights.has("layers.0.self_attn.q_norm.weight");
        for layer in &mut config.spec.layers {
            layer.qk_norm = has_norms.then_some(QkNorm::Head);
        }
        let block = head
            .block
            .ok_or_else(|| Error::internal("a parallel head has a block"))?;
        let mut embedding = weights.embedding_of_head(&config, &ends.embedding)?;
        if let Some(scale) = head.scales.embedding {
            embedding = embedding.scaled(Some(scale));
        }
        let fc = weights.linear("fc", (hidden, reads), false)?;
        let context_norm = Norm::rms(&mut weights, "hidden_norm", hidden)?;
        let ropes = RopeTables::new(config.ropes(), weights.rope_factors()?.as_deref());
        let layers = (0..config.num_layers()).map(|layer| {
            let name = format!("layers.{layer}");
            let at = |part: &str| format!("{name}.{part}");
            let mut layer = Layer::load(&config, layer, &ropes, &mut weights, at)?;
            if let Some(shape) = head.convs {
                layer.load_convs(&mut weights, &name, hidden, shape)?;
            }
            Ok(layer)
        });
        let layers = layers.collect::<Result<_>>()?;
        let norm = Norm::rms(&mut weights, "norm", hidden)?;
        let mut output = OutputLayer::of_head(&mut weights, &config, &ends.output)?;
        let EndScales {
            logits, soft_cap, ..
        } = head.scales;
        if logits.or(soft_cap).is_some() {
            output.scale = logits;
            output.soft_cap = soft_cap.filter(|&cap| cap > 0.);
        }
        let path = PathHead::load(head.path, &config, &mut weights, output.size(), &embedding)?;
        weights.finish(|_| false)?;
        weights.device().synchronize()?;
        Ok(Self {
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
            reads: taps,
            block,
            causal_windows: head.causal_windows,
            convs: head.convs,
            path,
            embedding,
            fc,
            context_norm,
            layers,
            norm,
            output,
            ropes,
            info: config.info(),
            config,
        })
    }

    fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// The residual stream after all layers and what is still to be added to it, of the rows with
    /// `tokens`, which follow those of `context`. `windowed` is the step of layers with a window, if it is
    /// another one.
    fn run(
        &self,
        tokens: &Tensor,
        context: Option<&Tensor>,
        (step, windowed): (&Step<'_>, Option<&Step<'_>>),
        kv: &KvStore,
    ) -> Result<(Tensor, Tensor)> {
        let mut x = self.embedding.forward(tokens)?;
        let mut delta = x.zeros_like()?;
        let specs = &self.config.spec.layers;
        for ((layer, spec), pool) in self.layers.iter().zip(specs).zip(&kv.layers) {
            let pool = LayerPool::Tokens(pool);
            let windowed = windowed.filter(|_| spec.window.is_some());
            let step = windowed.unwrap_or(step);
            (x, delta) = layer.forward_after(context, &x, &delta, &self.config, step, pool)?;
        }
        Ok((x, delta))
    }
}

/// The spans after the first `others` rows, as if those rows did not exist.
fn spans_after(others: usize, spans: &[Span]) -> Vec<Span> {
    let after = spans.iter().filter(|span| span.rows.start >= others);
    let moved = after.map(|span| Span {
        rows: span.rows.start - others..span.rows.end - others,
        ..span.clone()
    });
    moved.collect()
}

/// `spans` with rows that see only the rows before them.
fn causal(spans: &[Span]) -> Vec<Span> {
    let causal = spans.iter().map(|span| Span {
        tree: None,
        ..span.clone()
    });
    causal.collect()
}

impl Model for ParallelHead {
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
        let context = match &batch.context_features {
            Some(features) => Some(features.contiguous()?),
            None => None,
        };
        let read = context.as_ref().map_or(Ok(0), |context| context.dim(0))?;
        let wrong = || Error::internal(format!("a batch of {} context rows", read));
        let rows = inputs.slots.len().checked_sub(read).ok_or_else(wrong)?;
        let spans = spans_after(read, &batch.spans);
        let attention = AttentionBatch::new(&spans, kv.block_size, slots)?;
        let step = Step::new(&inputs, &attention, self.dtypes.activations)?;
        if rows == 0 {
            for (layer, pool) in self.layers.iter().zip(&kv.layers) {
                let pool = LayerPool::Tokens(pool);
                let context = context.as_ref().ok_or_else(wrong)?;
                layer.write(context, &self.config, &step, pool)?;
            }
            return ForwardOutput::none(vocab_size);
        }
        let tokens = inputs.tokens.narrow(0, read, rows)?;
        let dtype = self.dtypes.activations;
        let places = self
            .convs
            .map(|convs| BlockPlaces::new(&spans, convs.taps, dtype, &self.device));
        let places = places.transpose()?;
        let step = step.with_places(places.as_ref());
        let spans = causal(&spans);
        let spans = AttentionBatch::new(&spans, kv.block_size, slots)?;
        let windowed = Step::new(&inputs, &spans, dtype)?.with_places(places.as_ref());
        let windowed = self.causal_windows.then_some(&windowed);
        let (x, delta) = self.run(&tokens, context.as_ref(), (&step, windowed), kv)?;
        let wanted = (batch.logits.iter()).map(|&row| row.checked_sub(read as u32));
        let wanted: Vec<u32> = wanted.collect::<Option<_>>().ok_or_else(wrong)?;
        if wanted.is_empty() {
            return ForwardOutput::none(vocab_size);
        }
        let wanted = Tensor::new(wanted, &self.device)?;
        let (x, delta) = (x.index_select(&wanted, 0)?, delta.index_select(&wanted, 0)?);
        let (_, normed) = self.norm.add(&x, &delta, self.eps())?;
        let logits = self.output.forward(&normed)?;
        Ok(ForwardOutput {
            path_hidden: self.path.is_some().then_some(normed),
            ..ForwardOutput::of(logits)
        })
    }
}

impl Head for ParallelHead {
    fn reads(&self) -> &[usize] {
        &self.reads
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        // Hidden states may be a view of the states of other sequences, too.
        let hidden = hidden.to_dtype(self.dtypes.activations)?.contiguous()?;
        let context = self.fc.forward(&hidden)?;
        self.context_norm.forward(&context, self.eps())
    }

    fn masked_block(&self) -> Option<MaskedBlock> {
        Some(self.block)
    }

    fn follows_paths(&self) -> bool {
        self.path.is_some()
    }

    fn follow(&self, rows: &PathRows<'_>) -> Result<PathOutput> {
        let path = self.path.as_ref();
        let path = path.ok_or_else(|| Error::internal("this head follows no paths"))?;
        path.step(rows, &self.output)
    }

    fn layout(&self) -> String {
        let (size, windows) = (self.block.size, self.config.spec.layers.iter());
        let windows = windows.filter(|layer| layer.window.is_some()).count();
        let mut name = match &self.path {
            Some(path) => format!("{}, {}, blocks of {size}", path.name(), path.describe()),
            None => format!("DFlash, blocks of {size}"),
        };
        if windows > 0 {
            name = format!("{name}, {windows} layers with windows");
        }
        name
    }
}
