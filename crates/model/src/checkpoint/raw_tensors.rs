//! Tensors as safetensors have them, for those who know what their bytes mean.

use foretoken_core::error::Result;

/// A tensor as safetensors have it.
pub struct RawTensor<'a> {
    /// The dtype as the file writes it, for example `BF16`.
    pub dtype: String,
    pub dims: Vec<usize>,
    /// Number of its bytes in the file.
    pub bytes: u64,
    /// The tensor's bytes; `None` if only its header is here.
    pub data: Option<&'a [u8]>,
}

/// The tensors of a checkpoint, by their names there.
pub trait RawTensors {
    /// Whether there is the tensor `name`.
    fn has(&self, name: &str) -> bool;

    /// The tensor `name`.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing.
    fn raw(&self, name: &str) -> Result<RawTensor<'_>>;
}
