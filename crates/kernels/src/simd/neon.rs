//! [`Simd`] with NEON, and with ARMv8.6's instructions for bf16: a vector is four registers.

use super::vector::{
    BELOW_HALF, BYTE_SIGNS, E4M3_BITS, Element, LANES, Loop, Simd, UPPER, loads, on_vectors,
    with_instructions,
};
use crate::cpu::{Neon, NeonBf16};
use half::{bf16, f16};
use std::arch::aarch64::*;

/// Four registers of four floats.
#[derive(Clone, Copy)]
pub(crate) struct Quads([float32x4_t; 4]);

/// `f` of each register.
macro_rules! quads {
    ($i:ident => $value:expr) => {{
        // SAFETY: `Pairs` proves that the CPU has the instructions, none of which reads or writes memory.
        unsafe {
            let mut out = [vdupq_n_f32(0.0); 4];
            for ($i, out) in out.iter_mut().enumerate() {
                *out = $value;
            }
            out
        }
    }};
}

/// A proof that the CPU has NEON, and what differs between such CPUs.
pub(crate) trait Pairs: Copy {
    /// [`Simd::PAIR_SUMS`].
    const PAIR_SUMS: usize;

    /// [`Simd::dot_pairs`].
    fn dot(self, a: Quads, b: Quads, c: Quads) -> Quads;

    /// Eight numbers rounded to bf16: [`Simd::store_bf16`].
    fn round(self, x: [float32x4_t; 2]) -> uint16x8_t;
}

impl Pairs for Neon {
    const PAIR_SUMS: usize = 3;

    #[inline(always)]
    fn dot(self, a: Quads, b: Quads, c: Quads) -> Quads {
        let second = self.fma(self.second(a), self.second(b), c);
        self.fma(self.first(a), self.first(b), second)
    }

    #[inline(always)]
    fn round(self, x: [float32x4_t; 2]) -> uint16x8_t {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe {
            let mut rounded = [vreinterpretq_u32_f32(x[0]), vreinterpretq_u32_f32(x[1])];
            for x in &mut rounded {
                let odd = vandq_u32(vshrq_n_u32::<16>(*x), vdupq_n_u32(1));
                *x = vaddq_u32(*x, vaddq_u32(odd, vdupq_n_u32(BELOW_HALF)));
            }
            vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(rounded[0]), rounded[1])
        }
    }
}

/// Runs `work` with the instructions for bf16.
#[target_feature(enable = "neon,bf16")]
pub(super) fn run_bf16<L: Loop>(s: NeonBf16, work: L) -> L::Output {
    work.run(s)
}

/// The intrinsics for it are not stable.
impl Pairs for NeonBf16 {
    const PAIR_SUMS: usize = 6;

