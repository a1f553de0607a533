//! The products with AVX-512 VNNI (512 bits), AVX-VNNI and AVX2 (256 bits): two ways to multiply bytes, `vpdpbusd` and
//! the older pairs of instructions of AVX2.

use super::lanes::{Lanes, lanes};
use super::multiply::{Float, Int, Multiply, RecordWeights, Rows, each, floats};
use super::vectors::{VECTORS, VectorFormat, VectorScales, quants};
use super::{Activations, Ahead, Strip, Turn, WIDTH, product, product_fn, rows};
use crate::cpu;
use std::arch::x86_64::*;

/// 256 bits.
pub(super) struct Ymm;
/// 512 bits.
pub(super) struct Zmm;

lanes!(Ymm, __m256i, __m256, 8;
    load(at: *const u8) -> __m256i => _mm256_load_si256(at.cast());
    broadcast(at: *const u8) -> __m256i => _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
    bytes(byte: i8) -> __m256i => _mm256_set1_epi8(byte);
    zero() -> __m256i => _mm256_setzero_si256();
    and(a: __m256i, b: __m256i) -> __m256i => _mm256_and_si256(a, b);
    or(a: __m256i, b: __m256i) -> __m256i => _mm256_or_si256(a, b);
    left<BITS>(a: __m256i) -> __m256i => _mm256_sll_epi16(a, _mm_cvtsi32_si128(BITS as i32));
    right<BITS>(a: __m256i) -> __m256i => _mm256_srl_epi16(a, _mm_cvtsi32_si128(BITS as i32));
    add(a: __m256i, b: __m256i) -> __m256i => _mm256_add_epi32(a, b);
    unsigned(at: *const u8) -> __m256i => _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast()));
    signed(at: *const u8) -> __m256i => _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
    float_zero() -> __m256 => _mm256_setzero_ps();
    floats(a: __m256i) -> __m256 => _mm256_cvtepi32_ps(a);
    halves(at: *const u8) -> __m256 => _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
    float_broadcast(at: &f32) -> __m256 => _mm256_set1_ps(*at);
    float_mul(a: __m256, b: __m256) -> __m256 => _mm256_mul_ps(a, b);
    fma(a: __m256, b: __m256, c: __m256) -> __m256 => _mm256_fmadd_ps(a, b, c);
    negate(a: __m256) -> __m256 => _mm256_xor_ps(a, _mm256_set1_ps(-0.0));
    look_up(table: &[u8; 16], index: __m256i) -> __m256i => {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, index)
    };
    powers(exponents: __m256i, min: u32) -> __m256 => {
        let bits = _mm256_slli_epi32::<23>(exponents);
        _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(min as i32)))
    };
    floats_of_bits(numbers: __m256i) -> __m256 => _mm256_castsi256_ps(_mm256_slli_epi32::<20>(numbers));
);

