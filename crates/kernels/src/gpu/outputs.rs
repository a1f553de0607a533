//! The memory of ops' outputs.

use super::{CudaStorage, Storage};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Result, Shape, Tensor};
use std::cell::RefCell;
use std::collections::HashMap;

/// Memory for the outputs of ops while a graph is recorded. It is allocated before, because an allocation
/// within a graph keeps the kernel after it from starting early.
///
/// An output is overwritten by the [`COPIES`]-th output of about the same size after it. A layer of a model
/// has fewer between an output and its last use, and layers use nothing of the layer before the last.
#[derive(Default, Clone)]
pub(in super::super) struct Outputs {
    /// By dtype and number of elements, a power of two: the buffers, and the next to be used.
    buffers: HashMap<(DType, usize), (Vec<Tensor>, usize)>,
}

/// Buffers of each size.
const COPIES: usize = 8;

thread_local! {
    /// The memory that [`output`] takes; `None` = new memory.
    static OUTPUTS: RefCell<Option<Outputs>> = const { RefCell::new(None) };
}

impl Outputs {
    /// Runs `work`, whose ops write to this memory.
    pub fn during<T>(&mut self, work: impl FnOnce() -> T) -> T {
        struct Restore<'a>(&'a mut Outputs);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                *self.0 = OUTPUTS.take().unwrap_or_default();
            }
        }
        OUTPUTS.set(Some(std::mem::take(self)));
        let _restore = Restore(self);
        work()
    }

    /// The next buffer for `count` elements.
    fn take(
        &mut self,
        device: &CudaDevice,
        dtype: DType,
        count: usize,
        copies: usize,
    ) -> Result<Tensor> {
        let size = count.next_power_of_two();
        let (buffers, next) = self.buffers.entry((dtype, size)).or_default();
        while buffers.len() < copies {
            buffers.push(allocate(device, dtype, size)?);
        }
        *next = (*next + 1) % buffers.len();
        buffers[*next].narrow(0, 0, count)
    }
}

/// A new tensor of `count` elements, whose values are not specified. See [`output`] for those that ops return; only this
/// one is not overwritten by later ones while a graph is recorded.
pub(in super::super) fn allocate(
    device: &CudaDevice,
    dtype: DType,
    count: usize,
) -> Result<Tensor> {
    with_float!("output", dtype, T => {
        // SAFETY: the caller's kernel writes every element that is read.
        let slice = unsafe { device.alloc::<T>(count)? };
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
        Ok(Tensor::from_storage(storage, count, BackpropOp::none(), false))
    })
}

fn take(device: &CudaDevice, dtype: DType, count: usize, copies: usize) -> Result<Tensor> {
    OUTPUTS.with_borrow_mut(|outputs| match outputs {
        Some(outputs) => outputs.take(device, dtype, count, copies),
        None => allocate(device, dtype, count),
    })
}

/// A tensor for the output of an op. The op's kernel must write every element.
///
/// # Errors
/// If the device has no memory.
pub(in super::super) fn output(
    device: &CudaDevice,
    dtype: DType,
    shape: impl Into<Shape>,
) -> Result<Tensor> {
    let shape = shape.into();
    take(device, dtype, shape.elem_count(), COPIES)?.reshape(shape)
}

/// A tensor that is only used by the kernels of one op. They must write every element that they read.
///
/// # Errors
/// If the device has no memory.
pub(in super::super) fn scratch(device: &CudaDevice, count: usize) -> Result<Tensor> {
    take(device, DType::F32, count, 1)
}
