//! Rows of pools on a GPU. They are gathered there, so that few large copies cross the bus.

use super::PoolRows;
use crate::gpu::{self, WrapErr};
use crate::q8_blocks;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, result};
use candle_core::{CudaDevice, Result};

/// See [`read_pool_rows`](super::read_pool_rows).
pub fn read(device: &CudaDevice, parts: &[PoolRows<'_>]) -> Result<Vec<u8>> {
    let (stream, memory) = (device.cuda_stream(), memory_of(device, parts)?);
    let length = memory.iter().map(|&(_, bytes)| bytes).sum();
    // SAFETY: the copies below write all of it before it is read.
    let gathered = unsafe { device.alloc::<u8>(length)? };
    let mut to = gathered.device_ptr(&stream).0;
    for &(from, bytes) in &memory {
        copy(to, from, bytes, &stream)?;
        to += bytes as u64;
    }
    device.clone_dtoh(&gathered)
}

/// See [`write_pool_rows`](super::write_pool_rows), which has checked the number of bytes.
pub fn write(device: &CudaDevice, parts: &[PoolRows<'_>], bytes: &[u8]) -> Result<()> {
    let (stream, memory) = (device.cuda_stream(), memory_of(device, parts)?);
    let gathered = device.clone_htod(bytes)?;
    let mut from = gathered.device_ptr(&stream).0;
    for &(to, bytes) in &memory {
        copy(to, from, bytes, &stream)?;
        from += bytes as u64;
    }
    Ok(())
}

/// A part of the GPU's memory: its address, and its bytes.
type Memory = (u64, usize);

/// Where `parts` are. Blocks are in two places, their bytes and their scales.
fn memory_of(device: &CudaDevice, parts: &[PoolRows<'_>]) -> Result<Vec<Memory>> {
    let (stream, mut memory) = (device.cuda_stream(), Vec::new());
    for part in parts {
        let rows = part.pool.dim(0)?;
        if part.first + part.count > rows {
            candle_core::bail!(
                "no rows {} to {} of {rows}",
                part.first,
                part.first + part.count
            );
        }
        for plane in q8_blocks::planes(part.pool)? {
            let row = plane.elem_count() / rows * plane.dtype().size_in_bytes();
            let start = gpu::address(&plane, &stream)? + (part.first * row) as u64;
            memory.push((start, part.count * row));
        }
    }
    Ok(memory)
}

/// Copies `bytes` within the GPU's memory, after all that was asked of it before.
fn copy(to: u64, from: u64, bytes: usize, stream: &CudaStream) -> Result<()> {
    stream.context().bind_to_thread().w()?;
    // SAFETY: `memory_of` has checked that pools have the rows, whose bytes are as many as the other side has. All work on
    // pools is in the order of this stream.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.w()
}
