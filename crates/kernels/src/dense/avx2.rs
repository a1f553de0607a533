//! The products with AVX2, FMA and F16C.

use super::pack::Value;
use super::tiles::{Sums, TILES, TileRow, WIDTH};
use crate::cpu::Avx2;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Maximum rows of a pass: with the two vectors of a tile, 12 of the 16 registers are sums.
pub(super) const MAX_ROWS: usize = 6;

/// Weights that are loaded as two vectors of f32.
pub(super) trait Load: Value {
    /// Outputs 0..8 and 8..16.
    ///
    /// # Safety
    /// The CPU has AVX2 and F16C.
    unsafe fn load(row: &TileRow<Self>) -> [__m256; 2];
}

impl Load for f32 {
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn load(row: &TileRow<Self>) -> [__m256; 2] {
        let at = row.0.as_ptr();
        // SAFETY: sixteen floats are two vectors, and `TileRow`s are aligned for them.
        unsafe { [_mm256_load_ps(at), _mm256_load_ps(at.add(8))] }
    }
}

impl Load for f16 {
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn load(row: &TileRow<Self>) -> [__m256; 2] {
        let at = row.0.as_ptr().cast::<__m128i>();
        // SAFETY: sixteen halves are two vectors of 16 bytes, and `TileRow`s are aligned for them.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_load_si128(at)),
                _mm256_cvtph_ps(_mm_load_si128(at.add(1))),
            ]
        }
    }
}

impl Load for bf16 {
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    unsafe fn load(row: &TileRow<Self>) -> [__m256; 2] {
        // SAFETY: sixteen halves are one vector, and `TileRow`s are aligned for it.
        let pairs = unsafe { _mm256_load_si256(row.0.as_ptr().cast()) };
        let high = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        [
            _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(high),
        ]
    }
}

/// How many inputs ahead to prefetch when one tile is read at a time: the CPU's own prefetching ends at
/// the page, and with several rows its out-of-order window is too short to reach the next loads.
const AHEAD: usize = 64;

/// See `DenseKernel::pass`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pass<V: Load>(_: Avx2, tiles: &[&[TileRow<V>]], x: &[&[f32]], sums: &mut Sums) {
    match (x.len(), tiles.len()) {
        (1, TILES) => rows::<V, 1, TILES>(tiles, x, sums),
        (2, 2) => rows::<V, 2, 2>(tiles, x, sums),
        (1, 1) => rows::<V, 1, 1>(tiles, x, sums),
        (2, 1) => rows::<V, 2, 1>(tiles, x, sums),
        (3, 1) => rows::<V, 3, 1>(tiles, x, sums),
        (4, 1) => rows::<V, 4, 1>(tiles, x, sums),
        (5, 1) => rows::<V, 5, 1>(tiles, x, sums),
        (MAX_ROWS, 1) => rows::<V, MAX_ROWS, 1>(tiles, x, sums),
        (rows, tiles) => unreachable!("no pass of {rows} rows by {tiles} tiles"),
    }
}

/// A pass of `R` rows by `T` tiles: `2 R T` chains side by side.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<V: Load, const R: usize, const T: usize>(
    tiles: &[&[TileRow<V>]],
    x: &[&[f32]],
    sums: &mut Sums,
) {
    // Pointers, so that bounds are checked once and not once per vector.
    let len = x[0].len();
    let mut x_at = [std::ptr::null(); R];
    for (at, x) in x_at.iter_mut().zip(x) {
        assert_eq!(x.len(), len, "inputs of a row");
        *at = x.as_ptr();
    }
    let mut tile_at = [std::ptr::null(); T];
    for (at, tile) in tile_at.iter_mut().zip(tiles) {
        assert_eq!(tile.len(), len, "inputs of a tile");
        *at = tile.as_ptr();
    }
    let mut chains = [[[_mm256_setzero_ps(); 2]; R]; T];
    for t in 0..T {
        for r in 0..R {
            chains[t][r] = load(&sums[t][r]);
        }
    }
    for k in 0..len {
        for t in 0..T {
            if T == 1 {
                // Any address may be prefetched, also one beyond the end.
                _mm_prefetch::<_MM_HINT_T0>(tile_at[t].wrapping_add(k + AHEAD).cast());
            }
            // SAFETY: `k` is below the length of every slice; the CPU has the features.
            let [low, high] = unsafe { V::load(&*tile_at[t].add(k)) };
            for r in 0..R {
                // SAFETY: as above.
                let x = _mm256_set1_ps(unsafe { *x_at[r].add(k) });
                let chain = &mut chains[t][r];
                chain[0] = _mm256_fmadd_ps(low, x, chain[0]);
                chain[1] = _mm256_fmadd_ps(high, x, chain[1]);
            }
        }
    }
    for t in 0..T {
        for r in 0..R {
            store(chains[t][r], &mut sums[t][r]);
        }
    }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load(sums: &[f32; WIDTH]) -> [__m256; 2] {
    let at = sums.as_ptr();
    // SAFETY: sixteen floats are two vectors.
    unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store(chains: [__m256; 2], sums: &mut [f32; WIDTH]) {
    let at = sums.as_mut_ptr();
    // SAFETY: as in `load`.
    unsafe {
        _mm256_storeu_ps(at, chains[0]);
        _mm256_storeu_ps(at.add(8), chains[1]);
    }
}
