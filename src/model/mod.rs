//! The interface between the engine and a model, and the loading of models.

mod arch;
mod batch;
mod block_conv;
pub mod config;
mod conv_spec;
pub mod decoder;
mod delta_net;
mod delta_spec;
mod domino;
mod download;
mod dtypes;
mod dummy;
pub mod eagle;
mod experts;
mod experts_spec;
mod feed_forward;
mod fingerprint;
mod finite;
mod gguf;
mod gpu;
mod graphs;
pub mod head;
mod head_config;
mod head_gguf;
mod head_keys;
mod head_parallel;
pub mod hub;
pub mod hub_gguf;
pub mod hub_headers;
mod inputs;
mod inventory;
mod keys;
mod latent;
mod latent_spec;
mod layer;
mod layer_input;
mod layer_products;
mod layer_spec;
mod layer_step;
mod layers;
pub mod linear;
pub mod load;
mod lora;
mod mamba;
mod mamba_spec;
pub mod matrix;
mod medusa;
mod mixer;
mod mlp;
mod mtp;
mod mxfp4;
pub(crate) mod names;
mod norm;
mod output_layer;
mod packed;
pub mod parallel;
mod path;
pub(crate) mod pickle;
mod pooling;
mod raw_tensors;
mod recurrent;
mod requantize;
mod rope;
pub(crate) mod safetensors_header;
mod shards;
mod short_conv;
pub mod source;
mod tensor_source;
pub mod toy;
mod weights;

use crate::error::{Error, Result};
use crate::kv::{KvShape, KvStore};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

pub use crate::kernels::{KeptState, Span, StateRows, StateStart};
pub use batch::{Batch, MAX_TREE_NODES, MaskedBlock, Taps, is_chain};
pub use config::ModelConfig;
pub use delta_spec::{DeltaLayout, DeltaSpec};
pub use fingerprint::fingerprint;
pub use head::HeadKind;
pub(crate) use head_config::HeadConfig;
pub use head_config::MAX_MARKOV_RANK;
pub use inventory::{Inventory, TensorEntry};
pub use latent_spec::LatentSpec;
pub use layer_spec::{
    ExpertGroups, ExpertsSpec, KvSource, LayerSpec, MixerSpec, MlpSpec, ModelSpec, NormSpec, Norms,
    QkNorm, RopeRows, RouterScores, SharedExpert,
};
pub use layers::LayerList;
pub use load::{
    LoadOptions, inspect, inspect_head, inspect_mtp, load, load_head, load_head_of, load_mtp,
};
pub(crate) use load::{as_loaded, open_head};
pub use lora::{AdapterRows, LoraAdapter, LoraTarget};
pub use mamba_spec::MambaSpec;
pub use path::{PathOutput, PathRows};
pub use pooling::{EmbeddingSpec, Pooling};
pub use rope::{Llama3Scaling, RopeScaling, RopeSpec};
pub use safetensors_header::TensorHeaders;
pub(crate) use shards::safetensors_files;
pub use source::{LoadFormat, ModelSource};
pub(crate) use weights::Weights;

/// The result of a forward.
#[derive(Debug)]
pub struct ForwardOutput {
    /// `[batch.logits.len(), vocab_size]`, f32, in the order of [`Batch::logits`].
    pub logits: Tensor,
    /// `[taps.rows, taps.layers * hidden_size]` of [`Batch::taps`]: for each row its hidden states, layer
    /// after layer, in the dtype of the activations and on the model's device. `None` if no layer or
    /// no row was requested. Of an EAGLE head: `[batch.logits.len(), hidden_size]`, the features of the
    /// rows after those of the logits. Of a parallel head that [follows paths](Head::follows_paths): the
    /// hidden states of the logits.
    pub hidden: Option<Tensor>,
    /// `[batch.last_hidden.len(), hidden_size]`, f32, in the order of [`Batch::last_hidden`]: the residual
    /// stream after the final norm, Hugging Face's `last_hidden_state`. `None` if no row was requested.
    pub last_hidden: Option<Tensor>,
    /// Number of experts whose weights it read, over all layers with experts: an expert that several rows of a
    /// layer chose counts once. Those of all rows do not count. 0 without experts, and of draft heads.
    pub experts_read: usize,
}