lanes!(Zmm, __m512i, __m512, 16;
    load(at: *const u8) -> __m512i => _mm512_load_si512(at.cast());
    broadcast(at: *const u8) -> __m512i => _mm512_set1_epi32(at.cast::<i32>().read_unaligned());
    bytes(byte: i8) -> __m512i => _mm512_set1_epi8(byte);
    zero() -> __m512i => _mm512_setzero_si512();
    and(a: __m512i, b: __m512i) -> __m512i => _mm512_and_si512(a, b);
    or(a: __m512i, b: __m512i) -> __m512i => _mm512_or_si512(a, b);
    left<BITS>(a: __m512i) -> __m512i => _mm512_slli_epi16::<BITS>(a);
    right<BITS>(a: __m512i) -> __m512i => _mm512_srli_epi16::<BITS>(a);
    add(a: __m512i, b: __m512i) -> __m512i => _mm512_add_epi32(a, b);
    unsigned(at: *const u8) -> __m512i => _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast()));
    signed(at: *const u8) -> __m512i => _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()));
    float_zero() -> __m512 => _mm512_setzero_ps();
    floats(a: __m512i) -> __m512 => _mm512_cvtepi32_ps(a);
    halves(at: *const u8) -> __m512 => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
    float_broadcast(at: &f32) -> __m512 => _mm512_set1_ps(*at);
    float_mul(a: __m512, b: __m512) -> __m512 => _mm512_mul_ps(a, b);
    fma(a: __m512, b: __m512, c: __m512) -> __m512 => _mm512_fmadd_ps(a, b, c);
    look_up(table: &[u8; 16], index: __m512i) -> __m512i => {
        let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
        _mm512_shuffle_epi8(table, index)
    };
    powers(exponents: __m512i, min: u32) -> __m512 => {
        let bits = _mm512_slli_epi32::<23>(exponents);
        _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(min as i32)))
    };
    floats_of_bits(numbers: __m512i) -> __m512 => _mm512_castsi512_ps(_mm512_slli_epi32::<20>(numbers));
    negate(a: __m512) -> __m512 => {
        let sign = _mm512_set1_epi32(i32::MIN);
        _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), sign))
    };
);

/// A way that has the instruction `vpdpbusd`.
trait ByteDots: Multiply {
    /// Adds the products of four unsigned and signed bytes to each number of 32 bits.
    ///
    /// # Safety
    /// The CPU has the instruction.
    unsafe fn byte_dots(sums: Int<Self>, unsigned: Int<Self>, signed: Int<Self>) -> Int<Self>;

    /// The same vector; the compiler keeps the order of the code around it.
    ///
    /// # Safety
    /// The CPU has the vectors.
    unsafe fn keep(v: Int<Self>) -> Int<Self>;
}

/// Two sums for each row, which together are that of [`Multiply::dots`] before factors: those of the halves of a block, if
/// they are multiplied apart, or if there are few rows, so that instructions wait less for each other. Otherwise the second
/// is zero.
///
/// # Safety
/// As [`Multiply::dots`].
#[inline(always)]
unsafe fn sums<M: ByteDots, F: VectorFormat, const R: usize>(
    w: &RecordWeights,
    x: &Rows,
) -> [[Int<M>; R]; 2] {
    // SAFETY: in range and available, by the caller's contract.
    unsafe {
        let two = F::APART || R < 4;
        let (mut low, mut high) = ([M::Lanes::zero(); R], [M::Lanes::zero(); R]);
        for i in 0..R {
            match F::VALUE_BITS {
                8 => low[i] = M::Lanes::broadcast((&raw const x.sums(i).less_128).cast()),
                6 | 7 => {
                    low[i] = M::Lanes::broadcast((&raw const x.sums(i).less_32[0]).cast());
                    high[i] = M::Lanes::broadcast((&raw const x.sums(i).less_32[1]).cast());
                    if F::VALUE_BITS == 7 {
                        low[i] = M::Lanes::add(low[i], low[i]);
                        high[i] = M::Lanes::add(high[i], high[i]);
                    }
                }
                _ if F::BIAS != 0 => {
                    low[i] = M::Lanes::broadcast((&raw const x.sums(i).less_8).cast())
                }
                _ => {}
            }
        }
        each!(v in 0 4 1 5 2 6 3 7 => {
            // Quants of 8 bits in the order of memory.
            let v = if F::BITS == 8 { v % 4 * 2 + v / 4 } else { v };
            let w = quants::<F, M::Lanes>(w.tile, v);
            let sums = if two && v >= VECTORS / 2 { &mut high } else { &mut low };
            for (i, sum) in sums.iter_mut().enumerate() {
                let added = M::byte_dots(*sum, w, M::Lanes::broadcast(x.inputs(i, v)));
                // Row by row, as the compiler would have it, each addition waits for the one before.
                *sum = if R > 2 { M::keep(added) } else { added };
            }
        });
        [low, high]
    }
}

