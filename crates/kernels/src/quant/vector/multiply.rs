//! What the ways to multiply bytes have in common.
//!
//! Their loops over rows are plain loops: closures in `array::from_fn` and `map` are compiled without the
//! vector instructions wherever the compiler does not inline them (measured: a third of the speed).

use super::super::block_sums::BlockSums;
use super::super::formats::BLOCK;
use super::lanes::Lanes;
use super::vectors::VectorFormat;

/// A way to multiply bytes.
pub(super) trait Multiply {
    type Lanes: Lanes;

    /// The most rows that are multiplied together, so that what they need stays in registers; fewer if halves of a block
    /// are multiplied apart.
    fn max_rows(is_apart: bool) -> usize;

    /// For each of `R` rows, the exact `sum(factor * (quant - bias) * x)` of a block for the outputs of a
    /// vector: whole numbers of at most 24 bits, which floats hold.
    ///
    /// # Safety
    /// The CPU has the instructions; the tile, its scales and the rows are in range.
    unsafe fn dots<F: VectorFormat, const R: usize>(
        w: &RecordWeights,
        x: &Rows,
    ) -> [<Self::Lanes as Lanes>::F; R];

    /// The same `sum((quant - bias) * x)` of each half of a block, whose scales differ.
    ///
    /// # Safety
    /// As [`Multiply::dots`].
    unsafe fn half_dots<F: VectorFormat, const R: usize>(
        w: &RecordWeights,
        x: &Rows,
    ) -> [[<Self::Lanes as Lanes>::I; R]; 2];
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
    pub unsafe fn inputs(&self, i: usize, v: usize) -> *const u8 {
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

pub(super) use each;

/// The integers of a way to multiply.
pub(super) type Int<M> = <<M as Multiply>::Lanes as Lanes>::I;

/// The floats of a way to multiply.
pub(super) type Float<M> = <<M as Multiply>::Lanes as Lanes>::F;

/// The same numbers as floats.
///
/// # Safety
/// The CPU has what `M` needs.
#[inline(always)]
pub(super) unsafe fn floats<M: Multiply, const R: usize>(numbers: &[Int<M>; R]) -> [Float<M>; R] {
    // SAFETY: by the caller's contract.
    unsafe {
        let mut floats = [M::Lanes::float_zero(); R];
        for (float, &number) in floats.iter_mut().zip(numbers) {
            *float = M::Lanes::floats(number);
        }
        floats
    }
}
