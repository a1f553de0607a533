//! The formats as vectors of 256 bits.

use super::super::formats::{
    Affine, BLOCK, Bytes, Format, Q4_0, Q4_1, Q4K, Q5_1, Q5K, Q6K, Q8_0, Scales6K, ScalesK, WIDTH,
};
use half::f16;
use std::arch::x86_64::*;

/// Vectors per tile.
pub(super) const VECTORS: usize = BLOCK / 4;

/// A format as vectors. All functions need AVX2, FMA and F16C, and are inlined into functions that
/// have them.
pub(in super::super) trait Vectors: Format {
    /// Bits per quant. With 8 bits quants are signed, with fewer they are unsigned.
    const BITS: u32;

    /// Quants of inputs `4 v .. 4 v + 4` of eight outputs.
    ///
    /// # Safety
    /// The CPU has AVX2; `v < 8`.
    unsafe fn quants(quants: &Self::Quants, v: usize) -> __m256i;

    /// Scales of eight outputs.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C.
    unsafe fn scales(scales: &Self::Scales, sub: usize) -> __m256;

    /// Offsets of eight outputs; only called with [`Format::OFFSET`].
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C.
    unsafe fn offsets(_: &Self::Scales, _sub: usize) -> __m256 {
        unreachable!("the format has no offsets")
    }

    /// For each output, the factors of both half blocks as two i16; only called with 6 bits.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn factors(_: &Self::Scales, _sub: usize) -> __m256i {
        unreachable!("the format has no factors")
    }
}

/// The 32 bytes of vector `v`.
///
/// # Safety
/// The CPU has AVX2, and `bytes` contains vector `v`.
#[inline(always)]
unsafe fn load<const N: usize>(bytes: &Bytes<N>, v: usize) -> __m256i {
    debug_assert!((v + 1) * 32 <= N);
    // SAFETY: by the caller's contract; `Bytes` is aligned.
    unsafe { _mm256_load_si256(bytes.0.as_ptr().add(v * 32).cast()) }
}

/// Nibbles of vector `v`.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn nibbles<const N: usize>(bytes: &Bytes<N>, v: usize) -> __m256i {
    // SAFETY: by the caller's contract.
    unsafe {
        let both = load(bytes, v % (VECTORS / 2));
        let nibbles = if v < VECTORS / 2 {
            both
        } else {
            _mm256_srli_epi16::<4>(both)
        };
        _mm256_and_si256(nibbles, _mm256_set1_epi8(15))
    }
}

/// Quants of 5 bits.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn five<const N: usize>(bytes: &Bytes<N>, v: usize) -> __m256i {
    // SAFETY: by the caller's contract.
    unsafe {
        // Moves bit v of each byte to bit 4; bits shifted in from the neighbouring byte are masked off.
        let bits = _mm256_sll_epi16(load(bytes, 4), _mm_cvtsi32_si128(4 - v.min(4) as i32));
        let bits = _mm256_srl_epi16(bits, _mm_cvtsi32_si128(v.max(4) as i32 - 4));
        let bit = _mm256_and_si256(bits, _mm256_set1_epi8(16));
        _mm256_or_si256(nibbles(bytes, v), bit)
    }
}

/// Eight halves as floats.
///
/// # Safety
/// The CPU has F16C.
#[inline(always)]
unsafe fn widen(halves: &[f16; WIDTH]) -> __m256 {
    // SAFETY: eight halves are 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast())) }
}

/// Eight bytes as floats.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn widen_bytes(bytes: &[u8; WIDTH]) -> __m256 {
    // SAFETY: eight bytes are read.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast()))) }
}

/// # Safety
/// The CPU has AVX2 and F16C.
#[inline(always)]
unsafe fn scales_k(scales: &ScalesK, sub: usize) -> __m256 {
    // SAFETY: by the caller's contract.
    unsafe { _mm256_mul_ps(widen(&scales.d), widen_bytes(&scales.sc[sub])) }
}

/// # Safety
/// The CPU has AVX2 and F16C.
#[inline(always)]
unsafe fn offsets_k(scales: &ScalesK, sub: usize) -> __m256 {
    // SAFETY: by the caller's contract.
    unsafe {
        let offsets = _mm256_mul_ps(widen(&scales.m), widen_bytes(&scales.mn[sub]));
        _mm256_xor_ps(offsets, _mm256_set1_ps(-0.0))
    }
}

/// Implements [`Vectors`]: bits, quants, scales and, if any, offsets, using the functions above.
macro_rules! vectors {
    ($format:ty, $bits:literal, $quants:expr, $scales:expr $(, $offsets:expr)?) => {
        impl Vectors for $format {
            const BITS: u32 = $bits;

            #[inline(always)]
            unsafe fn quants(quants: &Self::Quants, v: usize) -> __m256i {
                // SAFETY: by the caller's contract.
                unsafe { $quants(quants, v) }
            }

            #[inline(always)]
            unsafe fn scales(scales: &Self::Scales, sub: usize) -> __m256 {
                // SAFETY: by the caller's contract.
                unsafe { $scales(scales, sub) }
            }

            $(#[inline(always)]
            unsafe fn offsets(scales: &Self::Scales, sub: usize) -> __m256 {
                // SAFETY: by the caller's contract.
                unsafe { $offsets(scales, sub) }
            })?
        }
    };
}

vectors!(Q8_0, 8, load, |s, _| widen(s));
vectors!(Q4_0, 4, nibbles, |s, _| widen(s));
vectors!(
    Q4_1,
    4,
    nibbles,
    |s: &Affine, _| widen(&s.d),
    |s: &Affine, _| widen(&s.m)
);
vectors!(
    Q5_1,
    5,
    five,
    |s: &Affine, _| widen(&s.d),
    |s: &Affine, _| widen(&s.m)
);
vectors!(Q4K, 4, nibbles, scales_k, offsets_k);
vectors!(Q5K, 5, five, scales_k, offsets_k);

impl Vectors for Q6K {
    const BITS: u32 = 6;

    #[inline(always)]
    unsafe fn quants(quants: &Self::Quants, v: usize) -> __m256i {
        // SAFETY: by the caller's contract.
        unsafe {
            let bits = load(quants, 4 + v % 4 / 2);
            let bits = match v / 4 * 2 + v % 2 {
                0 => _mm256_slli_epi16::<4>(bits),
                1 => _mm256_slli_epi16::<2>(bits),
                2 => bits,
                _ => _mm256_srli_epi16::<2>(bits),
            };
            let high = _mm256_and_si256(bits, _mm256_set1_epi8(0x30));
            _mm256_or_si256(nibbles(quants, v), high)
        }
    }

    #[inline(always)]
    unsafe fn scales(scales: &Scales6K, _: usize) -> __m256 {
        // SAFETY: by the caller's contract.
        unsafe { widen(&scales.d) }
    }

    #[inline(always)]
    unsafe fn factors(scales: &Scales6K, sub: usize) -> __m256i {
        // SAFETY: sixteen factors are 16 bytes.
        unsafe { _mm256_cvtepi8_epi16(_mm_loadu_si128(scales.sc[sub].as_ptr().cast())) }
    }
}
