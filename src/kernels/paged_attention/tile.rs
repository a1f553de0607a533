//! The steps of attention for some queries and one tile of keys: scores, weights, weighted values.
//!
//! Each function has a fixed order of additions for a (query, key) or (query, tile) pair, whatever else
//! it computes. AVX2 and plain Rust have different orders, but a process uses only one of them.

use super::portable;
use super::vectors::Vectors;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::kernels::cpu::Isa;

/// An element type of a pool, with the loads that this CPU's loops need.
#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::vectors::Element as Kernel;
#[cfg(target_arch = "x86_64")]
pub(super) use super::x86::Load as Kernel;

/// Calls the AVX2 or the portable version of a function.
macro_rules! dispatch {
    ($isa:expr, $name:ident($($argument:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = $isa.avx2() {
            // SAFETY: `avx2` proves that the CPU has the instructions.
            return unsafe { x86::$name(avx2, $($argument),*) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = $isa;
        portable::$name($($argument),*)
    }};
}

/// Computes the dot products of all queries with all keys.
///
/// `queries` is `[_, width]`. The scores of query `i` begin at `scores[i * STRIDE]`; up to seven elements
/// after its last score are overwritten.
pub(super) fn scores<E: Kernel>(
    isa: Isa,
    queries: &[f32],
    keys: Vectors<'_, E>,
    scores: &mut [f32],
) {
    dispatch!(isa, scores(queries, keys, scores))
}

/// Replaces each score by `cap * tanh(score / cap)`.
pub(super) fn soften(isa: Isa, scores: &mut [f32], cap: f32) {
    dispatch!(isa, soften(scores, cap))
}

/// Replaces each score by `e^(score - max)`. Returns the maximum, and the sum of the new values.
pub(super) fn weigh(isa: Isa, scores: &mut [f32]) -> (f32, f32) {
    dispatch!(isa, weigh(scores))
}

/// `sums[query] += weights[query][i] * values[i]` for the first `counts[query]` values, in order.
///
/// `sums` is `[counts.len(), width]`, weights have the layout of scores, and counts are ascending.
pub(super) fn add_weighted<E: Kernel>(
    isa: Isa,
    sums: &mut [f32],
    weights: &[f32],
    counts: &[usize],
    values: Vectors<'_, E>,
) {
    assert!(counts.is_sorted());
    dispatch!(isa, add_weighted(sums, weights, counts, values))
}

/// `to[..from.len()] = from`.
pub(super) fn widen<E: Kernel>(isa: Isa, from: &[E], to: &mut [f32]) {
    dispatch!(isa, widen(from, to))
}

/// Prefetches `width` numbers at each of `places`. The keys of a head are scattered in memory, which the
/// CPU does not predict: without this it would wait for memory at each key.
pub(super) fn prefetch<E>(data: &[E], places: &[usize], width: usize) {
    #[cfg(target_arch = "x86_64")]
    for &place in places {
        for at in (0..width).step_by(64 / size_of::<E>()) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a hint, which reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(data.as_ptr().wrapping_add(place + at).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (data, places, width);
}
