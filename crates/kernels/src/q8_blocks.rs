//! Keys and values in blocks of `Q8_0`, as ggml lays them out: an f16 scale in little-endian order, then 32 signed bytes.
//!
//! What a row becomes depends on this row alone, and has the same bits on every instruction set and on a GPU
//! (`q8_blocks.cuh`). A pool on a GPU has the same blocks in another order: the bytes of all blocks come first,
//! then all scales.

use super::float::f16_to_f32;
use super::simd::{Loop, Simd};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, DType, Layout, Result, Storage, Tensor};
use half::f16;

/// Values of a block.
pub(super) const BLOCK: usize = 32;
/// Bytes of a block.
pub(super) const BYTES: usize = 2 + BLOCK;

/// Values that are compared side by side, so that they are vectors.
const SIDE_BY_SIDE: usize = 8;

/// Bytes of `values` values; `None` if these are not whole blocks.
pub(super) fn bytes(values: usize) -> Option<usize> {
    (values.is_multiple_of(BLOCK)).then_some(values / BLOCK * BYTES)
}

/// The length of the first part of a pool of blocks on a GPU: the bytes of all blocks, before all scales.
///
/// # Errors
/// If it is no such pool, or a part of one, whose scales are elsewhere.
#[cfg(feature = "cuda")]
pub(super) fn bytes_before_scales(pool: &CudaStorage, layout: &Layout) -> Result<usize> {
    let len = pool.as_cuda_slice::<u8>()?.len();
    if layout.contiguous_offsets() != Some((0, len)) || !len.is_multiple_of(BYTES) {
        candle_core::bail!("a kernel needs a whole pool of blocks, got {layout:?} of {len} bytes");
    }
    Ok(len / BYTES * BLOCK)
}

/// The bytes and the scales of such a pool.
///
/// # Errors
/// See [`bytes_before_scales`].
#[cfg(feature = "cuda")]
pub(super) fn parts(pool: &Tensor) -> Result<[Tensor; 2]> {
    let (storage, layout) = pool.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("a kernel needs pools on the GPU, got {layout:?}");
    };
    let bytes = bytes_before_scales(storage, layout)?;
    let (all, len) = (pool.flatten_all()?, pool.elem_count());
    Ok([all.narrow(0, 0, bytes)?, all.narrow(0, bytes, len - bytes)?])
}

/// The tensors of a pool on a GPU that have a place for each row: the [`parts`] of a pool of blocks, or the pool itself.
///
/// # Errors
/// See [`bytes_before_scales`].
#[cfg(feature = "cuda")]
pub(super) fn planes(pool: &Tensor) -> Result<Vec<Tensor>> {
    match pool.dtype() {
        DType::U8 => Ok(parts(pool)?.to_vec()),
        _ => Ok(vec![pool.clone()]),
    }
}

/// Rounds values to blocks. The scale is rounded first, so a value is off by at most half of it, or by 4e-6 in blocks
/// of such small values that an f16 does not have all bits of the scale. A block with NaN, infinity or a value
/// of more than 8.3 million becomes NaN.
pub(super) struct Quantize<'a> {
    pub from: &'a [f32],
    /// [`bytes`] of them.
    pub to: &'a mut [u8],
}

impl Loop for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (from, to) = (
            self.from.as_chunks::<BLOCK>().0,
            self.to.as_chunks_mut::<BYTES>().0,
        );
        assert!(from.len() == to.len());
        for (from, to) in from.iter().zip(to) {
            quantize(from, to);
        }
    }
}

#[inline(always)]
fn quantize(from: &[f32; BLOCK], to: &mut [u8; BYTES]) {
    /// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let (mut largest, mut poison) = ([0f32; SIDE_BY_SIDE], [0f32; SIDE_BY_SIDE]);
    for values in from.as_chunks::<SIDE_BY_SIDE>().0 {
        for i in 0..SIDE_BY_SIDE {
            let size = values[i].abs();
            largest[i] = if size > largest[i] { size } else { largest[i] };
            // NaN, if the value is not finite.
            poison[i] += values[i] * 0.0;
        }
    }
    let largest = largest.into_iter().fold(0f32, f32::max);
    let poison: f32 = poison.into_iter().sum();
    let scale = f16::from_f32(largest / 127.0 + poison);
    let (to_scale, to) = to.split_at_mut(2);
    if !scale.is_finite() {
        to_scale.copy_from_slice(&f16::NAN.to_le_bytes());
        return to.fill(0);
    }
    to_scale.copy_from_slice(&scale.to_le_bytes());
    let scale = f16_to_f32(scale.to_bits());
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    for (to, from) in to.iter_mut().zip(from) {
        // Only a scale without all bits is so small that there is more than 127.
        let rounded = (from * inverse).clamp(-127.0, 127.0) + ROUND;
        *to = rounded.to_bits() as u8;
    }
}

