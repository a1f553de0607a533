//! What is noted of weights of which only headers are read.

use super::{Weights, inventory};
use crate::checkpoint::tensor_source::TensorSource;
use crate::matrix::WeightForm;
use candle_core::DType;
use foretoken_core::error::{Error, Result};

impl Weights {
    /// Adds the tensor `name` of the shape `dims` to the inventory, and returns what it is loaded as: matrices of the
    /// shape `matrix`, or a tensor in `dtype`.
    pub(super) fn note(
        &mut self,
        name: &str,
        dims: &[usize],
        matrix: Option<&[usize]>,
        dtype: DType,
    ) -> Result<WeightForm> {
        let name = &*self.stored_name(name);
        let (on_gpu, matrices) = (self.dtypes.on_gpu, self.dtypes.matrices);
        let mut dense = WeightForm::Dense(dtype);
        let (found, (format, form)) = match &mut self.source {
            TensorSource::Gguf(file) => {
                let (kind, found) = file.describe(name)?;
                if let (Some(_), Some(&inputs)) = (matrix, found.last()) {
                    dense = WeightForm::of_gguf(kind, inputs, matrices, on_gpu);
                }
                (found, (kind.to_string(), WeightForm::Blocks(kind)))
            }
            other => {
                self.read.insert(name.to_owned());
                let random = (dims.to_vec(), matrices.unwrap_or(DType::F32));
                let (found, dtype) = other.describe(name)?.unwrap_or(random);
                if let Some(matrix) = matrix {
                    dense = self.dtypes.form(dtype, matrix);
                }
                let stored = (dtype.as_str().to_uppercase(), WeightForm::Dense(dtype));
                (found, stored)
            }
        };
        if found != dims {
            return Err(Error::wrong_shape(name, &found, dims));
        }
        // Not before the shape is the config's: a header may name one whose bytes no number counts.
        let stored = (format, form.bytes(dims));
        self.list(name.to_owned(), matrix.unwrap_or(dims), stored, dense);
        Ok(dense)
    }

    /// Adds to the inventory, if there is one.
    pub(super) fn list(
        &self,
        name: String,
        dims: &[usize],
        stored: (String, u64),
        form: WeightForm,
    ) {
        if let Some(shared) = &self.inventory {
            let at = self.experts.place();
            inventory::lock(shared).add((name, at), dims, stored, form);
        }
    }
}
