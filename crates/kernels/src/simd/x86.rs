//! [`Simd`] with AVX-512 and with AVX2, FMA and F16C.

use super::vector::{BELOW_HALF, Element, LANES, Loop, Simd, UPPER};
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

// SAFETY of all blocks below: `self` proves that the CPU has the instructions; what pointers must allow is
// the caller's contract.

/// What both have in one register of 256 bits.
macro_rules! eights {
    () => {
        type Eight = __m256;

        #[inline(always)]
        fn zero_eight(self) -> __m256 {
            unsafe { _mm256_setzero_ps() }
        }

        #[inline(always)]
        fn fma_eight(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        fn sums_of(self, x: [__m256; 4]) -> [f32; 4] {
            unsafe { sums_of(x) }
        }

        #[inline(always)]
        unsafe fn load_eight(self, from: *const f32) -> __m256 {
            unsafe { _mm256_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn load_eight_f16(self, from: *const f16) -> __m256 {
            unsafe { eight_f16(from) }
        }

        #[inline(always)]
        unsafe fn load_eight_bf16(self, from: *const bf16) -> __m256 {
            unsafe { eight_bf16(from) }
        }
    };
}

/// The second of each pair. Masks have registers of their own: loops over pairs use all others.
const SECOND: __mmask32 = 0xAAAA_AAAA;

/// AVX-512, but for what differs with AVX512-BF16.
macro_rules! avx512 {
    ($type:ty $(, $pairs:item)*) => {
        impl Simd for $type {
        type Vector = __m512;
        const SUMS: usize = 24;

        #[inline(always)]
        fn splat(self, x: f32) -> __m512 {
            unsafe { _mm512_set1_ps(x) }
        }

        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_add_ps(a, b) }
        }

        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_sub_ps(a, b) }
        }

        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_mul_ps(a, b) }
        }

        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }

        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            unsafe { _mm512_max_ps(a, b) }
        }

        #[inline(always)]
        fn scale(self, x: __m512, n: __m512) -> __m512 {
            unsafe {
                let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(n));
                _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), n))
            }
        }

        #[inline(always)]
        fn zero_below(self, limit: f32, x: __m512, y: __m512) -> __m512 {
            unsafe {
                // Not less than: also for NaN.
                let kept = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
                _mm512_maskz_mov_ps(kept, y)
            }
        }

        #[inline(always)]
        fn max_of(self, x: __m512) -> f32 {
            unsafe { max_of(_mm256_max_ps(low(x), high(x))) }
        }

        #[inline(always)]
        fn sum_of(self, x: __m512) -> f32 {
            unsafe { sum_of(_mm256_add_ps(low(x), high(x))) }
        }

        eights!();

        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> __m512 {
            unsafe { _mm512_loadu_ps(from) }
        }

        #[inline(always)]
        unsafe fn load_f16(self, from: *const f16) -> __m512 {
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }

        /// A bf16 is the upper half of an f32.
        #[inline(always)]
        unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }

        #[inline(always)]
        unsafe fn load_apart(self, from: *const bf16) -> __m512 {
            unsafe {
                // Twice the eight pairs; the first eight lanes take the lower halves.
                let both = _mm512_broadcast_i64x4(_mm256_loadu_si256(from.cast()));
                let upper = _mm512_and_si512(both, _mm512_set1_epi32(UPPER.cast_signed()));
                _mm512_castsi512_ps(_mm512_mask_slli_epi32::<16>(upper, 0x00ff, both))
            }
        }

        #[inline(always)]
            fn pair(self, first: __m512, second: __m512) -> __m512 {
                unsafe {
                    let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(first));
                    let second = _mm512_castps_si512(second);
                    _mm512_castsi512_ps(_mm512_mask_blend_epi16(SECOND, first, second))
                }
            }

            #[inline(always)]
        fn first(self, pairs: __m512) -> __m512 {
            unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(pairs))) }
        }

        #[inline(always)]
            fn second(self, pairs: __m512) -> __m512 {
                unsafe {
                    let pairs = _mm512_castps_si512(pairs);
                    _mm512_castsi512_ps(_mm512_maskz_mov_epi16(SECOND, pairs))
                }
            }

            $($pairs)*

        #[inline(always)]
        unsafe fn store(self, to: *mut f32, x: __m512) {
            unsafe { _mm512_storeu_ps(to, x) }
        }

        #[inline(always)]
        unsafe fn transpose<E: Element>(self, from: &[*const E; LANES], to: *mut f32, step: usize) {
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
                    let (low, high) = (to.wrapping_add(c * step), to.wrapping_add((c + 4) * step));
                    self.store(low, _mm512_shuffle_f32x4::<0x88>(ab_even, de_even));
                    self.store(high, _mm512_shuffle_f32x4::<0x88>(ab_odd, de_odd));
                    let (low, high) = (low.add(LANES), high.add(LANES));
                    self.store(low, _mm512_shuffle_f32x4::<0xDD>(ab_even, de_even));
                    self.store(high, _mm512_shuffle_f32x4::<0xDD>(ab_odd, de_odd));
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
        unsafe { _mm512_dpbf16_ps(c, as_pairs(a), as_pairs(b)) }
    },
    /// Numbers below 1.2e-38 become 0.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: __m512) {
        unsafe { to.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(x)) }
    }
);

/// Two registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair(__m256, __m256);

