//! The numbers that weights are stored as.

use crate::simd::{Element, LANES, Simd, e4m3};
use half::{bf16, f16};

/// A stored weight.
pub(super) trait Value: Copy + Default + Send + Sync + 'static {
    /// Has the alignment of a row of weights, so that none crosses a cache line.
    type Align: Copy + Send + Sync;

    /// Whether weights are these numbers times the factors of [`Scales`](super::tiles::Scales), and inputs are multiplied
    /// with [`E4m3::INPUT`].
    const IS_SCALED: bool = false;

    /// The index of the tile's output `c` in a row.
    fn place(c: usize) -> usize {
        c
    }

    fn to_f32(self) -> f32;

    /// The numbers of a tile's outputs, in order.
    fn load_row<S: Simd>(s: S, row: &[Self; LANES]) -> S::Vector;
}

#[repr(align(16))]
#[derive(Clone, Copy)]
pub(super) struct Align16;

#[repr(align(32))]
#[derive(Clone, Copy)]
pub(super) struct Align32;

/// How a number becomes a float, and a row of them a vector.
macro_rules! reads {
    ($number:ident => $float:expr, $load:ident) => {
        #[inline(always)]
        fn to_f32($number) -> f32 {
            $float
        }

        #[inline(always)]
        fn load_row<S: Simd>(s: S, row: &[Self; LANES]) -> S::Vector {
            // SAFETY: a row has 16 numbers.
            unsafe { s.$load(row.as_ptr().cast()) }
        }
    };
}

impl Value for f32 {
    type Align = Align32;

    reads!(self => self, load);
}

impl Value for f16 {
    type Align = Align32;

    reads!(self => Element::to_f32(self), load_f16);
}

impl Value for bf16 {
    type Align = Align32;

    /// Output `c` is next to output `8 + c`: one is the low half of 32 bits and the other the high half,
    /// so that a shift and a mask make two vectors of f32.
    fn place(c: usize) -> usize {
        2 * (c % (LANES / 2)) + c / (LANES / 2)
    }

    reads!(self => Element::to_f32(self), load_apart);
}

/// A finite number of FP8 with an exponent of 4 bits (E4M3), over 2^120 as a float.
#[repr(transparent)]
#[derive(Clone, Copy, Default)]
pub(super) struct E4m3(pub u8);

impl E4m3 {
    /// 2^60, with which inputs are multiplied: products are near 1 over it then, and lose no bits.
    pub const INPUT: f32 = (1u64 << 60) as f32;
    /// With which scales are multiplied: what is left of 2^120.
    pub const SCALE: f32 = Self::INPUT;
}

impl Value for E4m3 {
    type Align = Align16;
    const IS_SCALED: bool = true;

    /// Outputs `c % 4` are in one word: a shift for each four outputs makes floats of them.
    fn place(c: usize) -> usize {
        4 * (c % 4) + 3 - c / 4
    }

    reads!(self => e4m3(self.0), load_e4m3);
}

/// The float of a scaled number.
#[repr(transparent)]
#[derive(Clone, Copy, Default)]
pub(super) struct Unpacked(pub f32);

impl Value for Unpacked {
    type Align = Align32;
    const IS_SCALED: bool = true;

    reads!(self => self.0, load);
}
