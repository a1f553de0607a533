//! The tile registers of AMX, for products of bf16 and of bytes.
//!
//! Rust has no stable intrinsics for them, and the compiler never uses them by itself: what one function leaves in a tile,
//! the next one finds there, on the same thread, while the thread's [`Tiles`] live.

use crate::cpu::{AmxBf16, AmxInt8};
use std::arch::asm;
use std::marker::PhantomData;

/// Rows of a tile.
pub(crate) const ROWS: usize = 16;
/// Lanes of 32 bits of a row: one number, or two bf16.
pub(crate) const COLUMNS: usize = 16;
/// Lanes of a tile.
pub(crate) const LANES_OF_TILE: usize = ROWS * COLUMNS;
/// Bytes of a row.
const BYTES: usize = 4 * COLUMNS;

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

/// Eight tiles of 64 bytes a row: 0 to 5 have 16 rows, 6 and 7 one row for each four bytes of a row of 4 and 5, which may be
/// shorter.
const fn shapes(bytes: usize) -> Shapes {
    let mut shapes = Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        columns: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        let (columns, rows) = match tile {
            4 | 5 => (bytes, ROWS),
            6 | 7 => (BYTES, bytes / 4),
            _ => (BYTES, ROWS),
        };
        shapes.columns[tile] = columns as u16;
        shapes.rows[tile] = rows as u8;
        tile += 1;
    }
    shapes
}

/// What is in tiles: pairs of bf16, or bytes.
pub(crate) enum Pairs {}
/// See [`Pairs`].
pub(crate) enum Bytes {}

/// This thread's eight tiles. Dropping it gives them back, so that the kernel has none of them to save. There must be one at a
/// time on a thread.
pub(crate) struct Tiles<T>(PhantomData<(T, *mut ())>);

impl Tiles<Pairs> {
    /// Tiles of 16 rows of 64 bytes.
    pub fn pairs(_: AmxBf16) -> Self {
        Self::new(const { &shapes(BYTES) })
    }

    /// `sums[m][n] += first[m][..] * second[..][n]`, where a lane of row `m` of `first` and a lane in column `n` of `second`
    /// are two bf16 each. Their first numbers are multiplied and added up in f32 by fused multiply-adds over the
    /// 16 lanes, and so are their second numbers; then both sums are added, and the result to `sums`. All that is rounded to
    /// nearest, and numbers below 1.2e-38 are zeros.
    #[inline(always)]
    pub fn dot<const SUMS: u8, const FIRST: u8, const SECOND: u8>(&self) {
        const { assert!(SUMS < 8 && FIRST < 8 && SECOND < 8) };
        // SAFETY: the thread has tiles.
        unsafe {
            asm!(
                "tdpbf16ps tmm{sums}, tmm{first}, tmm{second}",
                sums = const SUMS, first = const FIRST, second = const SECOND,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

impl Tiles<Bytes> {
    /// Tiles for products of rows of 32 bytes: tiles 4 and 5 have 16 of them, and tiles 6 and 7 eight rows of 64 bytes. All
    /// others have 16 rows of 64 bytes.
    pub fn bytes(_: AmxInt8) -> Self {
        Self::new(const { &shapes(32) })
    }

    /// `sums[m][n] += first[m][..] * second[..][n]`, where a lane of row `m` of `first` and a lane in column `n` of `second`
    /// are four signed bytes each, and sums have 32 bits. `FIRST` is 4 or 5, and `SECOND` is 6 or 7.
    #[inline(always)]
    pub fn dot<const SUMS: u8, const FIRST: u8, const SECOND: u8>(&self) {
        const { assert!(SUMS < 4 && FIRST / 2 == 2 && SECOND / 2 == 3) };
        // SAFETY: the thread has tiles of fitting shapes.
        unsafe {
            asm!(
                "tdpbssd tmm{sums}, tmm{first}, tmm{second}",
                sums = const SUMS, first = const FIRST, second = const SECOND,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

impl<T> Tiles<T> {
    /// The process may use tiles, as callers have to prove.
    fn new(shapes: &'static Shapes) -> Self {
        // SAFETY: as just said; the shapes are valid.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, preserves_flags, readonly));
        }
        Self(PhantomData)
    }

    /// Sets a tile to zeros.
    #[inline(always)]
    pub fn clear<const TILE: u8>(&self) {
        const { assert!(TILE < 8) };
        // SAFETY: the thread has tiles.
        unsafe { asm!("tilezero tmm{t}", t = const TILE, options(nomem, nostack, preserves_flags)) }
    }

    /// Loads a tile.
    ///
    /// # Safety
    /// The tile's rows can be read, `stride` bytes apart from `from` on.
    #[inline(always)]
    pub unsafe fn load<const TILE: u8>(&self, from: *const impl Sized, stride: usize) {
        const { assert!(TILE < 8) };
        // SAFETY: the thread has tiles; the caller's contract.
        unsafe {
            asm!(
                "tileloadd tmm{t}, [{from} + {stride}]",
                t = const TILE, from = in(reg) from, stride = in(reg) stride,
                options(nostack, preserves_flags, readonly)
            );
        }
    }

    /// Stores a tile of 16 rows of 64 bytes.
    ///
    /// # Safety
    /// 16 rows of 64 bytes can be written, one after the other from `to` on.
    #[inline(always)]
    pub unsafe fn store<const TILE: u8>(&self, to: *mut impl Sized) {
        const { assert!(TILE < 8) };
        // SAFETY: the thread has tiles; the caller's contract.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}], tmm{t}",
                t = const TILE, to = in(reg) to, stride = in(reg) BYTES,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl<T> Drop for Tiles<T> {
    fn drop(&mut self) {
        // SAFETY: the thread has tiles.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}
