//! The softmax over some keys, and how those of consecutive chunks become one.

use crate::simd::{LANES, Loop, Simd, exp2};
use std::f32::consts::LOG2_E;

/// The softmax over some keys, for each query. Scores are multiples of log2(e).
pub(super) struct Partial<'a> {
    /// Weighted sums of values, `[queries, width]`.
    pub acc: &'a mut [f32],
    /// The largest scores, and the sums of the weights: minus infinity and 0 for queries that see no key.
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
}

impl<'a> Partial<'a> {
    /// Floats per query.
    pub fn floats(width: usize) -> usize {
        width + 2
    }

    pub fn new(floats: &'a mut [f32], width: usize) -> Self {
        let queries = floats.len() / Self::floats(width);
        let (acc, rest) = floats.split_at_mut(queries * width);
        let (max, sum) = rest.split_at_mut(queries);
        Self { acc, max, sum }
    }
}

/// Merges the softmax of each query's next chunk (Milakov and Gimelshein 2018, "Online normalizer calculation for
/// softmax").
pub(super) struct Merge<'a, 'b> {
    pub so_far: &'a mut Partial<'b>,
    pub next: &'a Partial<'a>,
    pub width: usize,
}

impl Loop for Merge<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (ours, next, width) = (self.so_far, self.next, self.width);
        let factors = ours.max.chunks_mut(LANES).zip(ours.sum.chunks_mut(LANES));
        let theirs = next.max.chunks(LANES).zip(next.sum.chunks(LANES));
        let sums = (ours.acc.chunks_mut(LANES * width)).zip(next.acc.chunks(LANES * width));
        for (((max, sum), (next_max, next_sum)), (acc, next)) in factors.zip(theirs).zip(sums) {
            let lanes = [padded(max), padded(sum), padded(next_max), padded(next_sum)];
            let mut new = [[0.0; LANES]; 4];
            // SAFETY: 16 numbers each.
            unsafe {
                let [a, sum, b, next_sum] = [
                    s.load(lanes[0].as_ptr()),
                    s.load(lanes[1].as_ptr()),
                    s.load(lanes[2].as_ptr()),
                    s.load(lanes[3].as_ptr()),
                ];
                let max = s.max(a, b);
                // One of them is 2^0 = 1.
                let (ours, theirs) = (exp2(s, s.sub(a, max)), exp2(s, s.sub(b, max)));
                s.store(new[0].as_mut_ptr(), max);
                s.store(
                    new[1].as_mut_ptr(),
                    s.add(s.mul(sum, ours), s.mul(next_sum, theirs)),
                );
                s.store(new[2].as_mut_ptr(), ours);
                s.store(new[3].as_mut_ptr(), theirs);
            }
            let rows = acc.chunks_exact_mut(width).zip(next.chunks_exact(width));
            for (i, (acc, next)) in rows.enumerate() {
                if next_sum[i] == 0.0 {
                    continue;
                }
                if sum[i] == 0.0 {
                    // Its first chunk: others of the item see earlier ones.
                    (max[i], sum[i]) = (next_max[i], next_sum[i]);
                    acc.copy_from_slice(next);
                    continue;
                }
                (max[i], sum[i]) = (new[0][i], new[1][i]);
                let (ours, theirs) = (s.splat(new[2][i]), s.splat(new[3][i]));
                let vectors = acc.as_chunks_mut::<LANES>().0.iter_mut();
                for (acc, next) in vectors.zip(next.as_chunks::<LANES>().0) {
                    // SAFETY: 16 numbers each.
                    unsafe {
                        let next = s.mul(s.load(next.as_ptr()), theirs);
                        let acc_now = s.mul(s.load(acc.as_ptr()), ours);
                        s.store(acc.as_mut_ptr(), s.add(acc_now, next));
                    }
                }
            }
        }
    }
}

/// Up to 16 numbers, and zeros.
#[inline(always)]
fn padded(numbers: &[f32]) -> [f32; LANES] {
    let mut all = [0.0; LANES];
    all[..numbers.len()].copy_from_slice(numbers);
    all
}

/// Divides a query's weighted sums by the sum of the weights, with that of its head's sink.
pub(super) struct Normalize<'a> {
    pub sums: &'a [f32],
    pub max: f32,
    pub sum: f32,
    pub sink: Option<f32>,
    pub to: &'a mut [f32],
}

impl Loop for Normalize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sum = self.sum;
        if let Some(sink) = self.sink {
            let above = (sink * LOG2_E - self.max).min(127.0);
            sum += s.max_of(exp2(s, s.splat(above)));
        }
        let factor = 1.0 / sum;
        for (to, from) in self.to.iter_mut().zip(self.sums) {
            *to = from * factor;
        }
    }
}
