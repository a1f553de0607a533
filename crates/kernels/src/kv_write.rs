//! Scatters new keys or values into a pool.

use super::cpu;
use super::q8_blocks::{self, Quantize};
use super::simd::run;
use super::slots::{self, Slots};
use super::storage::contiguous;
use candle_core::{CpuStorage, InplaceOp3, Layout, Result, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use tracing::trace_span;

/// Writes row `i` of `rows` to slot `slots[i]` of `pool`, in place.
///
/// `pool` is `[num_slots, kv_heads, head_dim]` in f32, f16 or bf16, contiguous; `rows`
/// `[n, kv_heads, head_dim]` of the same dtype or f32, each row contiguous; `slots` `[n]` u32. No
/// other slot is touched. On the CPU `pool` may also be u8, `[num_slots, kv_heads, head_dim / 32 * 34]`, and `rows` f32:
/// each 32 values of a head become a block of `Q8_0`, which depends on nothing else.
///
/// # Errors
/// If the shapes or dtypes do not match, or a slot is outside the pool.
pub fn kv_write(pool: &Tensor, rows: &Tensor, slots: &Tensor) -> Result<()> {
    pool.inplace_op3(rows, slots, &KvWrite)
}

/// Writes `rows` to the slots of a forward's rows, as [`kv_write`] does.
///
/// # Errors
/// As [`kv_write`].
pub fn kv_write_to(pool: &Tensor, rows: &Tensor, slots: &Slots) -> Result<()> {
    kv_write(pool, rows, slots.tensor())
}

struct KvWrite;

impl InplaceOp3 for KvWrite {
    fn name(&self) -> &'static str {
        "kv-write"
    }

    fn cpu_fwd(
        &self,
        pool: &mut CpuStorage,
        pool_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
        slots: &CpuStorage,
        slots_layout: &Layout,
    ) -> Result<()> {
        let is_blocks = matches!(pool, CpuStorage::U8(_));
        let width = width(pool_layout, rows_layout, slots_layout, is_blocks)?;
        let slots = contiguous::<u32>(self.name(), slots, slots_layout)?;
        trace_span!("kv_write").in_scope(|| match pool {
            CpuStorage::F32(pool) => scatter(pool, pool_layout, rows, rows_layout, slots, width),
            CpuStorage::F16(pool) => scatter(pool, pool_layout, rows, rows_layout, slots, width),
            CpuStorage::BF16(pool) => scatter(pool, pool_layout, rows, rows_layout, slots, width),
            CpuStorage::U8(pool) => scatter(pool, pool_layout, rows, rows_layout, slots, width),
            _ => candle_core::bail!("kv-write: the pool must be f32, f16, bf16 or blocks"),
        })
    }
}

/// Values, and elements of the pool, per slot.
fn width(pool: &Layout, rows: &Layout, slots: &Layout, is_blocks: bool) -> Result<(usize, usize)> {
    let (rows_dims, pool_dims) = (rows.dims(), pool.dims());
    let mut stored = rows_dims.get(1..).map(<[usize]>::to_vec);
    if let (true, Some(head)) = (is_blocks, stored.as_mut().and_then(|dims| dims.last_mut())) {
        // No head has so many elements as those that are not whole blocks.
        *head = q8_blocks::bytes(*head).unwrap_or(usize::MAX);
    }
    if stored.as_deref() != pool_dims.get(1..) || rows_dims[0] != slots.shape().elem_count() {
        candle_core::bail!(
            "kv-write: rows {rows_dims:?} do not fit slots {:?} of pool {pool_dims:?}",
            slots.dims()
        );
    }
    if !rows.narrow(0, 0, rows_dims[0].min(1))?.is_contiguous() {
        candle_core::bail!("kv-write: each row must be contiguous");
    }
    let per_slot = |dims: &[usize]| dims[1..].iter().product();
    Ok((per_slot(rows_dims), per_slot(pool_dims)))
}