impl Simd for Avx2 {
    type Vector = Pair;
    const SUMS: usize = 6;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        let x = unsafe { _mm256_set1_ps(x) };
        Pair(x, x)
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        unsafe {
            Pair(
                _mm256_fmadd_ps(a.0, b.0, c.0),
                _mm256_fmadd_ps(a.1, b.1, c.1),
            )
        }
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        unsafe { Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn scale(self, x: Pair, n: Pair) -> Pair {
        unsafe { Pair(scale(x.0, n.0), scale(x.1, n.1)) }
    }

    #[inline(always)]
    fn zero_below(self, limit: f32, x: Pair, y: Pair) -> Pair {
        unsafe { Pair(zero_below(limit, x.0, y.0), zero_below(limit, x.1, y.1)) }
    }

    #[inline(always)]
    fn max_of(self, x: Pair) -> f32 {
        unsafe { max_of(_mm256_max_ps(x.0, x.1)) }
    }

    #[inline(always)]
    fn sum_of(self, x: Pair) -> f32 {
        unsafe { sum_of(_mm256_add_ps(x.0, x.1)) }
    }

    eights!();

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Pair {
        unsafe { Pair(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Pair {
        unsafe { Pair(eight_f16(from), eight_f16(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Pair {
        unsafe { Pair(eight_bf16(from), eight_bf16(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_apart(self, from: *const bf16) -> Pair {
        unsafe {
            let pairs = _mm256_loadu_ps(from.cast());
            Pair(first(pairs), second(pairs))
        }
    }

    #[inline(always)]
    fn pair(self, first: Pair, second: Pair) -> Pair {
        unsafe { Pair(pair(first.0, second.0), pair(first.1, second.1)) }
    }

    #[inline(always)]
    fn first(self, pairs: Pair) -> Pair {
        unsafe { Pair(first(pairs.0), first(pairs.1)) }
    }

    #[inline(always)]
    fn second(self, pairs: Pair) -> Pair {
        unsafe { Pair(second(pairs.0), second(pairs.1)) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, x: Pair) {
        unsafe {
            let (low, high) = (rounded(x.0), rounded(x.1));
            // Packing takes turns between the halves of both.
            let packed = _mm256_permute4x64_epi64::<0xD8>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(to.cast(), packed);
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Pair) {
        unsafe {
            _mm256_storeu_ps(to, x.0);
            _mm256_storeu_ps(to.add(8), x.1);
        }
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(self, from: &[*const E; LANES], to: *mut f32, step: usize) {
        for i in [0, 8] {
            for j in [0, 8] {
                unsafe {
                    let mut rows = [_mm256_setzero_ps(); 8];
                    for (row, from) in rows.iter_mut().zip(&from[j..j + 8]) {
                        *row = E::load_eight(self, from.add(i));
                    }
                    let mut to = to.add(i / 8 * LANES + j);
                    for column in transposed(rows) {
                        _mm256_storeu_ps(to, column);
                        to = to.wrapping_add(step);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn as_pairs(x: __m512) -> __m512bh {
    // SAFETY: both are 512 bits, of which any are valid.
    unsafe { std::mem::transmute::<__m512, __m512bh>(x) }
}

#[inline(always)]
unsafe fn low(x: __m512) -> __m256 {
    unsafe { _mm512_castps512_ps256(x) }
}

#[inline(always)]
unsafe fn high(x: __m512) -> __m256 {
    unsafe {
        let x = _mm512_castps_si512(x);
        _mm256_castsi256_ps(_mm512_extracti64x4_epi64::<1>(x))
    }
}

#[inline(always)]
unsafe fn scale(x: __m256, n: __m256) -> __m256 {
    unsafe {
        let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(n));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n))
    }
}

#[inline(always)]
unsafe fn zero_below(limit: f32, x: __m256, y: __m256) -> __m256 {
    unsafe {
        let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(limit));
        _mm256_andnot_ps(below, y)
    }
}

#[inline(always)]
unsafe fn pair(first: __m256, second: __m256) -> __m256 {
    unsafe {
        let first = _mm256_srli_epi32::<16>(_mm256_castps_si256(first));
        let second = _mm256_castps_si256(second);
        _mm256_castsi256_ps(_mm256_blend_epi16::<0xAA>(first, second))
    }
}

#[inline(always)]
unsafe fn first(pairs: __m256) -> __m256 {
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs))) }
}

#[inline(always)]
unsafe fn second(pairs: __m256) -> __m256 {
    unsafe { _mm256_and_ps(pairs, _mm256_set1_ps(f32::from_bits(UPPER))) }
}

/// The bf16 nearest to each, as integers.
#[inline(always)]
unsafe fn rounded(x: __m256) -> __m256i {
    unsafe {
        let x = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(x), _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(odd, _mm256_set1_epi32(BELOW_HALF.cast_signed()));
        _mm256_srli_epi32::<16>(_mm256_add_epi32(x, up))
    }
}

#[inline(always)]
unsafe fn max_of(x: __m256) -> f32 {
    unsafe {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}

#[inline(always)]
unsafe fn sum_of(x: __m256) -> f32 {
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

#[inline(always)]
unsafe fn eight_f16(from: *const f16) -> __m256 {
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
}

/// A bf16 is the upper half of an f32.
#[inline(always)]
unsafe fn eight_bf16(from: *const bf16) -> __m256 {
    unsafe {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
}

#[inline(always)]
unsafe fn sums_of([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
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
#[inline(always)]
unsafe fn transposed(rows: [__m256; 8]) -> [__m256; 8] {
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
