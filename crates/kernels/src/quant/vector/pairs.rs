//! What `i8mm` multiplies: a block of weights, and pairs of rows.

use super::lanes::Lanes;
use super::multiply::{RecordWeights, each};
use super::neon::{Quad, product};
use super::vectors::{VectorFormat, VectorScales, quants};
use super::{Activations, Turn};
use crate::quant::activations::PAIRED_ROWS;
use crate::quant::block_sums::{BY_LESS_32, PairSums};
use crate::quant::formats::{BLOCK, ScaleLayout, VECTOR};
use std::arch::aarch64::*;
use std::marker::PhantomData;

/// Parts of a block that an instruction multiplies.
const PARTS: usize = 4;

/// What belongs to four outputs: to the first two, and to the others.
pub(super) type Outputs<T> = [T; 2];

/// Where a block of activations is, for consecutive pairs of rows.
#[derive(Clone, Copy)]
pub(super) struct Pairs {
    q: *const i8,
    sums: *const PairSums,
}

impl Pairs {
    /// The first block of a turn, which has so many.
    pub fn of(x: &Activations, turn: &Turn, blocks: usize) -> Self {
        let (q, sums) = (x.q(turn.pass), x.pair_sums(turn.pass));
        let values = turn.rows.div_ceil(2) * blocks;
        assert!(turn.rows == turn.pass.rows && turn.rows <= PAIRED_ROWS);
        assert!(q.len() == 2 * values * BLOCK && sums.len() == values);
        let (q, sums) = (q.as_ptr(), sums.as_ptr());
        Self { q, sums }
    }

    /// The same pairs in block `first` of a turn.
    pub fn at_block(self, first: usize, turn: &Turn) -> Self {
        let pairs = turn.rows.div_ceil(2) * first;
        Self {
            q: self.q.wrapping_add(pairs * 2 * BLOCK),
            sums: self.sums.wrapping_add(pairs),
        }
    }

    /// Those of the next block, of `P` pairs.
    #[inline(always)]
    pub fn after<const P: usize>(self) -> Self {
        Self {
            q: self.q.wrapping_add(P * 2 * BLOCK),
            sums: self.sums.wrapping_add(P),
        }
    }
}

/// Groups of four bytes, one of each vector after the other.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn zip(a: uint8x16_t, b: uint8x16_t) -> Outputs<uint8x16_t> {
    // SAFETY: the caller's contract.
    unsafe {
        let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
        [vzip1q_u32(a, b), vzip2q_u32(a, b)].map(|both| vreinterpretq_u8_u32(both))
    }
}

/// Each number twice.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn twice(a: float32x4_t) -> Outputs<float32x4_t> {
    // SAFETY: the caller's contract.
    unsafe { [vzip1q_f32(a, a), vzip2q_f32(a, a)] }
}

/// Unsigned quants or values of a block for four outputs, as [`quants`], with eight inputs of an output side by side.
///
/// # Safety
/// As [`quants`].
#[inline(always)]
unsafe fn weights<F: VectorFormat>(tile: *const u8) -> [Outputs<uint8x16_t>; PARTS] {
    // SAFETY: by the caller's contract.
    unsafe {
        let mut weights = [[Quad::zero(); 2]; PARTS];
        if F::BITS != 4 {
            each!(part in 0 1 2 3 => {
                let quants = |v| quants::<F, Quad>(tile, v);
                weights[part] = zip(quants(2 * part), quants(2 * part + 1));
            });
            return weights;
        }
        // Both halves of bytes are moved at once.
        let value = |nibbles| match F::TABLE {
            Some(_) => Quad::look_up(const { &F::BIASED }, nibbles),
            None => nibbles,
        };
        each!(part in 0 1 => {
            let load = |v: usize| Quad::load(tile.add(v * VECTOR));
            let [first, second] = zip(load(2 * part), load(2 * part + 1));
            let low = |bytes| value(Quad::and(bytes, Quad::bytes(15)));
            let high = |bytes| value(Quad::right::<4>(bytes));
            weights[part] = [low(first), low(second)];
            weights[part + 2] = [high(first), high(second)];
        });
        weights
    }
}

