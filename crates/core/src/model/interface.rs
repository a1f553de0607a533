//! The interface between the engine and a model.

use super::{Batch, MaskedBlock};
use crate::error::{Error, Result};
use crate::kv::{KvShape, KvStore};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

/// What the engine knows of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelInfo {
    /// The name of its architecture, for messages.
    pub architecture: String,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The longest sequence that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Ids that end a text; zero or more.
    pub eos_token_ids: Vec<u32>,
    /// The id that stands for tokens to guess, if the model was trained to guess several in one forward (PARD, An et al.
    /// 2025, arXiv 2504.18583): a row after `i` of them predicts the token `i` places further.
    pub mask_token: Option<u32>,
    /// Whether a token sees those after it, too. Then a text is read whole, in one forward, and its hidden states are all that
    /// it gives: it has no next token.
    pub is_bidirectional: bool,
    /// For each layer with experts: the number of its experts, and the number of them that a token uses.
    pub experts: Vec<(usize, usize)>,
    /// Multiplications of a token's forward, about.
    pub multiplications: f64,
    /// Upper bound on the number of values that a forward keeps of a row at a time, without its logits.
    pub row_values: usize,
}

/// The result of a forward.
#[derive(Debug)]
pub struct ForwardOutput {
    /// `[batch.logits.len(), vocab_size]`, f32, in the order of [`Batch::logits`].
    pub logits: Tensor,
    /// `[taps.rows, taps.layers * hidden_size]` of [`Batch::taps`]: for each row its hidden states, layer after
    /// layer, in the dtype of the activations and on the model's device. `None` if no layer or no row was
    /// requested.
    pub tapped: Option<Tensor>,
    /// `[batch.logits.len(), hidden_size]`, only of an EAGLE head: the [features](Batch::features) of the rows after
    /// those with logits.
    pub features: Option<Tensor>,
    /// `[batch.logits.len(), width]`, only of a head that [follows paths](Head::follows_paths): the hidden states of the
    /// rows with logits, or what else the head keeps of them.
    pub path_hidden: Option<Tensor>,
    /// `[batch.last_hidden.len(), hidden_size]`, f32, in the order of [`Batch::last_hidden`]: the residual
    /// stream after the final norm, Hugging Face's `last_hidden_state`. `None` if no row was requested.
    pub last_hidden: Option<Tensor>,
    /// Number of experts whose weights it read, over all layers with experts: an expert that several rows of a
    /// layer chose counts once. Those of all rows do not count. 0 without experts, of draft heads, and on a GPU, whose
    /// choices the host does not know.
    pub experts_read: usize,
}

impl ForwardOutput {
    /// The output of a forward that computed nothing but `logits`.
    pub fn of(logits: Tensor) -> Self {
        Self {
            logits,
            tapped: None,
            features: None,
            path_hidden: None,
            last_hidden: None,
            experts_read: 0,
        }
    }

    /// The output of a forward without requested logits, over `vocab_size` ids. It is on the host: GPUs have no
    /// empty allocations.
    pub fn none(vocab_size: usize) -> Result<Self> {
        let logits = Tensor::zeros((0, vocab_size), DType::F32, &Device::Cpu)?;
        Ok(Self::of(logits))
    }

    /// Whether the logits are in the memory of a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.logits.device().is_cuda()
    }

    /// Calls `work` with the logits, row after row; copies them to the host if they are on a GPU.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read<R>(&self, work: impl FnOnce(&[f32]) -> R) -> Result<R> {
        if let (Storage::Cpu(CpuStorage::F32(values)), layout) =
            (&*self.logits.storage_and_layout().0, self.logits.layout())
            && let Some((start, end)) = layout.contiguous_offsets()
        {
            return Ok(work(&values[start..end]));
        }
        Ok(work(&self.logits.flatten_all()?.to_vec1::<f32>()?))
    }
}

/// Whether to give up a forward of which this share, more than 0 and less than 1, is done.
pub type GiveUp<'a> = dyn Fn(f64) -> bool + 'a;

