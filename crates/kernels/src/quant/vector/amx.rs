//! The products with AMX's tiles of bytes: one instruction adds up a block of 16 rows and 16 outputs.
//!
//! The sum within a block is the same exact integer as in the other loops, and blocks are added in the same order: the bits
//! are equal. The weights of a segment are unpacked once for all rows. All its sums are stored before the first is scaled and
//! added, because instructions on tiles and on vectors do not run side by side (measured on Sapphire Rapids).

use super::lanes::Lanes;
use super::vectors::{VECTORS, VectorFormat, VectorScales, quants};
use super::x86::Zmm;
use super::{Activations, Strip, Turn, WIDTH};
use crate::cpu::AmxInt8;
use crate::quant::PANEL;
use crate::quant::activations::TILE_ROWS;
use crate::quant::block_sums::BlockSums;
use crate::quant::formats::{BLOCK, ScaleLayout, VECTOR};
use crate::simd::amx::{Bytes, LANES_OF_TILE, Tiles};
use std::arch::x86_64::*;
use std::cell::RefCell;

/// Blocks whose unpacked weights, rows and sums fit into the first cache together.
const SEGMENT: usize = 16;
/// Sums that are in tiles at a time.
const GROUP: usize = 4;

/// A block of 16 outputs.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Weights {
    /// Signed values: vector `v` has inputs `4 v .. 4 v + 4`.
    values: [[u8; VECTOR]; VECTORS],
    scales: [f32; WIDTH],
    offsets: [f32; WIDTH],
}

/// Sums of 16 rows and 16 outputs.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Sums([i32; LANES_OF_TILE]);

/// What a strip needs for a time.
struct Scratch {
    weights: [Weights; SEGMENT],
    /// Those of the blocks of a segment.
    sums: [Sums; SEGMENT],
    /// The results of the rows of a panel.
    out: [[[f32; WIDTH]; TILE_ROWS]; PANEL],
}

impl Scratch {
    const EMPTY: Self = Self {
        weights: [Weights {
            values: [[0; VECTOR]; VECTORS],
            scales: [0.0; WIDTH],
            offsets: [0.0; WIDTH],
        }; SEGMENT],
        sums: [Sums([0; LANES_OF_TILE]); SEGMENT],
        out: [[[0.0; WIDTH]; TILE_ROWS]; PANEL],
    };
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch::EMPTY));
}

/// Unpacks blocks of a strip from `first` on, which a record begins with.
///
/// # Safety
/// The CPU has AVX-512 BW.
#[inline(always)]
unsafe fn unpack<F: VectorFormat>(strip: Strip<'_, F>, first: usize, to: &mut [Weights]) {
    const { assert!(SEGMENT.is_multiple_of(F::SPAN)) };
    let records = strip.bytes().chunks_exact(F::RECORD).skip(first / F::SPAN);
    for (record, to) in records.zip(to.chunks_mut(F::SPAN)) {
        for (sub, to) in to.iter_mut().enumerate() {
            let scales = record.as_ptr();
            // SAFETY: tiles and scales are in the record, and vectors are aligned; the CPU has the instructions by the
            // caller's contract.
            unsafe {
                let tile = scales.add(F::SCALES + sub * F::TILE);
                let bias = Zmm::bytes(if F::VALUE_BITS == 8 {
                    -128
                } else {
                    F::BIAS as i8
                });
                for (v, to) in to.values.iter_mut().enumerate() {
                    let values = _mm512_sub_epi8(quants::<F, Zmm>(tile, v), bias);
                    _mm512_store_si512(to.as_mut_ptr().cast(), values);
                }
                Zmm::store(
                    to.scales.as_mut_ptr(),
                    F::Scales::scales::<Zmm>(scales, sub, 0, 0),
                );
                if F::Scales::OFFSET {
                    let offsets = F::Scales::offsets::<Zmm>(scales, sub, 0, 0);
                    Zmm::store(to.offsets.as_mut_ptr(), offsets);
                }
            }
        }
    }
}

/// Computes the sums of a block in a tile, for 16 rows.
#[inline(always)]
fn dot<const SUMS: u8, const FIRST: u8, const SECOND: u8>(
    tiles: &Tiles<Bytes>,
    (x, w): (&[i8; TILE_ROWS * BLOCK], &Weights),
) {
    tiles.clear::<SUMS>();
    // SAFETY: there are 16 rows of 32 bytes and eight of 64, the shapes of these tiles.
    unsafe {
        tiles.load::<FIRST>(x.as_ptr(), BLOCK);
        tiles.load::<SECOND>(w.values.as_ptr(), VECTOR);
    }
    tiles.dot::<SUMS, FIRST, SECOND>();
}

