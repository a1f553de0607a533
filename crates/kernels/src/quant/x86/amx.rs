//! Products of bytes by AMX's tiles: one instruction for a block of up to 12 rows and 16 outputs.
//!
//! The sums within a block are exact integers, so they are those of the other ways. Rust has no stable intrinsics for tiles;
//! their registers are only used here, between [`Multiply::begin`] and [`release`].

use super::super::formats::{BLOCK, VECTOR};
use super::lanes::{Lanes, Zmm};
use super::multiply::{Multiply, RecordWeights, Rows};
use super::vectors::{VECTORS, VectorFormat, VectorScales, quants};
use std::arch::asm;
use std::arch::x86_64::*;

/// Tiles of AMX, and vectors of AVX-512.
pub(super) struct Amx;

/// The shapes of the tiles, as `ldtilecfg` reads them (Intel 64 and IA-32 Architectures Software Developer's Manual,
/// volume 1, 18.2).
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row of each tile.
    columns: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Tile 0 has sums of `rows` rows, tile 1 their inputs, tile 2 weights: those of a block, or of one of two `halves` if
    /// each of these has sums of its own.
    const fn new(rows: u8, halves: usize) -> Self {
        let mut shapes = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            columns: [0; 16],
            rows: [0; 16],
        };
        shapes.columns[0] = VECTOR as u16;
        shapes.rows[0] = rows;
        shapes.columns[1] = (BLOCK / halves) as u16;
        shapes.rows[1] = rows;
        shapes.columns[2] = VECTOR as u16;
        shapes.rows[2] = (VECTORS / halves) as u8;
        shapes
    }
}

/// Gives back the tiles, so that the kernel has none of them to save.
///
/// # Safety
/// The CPU has AMX.
#[inline(always)]
pub(super) unsafe fn release() {
    // SAFETY: by the caller's contract; nobody else uses tiles.
    unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
}

/// Aligned bytes.
#[repr(C, align(64))]
struct Aligned<T>(T);

/// The sums of `R` rows and 16 outputs, over the inputs of a tile.
///
/// # Safety
/// The tiles have the shapes for `R` rows; `x` and `w` are in range.
#[inline(always)]
unsafe fn multiply<const R: usize>(x: *const i8, w: *const [u8; VECTOR]) -> [__m512i; R] {
    let mut sums = Aligned([[0i32; 16]; R]);
    // SAFETY: by the caller's contract: R rows of `x`, a block apart, and rows of a vector of `w` and of the sums.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tileloadd tmm1, [{x} + {block}]",
            "tileloadd tmm2, [{w} + {vector}]",
            "tdpbsud tmm0, tmm1, tmm2",
            "tilestored [{sums} + {vector}], tmm0",
            x = in(reg) x,
            block = in(reg) BLOCK,
            w = in(reg) w,
            vector = in(reg) VECTOR,
            sums = in(reg) sums.0.as_mut_ptr(),
            out("tmm0") _,
            out("tmm1") _,
            out("tmm2") _,
            options(nostack, preserves_flags),
        );
        let mut vectors = [Zmm::zero(); R];
        for i in 0..R {
            vectors[i] = _mm512_load_si512(sums.0[i].as_ptr().cast());
        }
        vectors
    }
}

impl Multiply for Amx {
    type Lanes = Zmm;

    fn max_rows(bits: usize) -> usize {
        super::Avx512::max_rows(bits)
    }

    #[inline(always)]
    unsafe fn begin<F: VectorFormat, const R: usize>() {
        let shapes = const { &Shapes::new(R as u8, if F::BITS == 6 { 2 } else { 1 }) };
        // SAFETY: the CPU has AMX, by the caller's contract.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) shapes, options(readonly, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn dots<F: VectorFormat, const R: usize>(w: &RecordWeights, x: &Rows) -> [__m512i; R] {
        // SAFETY: in range and available, by the caller's contract.
        unsafe {
            let mut weights = Aligned([[0u8; VECTOR]; VECTORS]);
            for v in 0..VECTORS {
                let at = weights.0[v].as_mut_ptr();
                _mm512_store_si512(at.cast(), quants::<F, Zmm>(w.tile, v));
            }
            let mut sums = multiply::<R>(x.q, weights.0.as_ptr());
            if F::BITS == 6 {
                let half = multiply::<R>(x.q.add(BLOCK / 2), weights.0[VECTORS / 2..].as_ptr());
                let first = F::Scales::factors::<Zmm>(w.scales, w.sub, w.first, 0);
                let second = F::Scales::factors::<Zmm>(w.scales, w.sub, w.first, 1);
                for i in 0..R {
                    let less = x.sums(i).less_32.map(|less| _mm512_set1_epi32(less));
                    let low = Zmm::mul(Zmm::add(sums[i], less[0]), first);
                    let high = Zmm::mul(Zmm::add(half[i], less[1]), second);
                    sums[i] = Zmm::add(low, high);
                }
                return sums;
            }
            for i in 0..R {
                let less = match F::VALUE_BITS {
                    8 => &x.sums(i).less_128,
                    _ if F::BIAS != 0 => &x.sums(i).less_8,
                    _ => continue,
                };
                sums[i] = Zmm::add(sums[i], _mm512_set1_epi32(*less));
            }
            sums
        }
    }
}
