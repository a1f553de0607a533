//! What attention does with some queries and one tile of keys: scores, weights, weighted values.
//!
//! Each function keeps one order of additions for a (query, key) or a (query, tile), whatever else
//! is computed beside it. AVX2 and plain Rust differ in their orders; a process uses one of them for
//! good.

use super::portable;
use super::vectors::Vectors;
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::kernels::cpu::Isa;

/// What a pool may hold, with what the loops for this CPU need of it.
#[cfg(not(target_arch = "x86_64"))]
pub(super) use super::vectors::Element as Kernel;
#[cfg(target_arch = "x86_64")]
pub(super) use super::x86::Load as Kernel;

/// Calls the AVX2 or the portable function of a name.
macro_rules! dispatch {
    ($isa:expr, $name:ident($($argument:expr),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if let Some(avx2) = $isa.avx2() {
            // SAFETY: the CPU has the instructions, which `avx2` is the proof of.
            return unsafe { x86::$name(avx2, $($argument),*) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = $isa;
        portable::$name($($argument),*)
    }};
}

/// The products of all queries with all keys.
///
/// `queries` is `[_, width]`; the scores of query `i` begin at `scores[i * STRIDE]`, and up to seven
/// after the last of them are overwritten.
pub(super) fn scores<E: Kernel>(
    isa: Isa,
    queries: &[f32],
    keys: Vectors<'_, E>,
    scores: &mut [f32],
) {
    dispatch!(isa, scores(queries, keys, scores))
}

/// Turns scores into `e^(score - max)`; gives back their maximum and the sum of what they become.
pub(super) fn weigh(isa: Isa, scores: &mut [f32]) -> (f32, f32) {
    dispatch!(isa, weigh(scores))
}

/// `sums[query] += weights[query][i] * values[i]` for the first `counts[query]` values, in order.
///
/// `sums` is `[counts.len(), width]`; weights lie as scores do; counts do not fall.
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

/// Asks for `width` numbers at each of `places` to be brought near. Keys of a head lie apart, which
/// the CPU does not foresee: without this it waits for memory key by key.
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