/// What the sums of half a block begin with: the negative of what the bias of its quants adds.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn unbiased<F: VectorFormat>(sums: &PairSums, half: usize) -> int32x4_t {
    // SAFETY: by the caller's contract.
    unsafe {
        let less = match F::VALUE_BITS {
            8 if half == 0 => &sums.less_128,
            6 | 7 => &sums.less_32[half],
            4 if F::BIAS != 0 && half == 0 => &sums.less_8,
            _ => return vdupq_n_s32(0),
        };
        let less = vld1q_s32(less.as_ptr());
        if F::VALUE_BITS == 7 {
            vaddq_s32(less, less)
        } else {
            less
        }
    }
}

/// Adds to a pair's exact sums for four outputs the products of 16 inputs, which are `AT` bytes after `q`. The intrinsics for
/// it are not stable. One piece, because the compiler would mix the products of several pairs until registers do not suffice.
///
/// # Safety
/// The CPU has the instruction; there are 32 values.
#[target_feature(enable = "neon,i8mm")]
#[inline]
unsafe fn products<const AT: usize>(
    [first, second]: &mut Outputs<int32x4_t>,
    [w, next]: [Outputs<uint8x16_t>; 2],
    q: *const i8,
) {
    // SAFETY: the CPU has the instruction and values can be read, by the caller's contract.
    unsafe {
        std::arch::asm!(
            "ldp {x:q}, {y:q}, [{q}, {at}]",
            "usmmla {first:v}.4s, {a:v}.16b, {x:v}.16b",
            "usmmla {second:v}.4s, {b:v}.16b, {x:v}.16b",
            "usmmla {first:v}.4s, {c:v}.16b, {y:v}.16b",
            "usmmla {second:v}.4s, {d:v}.16b, {y:v}.16b",
            first = inout(vreg) *first,
            second = inout(vreg) *second,
            a = in(vreg) w[0],
            b = in(vreg) w[1],
            c = in(vreg) next[0],
            d = in(vreg) next[1],
            x = out(vreg) _,
            y = out(vreg) _,
            q = in(reg) q,
            at = const AT,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
}

/// A block of weights for four outputs.
pub(super) struct Block<F> {
    weights: [Outputs<uint8x16_t>; PARTS],
    /// Those of the block, or of its first half.
    scales: Outputs<float32x4_t>,
    offsets: Outputs<float32x4_t>,
    /// The factors of each half of the block. Or the scales and the offsets of the second half, as their bits: no format has
    /// both.
    of_halves: [Outputs<uint8x16_t>; 2],
    format: PhantomData<F>,
}

impl<F: VectorFormat> Block<F> {
    /// # Safety
    /// The CPU has the instructions; the tile and its scales are in range.
    #[inline(always)]
    pub unsafe fn new(w: &RecordWeights) -> Self {
        // SAFETY: by the caller's contract.
        unsafe {
            let scales = |half| twice(F::Scales::scales::<Quad>(w.scales, w.sub, w.first, half));
            let offsets = |half| {
                if F::Scales::OFFSET {
                    twice(F::Scales::offsets::<Quad>(w.scales, w.sub, w.first, half))
                } else {
                    [Quad::float_zero(); 2]
                }
            };
            let mut of_halves = [[Quad::zero(); 2]; 2];
            if F::BITS == 6 {
                each!(half in 0 1 => {
                    let four = F::Scales::factors::<Quad>(w.scales, w.sub, w.first, half);
                    of_halves[half] = zip(four, four);
                });
            }
            if F::Scales::BY_HALF {
                of_halves = [scales(1), offsets(1)].map(|of| of.map(|of| vreinterpretq_u8_f32(of)));
            }
            Self {
                weights: weights::<F>(w.tile),
                scales: scales(0),
                offsets: offsets(0),
                of_halves,
                format: PhantomData,
            }
        }
    }

    /// Adds the products with `P` pairs of rows to their sums.
    ///
    /// # Safety
    /// The CPU has the instructions; there are so many pairs.
    #[inline(always)]
    pub unsafe fn add<const P: usize>(&self, x: Pairs, sums: &mut [Outputs<float32x4_t>; P]) {
        macro_rules! add {
            ($($i:literal)*) => {$(
                if $i < P {
                    // SAFETY: by the caller's contract.
                    unsafe {
                        let sums_of_x = &*x.sums.add($i);
                        let mut halves = [[unbiased::<F>(sums_of_x, 0); 2], [unbiased::<F>(sums_of_x, 1); 2]];
                        let [a, b, c, d] = self.weights;
                        products::<{ $i * 2 * BLOCK }>(&mut halves[0], [a, b], x.q);
                        // One sum if halves are not multiplied apart.
                        let high = if F::APART { &mut halves[1] } else { &mut halves[0] };
                        products::<{ $i * 2 * BLOCK + BLOCK }>(high, [c, d], x.q);
                        self.scale(halves, sums_of_x, &mut sums[$i]);
                    }
                }
            )*};
        }
        // A loop would keep the sums in memory.
        add!(0 1 2 3);
    }

    /// Scales a pair's sums of each half of the block, and adds them to its sums.
    ///
    /// # Safety
    /// The CPU has NEON.
    #[inline(always)]
    unsafe fn scale(
        &self,
        [low, high]: [Outputs<int32x4_t>; 2],
        x: &PairSums,
        sums: &mut Outputs<float32x4_t>,
    ) {
        // SAFETY: by the caller's contract.
        unsafe {
            if F::Scales::BY_HALF {
                self.scale_half(low, x, 0, [self.scales, self.offsets], sums);
                let second = self
                    .of_halves
                    .map(|of| of.map(|of| vreinterpretq_f32_u8(of)));
                return self.scale_half(high, x, 1, second, sums);
            }
            let (scale, sum) = (vld1q_f32(x.scale.as_ptr()), vld1q_f32(x.sum.as_ptr()));
            each!(o in 0 1 => {
                let mut dots = vreinterpretq_u8_s32(low[o]);
                if F::BITS == 6 {
                    let high = product(vreinterpretq_u8_s32(high[o]), self.of_halves[1][o]);
                    dots = Quad::add(product(dots, self.of_halves[0][o]), high);
                }
                let scale = Quad::float_mul(self.scales[o], scale);
                sums[o] = Quad::fma(Quad::floats(dots), scale, sums[o]);
                if F::Scales::OFFSET {
                    sums[o] = Quad::fma(self.offsets[o], sum, sums[o]);
                }
            });
        }
    }

    /// Scales a pair's sums of half of the block, and adds them to its sums.
    ///
    /// # Safety
    /// The CPU has NEON.
    #[inline(always)]
    unsafe fn scale_half(
        &self,
        dots: Outputs<int32x4_t>,
        x: &PairSums,
        half: usize,
        [scales, offsets]: [Outputs<float32x4_t>; 2],
        sums: &mut Outputs<float32x4_t>,
    ) {
        // SAFETY: by the caller's contract.
        unsafe {
            let scale = vld1q_f32(x.scale.as_ptr());
            each!(o in 0 1 => {
                let by = Quad::float_mul(scales[o], scale);
                sums[o] = Quad::fma(vcvtq_f32_s32(dots[o]), by, sums[o]);
                if F::Scales::OFFSET {
                    let sum = vcvtq_f32_s32(vld1q_s32(x.less_32[half].as_ptr()));
                    let by = Quad::float_mul(offsets[o], Quad::float_broadcast(&BY_LESS_32));
                    sums[o] = Quad::fma(sum, Quad::float_mul(by, scale), sums[o]);
                }
            });
        }
    }
}
