//! Reads small tensors: biases, numbers, and those of layers with convolutions and states.

use super::{TensorSource, Weights};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use std::iter::repeat_n;

impl Weights {
    /// The bias of `name`, `[len]` in the compute dtype, if `name` has one.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(crate) fn bias(
        &mut self,
        name: &str,
        len: usize,
        has_bias: bool,
    ) -> Result<Option<Tensor>> {
        let bias = has_bias.then(|| self.tensor(&format!("{name}.bias"), &[len]));
        bias.transpose()
    }

    /// Factors of the outputs of a product, in the compute dtype: each of so many, one part after the other; `None` = all
    /// are 1.
    ///
    /// # Errors
    /// If the device has no memory.
    pub(crate) fn scales(&self, parts: &[(f32, usize)]) -> Result<Option<Tensor>> {
        if parts.iter().all(|(scale, _)| *scale == 1.) {
            return Ok(None);
        }
        let scales = parts
            .iter()
            .flat_map(|&(scale, count)| repeat_n(scale, count));
        let scales = Tensor::new(scales.collect::<Vec<f32>>(), self.device())?;
        Ok(Some(scales.to_dtype(self.dtypes().activations)?))
    }

    /// The only value of the tensor `name` (its full Hugging Face name) of shape `dims`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn scalar(&mut self, name: &str, dims: &[usize]) -> Result<f32> {
        let tensor = self.tensor(name, dims)?.to_dtype(DType::F32)?;
        Ok(tensor.flatten_all()?.to_vec1()?[0])
    }

    /// The `len` values of the tensor `name` (its full Hugging Face name), of which llama.cpp may have a matrix.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let dims = match &mut self.source {
            TensorSource::Gguf(file) => file.describe(name)?.1,
            _ => vec![len],
        };
        if dims.iter().product::<usize>() != len {
            return Err(Error::wrong_shape(name, &dims, &[len]));
        }
        let values = self.tensor(name, &dims)?.to_dtype(DType::F32)?;
        Ok(values.flatten_all()?.to_vec1()?)
    }

    /// The factors of a decay, below 0, of which the checkpoint has the logarithms `name`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn decay(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut values = self.vector(name, len)?;
        // llama.cpp's files have the factors themselves.
        if !self.are_gguf() {
            values.iter_mut().for_each(|x| *x = -x.exp());
        }
        Ok(values)
    }

    /// The weights of the convolution `name` (without `.weight`) of each channel over so many tokens, `[taps,
    /// channels]` f32, that of the row's own token first.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn convolution(&mut self, name: &str, channels: usize, taps: usize) -> Result<Tensor> {
        let dims: &[usize] = if self.are_gguf() {
            &[channels, taps]
        } else {
            &[channels, 1, taps]
        };
        let stored = self.tensor(&format!("{name}.weight"), dims)?;
        let stored = stored.reshape((channels, taps))?.to_dtype(DType::F32)?;
        let stored = stored.to_device(&Device::Cpu)?;
        // The last one is of the row's own token.
        let turned = stored.t()?.contiguous()?.flip(&[0])?.contiguous()?;
        Ok(turned.to_device(self.device())?)
    }
}
