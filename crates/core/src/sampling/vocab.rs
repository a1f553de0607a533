//! Loops over a whole vocabulary, written so that compilers vectorize them. Each has one order of
//! operations on every CPU.

pub(super) use foretoken_kernels::sample::weights;

/// SIMD lanes: partial results of a loop.
const LANES: usize = 16;
/// Entries that [`quantile`] skips at a time.
const STRIDE: usize = 64 * LANES;

/// The largest entry, if it is finite and no entry is NaN.
pub(super) fn max(values: &[f32]) -> Option<f32> {
    let (max, sum) = max_and_sum(values);
    // The sum is also NaN if one partial sum overflows to infinity and another is minus infinity.
    let has_nan = sum.is_nan() && values.iter().any(|x| x.is_nan());
    (max.is_finite() && !has_nan).then_some(max)
}

/// The largest entry that is not NaN, and a sum that is NaN if any entry is, in one pass.
fn max_and_sum(values: &[f32]) -> (f32, f32) {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut sums = [0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder().iter().copied();
    let (max, sum) = (rest.clone().fold(f32::NEG_INFINITY, larger), rest.sum());
    for chunk in chunks {
        for ((lane, sum), &x) in lanes.iter_mut().zip(&mut sums).zip(chunk) {
            *lane = larger(*lane, x);
            *sum += x;
        }
    }
    let sum = sums.into_iter().fold(sum, |a, b| a + b);
    (lanes.into_iter().fold(max, larger), sum)
}

/// The index of the first entry equal to `value`.
pub(super) fn place(values: &[f32], value: f32) -> Option<u32> {
    // Compares a whole stride without an early exit, so that it is vectorized.
    let holds = |stride: &[f32]| stride.iter().fold(false, |found, &x| found | (x == value));
    let stride = values.chunks(STRIDE).position(holds)?;
    let rest = &values[stride * STRIDE..];
    let place = stride * STRIDE + rest.iter().position(|&x| x == value)?;
    Some(place as u32)
}

/// Multiplies each entry by `factor`.
pub(super) fn scale(values: &mut [f32], factor: f64) {
    for value in values {
        *value = (f64::from(*value) * factor) as f32;
    }
}

/// The indices of the `count` largest entries, largest first, of equal ones the lower first. NaN
/// counts as minus infinity.
pub(super) fn largest(values: &[f32], count: usize) -> Vec<u32> {
    let mut found: Vec<(f32, u32)> = Vec::with_capacity(count + 1);
    if count == 0 {
        return Vec::new();
    }
    let mut least = f32::NEG_INFINITY;
    for (number, chunk) in values.chunks(4 * LANES).enumerate() {
        // Most chunks have nothing to add; this is vectorized.
        let any = chunk.iter().fold(false, |any, &x| any | (x > least));
        if !any {
            continue;
        }
        for (i, &x) in chunk.iter().enumerate() {
            if x > least {
                let place = found.partition_point(|&(other, _)| other >= x);
                found.insert(place, (x, (number * 4 * LANES + i) as u32));
                found.truncate(count);
                if found.len() == count {
                    least = found[count - 1].0;
                }
            }
        }
    }
    found.into_iter().map(|(_, id)| id).collect()
}

/// The sum of all entries, in f64.
pub(super) fn sum(values: &[f32]) -> f64 {
    let mut lanes = [0f64; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x)).sum();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x);
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// The index of the first entry at which the running sum exceeds `target`. It is never an entry of 0,
/// unless all are 0. If rounding puts `target` just beyond the total, it is the last entry above 0.
pub(super) fn quantile(values: &[f32], target: f64) -> u32 {
    let mut before = 0.0;
    let mut start = 0;
    for stride in values.chunks(STRIDE) {
        let through = before + sum(stride);
        if through > target {
            break;
        }
        before = through;
        start += stride.len();
    }
    let mut last = None;
    for (token, &p) in values
        .iter()
        .enumerate()
        .skip(start)
        .filter(|(_, p)| **p > 0.0)
    {
        before += f64::from(p);
        last = Some(token);
        if before > target {
            break;
        }
    }
    let above_zero = || values.iter().rposition(|&p| p > 0.0);
    last.or_else(above_zero).unwrap_or(0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::mix;

    fn noise(len: usize) -> Vec<f32> {
        let uniform = |i: usize| (mix(i as u64) >> 40) as f32 / (1 << 24) as f32;
        (0..len).map(|i| 12. * uniform(i) - 8.).collect()
    }

    #[test]
    fn passes_agree_with_plain_loops() {
        for len in [1, 15, 16, 17, 1000, 5000] {
            let logits = noise(len);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&logits), Some(largest));
            let first = logits.iter().position(|&x| x == largest);
            assert_eq!(place(&logits, largest), first.map(|at| at as u32));
            assert_eq!(place(&logits, 99.), None);
            let mut probs = logits.clone();
            weights(&mut probs, largest, 0.7);
            let mut total = 0f64;
            for (x, p) in logits.iter().zip(&probs) {
                let want = (f64::from(x - largest) / 0.7).exp();
                assert!((f64::from(*p) - want).abs() <= 3e-6 * want);
                total += f64::from(*p);
            }
            assert!((sum(&probs) - total).abs() < 1e-9 * total);
            let mut before = 0.0;
            for (token, &p) in probs.iter().enumerate() {
                if p > 1e-6 {
                    let middle = before + f64::from(p) / 2.;
                    assert_eq!(quantile(&probs, middle), token as u32);
                }
                before += f64::from(p);
            }
        }
    }

    #[test]
    fn the_largest_are_those_of_a_sort() {
        for (len, levels) in [(1, 9), (70, 3), (5000, 1000), (5000, 4)] {
            let level = |i: usize| (mix(i as u64) % levels) as f32 - 1.;
            let mut values: Vec<f32> = (0..len).map(level).collect();
            values[len / 2] = f32::NAN;
            let mut order: Vec<u32> = (0..len as u32).collect();
            order.retain(|&id| !values[id as usize].is_nan());
            order.sort_by(|&a, &b| values[b as usize].total_cmp(&values[a as usize]));
            for count in [0, 1, 2, 8] {
                let want = &order[..count.min(order.len())];
                assert_eq!(largest(&values, count), want, "{count} of {len}");
            }
        }
    }

    /// Values that are not finite are found at every index, in a row that ends with an incomplete chunk.
    #[test]
    fn values_that_are_not_finite_are_found() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for at in 0..37 {
            for (value, finite) in [(nan, false), (-nan, false), (inf, false), (-inf, true)] {
                let mut values = vec![1.; 37];
                values[(at + 1) % 37] = 2.;
                values[at] = value;
                assert_eq!(max(&values), finite.then_some(2.), "{value} at {at}");
            }
        }
        let huge = [[f32::MAX; 32], [-inf; 32], [f32::MAX; 32]].concat();
        assert_eq!(max(&huge), Some(f32::MAX));
        assert_eq!(max(&[-inf; 20]), None);
        assert_eq!(max(&[]), None);
        let mut values = [-inf, 1., 2.];
        weights(&mut values, 2., 1.);
        assert_eq!((values[0], values[2]), (0., 1.));
        assert_eq!(quantile(&[0., 0.5, 0.5, 0.], 1.), 2);
        assert_eq!(quantile(&[0.; 3], 0.), 0);
    }
}