/// Stores the sums of the blocks of a segment, for 16 rows.
#[inline(always)]
fn multiply<'x>(
    tiles: &Tiles<Bytes>,
    weights: &[Weights],
    x: impl Fn(usize) -> &'x [i8; TILE_ROWS * BLOCK],
    sums: &mut [Sums],
) {
    let sums = &mut sums[..weights.len()];
    for (i, sums) in sums.chunks_mut(GROUP).enumerate() {
        let count = sums.len();
        let at = |number: usize| (x(i * GROUP + number), &weights[i * GROUP + number]);
        dot::<0, 4, 6>(tiles, at(0));
        if count > 1 {
            dot::<1, 5, 7>(tiles, at(1));
        }
        if count > 2 {
            dot::<2, 4, 6>(tiles, at(2));
        }
        if count > 3 {
            dot::<3, 5, 7>(tiles, at(3));
        }
        for (number, sums) in sums.iter_mut().enumerate() {
            // SAFETY: there are 16 rows of 64 bytes.
            unsafe {
                match number {
                    0 => tiles.store::<0>(sums),
                    1 => tiles.store::<1>(sums),
                    2 => tiles.store::<2>(sums),
                    _ => tiles.store::<3>(sums),
                }
            }
        }
    }
}

/// Scales the sums of a segment, and adds them to the results of `R` rows of a turn.
///
/// # Safety
/// The CPU has AVX-512.
#[inline(always)]
unsafe fn add<F: VectorFormat, const R: usize>(
    weights: &[Weights],
    sums: &[Sums],
    (x, stride): (&[BlockSums], usize),
    out: &mut [[f32; WIDTH]; TILE_ROWS],
) {
    assert!(sums.len() >= weights.len() && R <= TILE_ROWS);
    assert!(x.len() >= (weights.len() - 1) * stride + R);
    // SAFETY: in range, as asserted, and vectors are aligned; the CPU has the instructions by the caller's contract.
    unsafe {
        let mut totals = [Zmm::float_zero(); R];
        for (total, out) in totals.iter_mut().zip(&*out) {
            *total = _mm512_loadu_ps(out.as_ptr());
        }
        let mut x = x.as_ptr();
        for (w, sum) in weights.iter().zip(sums) {
            let scales = _mm512_load_ps(w.scales.as_ptr());
            let offsets = _mm512_load_ps(w.offsets.as_ptr());
            for (i, total) in totals.iter_mut().enumerate() {
                let sum = _mm512_load_si512(sum.0.as_ptr().add(i * WIDTH).cast());
                let x = &*x.add(i);
                let scale = Zmm::float_mul(scales, Zmm::float_broadcast(&x.scale));
                *total = Zmm::fma(Zmm::floats(sum), scale, *total);
                if F::Scales::OFFSET {
                    *total = Zmm::fma(offsets, Zmm::float_broadcast(&x.sum), *total);
                }
            }
            x = x.wrapping_add(stride);
        }
        for (out, total) in out.iter_mut().zip(totals) {
            Zmm::store(out.as_mut_ptr(), total);
        }
    }
}

/// As [`super::x86::product_avx2`], for turns that are whole passes.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(in super::super) fn product_amx<F: VectorFormat>(
    proof: AmxInt8,
    strip: Strip<'_, F>,
    x: &Activations,
    turns: &[Turn],
    mut store: impl FnMut(usize, &[f32; WIDTH]),
) {
    let tiles = Tiles::bytes(proof);
    let blocks = strip.blocks();
    SCRATCH.with_borrow_mut(|scratch| {
        let Scratch { weights, sums, out } = &mut **scratch;
        out[..turns.len()].fill([[0.0; WIDTH]; TILE_ROWS]);
        for first in (0..blocks).step_by(SEGMENT) {
            let weights = &mut weights[..SEGMENT.min(blocks - first)];
            // SAFETY: the CPU has the instructions: a caller needs them, or has to show the proof.
            unsafe { unpack(strip, first, weights) };
            for (turn, out) in turns.iter().zip(out.iter_mut()) {
                let pass = turn.pass;
                assert_eq!(turn.rows, pass.rows);
                multiply(&tiles, weights, |i| x.tile(pass, first + i), sums);
                let x = (&x.sums(pass)[first * pass.rows..], pass.rows);
                macro_rules! add {
                    ($($rows:literal)*) => {
                        // At least 64 rows are divided evenly.
                        match pass.rows {
                            // SAFETY: as above.
                            $($rows => unsafe { add::<F, $rows>(weights, sums, x, out) },)*
                            _ => unreachable!("no pass has so few rows"),
                        }
                    };
                }
                add!(13 14 15 16);
            }
        }
        for (turn, out) in turns.iter().zip(out.iter()) {
            for (i, out) in out[..turn.rows].iter().enumerate() {
                store(turn.pass.first + i, out);
            }
        }
    });
}
