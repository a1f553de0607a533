//! Tensors with the matrices of all experts.

use super::{TensorSource, Weights, dummy, in_order, ordered_shape, requantize};
use crate::checkpoint::finite::{self, MAX_MXFP4_EXPONENT};
use crate::checkpoint::gguf;
use crate::matrix::{self, Matrix, Unread, WeightForm};
use crate::packed::mxfp4;
use candle_core::DType;
use foretoken_core::error::{Error, Result};
use foretoken_kernels::quant::BlockType;
use std::sync::Arc;

/// The matrices of all experts, as one tensor has them.
pub struct Stack<'a> {
    /// The full Hugging Face name of the tensor; of `Mxfp4`, what `_blocks` and `_scales` are added to.
    pub name: &'a str,
    /// Number of experts.
    pub count: usize,
    /// Outputs and inputs of one matrix.
    pub shape: (usize, usize),
    pub form: StackForm,
    /// The outputs that are wanted, if in another order: output `i` is that of row `order[i]`.
    pub order: Option<&'a [u32]>,
}

/// How a tensor stores matrices of outputs and inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StackForm {
    /// `[count, outputs, inputs]`.
    Rows,
    /// `[count, inputs, outputs]`.
    Columns,
    /// [MXFP4](mxfp4), which stays so unless other blocks are asked for.
    Mxfp4,
}