fn scatter<T: WithDType + FromF32>(
    pool: &mut [T],
    pool_layout: &Layout,
    rows: &CpuStorage,
    rows_layout: &Layout,
    slots: &[u32],
    (values, elements): (usize, usize),
) -> Result<()> {
    let Some((start, end)) = pool_layout.contiguous_offsets() else {
        candle_core::bail!("kv-write: the pool must be contiguous");
    };
    let pool = &mut pool[start..end];
    // Checked before the first write, so that an error changes nothing.
    slots::check(slots, pool.len() / elements.max(1))?;
    let stride = rows_layout.stride()[0];
    for (i, &slot) in slots.iter().enumerate() {
        let from = rows_layout.start_offset() + i * stride;
        let at = slot as usize * elements;
        let place = &mut pool[at..at + elements];
        match rows {
            CpuStorage::F32(rows) => T::narrow(&rows[from..from + values], place),
            rows if values == elements => {
                place.copy_from_slice(&rows.as_slice::<T>()?[from..from + values]);
            }
            _ => candle_core::bail!("kv-write: rows for a pool of blocks must be f32"),
        }
    }
    Ok(())
}

/// An element type of a pool.
trait FromF32: Sized {
    /// Rounds values to the pool's dtype, to nearest, ties to even; or to blocks.
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl FromF32 for f32 {
    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl FromF32 for half::f16 {
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

impl FromF32 for half::bf16 {
    fn narrow(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }
}

/// Blocks of `Q8_0`.
impl FromF32 for u8 {
    fn narrow(from: &[f32], to: &mut [u8]) {
        run(cpu::isa(), Quantize { from, to });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn writes_the_named_slots_and_no_other() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let cpu = Device::Cpu;
            let pool = Tensor::zeros((5, 2, 3), dtype, &cpu).unwrap();
            let rows = Tensor::arange(1f32, 13f32, &cpu).unwrap();
            let rows = rows.reshape((2, 2, 3)).unwrap().to_dtype(dtype).unwrap();
            let slots = Tensor::new(&[4u32, 1], &cpu).unwrap();
            kv_write(&pool, &rows, &slots).unwrap();
            let pool = pool.to_dtype(DType::F32).unwrap().flatten_from(1).unwrap();
            let got = pool.to_vec2::<f32>().unwrap();
            assert_eq!(got[4], [1., 2., 3., 4., 5., 6.]);
            assert_eq!(got[1], [7., 8., 9., 10., 11., 12.]);
            for untouched in [0, 2, 3] {
                assert_eq!(got[untouched], [0.; 6]);
            }
        }
    }

    /// As the decoder calls it: keys are part of wider rows in f32, and the pool may have fewer bits.
    #[test]
    fn takes_parts_of_rows_and_rounds_them() {
        let cpu = Device::Cpu;
        let wide = Tensor::randn(0f32, 1., (3, 5, 4), &cpu).unwrap();
        let keys = wide.narrow(1, 2, 2).unwrap();
        let slots = Tensor::new(&[6u32, 0, 3], &cpu).unwrap();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let pool = Tensor::zeros((7, 2, 4), dtype, &cpu).unwrap();
            kv_write(&pool, &keys, &slots).unwrap();
            let values = |t: &Tensor| {
                t.flatten_all()
                    .unwrap()
                    .to_dtype(DType::F32)
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
            };
            for (row, slot) in [6, 0, 3].into_iter().enumerate() {
                let want = keys.get(row).unwrap().to_dtype(dtype).unwrap();
                assert_eq!(values(&pool.get(slot).unwrap()), values(&want));
            }
        }
        let across = wide.transpose(1, 2).unwrap().narrow(1, 0, 2).unwrap();
        let pool = Tensor::zeros((7, 2, 5), DType::F32, &cpu).unwrap();
        assert!(kv_write(&pool, &across, &slots).is_err());
    }

    #[test]
    fn a_slot_outside_the_pool_is_an_error_and_nothing_is_written() {
        let pool = Tensor::zeros((5, 1, 2), DType::F32, &Device::Cpu).unwrap();
        let rows = Tensor::ones((2, 1, 2), DType::F32, &Device::Cpu).unwrap();
        for outside in [5, u32::MAX] {
            let slots = Tensor::new(&[1, outside], &Device::Cpu).unwrap();
            assert!(kv_write(&pool, &rows, &slots).is_err());
            let sum = pool.sum_all().unwrap().to_scalar::<f32>().unwrap();
            assert_eq!(sum, 0.0);
        }
    }
}
