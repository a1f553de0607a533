//! [`Simd`] with AVX-512 and with AVX2, FMA and F16C.

pub(crate) mod amx;
mod avx512;

use super::vector::{
    BELOW_HALF, BYTE_SIGNS, E4M3_BITS, Element, LANES, Loop, Simd, UPPER, loads, with_instructions,
};
use crate::cpu::{Avx2, Avx512Bf16, Avx512Vnni};
use half::{bf16, f16};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) fn run_avx512<L: Loop>(s: Avx512Vnni, work: L) -> L::Output {
    work.run(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) fn run_avx512_bf16<L: Loop>(s: Avx512Bf16, work: L) -> L::Output {
    work.run(s)
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run_avx2<L: Loop>(s: Avx2, work: L) -> L::Output {
    work.run(s)
}

/// Methods that use registers alone.
macro_rules! on_registers {
    ($($name:ident($($x:ident),*) => $value:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($x: Self::Vector),*) -> Self::Vector {
                // SAFETY: `self` proves that the CPU has the instructions, none of which reads or writes memory.
                unsafe { $value }
            }
        )*
    };
}
use on_registers;

/// Two registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair(__m256, __m256);

impl Simd for Avx2 {
    type Vector = Pair;
    const SUMS: usize = 6;

    on_registers! {
        add(a, b) => Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1));
        sub(a, b) => Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1));
        mul(a, b) => Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1));
        fma(a, b, c) => Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1));
        max(a, b) => Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1));
        scale(x, n) => Pair(scale(x.0, n.0), scale(x.1, n.1));
        pair(low, high) => Pair(pair(low.0, high.0), pair(low.1, high.1));
        first(pairs) => Pair(first(pairs.0), first(pairs.1));
        second(pairs) => Pair(second(pairs.0), second(pairs.1));
    }

    loads! {
        load(from: *const f32) => Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8)));
        load_f16(from: *const f16) => Pair(eight_f16(from), eight_f16(from.add(8)));
        load_bf16(from: *const bf16) => Pair(eight_bf16(from), eight_bf16(from.add(8)));
        load_i8(from: *const i8) => {
            let [low, high] = [from, from.add(8)].map(|from| _mm_loadl_epi64(from.cast()));
            Pair(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
            )
        };
        load_e4m3(from: *const u8) => {
            // Each four lanes have another byte of the four words as their highest.
            let words = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
            let low = _mm256_sllv_epi32(words, _mm256_setr_epi32(0, 0, 0, 0, 8, 8, 8, 8));
            let high = _mm256_sllv_epi32(words, _mm256_setr_epi32(16, 16, 16, 16, 24, 24, 24, 24));
            Pair(eight_e4m3(low), eight_e4m3(high))
        };
        load_apart(from: *const bf16) => {
            let pairs = _mm256_loadu_ps(from.cast());
            Pair(first(pairs), second(pairs))
        };
        load_halves(from: [*const f32; 2]) => Pair(_mm256_loadu_ps(from[0]), _mm256_loadu_ps(from[1]));
        load_halves_f16(from: [*const f16; 2]) => Pair(eight_f16(from[0]), eight_f16(from[1]));
        load_halves_bf16(from: [*const bf16; 2]) => Pair(eight_bf16(from[0]), eight_bf16(from[1]));
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        // SAFETY: `self` proves that the CPU has AVX2.
        let x = unsafe { _mm256_set1_ps(x) };
        Pair(x, x)
    }

    #[inline(always)]
    fn zero_below(self, limit: f32, x: Pair, y: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe { Pair(zero_below(limit, x.0, y.0), zero_below(limit, x.1, y.1)) }
    }

    #[inline(always)]
    fn flip_bytes(self, x: Pair) -> Pair {
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe {
            let signs = _mm256_set1_ps(f32::from_bits(BYTE_SIGNS));
            Pair(_mm256_xor_ps(x.0, signs), _mm256_xor_ps(x.1, signs))
        }
    }

    #[inline(always)]
    fn max_of(self, x: Pair) -> f32 {
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe { max_of(_mm256_max_ps(x.0, x.1)) }
    }

    #[inline(always)]
    fn sum_of(self, x: Pair) -> f32 {
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe { sum_of(_mm256_add_ps(x.0, x.1)) }
    }

    #[inline(always)]
    fn sums_of_halves(self, [a, b]: [Pair; 2]) -> [f32; 4] {
        // SAFETY: `self` proves that the CPU has AVX2.
        unsafe { sums_of([a.0, a.1, b.0, b.1]) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: Pair) {
        // SAFETY: `self` proves that the CPU has AVX2; the caller, that 16 halves can be written.
        unsafe {
            let (low, high) = (rounded(x.0), rounded(x.1));
            // Packing takes turns between the halves of both.
            let packed = _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), packed);
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Pair) {
        // SAFETY: `self` proves that the CPU has AVX2; the caller, that 16 floats can be written.
        unsafe {
            _mm256_storeu_ps(to, x.0);
            _mm256_storeu_ps(to.add(8), x.1);
        }
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(
        self,
        from: &[*const E; LANES],
        to: [*mut f32; 2],
        step: usize,
    ) {
        for i in [0, 8] {
            for j in [0, 8] {
                // SAFETY: `self` proves that the CPU has AVX2; the caller, that 16 numbers of each row can be
                // read, and all vectors be written, of which these are the halves `j` of eight.
                unsafe {
                    let mut rows = [_mm256_setzero_ps(); 8];
                    let from = from[j..j + 8].as_chunks::<2>().0;
                    for (two, from) in rows.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                        let Pair(first, second) =
                            E::load_halves(self, [from[0].add(i), from[1].add(i)]);
                        *two = [first, second];
                    }
                    let mut to = to[i / 8].add(j);
                    for column in transposed(rows) {
                        _mm256_storeu_ps(to, column);
                        to = to.wrapping_add(step);
                    }
                }
            }
        }
    }
}