/// See [`Multiply::dots`]. Factors are multiplied as floats, in which all products and sums are exact: Intel's CPUs take
/// two operations for a product of integers of 32 bits.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn dots<M: ByteDots, F: VectorFormat, const R: usize>(
    w: &RecordWeights,
    x: &Rows,
) -> [Float<M>; R] {
    // SAFETY: by the caller's contract.
    unsafe {
        let [mut low, high] = sums::<M, F, R>(w, x);
        if F::BITS == 6 {
            let factors = |half| {
                M::Lanes::floats(F::Scales::factors::<M::Lanes>(
                    w.scales, w.sub, w.first, half,
                ))
            };
            let (first, second) = (factors(0), factors(1));
            let (mut dots, high) = (floats::<M, R>(&low), floats::<M, R>(&high));
            for (dot, high) in dots.iter_mut().zip(high) {
                *dot = M::Lanes::fma(high, second, M::Lanes::float_mul(*dot, first));
            }
            return dots;
        }
        if R < 4 {
            for (low, high) in low.iter_mut().zip(high) {
                *low = M::Lanes::add(*low, high);
            }
        }
        floats::<M, R>(&low)
    }
}

macro_rules! byte_dots {
    ($(#[$doc:meta])* $name:ident, $lanes:ty, $max_rows:expr, $instruction:ident, $keep:ident) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Multiply for $name {
            type Lanes = $lanes;

            fn max_rows(is_apart: bool) -> usize {
                let (rows, apart): (usize, usize) = $max_rows;
                if is_apart { apart } else { rows }
            }

            #[inline(always)]
            unsafe fn dots<F: VectorFormat, const R: usize>(w: &RecordWeights, x: &Rows) -> [Float<Self>; R] {
                // SAFETY: by the caller's contract.
                unsafe { dots::<Self, F, R>(w, x) }
            }

            #[inline(always)]
            unsafe fn half_dots<F: VectorFormat, const R: usize>(
                w: &RecordWeights,
                x: &Rows,
            ) -> [[Int<Self>; R]; 2] {
                // SAFETY: by the caller's contract.
                unsafe { sums::<Self, F, R>(w, x) }
            }
        }

        impl ByteDots for $name {
            #[inline(always)]
            unsafe fn byte_dots(
                sums: Int<Self>,
                unsigned: Int<Self>,
                signed: Int<Self>,
            ) -> Int<Self> {
                // SAFETY: by the caller's contract.
                unsafe { $instruction(sums, unsigned, signed) }
            }

            #[inline(always)]
            unsafe fn keep(v: Int<Self>) -> Int<Self> {
                // SAFETY: by the caller's contract.
                unsafe { $keep(v) }
            }
        }
    };
}

byte_dots!(
    /// AVX-512 VNNI: 32 registers. A row needs two of them, or three if halves are multiplied apart.
    Avx512, Zmm, (12, 8), _mm512_dpbusd_epi32, keep_512
);
byte_dots!(
    /// AVX-VNNI: 16 registers.
    AvxVnni, Ymm, (6, 4), _mm256_dpbusd_avx_epi32, keep
);
byte_dots!(
    /// As [`AvxVnni`], for CPUs that have AVX-512 instead.
    Avx512Ymm, Ymm, (6, 4), _mm256_dpbusd_epi32, keep
);

/// AVX2: 16 registers.
pub(super) struct Avx2Ymm;

impl Multiply for Avx2Ymm {
    type Lanes = Ymm;

    fn max_rows(_: bool) -> usize {
        // More than the registers hold: the sums of floats are in memory meanwhile, but it unpacks less.
        8
    }

