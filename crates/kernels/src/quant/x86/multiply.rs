//! Two ways to multiply bytes: `vpdpbusd`, and the older pairs of instructions of AVX2.
//!
//! Loops over rows are plain loops: closures in `array::from_fn` and `map` are compiled without the
//! vector instructions wherever the compiler does not inline them (measured: a third of the speed).

use super::super::activations::BlockSums;
use super::super::formats::BLOCK;
use super::lanes::{Lanes, Ymm, Zmm};
use super::vectors::{VECTORS, VectorFormat, VectorScales, quants};
use std::arch::x86_64::*;

/// A way to multiply bytes.
pub(super) trait Multiply {
    type Lanes: Lanes;

    /// The most rows that are multiplied together, so that what they need stays in registers.
    fn max_rows(bits: usize) -> usize;

    /// For each of `R` rows, the exact `sum(factor * (quant - bias) * x)` of a block for the outputs of a
    /// vector.
    ///
    /// # Safety
    /// The CPU has the instructions; the tile, its scales and the rows are in range.
    unsafe fn dots<F: VectorFormat, const R: usize>(
        w: &RecordWeights,
        x: &Rows,
    ) -> [<Self::Lanes as Lanes>::I; R];
}

/// Where a block of weights is.
#[derive(Clone, Copy)]
pub(super) struct RecordWeights {
    /// The record, the number of the block in it, and the first output of the vector.
    pub scales: *const u8,
    pub sub: usize,
    pub first: usize,
    /// The address of the first output's quants.
    pub tile: *const u8,
}

/// Where a block of activations is, for consecutive rows.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub q: *const i8,
    pub sums: *const BlockSums,
}

impl Rows {
    /// The address of inputs `4 v .. 4 v + 4` of row `i`.
    ///
    /// # Safety
    /// There is such a row, and `v < 8`.
    #[inline(always)]
    unsafe fn inputs(&self, i: usize, v: usize) -> *const u8 {
        // SAFETY: by the caller's contract.
        unsafe { self.q.add(i * BLOCK + 4 * v).cast() }
    }

    /// # Safety
    /// There is such a row.
    #[inline(always)]
    pub unsafe fn sums(&self, i: usize) -> &BlockSums {
        // SAFETY: by the caller's contract.
        unsafe { &*self.sums.add(i) }
    }
}

/// Unrolled loop: repeats the body for each of these vectors.
macro_rules! each {
    ($v:ident in $($n:literal)* => $body:block) => {
        $({
            let $v: usize = $n;
            $body
        })*
    };
}

/// A way that has the instruction `vpdpbusd`.
trait ByteDots: Multiply {
    /// Adds the products of four unsigned and signed bytes to each number of 32 bits.
    ///
    /// # Safety
    /// The CPU has the instruction.
    unsafe fn byte_dots(sums: Int<Self>, unsigned: Int<Self>, signed: Int<Self>) -> Int<Self>;
}

type Int<M> = <<M as Multiply>::Lanes as Lanes>::I;

/// See [`Multiply::dots`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn dots<M: ByteDots, F: VectorFormat, const R: usize>(
    w: &RecordWeights,
    x: &Rows,
) -> [Int<M>; R] {
    // SAFETY: in range and available, by the caller's contract.
    unsafe {
        // Two sums per row if the halves have factors; or if there are few rows, so that instructions wait
        // less for each other.
        let two = F::BITS == 6 || R < 4;
        let (mut low, mut high) = ([M::Lanes::zero(); R], [M::Lanes::zero(); R]);
        for i in 0..R {
            match F::VALUE_BITS {
                8 => low[i] = M::Lanes::broadcast((&raw const x.sums(i).less_128).cast()),
                6 => {
                    low[i] = M::Lanes::broadcast((&raw const x.sums(i).less_32[0]).cast());
                    high[i] = M::Lanes::broadcast((&raw const x.sums(i).less_32[1]).cast());
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
                *sum = M::byte_dots(*sum, w, M::Lanes::broadcast(x.inputs(i, v)));
            }
        });
        if F::BITS == 6 {
            let first = F::Scales::factors::<M::Lanes>(w.scales, w.sub, w.first, 0);
            let second = F::Scales::factors::<M::Lanes>(w.scales, w.sub, w.first, 1);
            for i in 0..R {
                low[i] =
                    M::Lanes::add(M::Lanes::mul(low[i], first), M::Lanes::mul(high[i], second));
            }
        } else if two {
            for i in 0..R {
                low[i] = M::Lanes::add(low[i], high[i]);
            }
        }
        low
    }
}

macro_rules! byte_dots {
    ($(#[$doc:meta])* $name:ident, $lanes:ty, $max_rows:expr, $instruction:ident) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Multiply for $name {
            type Lanes = $lanes;

            fn max_rows(bits: usize) -> usize {
                $max_rows(bits)
            }

            #[inline(always)]
            unsafe fn dots<F: VectorFormat, const R: usize>(w: &RecordWeights, x: &Rows) -> [Int<Self>; R] {
                // SAFETY: by the caller's contract.
                unsafe { dots::<Self, F, R>(w, x) }
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
        }
    };
}

byte_dots!(
    /// AVX-512 VNNI: 32 registers. A row needs two of them, or three with 6 bits.
    Avx512, Zmm, |bits| if bits == 6 { 8 } else { 12 }, _mm512_dpbusd_epi32
);
byte_dots!(
    /// AVX-VNNI: 16 registers.
    AvxVnni, Ymm, |bits| if bits == 6 { 4 } else { 6 }, _mm256_dpbusd_avx_epi32
);
byte_dots!(
    /// As [`AvxVnni`], for CPUs that have AVX-512 instead.
    Avx512Ymm, Ymm, |bits| if bits == 6 { 4 } else { 6 }, _mm256_dpbusd_epi32
);

/// AVX2: 16 registers.
pub(super) struct Avx2Ymm;

impl Multiply for Avx2Ymm {
    type Lanes = Ymm;

    fn max_rows(_: usize) -> usize {
        // More than the registers hold: the sums of floats are in memory meanwhile, but it unpacks less.
        8
    }

    #[inline(always)]
    unsafe fn dots<F: VectorFormat, const R: usize>(w: &RecordWeights, x: &Rows) -> [__m256i; R] {
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
            dots
        }
    }
}

/// Returns the same vector, but keeps the compiler from reordering the code around it: otherwise it adds
/// row by row and spends a sixth of the time on copying registers.
///
/// # Safety
/// The CPU has AVX2.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn keep(mut v: __m256i) -> __m256i {
    // SAFETY: the assembly contains no instruction.
    unsafe {
        std::arch::asm!("/* {} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags));
    }
    v
}
