//! How a model is loaded.

use crate::checkpoint::safetensors_header::TensorHeaders;
use crate::source::{LoadFormat, ModelSource};
use candle_core::{DType, Device};
use foretoken_core::kv::KvCacheDtype;
use foretoken_kernels::quant::BlockType;
use std::sync::Arc;

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Dtype of unquantized weights, of K and V and, on a GPU, of activations (on the CPU these are f32).
    /// `None` = the checkpoint's dtype; K and V are then f16 on the CPU, unless the checkpoint is in f32.
    pub dtype: Option<DType>,
    /// What K and V are kept as instead, on the CPU.
    pub kv_cache_dtype: KvCacheDtype,
    /// The device that the weights are loaded to.
    pub device: Device,
    /// The GPUs after `device` over which the layers of a model are spread, consecutive ones on each; not those of heads.
    pub more_devices: Vec<Device>,
    /// The shares of the weights that `device` and `more_devices` get; empty = as equal as layers allow.
    pub shares: Vec<f64>,
    /// With [`inspect`](super::inspect) and the like: says what the weights become on a GPU, although `device` is the CPU.
    pub for_gpu: bool,
    /// Where the weights come from: the files, or random values.
    pub format: LoadFormat,
    /// Seed of the weights with [`LoadFormat::Dummy`].
    pub seed: u64,
    /// On a GPU, launch every kernel separately instead of recording forwards as CUDA graphs.
    pub enforce_eager: bool,
    /// On a GPU, compute all layers of a quantized model in one launch for up to
    /// [`MAX_FORWARD_ROWS`](foretoken_kernels::MAX_FORWARD_ROWS) rows, where that is possible, with the same bits.
    pub one_launch: bool,
    /// On a GPU, use one order of additions for any number of rows and any division of a prompt into
    /// chunks, which is slower for prompts; the CPU always does. Without it, a GPU uses one order for up to
    /// [`EXACT_ROWS`](foretoken_kernels::EXACT_ROWS) rows, unless it computes in f32.
    pub batch_invariant: bool,
    /// The blocks that matrices of safetensors become, as if they were from a GGUF file; those whose rows are not
    /// whole blocks become `Q8_0`, or stay as they are. GGUF files are not changed.
    pub quantize: Option<BlockType>,
    /// With [`LoadFormat::Dummy`], the tensors that the checkpoint has elsewhere, for
    /// [`inspect`](super::inspect) and [`inspect_head`](super::inspect_head).
    pub tensors: Option<Arc<TensorHeaders>>,
    /// On a GPU, the experts of so many layers stay in the host's memory, where the GPU reads them: those of the first
    /// layers of a model, not of heads.
    pub host_expert_layers: usize,
    /// The ids that a draft may predict; `None` = all that it can.
    pub draft_vocabulary: Option<DraftVocabulary>,
}

/// The ids to which the output layer of a draft is cut while it is loaded. The ids that it lacks are not drafted.
#[derive(Debug, Clone)]
pub struct DraftVocabulary {
    /// The ids, each once.
    pub ids: Arc<[u32]>,
    /// The checkpoint of the target, whose output layer a head may share, and how it was loaded.
    pub target: Box<(ModelSource, LoadOptions)>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            device: Device::Cpu,
            more_devices: Vec::new(),
            shares: Vec::new(),
            for_gpu: false,
            format: LoadFormat::Auto,
            seed: 0,
            enforce_eager: false,
            one_launch: false,
            batch_invariant: false,
            quantize: None,
            tensors: None,
            host_expert_layers: 0,
            draft_vocabulary: None,
        }
    }
}

impl LoadOptions {
    /// The defaults with weights in `dtype`.
    pub fn of(dtype: DType) -> Self {
        Self {
            dtype: Some(dtype),
            ..Self::default()
        }
    }

    /// Whether a GPU computes with the weights.
    pub(super) fn are_for_gpu(&self) -> bool {
        self.for_gpu || !self.device.is_cpu()
    }
}
