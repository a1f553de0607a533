//! Weights in the host's memory that a GPU reads where they are (zero copy).
//!
//! A step that decodes reads each weight of a chosen expert once, so a copy to the GPU would move as many bytes. Without
//! one, kernels take the addresses as those of weights in the GPU's memory, and nothing waits.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};
use candle_core::{CpuStorage, CudaDevice, Result, Storage, Tensor};
use std::ffi::c_void;
use std::slice;
use std::sync::Arc;

/// Where weights begin: at multiples of the lines that a GPU reads.
const ALIGNMENT: usize = 256;

/// Page-locked memory of the host that is mapped for a GPU.
pub(super) struct HostMemory {
    bytes: *mut c_void,
    context: Arc<CudaContext>,
}

// SAFETY: nothing but a GPU uses the memory after it was filled; it belongs to no thread.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Copies `weights`, which are on the CPU and contiguous, to such memory, and returns their addresses for kernels.
    ///
    /// # Errors
    /// If one is elsewhere, or the host has no memory that can be locked.
    pub fn with(weights: &[Tensor], device: &CudaDevice) -> Result<(Self, Vec<i64>)> {
        let size = |weight: &Tensor| weight.elem_count() * weight.dtype().size_in_bytes();
        let places = weights.iter().scan(0, |end, weight| {
            let start = *end;
            *end += size(weight).next_multiple_of(ALIGNMENT);
            Some(start)
        });
        let places: Vec<usize> = places.collect();
        let all: usize = (weights.iter())
            .map(|weight| size(weight).next_multiple_of(ALIGNMENT))
            .sum();
        let stream = device.cuda_stream();
        let memory = Self::allocate(all.max(ALIGNMENT), stream.context())?;
        for (weight, &place) in weights.iter().zip(&places) {
            // SAFETY: the places are disjoint and within the memory, and nobody else has it yet.
            let to = unsafe {
                slice::from_raw_parts_mut(memory.bytes.cast::<u8>().add(place), size(weight))
            };
            copy(weight, to)?;
        }
        let address = memory.address()?;
        let addresses = places.iter().map(|&place| (address + place as u64) as i64);
        Ok((memory, addresses.collect()))
    }

    fn allocate(bytes: usize, context: &Arc<CudaContext>) -> Result<Self> {
        context.bind_to_thread().w()?;
        // Written once by the host, and from then on only read by GPUs.
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_WRITECOMBINED;
        // SAFETY: the memory is freed once, by `drop`.
        match unsafe { result::malloc_host(bytes, flags) } {
            Ok(memory) => Ok(Self {
                bytes: memory,
                context: context.clone(),
            }),
            Err(_) => candle_core::bail!(
                "the host cannot lock {bytes} bytes of memory for the experts of a layer: lower --n-cpu-moe, or free memory"
            ),
        }
    }

    /// The address by which a GPU finds it.
    fn address(&self) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the memory was allocated as mapped.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.bytes, 0) };
        found.result().w()?;
        Ok(address)
    }
}

impl Drop for HostMemory {
    /// Waits for what the GPU still computes. If that fails, the memory is never freed: the GPU may still read it.
    fn drop(&mut self) {
        let waited = self.context.bind_to_thread();
        if waited.and_then(|()| self.context.synchronize()).is_ok() {
            // SAFETY: nothing uses it any more.
            unsafe { result::free_host(self.bytes) }.ok();
        }
    }
}

/// Copies the values of a tensor on the CPU to `to`, of as many bytes.
fn copy(weight: &Tensor, to: &mut [u8]) -> Result<()> {
    let (storage, layout) = weight.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, _))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("experts: a weight is not in the host's memory, but {layout:?}");
    };
    let from: *const u8 = match storage {
        CpuStorage::U8(values) => values.as_ptr(),
        CpuStorage::F16(values) => values.as_ptr().cast(),
        CpuStorage::BF16(values) => values.as_ptr().cast(),
        CpuStorage::F32(values) => values.as_ptr().cast(),
        _ => candle_core::bail!("experts: weights in {:?}", weight.dtype()),
    };
    let size = weight.dtype().size_in_bytes();
    if to.len() != weight.elem_count() * size {
        candle_core::bail!("experts: {weight:?} does not take {} bytes", to.len());
    }
    // SAFETY: the tensor has so many bytes from its first value on, and its types have no padding.
    to.copy_from_slice(unsafe { slice::from_raw_parts(from.add(start * size), to.len()) });
    Ok(())
}
