//! Rows of pools on a GPU. They are gathered there, so that few large copies cross the bus.

use super::PoolRows;
use crate::gpu::{self, WrapErr};
use crate::q8_blocks;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, result};
use candle_core::{CudaDevice, DType, Result};

/// See [`read_pool_rows`](super::read_pool_rows).
pub fn read(parts: &[PoolRows<'_>]) -> Result<Vec<u8>> {
    let Some((device, memory)) = memory_of(parts)? else {
        return Ok(Vec::new());
    };
    let stream = device.cuda_stream();
    // SAFETY: the copies below write all of it before it is read.
    let gathered = unsafe { device.alloc::<u8>(length(&memory))? };
    let mut to = gathered.device_ptr(&stream).0;
    for &(from, bytes) in &memory {
        copy(to, from, bytes, &stream)?;
        to += bytes as u64;
    }
    device.clone_dtoh(&gathered)
}

/// See [`write_pool_rows`](super::write_pool_rows).
pub fn write(parts: &[PoolRows<'_>], bytes: &[u8]) -> Result<()> {
    let Some((device, memory)) = memory_of(parts)? else {
        return Ok(());
    };
    if bytes.len() != length(&memory) {
        candle_core::bail!("{} bytes for {} of pools", bytes.len(), length(&memory));
    }
    let stream = device.cuda_stream();
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

fn length(memory: &[Memory]) -> usize {
    memory.iter().map(|&(_, bytes)| bytes).sum()
}

/// The GPU of `parts`, and where they are; `None` if there are none. Blocks are in two places, their bytes and their scales.
fn memory_of(parts: &[PoolRows<'_>]) -> Result<Option<(CudaDevice, Vec<Memory>)>> {
    let Some(first) = parts.first() else {
        return Ok(None);
    };
    let device = first.pool.device().as_cuda_device()?.clone();
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
        let planes = match part.pool.dtype() {
            DType::U8 => q8_blocks::parts(part.pool)?.to_vec(),
            _ => vec![part.pool.clone()],
        };
        for plane in planes {
            let row = plane.elem_count() / rows * plane.dtype().size_in_bytes();
            let start = gpu::address(&plane, &stream)? + (part.first * row) as u64;
            memory.push((start, part.count * row));
        }
    }
    Ok(Some((device, memory)))
}

/// Copies `bytes` within the GPU's memory, after all that was asked of it before.
fn copy(to: u64, from: u64, bytes: usize, stream: &CudaStream) -> Result<()> {
    stream.context().bind_to_thread().w()?;
    // SAFETY: `memory_of` has checked that pools have the rows, and the other side has room for all of them. All work on
    // pools is in the order of this stream.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.w()
}
