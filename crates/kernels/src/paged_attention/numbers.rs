//! How numbers are multiplied: as f32 or, for pools in bf16, as pairs of bf16, of which AVX512-BF16 multiplies two
//! where f32 has one product, and ARMv8.6 one, but without unpacking them. AMX has an order of its own (`tiles.rs`).
//!
//! With pairs, queries and softmax weights are rounded to bf16 as well. A sum takes the second product of a pair,
//! then the first, each by a fused multiply-add, as `vdpbf16ps` does by Intel's manual and on Zen 4
//! ([`Simd::dot_pairs`]). So instruction sets without it give the same bits (but for numbers below 1.2e-38, which it
//! takes as zeros). A score adds the pairs of a head in one order, a weighted sum those of keys `2i` and `2i + 1` of
//! a chunk: by number, so that nothing but the numbers matters.

use crate::simd::{Element, LANES, Loop, Simd};
use half::{bf16, f16};
use std::marker::PhantomData;

/// What a lane of a vector holds, and how it is multiplied.
pub(super) trait Number {
    /// Numbers per lane.
    const COUNT: usize;
    /// Partial sums of a score.
    const PARTS: usize;

    /// Lanes of a query or key of `head_dim` numbers, with zeros up to whole vectors.
    fn lanes(head_dim: usize) -> usize {
        head_dim.div_ceil(Self::COUNT).next_multiple_of(LANES)
    }

    /// Vectors of sums that registers have room for.
    fn sums<S: Simd>() -> usize {
        if Self::COUNT > 1 {
            S::PAIR_SUMS
        } else {
            S::SUMS
        }
    }

    /// `a * b + c`, for each number of a lane.
    fn fma<S: Simd>(s: S, a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector;

    /// Lanes of `first`, with `second` beside it if there is room.
    fn join<S: Simd>(s: S, first: S::Vector, second: S::Vector) -> S::Vector;

    /// Puts zero in place of a number of each lane. A weight of 0 alone would not do: the number may be infinite.
    fn hide<S: Simd>(s: S, lanes: S::Vector, hidden: Hidden) -> S::Vector;

    /// Writes a query, multiplied by `factor`, as [`lanes`](Self::lanes) in the order of
    /// [`Pack`](super::scores::Pack).
    fn load_query<S: Simd>(s: S, from: &[f32], factor: f32, to: &mut [f32]);
}

/// The number of a lane that a query does not see.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Hidden {
    Neither,
    First,
    Second,
}

/// One f32 per lane.
pub(super) struct Single;

impl Number for Single {
    const COUNT: usize = 1;
    const PARTS: usize = 8;

    #[inline(always)]
    fn fma<S: Simd>(s: S, a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector {
        s.fma(a, b, c)
    }

    #[inline(always)]
    fn join<S: Simd>(_: S, first: S::Vector, _: S::Vector) -> S::Vector {
        first
    }

    #[inline(always)]
    fn hide<S: Simd>(_: S, lanes: S::Vector, _: Hidden) -> S::Vector {
        lanes
    }

    #[inline(always)]
    fn load_query<S: Simd>(_: S, from: &[f32], factor: f32, to: &mut [f32]) {
        let (to, rest) = to.split_at_mut(from.len());
        for (to, from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
        rest.fill(0.0);
    }
}

/// Two bf16 per lane.
pub(super) struct Paired;

impl Number for Paired {
    const COUNT: usize = 2;
    const PARTS: usize = 1;

    #[inline(always)]
    fn fma<S: Simd>(s: S, a: S::Vector, b: S::Vector, c: S::Vector) -> S::Vector {
        s.dot_pairs(a, b, c)
    }

    #[inline(always)]
    fn join<S: Simd>(s: S, first: S::Vector, second: S::Vector) -> S::Vector {
        s.pair(first, second)
    }

    #[inline(always)]
    fn hide<S: Simd>(s: S, lanes: S::Vector, hidden: Hidden) -> S::Vector {
        match hidden {
            Hidden::Neither => lanes,
            Hidden::First => s.pair(s.splat(0.0), s.second(lanes)),
            Hidden::Second => s.pair(s.first(lanes), s.splat(0.0)),
        }
    }

    #[inline(always)]
    fn load_query<S: Simd>(s: S, from: &[f32], factor: f32, to: &mut [f32]) {
        let blocks = to.as_chunks_mut::<LANES>().0.iter_mut();
        assert!(from.len() <= blocks.len() * 2 * LANES);
        for (from, to) in from.chunks(2 * LANES).zip(blocks) {
            let mut numbers = [0.0; 2 * LANES];
            numbers[..from.len()].copy_from_slice(from);
            let mut pairs = [0.0; LANES];
            for half in [0, LANES] {
                // SAFETY: 16 numbers from `half` on are read, and as many bf16 written: `pairs` has room for 32.
                unsafe {
                    let scaled = s.mul(s.load(numbers[half..].as_ptr()), s.splat(factor));
                    s.store_bf16(pairs.as_mut_ptr().cast::<bf16>().add(half), scaled);
                }
            }
            for (i, to) in to.iter_mut().enumerate() {
                *to = pairs[i % 2 * (LANES / 2) + i / 2];
            }
        }
    }
}

/// An element type of a pool.
pub(super) trait Pool: Element {
    type Number: Number;
    /// What a lane is loaded from: as many bytes as [`Number::COUNT`] elements.
    type Lane: Element;
    /// Whether AMX's tiles multiply such elements, as one bf16 or two.
    const IN_TILES: bool = false;
    /// Whether it takes two.
    #[cfg(target_arch = "x86_64")]
    const HAS_RESTS: bool = false;
}

impl Pool for f32 {
    type Number = Single;
    type Lane = f32;
}

impl Pool for f16 {
    type Number = Single;
    type Lane = f16;
    const IN_TILES: bool = true;
    #[cfg(target_arch = "x86_64")]
    const HAS_RESTS: bool = true;
}

impl Pool for bf16 {
    type Number = Paired;
    type Lane = f32;
    const IN_TILES: bool = true;
}

/// Writes a query: see [`Number::load_query`].
pub(super) struct LoadQuery<'a, N> {
    pub from: &'a [f32],
    pub factor: f32,
    pub to: &'a mut [f32],
    pub number: PhantomData<N>,
}

impl<N: Number> Loop for LoadQuery<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        N::load_query(s, self.from, self.factor, self.to);
    }
}
