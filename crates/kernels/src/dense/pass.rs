//! Passes: the products of some rows with some tiles.

#![allow(
    clippy::needless_range_loop,
    reason = "indices of registers: loops over R and T are unrolled"
)]

use super::tiles::{ROWS, Sums, TILES, TileRow, WIDTH};
use super::value::Value;
use crate::cpu::Isa;
use crate::simd::{Loop, Simd, prefetch, run};

/// The fewest rows for which AVX-512 is faster than AVX2: fewer wait for memory.
const MIN_WIDE_ROWS: usize = 3;
/// How many inputs ahead to prefetch when one tile is read at a time: the CPU's own prefetching ends at
/// the page, and with several rows its out-of-order window is too short to reach the next loads.
const AHEAD: usize = 64;

/// Maximum rows of a pass, at most [`ROWS`]: as many sums as stay in registers.
pub(super) fn max_rows(isa: Isa) -> usize {
    match isa.avx512() {
        Some(_) => ROWS,
        // `SUMS` of AVX2 and of plain Rust leave room for no more.
        None => 6,
    }
}

/// Adds the products of `tiles` (a count that `at_once` returns) with the rows `x` (1 to [`max_rows`]) to `sums`. All
/// slices have the same length and cover the same inputs. If numbers are [scaled](Value::IS_SCALED), the products are added
/// to one another first, and their sum times the factors of each tile's outputs in `scales` is added to `sums`.
pub(super) fn pass<V: Value>(
    isa: Isa,
    tiles: &[&[TileRow<V>]],
    scales: &[&[f32; WIDTH]],
    x: &[&[f32]],
    sums: &mut Sums,
) {
    let isa = match isa.avx2() {
        Some(avx2) if x.len() < MIN_WIDE_ROWS => Isa::Avx2(avx2),
        _ => isa,
    };
    let pass = Pass {
        tiles,
        scales,
        x,
        sums,
    };
    run(isa, pass);
}

struct Pass<'a, V: Value> {
    tiles: &'a [&'a [TileRow<V>]],
    scales: &'a [&'a [f32; WIDTH]],
    x: &'a [&'a [f32]],
    sums: &'a mut Sums,
}

impl<V: Value> Loop for Pass<'_, V> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.x.len(), self.tiles.len()) {
            (1, TILES) => self.rows::<S, 1, TILES>(s),
            (2, 2) => self.rows::<S, 2, 2>(s),
            (1, 1) => self.rows::<S, 1, 1>(s),
            (2, 1) => self.rows::<S, 2, 1>(s),
            (3, 1) => self.rows::<S, 3, 1>(s),
            (4, 1) => self.rows::<S, 4, 1>(s),
            (5, 1) => self.rows::<S, 5, 1>(s),
            (6, 1) => self.rows::<S, 6, 1>(s),
            (7, 1) if S::SUMS >= ROWS => self.rows::<S, 7, 1>(s),
            (8, 1) if S::SUMS >= ROWS => self.rows::<S, 8, 1>(s),
            (9, 1) if S::SUMS >= ROWS => self.rows::<S, 9, 1>(s),
            (10, 1) if S::SUMS >= ROWS => self.rows::<S, 10, 1>(s),
            (11, 1) if S::SUMS >= ROWS => self.rows::<S, 11, 1>(s),
            (ROWS, 1) if S::SUMS >= ROWS => self.rows::<S, ROWS, 1>(s),
            (rows, tiles) => unreachable!("no pass of {rows} rows by {tiles} tiles"),
        }
    }
}

impl<V: Value> Pass<'_, V> {
    /// A pass of `R` rows by `T` tiles: `R T` vectors of chains side by side.
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const T: usize>(self, s: S) {
        assert!(
            self.x.len() == R && self.tiles.len() == T,
            "a pass of {R} rows by {T} tiles"
        );
        // Pointers, so that bounds are checked once and not once per vector.
        let len = self.x[0].len();
        let mut x_at = [std::ptr::null(); R];
        for (at, x) in x_at.iter_mut().zip(self.x) {
            assert_eq!(x.len(), len, "inputs of a row");
            *at = x.as_ptr();
        }
        let mut tile_at = [std::ptr::null(); T];
        for (at, tile) in tile_at.iter_mut().zip(self.tiles) {
            assert_eq!(tile.len(), len, "inputs of a tile");
            *at = tile.as_ptr();
        }
        let mut chains = [[s.splat(0.); R]; T];
        for t in 0..T {
            for r in 0..R {
                if !V::IS_SCALED {
                    // SAFETY: the sums of a row and a tile are 16 floats.
                    chains[t][r] = unsafe { s.load(self.sums[t][r].as_ptr()) };
                }
            }
        }
        for k in 0..len {
            for t in 0..T {
                if T == 1 {
                    prefetch::<_, true>(tile_at[t].wrapping_add(k + AHEAD));
                }
                // SAFETY: `k` is below the length of every tile, all of which were set: there are `T`.
                let weights = V::load_row(s, unsafe { &(*tile_at[t].add(k)).0 });
                for r in 0..R {
                    // SAFETY: `k` is below the length of every row, all of which were set: there are `R`.
                    let x = s.splat(unsafe { *x_at[r].add(k) });
                    chains[t][r] = s.fma(weights, x, chains[t][r]);
                }
            }
        }
        for t in 0..T {
            for r in 0..R {
                if V::IS_SCALED {
                    // SAFETY: the factors of a tile are 16 floats, and so are its sums.
                    let (factor, sum) = unsafe {
                        let sum = self.sums[t][r].as_ptr();
                        (s.load(self.scales[t].as_ptr()), s.load(sum))
                    };
                    chains[t][r] = s.fma(factor, chains[t][r], sum);
                }
                // SAFETY: as for loading.
                unsafe { s.store(self.sums[t][r].as_mut_ptr(), chains[t][r]) };
            }
        }
    }
}