    /// Each instruction rounds once, as a fused multiply-add of f32. (`bfdot` and `bfmmla` round sums on the way to odd: these
    /// would be other bits.)
    #[inline(always)]
    fn dot(self, Quads(a): Quads, Quads(b): Quads, Quads(c): Quads) -> Quads {
        let [mut c0, mut c1, mut c2, mut c3] = c;
        // SAFETY: `self` proves that the CPU has the instructions.
        unsafe {
            std::arch::asm!(
                "bfmlalt {c0:v}.4s, {a0:v}.8h, {b0:v}.8h",
                "bfmlalt {c1:v}.4s, {a1:v}.8h, {b1:v}.8h",
                "bfmlalt {c2:v}.4s, {a2:v}.8h, {b2:v}.8h",
                "bfmlalt {c3:v}.4s, {a3:v}.8h, {b3:v}.8h",
                "bfmlalb {c0:v}.4s, {a0:v}.8h, {b0:v}.8h",
                "bfmlalb {c1:v}.4s, {a1:v}.8h, {b1:v}.8h",
                "bfmlalb {c2:v}.4s, {a2:v}.8h, {b2:v}.8h",
                "bfmlalb {c3:v}.4s, {a3:v}.8h, {b3:v}.8h",
                a0 = in(vreg) a[0],
                a1 = in(vreg) a[1],
                a2 = in(vreg) a[2],
                a3 = in(vreg) a[3],
                b0 = in(vreg) b[0],
                b1 = in(vreg) b[1],
                b2 = in(vreg) b[2],
                b3 = in(vreg) b[3],
                c0 = inout(vreg) c0,
                c1 = inout(vreg) c1,
                c2 = inout(vreg) c2,
                c3 = inout(vreg) c3,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        Quads([c0, c1, c2, c3])
    }

    #[inline(always)]
    fn round(self, [low, high]: [float32x4_t; 2]) -> uint16x8_t {
        let rounded: uint16x8_t;
        // SAFETY: `self` proves that the CPU has the instructions.
        unsafe {
            std::arch::asm!(
                "bfcvtn {rounded:v}.4h, {low:v}.4s",
                "bfcvtn2 {rounded:v}.8h, {high:v}.4s",
                low = in(vreg) low,
                high = in(vreg) high,
                rounded = out(vreg) rounded,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        rounded
    }
}

impl<P: Pairs> Simd for P {
    type Vector = Quads;
    /// Of eight vectors in 32 registers.
    const SUMS: usize = 6;
    const PAIR_SUMS: usize = <P as Pairs>::PAIR_SUMS;

    on_vectors! {
        add(a, b) => Quads(quads!(i => vaddq_f32(a.0[i], b.0[i])));
        sub(a, b) => Quads(quads!(i => vsubq_f32(a.0[i], b.0[i])));
        mul(a, b) => Quads(quads!(i => vmulq_f32(a.0[i], b.0[i])));
        fma(a, b, c) => Quads(quads!(i => vfmaq_f32(c.0[i], a.0[i], b.0[i])));
        /// NaN in either lets the second stand, unlike `fmax`.
        max(a, b) => Quads(quads!(i => vbslq_f32(vcgtq_f32(a.0[i], b.0[i]), a.0[i], b.0[i])));
        scale(x, n) => Quads(quads!(i => {
            let n = vshlq_n_u32::<23>(vreinterpretq_u32_f32(n.0[i]));
            vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x.0[i]), n))
        }));
        pair(first, second) => Quads(quads!(i => {
            let (first, second) = (vreinterpretq_u32_f32(first.0[i]), vreinterpretq_u32_f32(second.0[i]));
            vreinterpretq_f32_u32(vsriq_n_u32::<16>(second, first))
        }));
        first(pairs) => Quads(quads!(i => first(pairs.0[i])));
        second(pairs) => Quads(quads!(i => second(pairs.0[i])));
    }

    loads! {
        load(from: *const f32) => Quads(quads!(i => vld1q_f32(from.add(4 * i))));
        load_f16(from: *const f16) => Quads(quads!(i => quad_f16(from.add(4 * i))));
        load_bf16(from: *const bf16) => Quads(quads!(i => quad_bf16(from.add(4 * i))));
        load_i8(from: *const i8) => {
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            Quads([
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
                vcvtq_f32_s32(vmovl_high_s16(low)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
                vcvtq_f32_s32(vmovl_high_s16(high)),
            ])
        };
        load_e4m3(from: *const u8) => {
            // Each quad has another byte of the four words as its highest.
            let words = vreinterpretq_s32_u8(vld1q_u8(from));
            Quads([
                quad_e4m3(words),
                quad_e4m3(vshlq_n_s32::<8>(words)),
                quad_e4m3(vshlq_n_s32::<16>(words)),
                quad_e4m3(vshlq_n_s32::<24>(words)),
            ])
        };
        load_apart(from: *const bf16) => {
            let (low, high) = (quad_pairs(from), quad_pairs(from.add(8)));
            Quads([first(low), first(high), second(low), second(high)])
        };
        load_halves(from: [*const f32; 2]) => Quads(quads!(i => vld1q_f32(from[i / 2].add(i % 2 * 4))));
        load_halves_f16(from: [*const f16; 2]) => Quads(quads!(i => quad_f16(from[i / 2].add(i % 2 * 4))));
        load_halves_bf16(from: [*const bf16; 2]) => Quads(quads!(i => quad_bf16(from[i / 2].add(i % 2 * 4))));
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Quads {
        // SAFETY: `self` proves that the CPU has NEON.
        Quads([unsafe { vdupq_n_f32(x) }; 4])
    }

    #[inline(always)]
    fn zero_below(self, limit: f32, x: Quads, y: Quads) -> Quads {
        Quads(quads!(i => {
            let below = vcltq_f32(x.0[i], vdupq_n_f32(limit));
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.0[i]), below))
        }))
    }