with_instructions! {
    scale(x: __m256, n: __m256) -> __m256 => {
        let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n))
    };
    zero_below(limit: f32, x: __m256, y: __m256) -> __m256 => {
        let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(limit));
        _mm256_andnot_ps(below, y)
    };
    pair(first: __m256, second: __m256) -> __m256 => {
        let first = _mm256_srli_epi32::<16>(_mm256_castps_si256(first));
        let second = _mm256_castps_si256(second);
        _mm256_castsi256_ps(_mm256_blend_epi16::<0xAA>(first, second))
    };
    first(pairs: __m256) -> __m256 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs)));
    second(pairs: __m256) -> __m256 => _mm256_and_ps(pairs, _mm256_set1_ps(f32::from_bits(UPPER)));
    /// The bf16 nearest to each, as integers.
    rounded(x: __m256) -> __m256i => {
        let x = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(x), _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(odd, _mm256_set1_epi32(BELOW_HALF.cast_signed()));
        _mm256_srli_epi32::<16>(_mm256_add_epi32(x, up))
    };
    max_of(x: __m256) -> f32 => {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    };
    sum_of(x: __m256) -> f32 => {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    };
    eight_f16(from: *const f16) -> __m256 => _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
    /// The numbers of E4M3 in the highest byte of each lane.
    eight_e4m3(lanes: __m256i) -> __m256 => {
        let bits = _mm256_set1_epi32(E4M3_BITS.cast_signed());
        _mm256_castsi256_ps(_mm256_and_si256(_mm256_srai_epi32::<4>(lanes), bits))
    };
    /// A bf16 is the upper half of an f32.
    eight_bf16(from: *const bf16) -> __m256 => {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    };
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn sums_of([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
        let (ab_high, cd_high) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
        // Lanes 0 to 3 of all four in the lower half, lanes 4 to 7 in the upper half.
        let sums = _mm256_add_ps(
            _mm256_shuffle_ps::<0x44>(ab, cd),
            _mm256_shuffle_ps::<0xEE>(ab, cd),
        );
        let sums = _mm256_add_ps(sums, _mm256_shuffle_ps::<0x44>(ab_high, cd_high));
        let sums = _mm256_add_ps(sums, _mm256_shuffle_ps::<0xEE>(ab_high, cd_high));
        let (low, high) = (
            _mm256_castps256_ps128(sums),
            _mm256_extractf128_ps::<1>(sums),
        );
        let mut sums = [0f32; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(low, high));
        sums
    }
}

/// Eight rows of eight as columns.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's contract.
    unsafe {
        // `quads[4 * i + c]` has in its part `p` the numbers `4 * p + c` of rows `4 * i..4 * i + 4`.
        let mut quads = [_mm256_setzero_ps(); 8];
        for i in 0..2 {
            let [a, b, c, d] = [
                rows[4 * i],
                rows[4 * i + 1],
                rows[4 * i + 2],
                rows[4 * i + 3],
            ];
            let ab = [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)];
            let cd = [_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)];
            for j in 0..2 {
                let (ab, cd) = (_mm256_castps_pd(ab[j]), _mm256_castps_pd(cd[j]));
                quads[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
                quads[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
            }
        }
        let mut columns = [_mm256_setzero_ps(); 8];
        for c in 0..4 {
            let (a, b) = (quads[c], quads[4 + c]);
            columns[c] = _mm256_permute2f128_ps::<0x20>(a, b);
            columns[4 + c] = _mm256_permute2f128_ps::<0x31>(a, b);
        }
        columns
    }
}
