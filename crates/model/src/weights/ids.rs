//! Tensors of token ids.

use super::Weights;
use crate::checkpoint::tensor_source::TensorSource;
use crate::config::ModelConfig;
use crate::names;
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};

impl Weights {
    /// The id of each row of the output layer, `[draft_vocab_size]` u32, if the layer has only some of the
    /// ids. As in EAGLE-3, `d2t` stores the id minus the row's number.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`]. An id that is not below `vocab_size` is an error, too.
    pub fn output_ids(&mut self, config: &ModelConfig) -> Result<Option<Tensor>> {
        if let Some(ids) = &config.output_ids {
            return Ok(Some(Tensor::new(&**ids, &self.device)?));
        }
        let Some(size) = config.draft_vocab_size else {
            return Ok(None);
        };
        if size == config.vocab_size && !self.has(names::OUTPUT_IDS) {
            // The speculators library says so of a head with all ids.
            return Ok(None);
        }
        if let TensorSource::Dummy(_) = self.source {
            return Ok(Some(Tensor::arange(0, size as u32, &self.device)?));
        }
        let offsets = self.stored(names::OUTPUT_IDS, &[size])?;
        let offsets = offsets.to_dtype(DType::F64)?;
        let ids: Option<Vec<u32>> = (0..)
            .zip(offsets.to_vec1::<f64>()?)
            .map(|(row, offset)| u32::try_from(i64::from(row) + offset as i64).ok())
            .collect();
        match ids {
            Some(ids) if ids.iter().all(|&id| (id as usize) < config.vocab_size) => {
                Ok(Some(Tensor::new(ids, &self.device)?))
            }
            _ => Err(Error::setup(format!(
                "tensor d2t names an id that is not below vocab_size {}",
                config.vocab_size
            ))),
        }
    }

    /// The ids in the tensor `name` (its full Hugging Face name), `[count]` u32.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`]. An id that is not below `vocab_size` is an error, too.
    pub(crate) fn ids(&mut self, name: &str, count: usize, vocab_size: usize) -> Result<Tensor> {
        if let TensorSource::Dummy(_) = self.source {
            return Ok(Tensor::arange(0, count as u32, &self.device)?);
        }
        let ids = self.stored(name, &[count])?.to_dtype(DType::F64)?;
        let fits = |&id: &f64| id >= 0. && id < vocab_size as f64;
        if !ids.to_vec1::<f64>()?.iter().all(fits) {
            return Err(Error::setup(format!(
                "tensor {name} has an id that is not below vocab_size {vocab_size}"
            )));
        }
        Ok(ids.to_dtype(DType::U32)?)
    }
}
