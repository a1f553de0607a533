//! Rows of pools as bytes, for a place that is not a pool. In the byte order of this machine.

#[cfg(feature = "cuda")]
mod device;

use candle_core::{CpuStorage, Device, Result, Storage, Tensor};

/// Some rows of a contiguous pool, `[rows, ...]` in f32, f16, bf16 or u8 (blocks), on a GPU also in FP8.
#[derive(Debug, Clone, Copy)]
pub struct PoolRows<'a> {
    /// The pool, all of it.
    pub pool: &'a Tensor,
    /// The first of the rows.
    pub first: usize,
    /// Their number.
    pub count: usize,
}

impl PoolRows<'_> {
    /// Bytes of the rows.
    pub fn bytes(&self) -> usize {
        let values: usize = self.pool.dims().iter().skip(1).product();
        self.count * values * self.pool.dtype().size_in_bytes()
    }
}

/// The contents of `parts`, one after the other. They are on one device. On a GPU, the host waits for them once.
///
/// # Errors
/// If a pool has no such rows, another dtype or layout, or the device fails.
pub fn read_pool_rows(parts: &[PoolRows<'_>]) -> Result<Vec<u8>> {
    #[cfg(feature = "cuda")]
    if let Some(Device::Cuda(gpu)) = parts.first().map(|part| part.pool.device()) {
        return device::read(gpu, parts);
    }
    let mut bytes = Vec::with_capacity(parts.iter().map(PoolRows::bytes).sum());
    for part in parts {
        append(&part.pool.narrow(0, part.first, part.count)?, &mut bytes)?;
    }
    Ok(bytes)
}

/// Overwrites `parts` with what [`read_pool_rows`] has returned for parts of the same shapes and dtypes on the same kind of
/// device.
///
/// # Errors
/// If the bytes are more or fewer, or as there. The contents of the rows are then not specified.
pub fn write_pool_rows(parts: &[PoolRows<'_>], bytes: &[u8]) -> Result<()> {
    let wanted: usize = parts.iter().map(PoolRows::bytes).sum();
    if bytes.len() != wanted {
        candle_core::bail!(
            "{} bytes for a part of pools that has {wanted}",
            bytes.len()
        );
    }
    #[cfg(feature = "cuda")]
    if let Some(Device::Cuda(gpu)) = parts.first().map(|part| part.pool.device()) {
        return device::write(gpu, parts, bytes);
    }
    let mut rest = bytes;
    for part in parts {
        let (own, later) = rest.split_at(part.bytes());
        rest = later;
        let dims = [&[part.count][..], &part.pool.dims()[1..]].concat();
        let own = Tensor::from_raw_buffer(own, part.pool.dtype(), &dims, &Device::Cpu)?;
        part.pool.slice_set(&own, 0, part.first)?;
    }
    Ok(())
}

/// Appends the values of a contiguous tensor on the CPU.
fn append(tensor: &Tensor, bytes: &mut Vec<u8>) -> Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        candle_core::bail!("a pool is elsewhere, or not contiguous: {layout:?}");
    };
    match storage {
        CpuStorage::F32(values) => append_values(&values[start..end], bytes, f32::to_ne_bytes),
        CpuStorage::F16(values) => {
            append_values(&values[start..end], bytes, half::f16::to_ne_bytes)
        }
        CpuStorage::BF16(values) => {
            append_values(&values[start..end], bytes, half::bf16::to_ne_bytes)
        }
        CpuStorage::U8(blocks) => bytes.extend_from_slice(&blocks[start..end]),
        _ => candle_core::bail!("a pool is not of f32, f16, bf16 or blocks"),
    }
    Ok(())
}

/// Appends `values`, of `N` bytes each.
pub(super) fn append_values<T: Copy, const N: usize>(
    values: &[T],
    bytes: &mut Vec<u8>,
    of: impl Fn(T) -> [u8; N],
) {
    let start = bytes.len();
    bytes.resize(start + N * values.len(), 0);
    let places = bytes[start..].chunks_exact_mut(N);
    for (place, &value) in places.zip(values) {
        place.copy_from_slice(&of(value));
    }
}
