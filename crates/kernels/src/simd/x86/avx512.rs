//! [`Simd`] with AVX-512.

use super::{max_of, on_registers, sum_of, sums_of};
use crate::cpu::{Avx512Bf16, Avx512Vnni};
use crate::simd::vector::{
    BELOW_HALF, BYTE_SIGNS, E4M3_BITS, Element, LANES, Simd, UPPER, loads, with_instructions,
};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The second of each pair. Masks have registers of their own: loops over pairs use all others.
const SECOND: __mmask32 = 0xAAAA_AAAA;

/// AVX-512, but for what differs with AVX512-BF16.
macro_rules! avx512 {
    ($type:ty $(, $pairs:item)*) => {
        impl Simd for $type {
            type Vector = __m512;
            const SUMS: usize = 24;
            // There are plenty of registers.
            const PAIR_SUMS: usize = 24;

            on_registers! {
                add(a, b) => _mm512_add_ps(a, b);
                sub(a, b) => _mm512_sub_ps(a, b);
                mul(a, b) => _mm512_mul_ps(a, b);
                fma(a, b, c) => _mm512_fmadd_ps(a, b, c);
                max(a, b) => _mm512_max_ps(a, b);
                scale(x, n) => {
                    let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
                    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n))
                };
                pair(first, second) => {
                    let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(first));
                    let second = _mm512_castps_si512(second);
                    _mm512_castsi512_ps(_mm512_mask_blend_epi16(SECOND, first, second))
                };
                first(pairs) => {
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(pairs)))
                };
                second(pairs) => {
                    let pairs = _mm512_castps_si512(pairs);
                    _mm512_castsi512_ps(_mm512_maskz_mov_epi16(SECOND, pairs))
                };
            }

            loads! {
                load(from: *const f32) => _mm512_loadu_ps(from);
                load_f16(from: *const f16) => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
                /// A bf16 is the upper half of an f32.
                load_bf16(from: *const bf16) => {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                };
                load_i8(from: *const i8) => {
                    let bytes = _mm_loadu_si128(from.cast());
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
                };
                load_e4m3(from: *const u8) => {
                    // Each four lanes have another byte of the four words as their highest.
                    let words = _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast()));
                    let places = _mm512_setr_epi32(
                        0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24,
                    );
                    let moved = _mm512_srai_epi32::<4>(_mm512_sllv_epi32(words, places));
                    let bits = _mm512_set1_epi32(E4M3_BITS.cast_signed());
                    _mm512_castsi512_ps(_mm512_and_si512(moved, bits))
                };
                load_apart(from: *const bf16) => {
                    // Twice the eight pairs; the first eight lanes take the lower halves.
                    let both = _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast()));
                    let upper = _mm512_and_si512(both, _mm512_set1_epi32(UPPER.cast_signed()));
                    _mm512_castsi512_ps(_mm512_mask_slli_epi32::<16>(upper, 0x00ff, both))
                };
                load_halves(from: [*const f32; 2]) => {
                    let low = _mm512_castpd256_pd512(_mm256_loadu_pd(from[0].cast()));
                    _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_loadu_pd(from[1].cast())))
                };
                load_halves_f16(from: [*const f16; 2]) => _mm512_cvtph_ps(both(from));
                load_halves_bf16(from: [*const bf16; 2]) => {
                    let wide = _mm512_cvtepu16_epi32(both(from));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                };
            }

            #[inline(always)]
            fn splat(self, x: f32) -> __m512 {
                // SAFETY: `self` proves that the CPU has AVX-512 F.
                unsafe { _mm512_set1_ps(x) }
            }

            #[inline(always)]
            fn zero_below(self, limit: f32, x: __m512, y: __m512) -> __m512 {
                // SAFETY: `self` proves that the CPU has AVX-512 F.
                unsafe {
                    // Not less than: also for NaN.
                    let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
                    _mm512_maskz_mov_ps(kept, y)
                }
            }

            #[inline(always)]
            fn max_of(self, x: __m512) -> f32 {
                // SAFETY: `self` proves that the CPU has AVX-512 F and AVX2.
                unsafe { max_of(_mm256_max_ps(low(x), high(x))) }
            }

            #[inline(always)]
            fn sum_of(self, x: __m512) -> f32 {
                // SAFETY: `self` proves that the CPU has AVX-512 F and AVX2.
                unsafe { sum_of(_mm256_add_ps(low(x), high(x))) }
            }

            #[inline(always)]
            fn sums_of_halves(self, [a, b]: [__m512; 2]) -> [f32; 4] {
                // SAFETY: `self` proves that the CPU has AVX-512 F and AVX2.
                unsafe { sums_of([low(a), high(a), low(b), high(b)]) }
            }

            #[inline(always)]
            fn flip_bytes(self, x: __m512) -> __m512 {
                // SAFETY: `self` proves that the CPU has AVX-512 F.
                unsafe {
                    let signs = _mm512_set1_epi32(BYTE_SIGNS.cast_signed());
                    _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), signs))
                }
            }

            $($pairs)*

            #[inline(always)]
            unsafe fn store(self, to: *mut f32, x: __m512) {
                // SAFETY: `self` proves that the CPU has AVX-512 F; the caller, that 16 floats can be written.
                unsafe { _mm512_storeu_ps(to, x) }
            }

            #[inline(always)]
            unsafe fn transpose<E: Element>(
                self,
                from: &[*const E; LANES],
                to: [*mut f32; 2],
                step: usize,
            ) {
                // SAFETY: `self` proves that the CPU has AVX-512 F; the caller, that 16 numbers of each row can be
                // read, and all 16 vectors be written, of which these are two for each `c` and part.
                unsafe {
                    // `quads[4 * i + c]` has in its part `p` the numbers `4 * p + c` of rows `4 * i..4 * i + 4`.
                    let mut quads = [_mm512_setzero_ps(); LANES];
                    for i in 0..4 {
                        let [a, b, c, d] = [
                            E::load(self, from[4 * i]),
                            E::load(self, from[4 * i + 1]),
                            E::load(self, from[4 * i + 2]),
                            E::load(self, from[4 * i + 3]),
                        ];
                        let ab = [_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)];
                        let cd = [_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)];
                        for j in 0..2 {
                            let (ab, cd) = (_mm512_castps_pd(ab[j]), _mm512_castps_pd(cd[j]));
                            quads[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
                            quads[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
                        }
                    }
                    for c in 0..4 {
                        let [a, b, d, e] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
                        // Parts 0 and 2 of two vectors, and parts 1 and 3.
                        let (ab_even, de_even) = (
                            _mm512_shuffle_f32x4::<0x88>(a, b),
                            _mm512_shuffle_f32x4::<0x88>(d, e),
                        );
                        let (ab_odd, de_odd) = (
                            _mm512_shuffle_f32x4::<0xDD>(a, b),
                            _mm512_shuffle_f32x4::<0xDD>(d, e),
                        );
                        let [low, high] = [c * step, (c + 4) * step];
                        let columns = [
                            _mm512_shuffle_f32x4::<0x88>(ab_even, de_even),
                            _mm512_shuffle_f32x4::<0x88>(ab_odd, de_odd),
                            _mm512_shuffle_f32x4::<0xDD>(ab_even, de_even),
                            _mm512_shuffle_f32x4::<0xDD>(ab_odd, de_odd),
                        ];
                        self.store(to[0].wrapping_add(low), columns[0]);
                        self.store(to[0].wrapping_add(high), columns[1]);
                        self.store(to[1].wrapping_add(low), columns[2]);
                        self.store(to[1].wrapping_add(high), columns[3]);
                    }
                }
            }
        }
    };
}
avx512!(
    Avx512Vnni,
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: __m512) {
        // SAFETY: `self` proves that the CPU has AVX-512 F; the caller, that 16 halves, 256 bits, can be written.
        unsafe {
            let x = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(x), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(odd, _mm512_set1_epi32(BELOW_HALF.cast_signed()));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(x, up));
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(rounded));
        }
    }
);
avx512!(
    Avx512Bf16,
    #[inline(always)]
    fn dot_pairs(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that the CPU has AVX512-BF16.
        unsafe { _mm512_dpbf16_ps(c, as_pairs(a), as_pairs(b)) }
    },
    /// Numbers below 1.2e-38 become 0.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: __m512) {
        // SAFETY: `self` proves that the CPU has AVX512-BF16; the caller, that 16 halves can be written.
        unsafe { to.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(x)) }
    }
);

/// 128 bits from each.
///
/// # Safety
/// The CPU has AVX2, and they can be read.
#[inline(always)]
unsafe fn both<E>([low, high]: [*const E; 2]) -> __m256i {
    // SAFETY: the caller's contract.
    unsafe { _mm256_loadu2_m128i(high.cast(), low.cast()) }
}

#[inline(always)]
fn as_pairs(x: __m512) -> __m512bh {
    // SAFETY: both are 512 bits, of which any are valid.
    unsafe { std::mem::transmute::<__m512, __m512bh>(x) }
}

with_instructions! {
    low(x: __m512) -> __m256 => _mm512_castps512_ps256(x);
    high(x: __m512) -> __m256 => {
        let x = _mm512_castps_si512(x);
        _mm256_castsi256_ps(_mm512_extracti64x4_epi64::<1>(x))
    };
}
