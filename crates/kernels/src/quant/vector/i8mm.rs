//! The products with the matrix instructions of ARMv8.6 (`i8mm`), of which one multiplies eight inputs of two outputs with
//! those of two rows.

use super::lanes::Lanes;
use super::multiply::{RecordWeights, each};
use super::neon::Quad;
use super::pairs::{Block, Outputs, Pairs};
use super::vectors::VectorFormat;
use super::{Activations, Ahead, Strip, Turn, WIDTH};
use crate::cpu::I8mm;
use crate::quant::PANEL;
use crate::quant::activations::PAIRED_ROWS;
use std::arch::aarch64::*;
use std::mem::MaybeUninit;

/// Pairs of a turn, at most.
const MAX_PAIRS: usize = PAIRED_ROWS / 2;
/// Vectors of four outputs.
const VECTORS_OF_STRIP: usize = WIDTH / Quad::COUNT;
/// Blocks whose unpacked weights, and a turn's rows, fit into the first cache together.
const SEGMENT: usize = 16;

/// The sums of a turn's pairs, for each vector. Of both outputs, the first row's comes first.
type Totals = [[Outputs<float32x4_t>; MAX_PAIRS]; VECTORS_OF_STRIP];
/// Blocks of a strip, for each vector.
type Unpacked<F> = [[MaybeUninit<Block<F>>; SEGMENT]; VECTORS_OF_STRIP];

/// Multiplies the `P` pairs of rows of a turn with the outputs of `V` vectors of a strip, from output `from`, unpacking
/// blocks for them alone.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn unpacked_once<F: VectorFormat, const P: usize, const V: usize>(
    strip: Strip<'_, F>,
    from: usize,
    mut x: Pairs,
    mut ahead: Ahead,
    totals: &mut Totals,
) {
    assert!(from + V <= VECTORS_OF_STRIP);
    // SAFETY: blocks are in range of the strip; the rest by the caller's contract.
    unsafe {
        let mut record = strip.bytes().as_ptr();
        let mut sums = [[[Quad::float_zero(); 2]; P]; V];
        let mut left = strip.blocks();
        while left > 0 {
            let blocks = left.min(F::SPAN);
            for sub in 0..blocks {
                ahead.share::<F>(const { VECTORS_OF_STRIP / V });
                each!(v in 0 1 => {
                    if v < V {
                        Block::<F>::new(&weights_at::<F>(record, sub, from + v)).add(x, &mut sums[v]);
                    }
                });
                x = x.after::<P>();
            }
            record = record.wrapping_add(F::RECORD);
            left -= blocks;
        }
        for (v, sums) in sums.into_iter().enumerate() {
            totals[from + v][..P].copy_from_slice(&sums);
        }
    }
}

/// Where block `sub` of a record is for the outputs of vector `v`.
#[inline(always)]
fn weights_at<F: VectorFormat>(record: *const u8, sub: usize, v: usize) -> RecordWeights {
    RecordWeights {
        scales: record,
        sub,
        first: v * Quad::COUNT,
        tile: record.wrapping_add(F::SCALES + sub * F::TILE + 4 * v * Quad::COUNT),
    }
}

/// Unpacks blocks of a strip from `first` on, which a record begins with.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn unpack<F: VectorFormat>(
    strip: Strip<'_, F>,
    first: usize,
    count: usize,
    ahead: &mut Ahead,
    to: &mut Unpacked<F>,
) {
    const { assert!(SEGMENT.is_multiple_of(F::SPAN)) };
    assert!(first + count <= strip.blocks() && count <= SEGMENT);
    let start = strip.bytes().as_ptr();
    for i in 0..count {
        let block = first + i;
        let record = start.wrapping_add(block / F::SPAN * F::RECORD);
        ahead.share::<F>(1);
        for (v, to) in to.iter_mut().enumerate() {
            // SAFETY: the block is in range, as asserted; the CPU has the instructions by the caller's contract.
            let block = unsafe { Block::new(&weights_at::<F>(record, block % F::SPAN, v)) };
            to[i].write(block);
        }
    }
}

/// Adds the products of unpacked blocks to the totals of a turn of `P` pairs.
///
/// # Safety
/// The CPU has the instructions; the first `count` blocks are unpacked, and there are so many of the pairs.
#[inline(always)]
unsafe fn add_unpacked<F: VectorFormat, const P: usize>(
    blocks: &Unpacked<F>,
    count: usize,
    x: Pairs,
    totals: &mut Totals,
) {
    for (blocks, totals) in blocks.iter().zip(totals) {
        let mut x = x;
        let totals: &mut [_; P] = (&mut totals[..P]).try_into().expect("so many pairs");
        let mut sums = *totals;
        for block in &blocks[..count] {
            // SAFETY: by the caller's contract.
            unsafe { block.assume_init_ref().add(x, &mut sums) };
            x = x.after::<P>();
        }
        *totals = sums;
    }
}

