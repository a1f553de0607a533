//! What all ways to pack a matrix have in common.

use super::parts::Parts;
use foretoken_core::error::Result;
use foretoken_kernels::dense::Float8;
use foretoken_kernels::quant::{BlockType, Nvfp4};
use std::fmt;

/// A way to pack a matrix.
pub trait Scheme: fmt::Debug + Send + Sync {
    /// The scheme's name, for the inventory.
    fn label(&self) -> String;

    /// Whether these are the parts of a matrix that is packed so.
    fn is_in(&self, parts: &Parts<'_>) -> bool;

    /// Checks the parts of a matrix of outputs and inputs by their headers.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing, or has another shape or dtype.
    fn open<'a>(&self, parts: &mut Parts<'a>, shape: (usize, usize)) -> Result<Opened<'a>>;

    /// The blocks that its matrices become, if scales are as usual; `None` = they become dense.
    fn usual_blocks(&self) -> Option<BlockType>;

    /// What its matrices of outputs and inputs are, if they are floats that products take.
    fn floats(&self, _shape: (usize, usize)) -> Option<FloatFormat> {
        None
    }
}

/// Floats that products take as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FloatFormat {
    /// FP8, of which so many inputs have a scale in common.
    Float8(usize),
    Nvfp4,
}

/// A matrix whose headers were checked.
pub struct Opened<'a> {
    /// The blocks that it becomes, as far as headers tell; `None` = it becomes dense.
    pub blocks: Option<BlockType>,
    /// Whether its inputs may have to be in another order then.
    pub may_reorder: bool,
    /// Reads its values; not if only headers are here.
    pub unpack: Box<dyn FnOnce() -> Result<Box<dyn Unpacked + 'a>> + 'a>,
}

impl<'a> Opened<'a> {
    /// A matrix that becomes `blocks`, whose inputs keep their order, and whose values `unpack` reads.
    pub fn new<U: Unpacked + 'a>(
        blocks: Option<BlockType>,
        unpack: impl FnOnce() -> Result<U> + 'a,
    ) -> Self {
        Self {
            blocks,
            may_reorder: false,
            unpack: Box::new(|| Ok(Box::new(unpack()?))),
        }
    }
}

/// A matrix whose values are known.
pub trait Unpacked: Sync {
    /// The values of the row of `output`, in f32: each rounded once, or for each factor of its scale.
    fn row(&self, output: usize, row: &mut [f32]);

    /// The blocks that hold the matrix exactly, if there are such.
    fn blocks(&self) -> Option<Blocks> {
        None
    }

    /// The matrix as it is, if it is FP8 that a product takes.
    fn float8(&self) -> Option<Float8<'_>> {
        None
    }

    /// The same of NVFP4.
    fn nvfp4(&self) -> Option<Nvfp4<'_>> {
        None
    }
}

/// Blocks of a matrix, row after row.
pub struct Blocks {
    pub kind: BlockType,
    pub data: Vec<u8>,
    /// The inputs in the order of the blocks, if it is another one.
    pub inputs: Option<Vec<u32>>,
}