    #[inline(always)]
    unsafe fn dots<F: VectorFormat, const R: usize>(w: &RecordWeights, x: &Rows) -> [__m256; R] {
        // SAFETY: in range and available, by the caller's contract.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut dots = [_mm256_setzero_si256(); R];
            // Products of these vectors are added in i16, where they fit: 8 * 2 * 15 * 127, and so on.
            // The two halves of the same bytes are processed one after the other.
            macro_rules! run {
                ($factor:expr; $($n:literal)*) => {
                    let mut pairs = [_mm256_setzero_si256(); R];
                    each!(v in $($n)* => {
                        let w = quants::<F, Ymm>(w.tile, v);
                        for (i, pairs) in pairs.iter_mut().enumerate() {
                            let x = Ymm::broadcast(x.inputs(i, v));
                            let sum = _mm256_add_epi16(*pairs, _mm256_maddubs_epi16(w, x));
                            *pairs = if R > 2 { keep(sum) } else { sum };
                        }
                    });
                    for (dot, pairs) in dots.iter_mut().zip(pairs) {
                        *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, $factor));
                    }
                };
            }
            match F::VALUE_BITS {
                8 => {
                    each!(v in 0 1 2 3 4 5 6 7 => {
                        // |w| * (x with the sign of w): pairs are at most 2 * 128 * 127, within i16.
                        let w = quants::<F, Ymm>(w.tile, v);
                        let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                        let magnitude = _mm256_abs_epi8(w);
                        for (i, dot) in dots.iter_mut().enumerate() {
                            let signed = _mm256_sign_epi8(Ymm::broadcast(x.inputs(i, v)), w);
                            let pairs = _mm256_maddubs_epi16(magnitude, signed);
                            let sum = _mm256_add_epi32(*dot, _mm256_madd_epi16(pairs, ones));
                            *dot = if R > 2 { keep(sum) } else { sum };
                        }
                    });
                }
                4 => {
                    run!(ones; 0 4 1 5 2 6 3 7);
                    if F::BIAS != 0 {
                        for (i, dot) in dots.iter_mut().enumerate() {
                            *dot = _mm256_add_epi32(*dot, _mm256_set1_epi32(x.sums(i).less_8));
                        }
                    }
                }
                5 => {
                    run!(ones; 0 4 1 5);
                    run!(ones; 2 6 3 7);
                }
                _ => {
                    // Each factor twice, as two numbers of 16 bits.
                    let both = |factor: __m256i| {
                        let low = _mm256_and_si256(factor, _mm256_set1_epi32(0xFFFF));
                        _mm256_or_si256(low, _mm256_slli_epi32::<16>(factor))
                    };
                    let low = F::Scales::factors::<Ymm>(w.scales, w.sub, w.first, 0);
                    let high = F::Scales::factors::<Ymm>(w.scales, w.sub, w.first, 1);
                    let factors = _mm256_blend_epi16::<0b1010_1010>(both(low), both(high));
                    let [low, high] = [both(low), both(high)];
                    run!(low; 0 1);
                    run!(low; 2 3);
                    run!(high; 4 5);
                    run!(high; 6 7);
                    for (i, dot) in dots.iter_mut().enumerate() {
                        let halves = Ymm::broadcast((&raw const x.sums(i).halves).cast());
                        let biased = _mm256_madd_epi16(factors, halves);
                        *dot = _mm256_sub_epi32(*dot, _mm256_slli_epi32::<5>(biased));
                    }
                }
            }
            floats::<Self, R>(&dots)
        }
    }

    #[inline(always)]
    unsafe fn half_dots<F: VectorFormat, const R: usize>(
        w: &RecordWeights,
        x: &Rows,
    ) -> [[__m256i; R]; 2] {
        // SAFETY: in range and available, by the caller's contract.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut dots = [[_mm256_setzero_si256(); R]; 2];
            if matches!(F::VALUE_BITS, 6 | 7) {
                let times = if F::VALUE_BITS == 7 { 2 } else { 1 };
                for (half, dots) in dots.iter_mut().enumerate() {
                    for (i, dot) in dots.iter_mut().enumerate() {
                        *dot = _mm256_set1_epi32(times * x.sums(i).less_32[half]);
                    }
                }
            }
            // Products of two vectors are added in i16: at most 2 * 2 * 63 * 127; with 7 bits those of one: 2 * 127 * 127.
            each!(two in 0 1 2 3 => {
                let mut pairs = [_mm256_setzero_si256(); R];
                each!(of_two in 0 1 => {
                    let v = 2 * two + of_two;
                    let w = quants::<F, Ymm>(w.tile, v);
                    for (i, pairs) in pairs.iter_mut().enumerate() {
                        let products = _mm256_maddubs_epi16(w, Ymm::broadcast(x.inputs(i, v)));
                        let sum = _mm256_add_epi16(*pairs, products);
                        *pairs = if R > 2 { keep(sum) } else { sum };
                    }
                    if of_two == 1 || F::VALUE_BITS == 7 {
                        for (dot, pairs) in dots[two / 2].iter_mut().zip(&mut pairs) {
                            *dot = _mm256_add_epi32(*dot, _mm256_madd_epi16(*pairs, ones));
                            *pairs = _mm256_setzero_si256();
                        }
                    }
                });
            });
            dots
        }
    }
}