/// Draws a token from each row of the logits of a forward without waiting for a GPU, and returns their ids,
/// `[rows of logits]` u32: in the given memory, u32 of at least as many elements, if there is any.
pub type Draw<'a> = dyn FnMut(&ForwardOutput, Option<&Tensor>) -> Result<Tensor> + 'a;

/// A causal language model over a paged pool.
///
/// `forward` first writes the K and V of every row to its slot, then attends: each row sees its
/// span's context and the rows of its span that the mask allows. It touches no other slot. A row's
/// logits depend only on its own sequence, bit for bit: neither on the other spans nor on how the
/// sequence was divided into forwards (docs/cuda.md says when this holds on a GPU). Only a text whose tokens see those
/// after them must not be divided ([`ModelInfo::is_bidirectional`]).
pub trait Model: Send {
    /// What the engine knows of this model.
    fn info(&self) -> &ModelInfo;

    /// The shape of its K and V.
    fn kv_shape(&self) -> KvShape;

    /// The device of its weights and of its pool.
    fn device(&self) -> &Device;

    /// An empty pool of `num_blocks * block_size` slots for this model.
    ///
    /// # Errors
    /// If the device has no memory for it.
    fn new_kv(&self, num_blocks: usize, block_size: usize) -> Result<KvStore> {
        KvStore::new(self.kv_shape(), num_blocks, block_size, self.device())
    }

    /// Whether it has an output layer. Without one, as a [bidirectional](ModelInfo::is_bidirectional) one, it computes hidden
    /// states, and no logits.
    fn generates(&self) -> bool {
        true
    }

    /// Whether rows may have adapters.
    fn takes_adapters(&self) -> bool {
        false
    }

    /// The number of rows, at least `rows`, that a forward of `rows` rows is rounded up to: all forwards that are
    /// rounded up to the same number take the same time. It never falls as `rows` grows.
    fn padded_rows(&self, rows: usize) -> usize {
        rows
    }

    /// One ragged forward. The trait's documentation says what it may read and write.
    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput>;

    /// One forward for each of `batches`, at least one, and `draw` after each. All but the first take the tokens that were
    /// drawn from the logits before: row `i` that of the `i`-th row of logits, of which there are at least as many. A head's
    /// rows also read what it put out in those rows. Returns the last output. The host waits for nothing in between.
    ///
    /// # Errors
    /// Those of [`Model::forward`] and of `draw`. The slots of all batches then hold anything.
    fn forward_chain(
        &mut self,
        batches: &mut [Batch],
        kv: &mut KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        let mut last: Option<ForwardOutput> = None;
        for at in 0..batches.len() {
            let output = self.forward(&batches[at], kv)?;
            let ids = draw(&output, None)?;
            if let Some(next) = batches.get_mut(at + 1) {
                let rows = next.tokens.len();
                let of_rows = |all: &Tensor| all.narrow(0, 0, rows);
                next.drawn = Some(of_rows(&ids)?);
                next.features = output.features.as_ref().map(of_rows).transpose()?;
            }
            last = Some(output);
        }
        last.ok_or_else(|| Error::internal("a chain of no forwards"))
    }

    /// Whether [`Model::forward_unless`] may be given up between layers.
    fn is_interruptible(&self) -> bool {
        false
    }

    /// As [`Model::forward`], but given up as soon as `gives_up`, which gets the share of the forward that is done, returns
    /// true: `None`. The slots and states that the batch writes then hold anything, and nothing else has changed.
    ///
    /// # Errors
    /// See [`Model::forward`].
    fn forward_unless(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        _gives_up: &GiveUp<'_>,
    ) -> Result<Option<ForwardOutput>> {
        self.forward(batch, kv).map(Some)
    }
}

/// How often a head's first guess for a draft token was right, where those for the tokens before it were.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DepthRates {
    /// In greedy texts: for the first, the second, ... token of a draft. Deeper tokens are like the last one.
    pub greedy: Vec<f32>,
    /// In texts at temperature 1, if accepted as often as possible: the overlap of the distributions.
    pub sampled: Vec<f32>,
}

/// A draft head: a model that reads, besides tokens, hidden states of its target.
pub trait Head: Model {
    /// The target's layers whose hidden states it reads, as in [`Taps::layers`](super::Taps::layers).
    fn reads(&self) -> &[usize];