/// Passes the results of a turn to `store`.
#[inline(always)]
fn store_totals(turn: &Turn, totals: &Totals, store: &mut impl FnMut(usize, &[f32; WIDTH])) {
    let mut out = [[0f32; WIDTH]; PAIRED_ROWS];
    for (v, totals) in totals.iter().enumerate() {
        for (rows, [a, b]) in out.chunks_exact_mut(2).zip(totals) {
            // SAFETY: the CPU has NEON, and rows have four numbers for each vector.
            unsafe {
                let at = v * Quad::COUNT;
                Quad::store(rows[0].as_mut_ptr().add(at), vuzp1q_f32(*a, *b));
                Quad::store(rows[1].as_mut_ptr().add(at), vuzp2q_f32(*a, *b));
            }
        }
    }
    for (i, out) in out[..turn.rows].iter().enumerate() {
        store(turn.pass.first + i, out);
    }
}

/// The products of one turn.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn product_of_one<F: VectorFormat>(
    strip: Strip<'_, F>,
    x: &Activations,
    turn: &Turn,
    totals: &mut Totals,
) {
    let x = Pairs::of(x, turn, strip.blocks());
    // Pairs, and the vectors of a tile that they are multiplied with at a time.
    macro_rules! product {
        ($([$pairs:literal x $vectors:literal])*) => {
            match turn.rows.div_ceil(2) {
                $($pairs => for from in (0..VECTORS_OF_STRIP).step_by($vectors) {
                    let passes = VECTORS_OF_STRIP / $vectors;
                    let ahead = Ahead::new(strip, from / $vectors, passes);
                    // SAFETY: the strip's blocks have such pairs; the CPU has the instructions by the caller's contract.
                    unsafe { unpacked_once::<F, $pairs, $vectors>(strip, from, x, ahead, totals) };
                })*
                _ => unreachable!("no turn has so many rows"),
            }
        };
    }
    product!([2 x 2] [3 x 1] [4 x 1]);
}

/// The products of several turns, for which blocks are unpacked once.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn product_of_several<F: VectorFormat>(
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    totals: &mut [Totals; PANEL],
) {
    assert!(turns.len() <= PANEL);
    let mut unpacked: Unpacked<F> =
        [const { [const { MaybeUninit::uninit() }; SEGMENT] }; VECTORS_OF_STRIP];
    let mut ahead = Ahead::new(strip, 0, 1);
    for first in (0..strip.blocks()).step_by(SEGMENT) {
        let count = SEGMENT.min(strip.blocks() - first);
        // SAFETY: by the caller's contract.
        unsafe { unpack(strip, first, count, &mut ahead, &mut unpacked) };
        for (turn, totals) in turns.iter().zip(&mut *totals) {
            let x = Pairs::of(x, turn, strip.blocks()).at_block(first, turn);
            macro_rules! add {
                ($($pairs:literal)*) => {
                    match turn.rows.div_ceil(2) {
                        // SAFETY: these blocks are unpacked and have such pairs; the rest by the caller's contract.
                        $($pairs => unsafe { add_unpacked::<F, $pairs>(&unpacked, count, x, totals) },)*
                        _ => unreachable!("more rows than a pass has are divided evenly"),
                    }
                };
            }
            add!(2 3 4);
        }
    }
}

/// As [`super::neon::product_neon`], for turns that are whole passes, whose rows are in pairs.
#[target_feature(enable = "neon,dotprod,i8mm")]
pub(in super::super) fn product_i8mm<F: VectorFormat>(
    _: I8mm,
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
    unsafe {
        let zero: Totals = [[[Quad::float_zero(); 2]; MAX_PAIRS]; VECTORS_OF_STRIP];
        if let [turn] = turns {
            let mut totals = zero;
            product_of_one(strip, x, turn, &mut totals);
            return store_totals(turn, &totals, &mut store);
        }
        let mut totals = [zero; PANEL];
        product_of_several(strip, x, turns, &mut totals);
        for (turn, totals) in turns.iter().zip(&totals) {
            store_totals(turn, totals, &mut store);
        }
    }
}
