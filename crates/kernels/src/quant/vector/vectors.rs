//! The formats as vectors.

use super::super::formats::{
    BlockOffsets, BlockScales, Exponents, Format, GroupScales, HalfBlockEighths, HalfBlockOffsets,
    HalfBlockScales, ScaleLayout, SuperEighths, SuperOffsets, SuperScales, VECTOR, WIDTH, of_half,
};
use super::super::scales::EIGHTH;
use super::super::tiles::NIBBLES;
use super::lanes::Lanes;

/// Vectors per tile.
pub(super) const VECTORS: usize = 8;

/// A format whose scales vector code reads.
pub(in super::super) trait VectorFormat: Format<Scales: VectorScales> {}

impl<F: Format<Scales: VectorScales>> VectorFormat for F {}

/// Scales as vectors. The functions are inlined into functions that have the instructions. `first` is the
/// first of the outputs that a vector has.
pub(in super::super) trait VectorScales: ScaleLayout {
    /// The scales of block `sub` of a record, or with [`ScaleLayout::BY_HALF`] of half a block.
    ///
    /// # Safety
    /// The CPU has the instructions; `scales` is the start of a record.
    unsafe fn scales<L: Lanes>(scales: *const u8, sub: usize, first: usize, half: usize) -> L::F;

    /// The offsets; only called with [`ScaleLayout::OFFSET`].
    ///
    /// # Safety
    /// As [`VectorScales::scales`].
    unsafe fn offsets<L: Lanes>(
        _scales: *const u8,
        _sub: usize,
        _first: usize,
        _half: usize,
    ) -> L::F {
        unreachable!("the format has no offsets")
    }

    /// The factors of half a block; only called with 6 bits.
    ///
    /// # Safety
    /// As [`VectorScales::scales`].
    unsafe fn factors<L: Lanes>(
        _scales: *const u8,
        _sub: usize,
        _first: usize,
        _half: usize,
    ) -> L::I {
        unreachable!("the format has no factors")
    }
}

/// Unsigned quants of inputs `4 v .. 4 v + 4`, or the values plus a bias that they stand for. `tile` is the tile's address
/// plus four bytes for each output before the vector's first.
///
/// # Safety
/// The CPU has the instructions; the tile has format `F`; `v < 8`.
#[inline(always)]
pub(super) unsafe fn quants<F: Format, L: Lanes>(tile: *const u8, v: usize) -> L::I {
    // SAFETY: by the caller's contract.
    unsafe {
        if F::BITS == 8 {
            return L::load(tile.add(v * VECTOR));
        }
        if F::BITS == 2 {
            let all = L::load(tile.add(v % 2 * VECTOR));
            let pairs = match v / 2 {
                0 => all,
                1 => L::right::<2>(all),
                2 => L::right::<4>(all),
                _ => L::right::<6>(all),
            };
            return L::and(pairs, L::bytes(3));
        }
        let both = L::load(tile.add(v % (VECTORS / 2) * VECTOR));
        let nibbles = if v < VECTORS / 2 {
            both
        } else {
            L::right::<4>(both)
        };
        let nibbles = L::and(nibbles, L::bytes(15));
        if F::TABLE.is_some() {
            return L::look_up(const { &F::BIASED }, nibbles);
        }
        match F::BITS {
            5 => L::or(nibbles, fifth::<L>(tile, v)),
            6 => L::or(nibbles, upper_pair::<L>(tile, v)),
            _ => nibbles,
        }
    }
}

/// Bit `v` of each byte, moved to bit 4. Bits that come from the neighbouring byte are masked off.
///
/// # Safety
/// As [`quants`], with 5 bits.
#[inline(always)]
unsafe fn fifth<L: Lanes>(tile: *const u8, v: usize) -> L::I {
    // SAFETY: by the caller's contract.
    unsafe {
        let bits = L::load(tile.add(NIBBLES));
        let bits = match v {
            0 => L::left::<4>(bits),
            1 => L::left::<3>(bits),
            2 => L::left::<2>(bits),
            3 => L::left::<1>(bits),
            4 => bits,
            5 => L::right::<1>(bits),
            6 => L::right::<2>(bits),
            _ => L::right::<3>(bits),
        };
        L::and(bits, L::bytes(16))
    }
}