    #[inline(always)]
    fn flip_bytes(self, Quads(quads): Quads) -> Quads {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe {
            let signs = vdupq_n_u32(BYTE_SIGNS);
            let mut flipped = quads;
            for quad in &mut flipped {
                *quad = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(*quad), signs));
            }
            Quads(flipped)
        }
    }

    #[inline(always)]
    fn max_of(self, Quads([a, b, c, d]): Quads) -> f32 {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a, b), vmaxnmq_f32(c, d))) }
    }

    #[inline(always)]
    fn sum_of(self, Quads([a, b, c, d]): Quads) -> f32 {
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe {
            let x = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)))
        }
    }

    #[inline(always)]
    fn sums_of_halves(self, [x, y]: [Quads; 2]) -> [f32; 4] {
        let (low, high) = (
            [x.0[0], x.0[2], y.0[0], y.0[2]],
            [x.0[1], x.0[3], y.0[1], y.0[3]],
        );
        // SAFETY: `self` proves that the CPU has NEON.
        unsafe { sums_of(low, high) }
    }

    #[inline(always)]
    fn dot_pairs(self, a: Quads, b: Quads, c: Quads) -> Quads {
        self.dot(a, b, c)
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16, Quads([a, b, c, d]): Quads) {
        for (i, x) in [[a, b], [c, d]].into_iter().enumerate() {
            // SAFETY: `self` proves that the CPU has NEON; the caller, that 16 halves can be written.
            unsafe { vst1q_u16(to.add(8 * i).cast(), self.round(x)) };
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Quads) {
        for (i, x) in x.0.into_iter().enumerate() {
            // SAFETY: `self` proves that the CPU has NEON; the caller, that 16 floats can be written.
            unsafe { vst1q_f32(to.add(4 * i), x) };
        }
    }

    #[inline(always)]
    unsafe fn transpose<E: Element>(
        self,
        from: &[*const E; LANES],
        to: [*mut f32; 2],
        step: usize,
    ) {
        for j in (0..LANES).step_by(4) {
            // SAFETY: `self` proves that the CPU has NEON; the caller, that 16 numbers of each row can be read, and
            // all 16 vectors be written, of which these are the quarters `j`.
            unsafe {
                let rows = [
                    E::load(self, from[j]),
                    E::load(self, from[j + 1]),
                    E::load(self, from[j + 2]),
                    E::load(self, from[j + 3]),
                ];
                for quarter in 0..4 {
                    let [a, b, c, d] = rows;
                    let rows = [a.0[quarter], b.0[quarter], c.0[quarter], d.0[quarter]];
                    for (i, column) in transposed(rows).into_iter().enumerate() {
                        let i = 4 * quarter + i;
                        vst1q_f32(to[i / 8].wrapping_add(i % 8 * step + j), column);
                    }
                }
            }
        }
    }
}

/// Four halves as floats. The intrinsic for it needs a type that compilers before Rust 1.94 do not have.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
pub(crate) unsafe fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: the caller's contract.
    unsafe {
        std::arch::asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

with_instructions! {
    quad_f16(from: *const f16) -> float32x4_t => widen_f16(vld1_u16(from.cast()));
    /// The numbers of E4M3 in the highest byte of each lane.
    quad_e4m3(lanes: int32x4_t) -> float32x4_t => {
        let moved = vreinterpretq_u32_s32(vshrq_n_s32::<4>(lanes));
        vreinterpretq_f32_u32(vandq_u32(moved, vdupq_n_u32(E4M3_BITS)))
    };
    /// A bf16 is the upper half of an f32.
    quad_bf16(from: *const bf16) -> float32x4_t => vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast())));
    quad_pairs(from: *const bf16) -> float32x4_t => vreinterpretq_f32_u16(vld1q_u16(from.cast()));
    first(pairs: float32x4_t) -> float32x4_t => vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(pairs)));
    second(pairs: float32x4_t) -> float32x4_t => vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs), vdupq_n_u32(UPPER)));
}

/// The sums of four times eight floats, of which `low` has the first four each and `high` the others.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn sums_of(low: [float32x4_t; 4], high: [float32x4_t; 4]) -> [f32; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        let [a, b, c, d] = transposed(low);
        let [e, f, g, h] = transposed(high);
        let low = vaddq_f32(vaddq_f32(vaddq_f32(a, b), c), d);
        let high = vaddq_f32(vaddq_f32(vaddq_f32(e, f), g), h);
        let mut sums = [0f32; 4];
        vst1q_f32(sums.as_mut_ptr(), vaddq_f32(low, high));
        sums
    }
}

/// Four rows of four as columns.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn transposed([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: the caller's contract.
    unsafe {
        // Numbers 0 and 2 of two rows, and numbers 1 and 3.
        let pairs = |a, b| {
            [
                vreinterpretq_f64_f32(vtrn1q_f32(a, b)),
                vreinterpretq_f64_f32(vtrn2q_f32(a, b)),
            ]
        };
        let ([ab_even, ab_odd], [cd_even, cd_odd]) = (pairs(a, b), pairs(c, d));
        [
            vreinterpretq_f32_f64(vzip1q_f64(ab_even, cd_even)),
            vreinterpretq_f32_f64(vzip1q_f64(ab_odd, cd_odd)),
            vreinterpretq_f32_f64(vzip2q_f64(ab_even, cd_even)),
            vreinterpretq_f32_f64(vzip2q_f64(ab_odd, cd_odd)),
        ]
    }
}
