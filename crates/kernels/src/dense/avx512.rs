//! The products of three rows and more with AVX-512. One or two rows wait for memory: there AVX2 is as fast.

use super::pack::Value;
use super::tiles::{ROWS, Sums, TileRow};
use crate::cpu::Avx512Vnni;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// The fewest rows of a pass.
pub(super) const MIN_ROWS: usize = 3;

/// Weights that are loaded as a vector of f32.
pub(super) trait LoadWide: Value {
    /// Outputs 0..16.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    unsafe fn load_wide(row: &TileRow<Self>) -> __m512;
}

impl LoadWide for f32 {
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_wide(row: &TileRow<Self>) -> __m512 {
        // SAFETY: sixteen floats.
        unsafe { _mm512_loadu_ps(row.0.as_ptr()) }
    }
}

impl LoadWide for f16 {
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_wide(row: &TileRow<Self>) -> __m512 {
        // SAFETY: sixteen halves are one vector of 32 bytes, and `TileRow`s are aligned for it.
        unsafe { _mm512_cvtph_ps(_mm256_load_si256(row.0.as_ptr().cast())) }
    }
}

impl LoadWide for bf16 {
    #[target_feature(enable = "avx512f")]
    #[inline]
    unsafe fn load_wide(row: &TileRow<Self>) -> __m512 {
        // SAFETY: sixteen halves are one vector, and `TileRow`s are aligned for it.
        let pairs = unsafe { _mm256_load_si256(row.0.as_ptr().cast()) };
        // Twice the eight pairs; the first eight lanes take the lower halves.
        let both = _mm512_broadcast_i64x4(pairs);
        let upper = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        _mm512_castsi512_ps(_mm512_mask_slli_epi32::<16>(upper, 0x00ff, both))
    }
}

/// How many inputs ahead to prefetch: the CPU's own prefetching ends at the page, and with several rows its
/// out-of-order window is too short to reach the next loads.
const AHEAD: usize = 64;

/// See `DenseKernel::pass`; of one tile, with at least [`MIN_ROWS`] rows.
#[target_feature(enable = "avx512f")]
pub(super) fn pass<V: LoadWide>(_: Avx512Vnni, tile: &[TileRow<V>], x: &[&[f32]], sums: &mut Sums) {
    match x.len() {
        3 => rows::<V, 3>(tile, x, sums),
        4 => rows::<V, 4>(tile, x, sums),
        5 => rows::<V, 5>(tile, x, sums),
        6 => rows::<V, 6>(tile, x, sums),
        7 => rows::<V, 7>(tile, x, sums),
        8 => rows::<V, 8>(tile, x, sums),
        9 => rows::<V, 9>(tile, x, sums),
        10 => rows::<V, 10>(tile, x, sums),
        11 => rows::<V, 11>(tile, x, sums),
        ROWS => rows::<V, ROWS>(tile, x, sums),
        rows => unreachable!("no pass of {rows} rows"),
    }
}

/// A pass of `R` rows: as many chains side by side.
#[target_feature(enable = "avx512f")]
fn rows<V: LoadWide, const R: usize>(tile: &[TileRow<V>], x: &[&[f32]], sums: &mut Sums) {
    // Pointers, so that bounds are checked once and not once per vector.
    let mut x_at = [std::ptr::null(); R];
    for (at, x) in x_at.iter_mut().zip(x) {
        assert_eq!(x.len(), tile.len(), "inputs of a row and of the tile");
        *at = x.as_ptr();
    }
    let mut chains = [_mm512_setzero_ps(); R];
    for (chain, sums) in chains.iter_mut().zip(&sums[0]) {
        // SAFETY: sixteen floats.
        *chain = unsafe { _mm512_loadu_ps(sums.as_ptr()) };
    }
    for (k, row) in tile.iter().enumerate() {
        // Any address may be prefetched, also one beyond the end.
        _mm_prefetch::<_MM_HINT_T0>((&raw const *row).wrapping_add(AHEAD).cast());
        // SAFETY: the CPU has the features.
        let weights = unsafe { V::load_wide(row) };
        for (chain, x) in chains.iter_mut().zip(x_at) {
            // SAFETY: `k` is below the length of every slice.
            let x = _mm512_set1_ps(unsafe { *x.add(k) });
            *chain = _mm512_fmadd_ps(weights, x, *chain);
        }
    }
    for (chain, sums) in chains.into_iter().zip(&mut sums[0]) {
        // SAFETY: sixteen floats.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), chain) };
    }
}