/// The first and the last layer of a model, which draft heads may share.
pub struct Ends {
    pub(crate) embedding: linear::Embedding,
    /// The norm before the output layer.
    pub(crate) norm: norm::Norm,
    pub(crate) output: output_layer::OutputLayer,
}

/// What a head needs of its target, which may be elsewhere.
pub struct HeadTarget {
    pub(crate) config: ModelConfig,
    pub(crate) ends: Ends,
}

impl HeadTarget {
    /// That of `target`, whose weights it shares.
    ///
    /// # Errors
    /// A setup error if it has no first and last layer to share.
    pub fn of(target: &dyn Model) -> Result<Self> {
        let config = target.config().clone();
        let ends = target.ends().ok_or_else(|| {
            Error::setup(format!(
                "{}: this model cannot have a head",
                config.architecture
            ))
        })?;
        Ok(Self { config, ends })
    }

    /// The embeddings of `ids`, `[n]` u32: `[n, hidden]`.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        self.ends.embedding.forward(ids)
    }
}

impl ForwardOutput {
    /// Of a forward without requested logits, over `vocab_size` ids. On the host: GPUs have no empty
    /// allocations.
    pub(crate) fn none(vocab_size: usize) -> Result<Self> {
        Ok(Self {
            logits: Tensor::zeros((0, vocab_size), DType::F32, &Device::Cpu)?,
            hidden: None,
            last_hidden: None,
            experts_read: 0,
        })
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

/// A causal language model over a paged pool.
///
/// `forward` first writes the K and V of every row to its slot, then attends: each row sees its
/// span's context and the rows of its span that the mask allows. It touches no other slot. A row's
/// logits depend only on its own sequence, bit for bit: neither on the other spans nor on how the
/// sequence was divided into forwards (on a GPU, see [`LoadOptions::batch_invariant`]).
pub trait Model: Send {
    /// Shapes, special ids and limits.
    fn config(&self) -> &ModelConfig;

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

    /// Whether it has an output layer. Without one it computes hidden states, and no logits.
    fn generates(&self) -> bool {
        true
    }

    /// What adapters can change of it; `None` if it takes none, as on a GPU.
    fn lora_target(&self) -> Option<&LoraTarget> {
        None
    }

    /// Its first and last layer; `None` if it has none to share.
    fn ends(&self) -> Option<Ends> {
        None
    }

    /// A model of these `layers` (ascending indices) of this one, which shares its weights.
    ///
    /// # Errors
    /// A setup error if a layer does not exist, or this kind of model has no layers to choose from.
    fn subset(&self, _layers: &[usize]) -> Result<Box<dyn Model>> {
        let kind = &self.config().architecture;
        Err(Error::setup(format!(
            "{kind}: its layers cannot be left out"
        )))
    }

    /// One ragged forward. The trait's documentation says what it may read and write.
    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput>;
}

/// A draft head: a model that reads, besides tokens, hidden states of its target.
pub trait Head: Model {
    /// The target's layers whose hidden states it reads, as in [`Taps::layers`].
    fn reads(&self) -> &[usize];

    /// The features, `[rows, hidden_size]`, that it makes of the target's hidden states,
    /// `[rows, reads().len() * hidden_size of the target]`; see [`Batch::features`].
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

    /// What the tokens before some rows of blocks make of their logits.
    ///
    /// # Errors
    /// If it follows no paths, or the device fails.
    fn follow(&self, _rows: &PathRows<'_>) -> Result<PathOutput> {
        Err(Error::internal("this head follows no paths"))
    }

    /// What stands for the target's hidden states in rows with masks, `[1, as for fuse]`, of a head that predicts
    /// a block and whose rows are otherwise those of EAGLE (P-EAGLE).
    fn mask_hidden(&self) -> Option<&Tensor> {
        None
    }

    /// The name of its layout and what distinguishes it, for the log.
    fn layout(&self) -> String {
        "a draft head".into()
    }
}

/// What drafts for a target: a model of its own, or a head.
pub enum DraftNetwork {
    Model(Box<dyn Model>),
    Head(Box<dyn Head>),
}

impl DraftNetwork {
    pub fn model(&self) -> &dyn Model {
        match self {
            Self::Model(model) => &**model,
            Self::Head(head) => &**head,
        }
    }

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

    /// See [`Head::masked_block`].
    pub fn masked_block(&self) -> Option<MaskedBlock> {
        self.head().and_then(Head::masked_block)
    }
}
