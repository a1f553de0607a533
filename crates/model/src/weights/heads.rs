//! Matrices of heads that a checkpoint has as one.

use super::Weights;
use crate::matrix::{Matrix, Unread};
use foretoken_core::error::Result;
use std::sync::Arc;

/// A matrix of each head.
type Matrices = Vec<Arc<dyn Matrix>>;

impl Weights {
    /// Splits the matrix `name` (without `.weight`) into matrices of the heads. The matrix has `keys` and then `values`
    /// outputs for each head. The first matrices are those of keys, transposed, `[inputs, keys]`; the second are those
    /// of values, `[values, inputs]`. A packed matrix is unpacked.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(crate) fn matrices_of_heads(
        &mut self,
        name: &str,
        heads: usize,
        (keys, values): (usize, usize),
        inputs: usize,
    ) -> Result<(Matrices, Matrices)> {
        let shape = (heads * (keys + values), inputs);
        if self.inventory.is_some() {
            let format = match self.list_unpacked(name, shape)? {
                Some(format) => format,
                None => self.matrix(name, shape, None)?.format(),
            };
            let unread = |shape| Unread::matrices(heads, shape, &format);
            return Ok((unread((inputs, keys)), unread((values, inputs))));
        }
        let stored = match self.packed_matrix(name, shape, None)? {
            Some(packed) => packed.dequantize()?,
            None => self.stored(&format!("{name}.weight"), &[shape.0, shape.1])?,
        };
        let part = |head: usize, start: usize, count: usize| {
            stored.narrow(0, head * (keys + values) + start, count)
        };
        let of_keys = (0..heads).map(|head| {
            let own = part(head, 0, keys)?.t()?.contiguous()?;
            self.matrix_of(&own, name)
        });
        let of_values = (0..heads).map(|head| {
            let own = part(head, keys, values)?.contiguous()?;
            self.matrix_of(&own, name)
        });
        Ok((
            of_keys.collect::<Result<_>>()?,
            of_values.collect::<Result<_>>()?,
        ))
    }
}
