//! The products with NEON (128 bits): two ways to multiply bytes, the dot products of ARMv8.2 (`sdot`), and products
//! widened to 16 bits, which all CPUs of 64-bit ARM have.

use super::lanes::{Lanes, lanes};
use super::multiply::{Float, Int, Multiply, RecordWeights, Rows, each};
use super::vectors::{VECTORS, VectorFormat, VectorScales, quants};
use super::{Activations, Ahead, Strip, Turn, WIDTH, product, product_fn, rows};
use crate::cpu;
use crate::simd::widen_f16;
use std::arch::aarch64::*;

/// 128 bits.
pub(super) struct Quad;

/// Shifts bytes. The intrinsics need constants that are not those of [`Lanes`].
macro_rules! shift {
    ($shift:ident, $bits:ident, $bytes:ident) => {
        match $bits {
            1 => $shift::<1>($bytes),
            2 => $shift::<2>($bytes),
            3 => $shift::<3>($bytes),
            4 => $shift::<4>($bytes),
            6 => $shift::<6>($bytes),
            _ => unreachable!("no format needs it"),
        }
    };
}

lanes!(Quad, uint8x16_t, float32x4_t, 4;
    load(at: *const u8) -> uint8x16_t => vld1q_u8(at);
    broadcast(at: *const u8) -> uint8x16_t => vreinterpretq_u8_u32(vdupq_n_u32(at.cast::<u32>().read_unaligned()));
    bytes(byte: i8) -> uint8x16_t => vdupq_n_u8(byte.cast_unsigned());
    zero() -> uint8x16_t => vdupq_n_u8(0);
    and(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t => vandq_u8(a, b);
    or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t => vorrq_u8(a, b);
    left<BITS>(a: uint8x16_t) -> uint8x16_t => shift!(vshlq_n_u8, BITS, a);
    right<BITS>(a: uint8x16_t) -> uint8x16_t => shift!(vshrq_n_u8, BITS, a);
    add(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t => {
        vreinterpretq_u8_u32(vaddq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)))
    };
    unsigned(at: *const u8) -> uint8x16_t => {
        let four = vcreate_u8(u64::from(at.cast::<u32>().read_unaligned()));
        vreinterpretq_u8_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))))
    };
    signed(at: *const u8) -> uint8x16_t => {
        let four = vcreate_s8(u64::from(at.cast::<u32>().read_unaligned()));
        vreinterpretq_u8_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))))
    };
    float_zero() -> float32x4_t => vdupq_n_f32(0.0);
    floats(a: uint8x16_t) -> float32x4_t => vcvtq_f32_s32(vreinterpretq_s32_u8(a));
    halves(at: *const u8) -> float32x4_t => widen_f16(vld1_u16(at.cast()));
    float_broadcast(at: &f32) -> float32x4_t => vdupq_n_f32(*at);
    float_mul(a: float32x4_t, b: float32x4_t) -> float32x4_t => vmulq_f32(a, b);
    fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t => vfmaq_f32(c, a, b);
    negate(a: float32x4_t) -> float32x4_t => vnegq_f32(a);
    look_up(table: &[u8; 16], index: uint8x16_t) -> uint8x16_t => vqtbl1q_u8(vld1q_u8(table.as_ptr()), index);
    powers(exponents: uint8x16_t, min: u32) -> float32x4_t => {
        let bits = vshlq_n_u32::<23>(vreinterpretq_u32_u8(exponents));
        vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(min)))
    };
    floats_of_bits(numbers: uint8x16_t) -> float32x4_t => {
        vreinterpretq_f32_u32(vshlq_n_u32::<20>(vreinterpretq_u32_u8(numbers)))
    };
);