impl Weights {
    /// The matrices of `stack`. They are converted one after another, so that only one takes more memory than it needs.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn matrices(&mut self, stack: &Stack<'_>) -> Result<Vec<Arc<dyn Matrix>>> {
        if let Some(packed) = self.packed_stack(stack)? {
            return Ok(packed);
        }
        if self.inventory.is_some() {
            let format = self.note_stack(stack)?;
            return Ok(Unread::matrices(stack.count, stack.shape, &format));
        }
        let Stack {
            name,
            count,
            shape: (outputs, inputs),
            ..
        } = *stack;
        match (stack.form, &mut self.source) {
            (StackForm::Mxfp4, &mut TensorSource::Dummy(seed)) => self.random_blocks(stack, seed),
            (StackForm::Mxfp4, _) => self.of_blocks(stack),
            (_, TensorSource::Gguf(file)) => {
                let name = name.strip_suffix(".weight").unwrap_or(name);
                file.matrices(name, count, stack.shape, &self.dtypes, &self.device)
            }
            (form, _) => {
                let all = self.stored(name, &stored_dims(stack))?;
                let one = |i: usize| {
                    let own = all.get(i)?;
                    let own = match form {
                        StackForm::Columns => own.t()?,
                        _ => own,
                    };
                    let own = in_order(own.contiguous()?, stack.order)?;
                    self.matrix_of(&own.reshape((outputs, inputs))?, name)
                };
                (0..count).map(one).collect()
            }
        }
    }

    /// Adds `stack` to the inventory, and returns what its matrices are loaded as.
    fn note_stack(&mut self, stack: &Stack<'_>) -> Result<String> {
        let dims = [stack.count, stack.shape.0, stack.shape.1];
        if stack.form != StackForm::Mxfp4 {
            let dtype = self.dtypes.activations;
            let form = self.note(stack.name, &stored_dims(stack), Some(&dims), dtype)?;
            return Ok(form.name());
        }
        let names = self.names_of_blocks(stack);
        if !self.are_random() {
            self.blocks(stack, &names)?;
        }
        let kept = self.kept_blocks(stack.shape.1);
        let form = kept.unwrap_or_else(|| self.dtypes.form(DType::BF16, &dims));
        let elements: u64 = dims.iter().map(|&dim| dim as u64).product();
        let bytes = elements / mxfp4::BLOCK as u64 * mxfp4::BLOCK_BYTES as u64;
        let [name, _] = names;
        self.list(name, &dims, ("MXFP4".into(), bytes), form);
        Ok(form.name())
    }

    /// The form of MXFP4 of so many inputs that stays so; `None` = it becomes other blocks, which are asked for, or dense.
    fn kept_blocks(&self, inputs: usize) -> Option<WeightForm> {
        let form = self.form_of_blocks(BlockType::Mxfp4, inputs);
        let is_kept = self.dtypes.blocks.is_none() && form.blocks() == Some(BlockType::Mxfp4);
        is_kept.then_some(form)
    }

    fn of_blocks(&mut self, stack: &Stack<'_>) -> Result<Vec<Arc<dyn Matrix>>> {
        let names = self.names_of_blocks(stack);
        let (Some(values), Some(scales)) = self.blocks(stack, &names)? else {
            return Err(Error::internal("there are no weights that have values"));
        };
        if scales.iter().any(|&scale| scale > MAX_MXFP4_EXPONENT) {
            return Err(finite::error(&names[0]));
        }
        let (values_each, scales_each) = (values.len() / stack.count, scales.len() / stack.count);
        let pairs = (values.chunks_exact(values_each)).zip(scales.chunks_exact(scales_each));
        let kept = self.kept_blocks(stack.shape.1);
        let one = |(values, scales)| {
            if let Some(form) = kept {
                let data = mxfp4::blocks(values, scales);
                return self.matrix_of_blocks(stack, form, data, &names[0]);
            }
            let own = mxfp4::dequantize(values, scales, stack.shape)?.to_device(&self.device)?;
            self.matrix_of(&in_order(own, stack.order)?, &names[0])
        };
        pairs.map(one).collect()
    }

    /// Random matrices in the form of `stack`.
    fn random_blocks(&self, stack: &Stack<'_>, seed: u64) -> Result<Vec<Arc<dyn Matrix>>> {
        let (outputs, inputs) = stack.shape;
        let kept = self.kept_blocks(inputs);
        let one = |number: usize| {
            let name = format!("{}.{number}", stack.name);
            let noise = dummy::tensor(seed, &name, &[outputs, inputs])?;
            if let Some(form) = kept {
                let data = requantize::blocks(&noise, BlockType::Mxfp4)?;
                return self.matrix_of_blocks(stack, form, data, &name);
            }
            let noise = noise.to_dtype(DType::BF16)?.to_device(&self.device)?;
            self.matrix_of(&in_order(noise, stack.order)?, &name)
        };
        (0..stack.count).map(one).collect()
    }

    /// A matrix of `stack` with these blocks, as GGUF files have them; it is one of the tensor `name`.
    fn matrix_of_blocks(
        &self,
        stack: &Stack<'_>,
        form: WeightForm,
        mut data: Vec<u8>,
        name: &str,
    ) -> Result<Arc<dyn Matrix>> {
        self.dtypes.check_mxfp4(&data, name)?;
        if let Some(order) = stack.order {
            data = gguf::in_order(&data, stack.shape.0, order);
        }
        let shape = ordered_shape(stack.shape, stack.order);
        matrix::quantized(form, data, shape, &self.device)
    }

    /// The names of the values of `stack` and of their scales, which count as read.
    fn names_of_blocks(&mut self, stack: &Stack<'_>) -> [String; 2] {
        let names = ["_blocks", "_scales"].map(|end| {
            let name = format!("{}{end}", stack.name);
            self.stored_name(&name)
        });
        self.read.extend(names.clone());
        names
    }

    /// The values of `stack` and their scales, which have these names, if their files are here.
    fn blocks(&self, stack: &Stack<'_>, [values, scales]: &[String; 2]) -> Result<Blocks<'_>> {
        let (outputs, inputs) = stack.shape;
        if !inputs.is_multiple_of(mxfp4::BLOCK) {
            return Err(Error::setup(format!(
                "tensor {values} needs a multiple of {} inputs, the config asks for {inputs}",
                mxfp4::BLOCK
            )));
        }
        let blocks = inputs / mxfp4::BLOCK;
        let dims = [stack.count, outputs, blocks, mxfp4::BLOCK / 2];
        let found = self.source.bytes(values, &dims)?;
        Ok((found, self.source.bytes(scales, &dims[..3])?))
    }
}

/// Values and scales.
type Blocks<'a> = (Option<&'a [u8]>, Option<&'a [u8]>);

fn stored_dims(stack: &Stack<'_>) -> [usize; 3] {
    let (outputs, inputs) = stack.shape;
    match stack.form {
        StackForm::Columns => [stack.count, inputs, outputs],
        StackForm::Rows | StackForm::Mxfp4 => [stack.count, outputs, inputs],
    }
}