macro_rules! keep {
    ($name:ident, $vector:ty, $register:ident, $feature:literal) => {
        /// Returns the same vector, but keeps the compiler from reordering the code around it: otherwise it adds row by row.
        /// With AVX2, it then spends a sixth of the time on copying registers. With `vpdpbusd`, an Intel Xeon multiplies 4 to
        /// 64 rows 1.05 to 1.2 times as fast with this order (measured).
        ///
        /// # Safety
        /// The CPU has the vectors.
        #[target_feature(enable = $feature)]
        #[inline]
        unsafe fn $name(mut v: $vector) -> $vector {
            // SAFETY: the assembly contains no instruction.
            unsafe {
                std::arch::asm!("/* {} */", inout($register) v, options(nomem, nostack, preserves_flags));
            }
            v
        }
    };
}
keep!(keep, __m256i, ymm_reg, "avx2");
keep!(keep_512, __m512i, zmm_reg, "avx512f");

#[cfg(test)]
pub(in super::super) fn max_rows_avx_vnni<F: VectorFormat>() -> usize {
    AvxVnni::max_rows(F::APART)
}

product_fn!(
    /// Multiplies the rows of `turns` with a strip. `store` is called with the row and its 16 outputs.
    #[target_feature(enable = "avx2,fma,f16c")]
    product_avx2(cpu::Avx2) by Avx2Ymm; [1 x 2] [2 x 2] [3 x 2] [4 x 2] [5 x 2] [6 x 2] [7 x 2] [8 x 2]
);

product_fn!(
    /// As [`product_avx2`].
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    product_avx_vnni(cpu::AvxVnni) by AvxVnni; [1 x 2] [2 x 2] [3 x 1] [4 x 1] [5 x 1] [6 x 1]
);

product_fn!(
    /// The code of [`product_avx_vnni`], for CPUs that have AVX-512 instead.
    #[cfg(test)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
    product_avx512_ymm(cpu::Avx512Vnni) by Avx512Ymm; [1 x 2] [2 x 2] [3 x 1] [4 x 1] [5 x 1] [6 x 1]
);

/// As [`product_avx2`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(in super::super) fn product_avx512<F: VectorFormat>(
    _: cpu::Avx512Vnni,
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
    unsafe {
        if let [Turn { rows: 1, .. }] = turns {
            // Weights of 8 bits come from memory up to a sixth faster with 256 bits (measured).
            return product!(Avx512Ymm, F, strip, x, turns, store; [1 x 2]);
        }
        product!(Avx512, F, strip, x, turns, store;
            [1 x 1] [2 x 1] [3 x 1] [4 x 1] [5 x 1] [6 x 1]
            [7 x 1] [8 x 1] [9 x 1] [10 x 1] [11 x 1] [12 x 1]);
    };
}