/// The weights of a block for four outputs, as signed bytes: quants below 128, or values, of halves with their bias.
///
/// # Safety
/// As [`quants`].
#[inline(always)]
unsafe fn weights<F: VectorFormat>(tile: *const u8) -> [int8x16_t; VECTORS] {
    // SAFETY: by the caller's contract.
    unsafe {
        let mut weights = [vdupq_n_s8(0); VECTORS];
        each!(v in 0 1 2 3 4 5 6 7 => {
            let quants = quants::<F, Quad>(tile, v);
            let signed = if F::VALUE_BITS == 8 { veorq_u8(quants, Quad::bytes(-128)) } else { quants };
            weights[v] = vreinterpretq_s8_u8(signed);
        });
        weights
    }
}

/// What the sums of half a block begin with: the negative of what the bias of its quants adds. Values have none.
///
/// # Safety
/// There is such a row.
#[inline(always)]
unsafe fn unbiased<F: VectorFormat>(x: &Rows, i: usize, half: usize) -> int32x4_t {
    // SAFETY: by the caller's contract.
    unsafe {
        match F::VALUE_BITS {
            6 => vdupq_n_s32(x.sums(i).less_32[half]),
            7 => vdupq_n_s32(2 * x.sums(i).less_32[half]),
            4 if F::BIAS != 0 && half == 0 => vdupq_n_s32(x.sums(i).less_8),
            _ => vdupq_n_s32(0),
        }
    }
}

/// Products of numbers of 32 bits.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
pub(super) unsafe fn product(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
    // SAFETY: by the caller's contract.
    unsafe { vreinterpretq_u8_u32(vmulq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))) }
}

/// The sum over both halves, each with its factor; without factors, the first has both.
///
/// # Safety
/// The CPU has NEON; `w` is in range.
#[inline(always)]
unsafe fn join<F: VectorFormat>(w: &RecordWeights, halves: [int32x4_t; 2]) -> uint8x16_t {
    // SAFETY: by the caller's contract.
    unsafe {
        let [low, high] = halves.map(|half| vreinterpretq_u8_s32(half));
        if F::BITS != 6 {
            return low;
        }
        let factors = |half| F::Scales::factors::<Quad>(w.scales, w.sub, w.first, half);
        Quad::add(product(low, factors(0)), product(high, factors(1)))
    }
}

/// A way to multiply the values of one row after the other.
trait Halves {
    /// The sums of a row: of both halves, if they are multiplied apart, or all in the first.
    ///
    /// # Safety
    /// The CPU has the instructions; there is such a row.
    unsafe fn halves<F: VectorFormat>(
        weights: &[int8x16_t; VECTORS],
        x: &Rows,
        i: usize,
    ) -> [int32x4_t; 2];
}

impl<M: Halves> Multiply for M {
    type Lanes = Quad;

    fn max_rows(_: bool) -> usize {
        6
    }

    #[inline(always)]
    unsafe fn dots<F: VectorFormat, const R: usize>(
        w: &RecordWeights,
        x: &Rows,
    ) -> [Float<Self>; R] {
        // SAFETY: in range and available, by the caller's contract.
        unsafe {
            let weights = weights::<F>(w.tile);
            let mut dots = [Quad::float_zero(); R];
            for (i, dot) in dots.iter_mut().enumerate() {
                *dot = Quad::floats(join::<F>(w, Self::halves::<F>(&weights, x, i)));
            }
            dots
        }
    }

    #[inline(always)]
    unsafe fn half_dots<F: VectorFormat, const R: usize>(
        w: &RecordWeights,
        x: &Rows,
    ) -> [[Int<Self>; R]; 2] {
        // SAFETY: by the caller's contract.
        unsafe {
            let weights = weights::<F>(w.tile);
            let mut dots = [[Quad::zero(); R]; 2];
            let [lows, highs] = &mut dots;
            for (i, (low, high)) in lows.iter_mut().zip(highs).enumerate() {
                let halves = Self::halves::<F>(&weights, x, i);
                [*low, *high] = halves.map(|half| vreinterpretq_u8_s32(half));
            }
            dots
        }
    }
}

/// `sdot`, of which an instruction takes four inputs of a row out of a register with 16.
///
/// A block of `Q4_0` and 16 outputs takes 109 instructions with one row and 359 with four, of which 32 and 128 are
/// `sdot` (counted; times are not measured). More rows than four are multiplied with one vector at a time: 32 registers
/// hold no more sums.
pub(super) struct Dots;