/// The upper two bits, moved to bits 4 and 5.
///
/// # Safety
/// As [`quants`], with 6 bits.
#[inline(always)]
unsafe fn upper_pair<L: Lanes>(tile: *const u8, v: usize) -> L::I {
    // SAFETY: by the caller's contract.
    unsafe {
        let bits = L::load(tile.add(NIBBLES + v % 4 / 2 * VECTOR));
        let bits = match v / 4 * 2 + v % 2 {
            0 => L::left::<4>(bits),
            1 => L::left::<2>(bits),
            2 => bits,
            _ => L::right::<2>(bits),
        };
        L::and(bits, L::bytes(0x30))
    }
}

/// The [`VectorScales`] of layouts over vectors called `$lanes`.
macro_rules! vector_scales {
    ($lanes:ident; $($layout:ident {
        $($name:ident($scales:ident, $sub:pat_param, $first:ident, $half:pat_param) -> $of:ident => $value:expr;)*
    })*) => {
        $(
            impl VectorScales for $layout {
                $(
                    #[inline(always)]
                    unsafe fn $name<$lanes: Lanes>(
                        $scales: *const u8,
                        $sub: usize,
                        $first: usize,
                        $half: usize,
                    ) -> $lanes::$of {
                        // SAFETY: in the record, by the caller's contract.
                        unsafe { $value }
                    }
                )*
            }
        )*
    };
}

vector_scales! {
    L;
    BlockScales {
        scales(scales, sub, first, _) -> F => L::halves(scales.add(2 * (sub * WIDTH + first)));
    }
    BlockOffsets {
        scales(scales, _, first, _) -> F => L::halves(scales.add(2 * first));
        offsets(scales, _, first, _) -> F => L::halves(scales.add(2 * (WIDTH + first)));
    }
    SuperOffsets {
        scales(scales, sub, first, _) -> F => {
            let sc = L::unsigned(scales.add(Self::SC + sub * WIDTH + first));
            L::float_mul(L::halves(scales.add(2 * first)), L::floats(sc))
        };
        offsets(scales, sub, first, _) -> F => {
            let mn = L::unsigned(scales.add(Self::MN + sub * WIDTH + first));
            let m = L::halves(scales.add(Self::M + 2 * first));
            L::negate(L::float_mul(m, L::floats(mn)))
        };
    }
    SuperScales {
        scales(scales, sub, first, _) -> F => {
            let factors = L::signed(scales.add(Self::factors(sub) + first));
            L::float_mul(L::halves(scales.add(2 * first)), L::floats(factors))
        };
    }
    SuperEighths {
        scales(scales, sub, first, half) -> F => {
            let whole = SuperScales::scales::<L>(scales, sub, first, half);
            L::float_mul(whole, L::float_broadcast(&EIGHTH))
        };
    }
    HalfBlockEighths {
        scales(scales, sub, first, half) -> F => {
            let factors = L::unsigned(scales.add(of_half(sub, half) + first));
            let whole = L::float_mul(L::halves(scales.add(2 * first)), L::floats(factors));
            L::float_mul(whole, L::float_broadcast(&EIGHTH))
        };
    }
    Exponents {
        scales(scales, sub, first, _) -> F => {
            let exponents = L::unsigned(scales.add(sub * WIDTH + first));
            L::float_mul(L::powers(exponents, Self::SMALLEST), L::float_broadcast(&0.5))
        };
    }
    HalfBlockScales {
        scales(scales, _, first, _) -> F => L::halves(scales.add(2 * first));
        factors(scales, sub, first, half) -> I => L::signed(scales.add(of_half(sub, half) + first));
    }
    HalfBlockOffsets {
        scales(scales, sub, first, half) -> F => {
            let both = L::unsigned(scales.add(of_half(sub, half) + first));
            let sc = L::floats(L::and(both, L::bytes(15)));
            L::float_mul(L::halves(scales.add(2 * first)), sc)
        };
        offsets(scales, sub, first, half) -> F => {
            let both = L::unsigned(scales.add(of_half(sub, half) + first));
            let mn = L::floats(L::right::<4>(both));
            let m = L::halves(scales.add(Self::M + 2 * first));
            L::negate(L::float_mul(m, mn))
        };
    }
    GroupScales {
        // A record is aligned for an f32.
        scales(scales, sub, first, half) -> F => {
            let numbers = L::unsigned(scales.add(of_half(sub, half) + first));
            let factor = L::float_broadcast(&*scales.cast::<f32>());
            L::float_mul(L::floats_of_bits(numbers), factor)
        };
    }
}
