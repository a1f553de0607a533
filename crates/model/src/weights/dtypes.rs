//! What the tensors of a checkpoint become when they are loaded.

use crate::matrix::{self, WeightForm};
use candle_core::{DType, Device};
use foretoken_kernels::quant::BlockType;

/// The dtypes that tensors are converted to. Quantized weights keep their blocks.
#[derive(Debug, Clone, Copy)]
pub struct Dtypes {
    /// Activations, norms and biases.
    pub activations: DType,
    /// Unquantized matrices; `None` = each keeps its own dtype.
    pub matrices: Option<DType>,
    /// The blocks that unquantized matrices become, if they fit; not those of GGUF files.
    pub blocks: Option<BlockType>,
    /// K and V.
    pub kv: DType,
}

impl Dtypes {
    /// What a matrix that is not from a GGUF file becomes.
    pub(crate) fn form(&self, own: DType, dims: &[usize], device: &Device) -> WeightForm {
        let inputs = dims.last().copied().unwrap_or_default();
        let kinds = self
            .blocks
            .into_iter()
            .flat_map(|kind| [kind, BlockType::Q8_0]);
        let mut fitting = kinds.filter(|kind| inputs.is_multiple_of(kind.block_size()));
        match fitting.next() {
            Some(kind) => WeightForm::of_gguf(kind, inputs, self.matrices, device),
            None => WeightForm::Dense(matrix::unquantized_dtype(own, self.matrices)),
        }
    }
}
