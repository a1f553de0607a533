//! What the tensors of a checkpoint become when they are loaded.

use crate::matrix::{self, WeightForm};
use crate::packed::mxfp4;
use candle_core::DType;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::kv::{KvForm, KvHeads};
use foretoken_kernels::FLOAT8_HEAD_DIM_STEP;
use foretoken_kernels::quant::BlockType;
use half::f16;

/// The dtypes that tensors are converted to. Quantized weights keep their blocks.
#[derive(Debug, Clone, Copy)]
pub struct Dtypes {
    /// Activations, norms and biases.
    pub activations: DType,
    /// Unquantized matrices; `None` = each keeps its own dtype.
    pub matrices: Option<DType>,
    /// The blocks that unquantized matrices become, if they fit; not those of GGUF files.
    pub blocks: Option<BlockType>,
    /// K and V that are in no other form, and whatever else is kept of tokens.
    pub kv: DType,
    /// What K and V of attention are kept in instead.
    pub kv_form: Option<KvForm>,
    /// Whether a GPU computes with them, on this machine or, if only headers are read, on another.
    pub on_gpu: bool,
}

impl Dtypes {
    /// Everything in `dtype`, on the CPU.
    pub(crate) fn all(dtype: DType) -> Self {
        Self {
            activations: dtype,
            matrices: Some(dtype),
            blocks: None,
            kv: dtype,
            kv_form: None,
            on_gpu: false,
        }
    }

    /// Checks that K and V of a layer's attention can be in their form: in `heads`, or in latent vectors if these are
    /// `None`.
    ///
    /// # Errors
    /// A setup error, which says what would be accepted.
    pub(crate) fn check_kv(&self, heads: Option<KvHeads>) -> Result<()> {
        let (name, size) = match self.kv_form {
            None => return Ok(()),
            Some(KvForm::Blocks(blocks)) => ("q8_0", blocks.block_size()),
            Some(KvForm::Float8) => ("fp8", FLOAT8_HEAD_DIM_STEP),
        };
        let found = match heads {
            Some(heads) if heads.dim.is_multiple_of(size) => return Ok(()),
            Some(heads) => format!("heads of {} values", heads.dim),
            None => "latent vectors".into(),
        };
        let accepted = if self.on_gpu {
            format!("auto and {} are accepted", self.kv.as_str())
        } else {
            "auto, f32, bf16 and f16 are accepted".into()
        };
        Err(Error::setup(format!(
            "--kv-cache-dtype {name} needs keys and values in heads of a multiple of {size} values, and the model has {found}: {accepted}"
        )))
    }

    /// Whether a weight may have such a value: on a GPU, products of many rows round weights to the dtype of activations.
    pub(crate) fn holds(&self, value: f32) -> bool {
        !self.rounds_to_f16() || value <= f16::MAX.to_f32()
    }

    fn rounds_to_f16(&self) -> bool {
        self.on_gpu && self.activations == DType::F16
    }

    /// Checks that blocks of MXFP4, as GGUF files have them, have no value that a weight of the tensor `name` may not have.
    ///
    /// # Errors
    /// A setup error that names the tensor if there is such a value.
    pub(crate) fn check_mxfp4(&self, blocks: &[u8], name: &str) -> Result<()> {
        if !self.rounds_to_f16() || self.holds(mxfp4::largest(blocks)) {
            return Ok(());
        }
        Err(Error::setup(format!(
            "tensor {} has values above {}, which f16 does not have: --dtype bf16 takes them",
            clipped(name),
            f16::MAX
        )))
    }

    /// What a matrix that is not from a GGUF file becomes.
    pub(crate) fn form(&self, own: DType, dims: &[usize]) -> WeightForm {
        let inputs = dims.last().copied().unwrap_or_default();
        let kinds = self
            .blocks
            .into_iter()
            .flat_map(|kind| [kind, BlockType::Q8_0]);
        let mut fitting = kinds.filter(|kind| inputs.is_multiple_of(kind.block_size()));
        match fitting.next() {
            Some(kind) => WeightForm::of_gguf(kind, inputs, self.matrices, self.on_gpu),
            None => WeightForm::Dense(matrix::unquantized_dtype(own, self.matrices)),
        }
    }
}