/// The values of blocks.
#[inline(always)]
pub(super) fn dequantize<S: Simd>(s: S, from: &[u8], to: &mut [f32]) {
    let (from, to) = (from.as_chunks::<BYTES>().0, to.as_chunks_mut::<BLOCK>().0);
    assert!(from.len() == to.len());
    for (from, to) in from.iter().zip(to) {
        let scale = s.splat(f16_to_f32(u16::from_le_bytes([from[0], from[1]])));
        for half in [0, BLOCK / 2] {
            // SAFETY: a block has 32 bytes after its scale, and 32 values.
            unsafe {
                let values = s.load_i8(from.as_ptr().add(2 + half).cast());
                s.store(to.as_mut_ptr().add(half), s.mul(values, scale));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::simd::{Portable, run};
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Tensor};

    fn blocks(isa: Isa, from: &[f32]) -> Vec<u8> {
        let mut to = vec![1; bytes(from.len()).unwrap()];
        run(isa, Quantize { from, to: &mut to });
        to
    }

    fn values(blocks: &[u8]) -> Vec<f32> {
        let mut to = vec![0.; blocks.len() / BYTES * BLOCK];
        dequantize(Portable, blocks, &mut to);
        to
    }

    /// Blocks of values of every size that has a scale.
    fn samples() -> Vec<f32> {
        let mut state = 1u32;
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as f32 / (1u64 << 31) as f32 - 1.0
        };
        (0..400 * BLOCK)
            .map(|i| noise() * ((i / BLOCK) as f32 / 10. - 18.).exp2())
            .collect()
    }

    #[test]
    fn values_are_off_by_half_a_scale_on_every_instruction_set() {
        let from = samples();
        let first = blocks(Isa::Portable, &from);
        for isa in Isa::available() {
            assert_eq!(blocks(isa, &from), first, "{isa:?}");
        }
        let got = values(&first);
        for (from, got) in from.chunks(BLOCK).zip(got.chunks(BLOCK)) {
            let largest = from.iter().fold(0f32, |most, x| most.max(x.abs()));
            // The scale itself is off by up to 2^-11.
            let limit = (largest / 127. * 0.5 * 1.0005).max(4e-6);
            for (from, got) in from.iter().zip(got) {
                assert!((from - got).abs() <= limit, "{from} {got} of {largest}");
            }
        }
    }

    /// The layout is ggml's: another reader of it finds the same values.
    #[test]
    fn the_layout_is_that_of_ggml() {
        let ours = blocks(Isa::Portable, &samples());
        let data = candle_core::quantized::QStorage::from_data(
            std::borrow::Cow::Borrowed(&ours),
            &Device::Cpu,
            GgmlDType::Q8_0,
        );
        let theirs = QTensor::new(data.unwrap(), (400, BLOCK)).unwrap();
        let theirs: Tensor = theirs.dequantize(&Device::Cpu).unwrap();
        let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(values(&ours), theirs);
    }

    #[test]
    fn a_block_with_a_value_that_is_not_finite_is_nan_and_its_neighbour_is_not() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 9e6] {
            let mut from = vec![1f32; 3 * BLOCK];
            from[BLOCK + 7] = wrong;
            for isa in Isa::available() {
                let got = values(&blocks(isa, &from));
                let is_nan = |values: &[f32]| values.iter().all(|x| x.is_nan());
                assert!(is_nan(&got[BLOCK..2 * BLOCK]), "{wrong}, {isa:?}");
                assert!(got[..BLOCK].iter().all(|x| (x - 1.).abs() < 4e-3));
                assert_eq!(got[..BLOCK], got[2 * BLOCK..]);
            }
        }
        assert_eq!(values(&[0; BYTES]), [0.; BLOCK], "an empty slot");
        assert_eq!((bytes(64), bytes(0), bytes(40)), (Some(68), Some(0), None));
    }
}