impl Halves for Dots {
    #[inline(always)]
    unsafe fn halves<F: VectorFormat>(
        weights: &[int8x16_t; VECTORS],
        x: &Rows,
        i: usize,
    ) -> [int32x4_t; 2] {
        // SAFETY: by the caller's contract.
        unsafe {
            let mut halves = [unbiased::<F>(x, i, 0), unbiased::<F>(x, i, 1)];
            each!(half in 0 1 => {
                let w = &weights[4 * half..];
                let x = vld1q_s8(x.inputs(i, 4 * half).cast());
                let sum = &mut halves[if F::APART { half } else { 0 }];
                *sum = sdot::<0>(*sum, w[0], x);
                *sum = sdot::<1>(*sum, w[1], x);
                *sum = sdot::<2>(*sum, w[2], x);
                *sum = sdot::<3>(*sum, w[3], x);
            });
            halves
        }
    }
}

/// Adds to each sum the products of its four weights with inputs `4 GROUP .. 4 GROUP + 4`. The intrinsic for it is not
/// stable.
///
/// # Safety
/// The CPU has the instruction.
#[target_feature(enable = "neon,dotprod")]
#[inline]
unsafe fn sdot<const GROUP: i32>(
    mut sums: int32x4_t,
    weights: int8x16_t,
    inputs: int8x16_t,
) -> int32x4_t {
    // SAFETY: the CPU has the instruction, by the caller's contract.
    unsafe {
        std::arch::asm!(
            "sdot {sums:v}.4s, {weights:v}.16b, {inputs:v}.4b[{group}]",
            sums = inout(vreg) sums,
            weights = in(vreg) weights,
            inputs = in(vreg) inputs,
            group = const GROUP,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// `smlal`: products are added in 16 bits, as many as fit there.
pub(super) struct Widening;

impl Halves for Widening {
    #[inline(always)]
    unsafe fn halves<F: VectorFormat>(
        weights: &[int8x16_t; VECTORS],
        x: &Rows,
        i: usize,
    ) -> [int32x4_t; 2] {
        // SAFETY: by the caller's contract.
        unsafe {
            let mut halves = [unbiased::<F>(x, i, 0), unbiased::<F>(x, i, 1)];
            // Each number of 16 bits gets one product of each vector: of quants of 6 bits at most 4 * 63 * 127, of
            // values with more 2 * 128 * 127.
            each!(half in 0 1 => {
                let sum = &mut halves[if F::APART { half } else { 0 }];
                let mut products = [vdupq_n_s16(0); 2];
                each!(v in 0 1 2 3 => {
                    let v = 4 * half + v;
                    let x = vreinterpretq_s8_u8(Quad::broadcast(x.inputs(i, v)));
                    products[0] = vmlal_s8(products[0], vget_low_s8(weights[v]), vget_low_s8(x));
                    products[1] = vmlal_high_s8(products[1], weights[v], x);
                    if F::VALUE_BITS > 6 && v % 4 == 1 {
                        *sum = vaddq_s32(*sum, four_sums(products));
                        products = [vdupq_n_s16(0); 2];
                    }
                });
                *sum = vaddq_s32(*sum, four_sums(products));
            });
            halves
        }
    }
}

/// The sums of each four of 16 numbers.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn four_sums([low, high]: [int16x8_t; 2]) -> int32x4_t {
    // SAFETY: by the caller's contract.
    unsafe { vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)) }
}

product_fn!(
    /// Multiplies the rows of `turns` with a strip. `store` is called with the row and its 16 outputs.
    product_neon(cpu::Neon) by Widening; [1 x 4] [2 x 4] [3 x 4] [4 x 4] [5 x 1] [6 x 1]
);

product_fn!(
    /// As [`product_neon`].
    #[target_feature(enable = "neon,dotprod")]
    product_dotprod(cpu::Dotprod) by Dots; [1 x 4] [2 x 4] [3 x 4] [4 x 4] [5 x 1] [6 x 1]
);