    /// The features, `[rows, hidden_size]`, that it makes of the target's hidden states,
    /// `[rows, reads().len() * hidden_size of the target]`; see [`Batch::features`] and
    /// [`Batch::context_features`].
    ///
    /// # Errors
    /// If the shape is another one, or the device fails.
    fn fuse(&self, hidden: &Tensor) -> Result<Tensor>;

    /// The largest block that a parallel head predicts; `None` = it predicts one token, as EAGLE's do.
    fn masked_block(&self) -> Option<MaskedBlock> {
        None
    }

    /// Whether the tokens of its blocks depend on those before them, by [`Head::follow`]. Its forwards then
    /// return the hidden states of the rows with logits, too.
    fn follows_paths(&self) -> bool {
        false
    }

    /// Applies to some rows of blocks what the tokens before them make of their logits.
    ///
    /// # Errors
    /// If it follows no paths, or the device fails.
    fn follow(&self, _rows: &PathRows<'_>) -> Result<PathOutput> {
        Err(Error::internal("this head follows no paths"))
    }

    /// Whether it drafts all tokens from the place of the last committed row, whose K and V it does not write again:
    /// what it drafts has no K and V. Rows then have [`Batch::written`].
    fn drafts_in_place(&self) -> bool {
        false
    }

    /// Values that stand for the target's hidden states in rows with masks, `[1, width as for fuse]`. Only a
    /// P-EAGLE head has them: it predicts a block, and its rows are otherwise EAGLE's.
    fn mask_hidden(&self) -> Option<&Tensor> {
        None
    }

    /// How often its guesses were right in its training; `None` = its checkpoint does not say.
    fn rates(&self) -> Option<&DepthRates> {
        None
    }

    /// The name of its layout and what distinguishes it, for the log.
    fn layout(&self) -> String {
        "a draft head".into()
    }
}

/// The network that drafts for a target: a model of its own, or a head.
pub enum DraftNetwork {
    /// A model of its own.
    Model(Box<dyn Model>),
    /// A head, which reads the target's hidden states.
    Head(Box<dyn Head>),
}

impl DraftNetwork {
    /// The network as a model; a head is one, too.
    pub fn model(&self) -> &dyn Model {
        match self {
            Self::Model(model) => &**model,
            Self::Head(head) => &**head,
        }
    }

    /// The network as a mutable model; see [`DraftNetwork::model`].
    pub fn model_mut(&mut self) -> &mut dyn Model {
        match self {
            Self::Model(model) => &mut **model,
            Self::Head(head) => &mut **head,
        }
    }

    /// The head; `None` if it is a model.
    pub fn head(&self) -> Option<&dyn Head> {
        match self {
            Self::Model(_) => None,
            Self::Head(head) => Some(&**head),
        }
    }

    /// The largest block that it predicts in one forward; `None` = it predicts one token. See [`Head::masked_block`]
    /// and [`ModelInfo::mask_token`].
    pub fn masked_block(&self) -> Option<MaskedBlock> {
        match self {
            Self::Model(model) => model.info().mask_token.map(MaskedBlock::of_model),
            Self::Head(head) => head.masked_block(),
        }
    }
}

/// Rows of a block, each after a token.
pub struct PathRows<'a> {
    /// The block's logits of these rows, `[rows, vocab_size]`, and their hidden states.
    pub logits: &'a Tensor,
    /// What the forward returned of these rows as [`ForwardOutput::path_hidden`]; row `i` belongs to row `i` of `logits`.
    pub hidden: &'a Tensor,
    /// The token before each row.
    pub tokens: &'a [u32],
    /// Number of tokens of the block before these rows.
    pub level: usize,
    /// [`PathOutput::states`] of the row before; `None` = these are the first rows.
    pub states: Option<&'a Tensor>,
}

/// The result of [`Head::follow`].
pub struct PathOutput {
    /// `[rows, vocab_size]`, f32.
    pub logits: Tensor,
    /// The states of the paths, if the head has any.
    pub states: Option<Tensor>,
    /// The probability that the token of each row stands if those before it do, if the head says so.
    pub confidence: Option<Vec<f32>>,
}
