//! The loops of a tile in plain Rust.

use super::vectors::{Element, STRIDE, Vectors};
use crate::kernels::float::{exp, tanh};

/// SIMD lanes: partial sums of a sum.
const SUMS: usize = 8;

pub(super) fn scores<E: Element>(queries: &[f32], keys: Vectors<'_, E>, scores: &mut [f32]) {
    let queries = queries
        .chunks_exact(keys.width())
        .zip(scores.chunks_mut(STRIDE));
    for (query, scores) in queries {
        for (score, &place) in scores.iter_mut().zip(keys.places()) {
            let key = &keys.data()[place..place + keys.width()];
            let mut sums = [0f32; SUMS];
            for (q, k) in query.chunks_exact(SUMS).zip(key.chunks_exact(SUMS)) {
                for ((sum, q), k) in sums.iter_mut().zip(q).zip(k) {
                    *sum += q * k.to_f32();
                }
            }
            *score = sums.iter().sum();
        }
    }
}

#[inline(always)]
pub(super) fn soften(scores: &mut [f32], cap: f32) {
    for score in scores {
        *score = cap * tanh(*score / cap);
    }
}

#[inline(always)]
pub(super) fn weigh(scores: &mut [f32]) -> (f32, f32) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0f32; SUMS];
    for chunk in scores.chunks_mut(SUMS) {
        for (score, sum) in chunk.iter_mut().zip(&mut sums) {
            *score = exp(*score - max);
            *sum += *score;
        }
    }
    (max, sums.iter().sum())
}

pub(super) fn add_weighted<E: Element>(
    sums: &mut [f32],
    weights: &[f32],
    counts: &[usize],
    values: Vectors<'_, E>,
) {
    let queries = sums
        .chunks_exact_mut(values.width())
        .zip(weights.chunks(STRIDE));
    for ((sum, weights), &count) in queries.zip(counts) {
        for (weight, &place) in weights.iter().zip(&values.places()[..count]) {
            let value = &values.data()[place..place + values.width()];
            for (sum, value) in sum.iter_mut().zip(value) {
                *sum += weight * value.to_f32();
            }
        }
    }
}

pub(super) fn widen<E: Element>(from: &[E], to: &mut [f32]) {
    E::widen(from, to);
}
