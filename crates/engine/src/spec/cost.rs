//! The seconds that a forward takes by its number of rows, learned from the forwards that run. Pure:
//! the caller measures.

use super::learned::LearnedCost;

/// Numbers of rows up to this have a knot each; above it a knot is for numbers within a quarter.
const EXACT_ROWS: usize = 16;
const KNOT_RATIO: f64 = 1.25;
/// The weight of an observation in the scale. High: the speed of a shared machine changes.
const SCALE_WEIGHT: f64 = 0.25;
/// The least weight of an observation in its knot.
const KNOT_WEIGHT: f64 = 0.02;
/// Observations that a knot is worth if it is measured before the first step.
pub(super) const CALIBRATED: u32 = 8;
/// Observations after which a knot is believed.
const SETTLED: u32 = 16;
/// A step may be interrupted: an observation counts as at most this many times what was expected,
/// and at least its inverse.
pub(super) const MAX_RATIO: f64 = 3.0;
/// The cost of another row, in one-row steps, while nothing is known about it: rather too high,
/// since rows are then tried only where they are likely to pay.
const UNKNOWN_ROW: f64 = 0.2;

/// The cost curve of a model's forwards: seconds by rows, never falling.
///
/// It is the product of a scale, which follows the machine's speed within a few steps, and a shape,
/// which changes slowly: a knot learns only from a step that follows one of another knot, since
/// only such a pair tells a change of the shape from a change of the machine. So a knot that was
/// last seen before the machine became slower still has the right cost relative to the others.
/// Between knots the curve is linear.
///
/// Where forwards are rounded up to one of some numbers of rows, the [edges](CostCurve::with_edges), the curve has a step
/// at each of them.
#[derive(Debug, Clone)]
pub struct CostCurve {
    /// Seconds for each unit of a knot's cost.
    scale: f64,
    /// Knots by rows; only the knots that were seen.
    knots: Vec<Knot>,
    /// `end` of the last step's knot.
    last: usize,
    /// Numbers of rows that forwards are rounded up to, ascending; forwards with more rows are not rounded up.
    edges: Vec<usize>,
}

/// The steps of similar numbers of rows.
#[derive(Debug, Clone)]
struct Knot {
    /// The least number of rows of the next knot.
    end: usize,
    /// Average of the numbers of rows seen.
    rows: f64,
    /// Average of the observations, in units of the scale.
    cost: f64,
    /// `cost` after the monotone fit over all knots.
    fitted: f64,
    /// Number of observations learned from, up to where more would not change their weight.
    seen: u32,
    /// How many of them were measured before the first step.
    calibrated: u32,
}

impl Default for CostCurve {
    /// A curve that knows nothing: 1 second, and a fifth of a second for each further row.
    fn default() -> Self {
        Self {
            scale: 1.0,
            knots: Vec::new(),
            last: 0,
            edges: Vec::new(),
        }
    }
}

impl CostCurve {
    /// A curve that knows nothing of forwards that are rounded up to the next one of `edges`, ascending numbers of
    /// rows. All numbers of rows up to an edge have one knot and one cost.
    pub fn with_edges(edges: Vec<usize>) -> Self {
        Self {
            edges,
            ..Self::default()
        }
    }

    /// Starts again from measured steps, `(rows, seconds)` in any order: preferably the median or
    /// the minimum of a few runs each. Those without rows or without a positive, finite time are
    /// ignored.
    pub fn calibrate(&mut self, steps: &[(usize, f64)]) {
        let steps = steps.iter().copied().filter(is_measured);
        let mut steps: Vec<_> = steps.map(|(rows, s)| (self.padded(rows), s)).collect();
        steps.sort_by_key(|step| step.0);
        *self = Self::with_edges(std::mem::take(&mut self.edges));
        let Some(&(_, scale)) = steps.first() else {
            return;
        };
        self.scale = scale;
        for (rows, seconds) in steps {
            let at = self.knot(rows);
            let knot = &mut self.knots[at];
            let count = f64::from(knot.seen / CALIBRATED + 1);
            knot.seen += CALIBRATED;
            knot.calibrated = knot.seen;
            knot.rows += (rows as f64 - knot.rows) / count;
            knot.cost += (seconds / scale - knot.cost) / count;
        }
        self.fit();
    }

    /// Lets each knot count as at most so many observations: the next ones change it sooner.
    pub fn believe(&mut self, observations: u32) {
        for knot in &mut self.knots {
            knot.seen = knot.seen.min(observations.max(1));
            knot.calibrated = knot.calibrated.min(knot.seen);
        }
        self.fit();
    }

    /// Learns from a step of `rows` rows that took `seconds`. Returns whether it tells more than the speed of the machine.
    pub fn note(&mut self, rows: usize, seconds: f64) -> bool {
        if !is_measured(&(rows, seconds)) {
            return false;
        }
        let rows = self.padded(rows);
        if self.knots.is_empty() {
            self.scale = seconds / prior(rows as f64);
        }
        let expected = self.scale * self.interpolate(rows as f64, |knot| knot.cost);
        let ratio = (seconds / expected).clamp(1.0 / MAX_RATIO, MAX_RATIO);
        self.scale *= ratio.powf(SCALE_WEIGHT);
        let at = self.knot(rows);
        let knot = &mut self.knots[at];
        if std::mem::replace(&mut self.last, knot.end) == knot.end {
            return false;
        }
        knot.seen = (knot.seen + 1).min((1.0 / KNOT_WEIGHT) as u32);
        // What was expected from the neighbours counts as one observation.
        let weight = 1.0 / f64::from(knot.seen + 1);
        knot.rows += (rows as f64 - knot.rows) * weight;
        knot.cost *= ratio.powf(weight);
        self.fit();
        true
    }

    /// The shape as far as steps have told it, to [recall](CostCurve::recall) it later.
    pub fn learned(&self) -> Vec<LearnedCost> {
        let one = self.interpolate(1.0, |knot| knot.fitted);
        let knots = self.knots.iter();
        let of_steps = knots.filter(|knot| knot.seen > knot.calibrated);
        of_steps
            .map(|knot| LearnedCost {
                rows: knot.rows.round() as usize,
                cost: knot.fitted / one,
                seen: knot.seen - knot.calibrated,
            })
            .collect()
    }

    /// Adds a shape that was learned at another time, with at most the weight of what is measured before the first
    /// step. Without any such measurement there is no scale for it, and it is left out.
    pub fn recall(&mut self, learned: &[LearnedCost]) {
        if self.knots.is_empty() {
            return;
        }
        let one = self.interpolate(1.0, |knot| knot.cost);
        for known in learned {
            let rows = self.padded(known.rows);
            let at = self.knot(rows);
            let knot = &mut self.knots[at];
            let weight = known.seen.min(CALIBRATED);
            let share = f64::from(weight) / f64::from(knot.seen + weight).max(1.0);
            knot.rows += share * (rows as f64 - knot.rows);
            knot.cost += share * (one * known.cost - knot.cost);
            // Of what was never tried since the start, steps may try more or less.
            knot.seen = (knot.seen + weight).min(SETTLED - 1);
        }
        self.knots.retain(|knot| knot.seen > 0);
        self.fit();
    }

    /// Seconds for a unit of what the shape says: it follows the speed of the machine.
    pub(super) fn scale(&self) -> f64 {
        self.scale
    }

    /// Whether any step was measured.
    pub fn is_known(&self) -> bool {
        !self.knots.is_empty()
    }

    /// Whether the cost of `rows` rows is more than a guess from few steps or from other rows.
    pub fn is_settled(&self, rows: usize) -> bool {
        let rows = self.padded(rows);
        let at = self.knots.partition_point(|knot| knot.end <= rows);
        let knot = self.knots.get(at).filter(|knot| knot.end == self.end(rows));
        knot.is_some_and(|knot| knot.seen >= SETTLED)
    }

    /// Expected seconds of a step of `rows` rows; 0 for none.
    pub fn seconds(&self, rows: usize) -> f64 {
        match rows {
            0 => 0.0,
            rows => self.scale * self.interpolate(self.padded(rows) as f64, |knot| knot.fitted),
        }
    }

    /// The number of rows that a forward of `rows` rows is rounded up to.
    fn padded(&self, rows: usize) -> usize {
        let edge = self.edges.partition_point(|&edge| edge < rows);
        self.edges.get(edge).copied().unwrap_or(rows)
    }

    /// The least number of rows above `rows` that has another knot; `rows` is rounded up already.
    fn end(&self, rows: usize) -> usize {
        let last_edge = self.edges.last().copied().unwrap_or(0);
        let mut end = rows.min(EXACT_ROWS.max(last_edge)) + 1;
        while end <= rows {
            end = (end as f64 * KNOT_RATIO).ceil() as usize;
        }
        end
    }

    /// The index of the knot of `rows`. A new one starts on the line between its neighbours.
    fn knot(&mut self, rows: usize) -> usize {
        let at = self.knots.partition_point(|knot| knot.end <= rows);
        let end = self.end(rows);
        if self.knots.get(at).is_none_or(|knot| knot.end != end) {
            let rows = rows as f64;
            let cost = self.interpolate(rows, |knot| knot.cost);
            let knot = Knot {
                end,
                rows,
                cost,
                fitted: cost,
                seen: 0,
                calibrated: 0,
            };
            self.knots.insert(at, knot);
        }
        at
    }

    /// The cost at `rows`, at least 1, in units of the scale. Outside the knots: below them the
    /// shape of [`prior`]; above them the slope of their upper half.
    fn interpolate(&self, rows: f64, cost: impl Fn(&Knot) -> f64) -> f64 {
        let (Some(first), Some(last)) = (self.knots.first(), self.knots.last()) else {
            return prior(rows);
        };
        let above = self.knots.partition_point(|knot| knot.rows <= rows);
        if above == 0 {
            return cost(first) * prior(rows) / prior(first.rows);
        }
        let low = &self.knots[above - 1];
        if let Some(high) = self.knots.get(above) {
            let share = (rows - low.rows) / (high.rows - low.rows);
            return cost(low) + share * (cost(high) - cost(low));
        }
        let mut lower = self.knots.iter().rev();
        let half = lower.find(|knot| knot.rows <= last.rows / 2.0);
        let half = half.unwrap_or(first);
        let slope = if last.rows > half.rows {
            (cost(last) - cost(half)) / (last.rows - half.rows)
        } else {
            cost(last) * UNKNOWN_ROW / prior(last.rows)
        };
        cost(last) + slope.max(0.0) * (rows - last.rows)
    }

    /// Fits the closest monotone curve to the knots, weighted by what was seen: isotonic
    /// regression, by pooling neighbours that violate the order.
    fn fit(&mut self) {
        // Sum of weighted costs, sum of weights, and number of knots of each pool.
        let mut pools: Vec<(f64, f64, usize)> = Vec::with_capacity(self.knots.len());
        for knot in &self.knots {
            let weight = f64::from(knot.seen);
            let mut pool = (knot.cost * weight, weight, 1);
            while let Some(&(sum, weight, count)) = pools.last()
                && sum * pool.1 > pool.0 * weight
            {
                pool = (pool.0 + sum, pool.1 + weight, pool.2 + count);
                pools.pop();
            }
            pools.push(pool);
        }
        let pools = pools.into_iter();
        let fitted = pools.flat_map(|(sum, weight, n)| std::iter::repeat_n(sum / weight, n));
        for (knot, fitted) in self.knots.iter_mut().zip(fitted) {
            knot.fitted = fitted;
        }
    }
}

fn is_measured(&(rows, seconds): &(usize, f64)) -> bool {
    rows > 0 && seconds.is_finite() && seconds > 0.0
}

/// The cost of a step of `rows` rows in one-row steps while nothing is known.
fn prior(rows: f64) -> f64 {
    1.0 + UNKNOWN_ROW * (rows - 1.0)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What was measured beside other work is sooner corrected by steps, also where the numbers of rows are others.
    #[test]
    fn a_doubted_curve_recovers() {
        // The mean over many starts of the worst error after 100 steps.
        let error = |observations: u32| {
            let mut noise = Noise(3);
            let worst = (0..50).map(|seed| {
                let (mut curve, mut start) = (CostCurve::default(), Noise(seed));
                let wrong = [1, 2, 4, 6, 8, 16];
                let wrong = wrong.map(|rows| (rows, avx2(rows) * (0.8 + 2.2 * start.unit())));
                curve.calibrate(&wrong);
                curve.believe(observations);
                for _ in 0..100 {
                    let rows = 8 + noise.below(14);
                    curve.note(rows, 0.01 * avx2(rows) * noise.factor(0.05));
                }
                let relative =
                    |rows| curve.seconds(rows) / curve.seconds(8) / (avx2(rows) / avx2(8));
                let errors = (8..22).map(|rows| (relative(rows) - 1.0).abs());
                errors.fold(0.0, f64::max)
            });
            worst.sum::<f64>() / 50.0
        };
        let (doubted, believed) = (error(1), error(CALIBRATED));
        assert!(doubted < 0.85 * believed, "{doubted} {believed}");
    }

    /// Reproducible noise (SplitMix64).
    pub(in crate::spec) struct Noise(pub u64);

    impl Noise {
        /// Uniform in 0..1.
        pub fn unit(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) as f64 / u64::MAX as f64
        }

        /// Uniform in 0..`end`.
        pub fn below(&mut self, end: usize) -> usize {
            ((self.unit() * end as f64) as usize).min(end - 1)
        }

        /// A random factor around 1 with the standard deviation `deviation`.
        pub fn factor(&mut self, deviation: f64) -> f64 {
            1.0 + deviation * 3f64.sqrt() * (2.0 * self.unit() - 1.0)
        }
    }

    /// Seconds of a forward of `rows` rows relative to one row, as measured on a CPU with AVX2.
    fn avx2(rows: usize) -> f64 {
        let known = [(1, 1.0), (4, 1.51), (6, 2.0), (8, 2.5), (16, 4.3)];
        let [.., (a, low), (b, high)] = known;
        let after = known.windows(2).find(|pair| rows <= pair[1].0);
        let ((a, low), (b, high)) = after.map_or(((a, low), (b, high)), |pair| (pair[0], pair[1]));
        low + (high - low) * (rows - a) as f64 / (b - a) as f64
    }

    /// The largest relative difference of the curve's shape from `truth` at `rows`.
    fn worst(
        curve: &CostCurve,
        truth: impl Fn(usize) -> f64,
        rows: impl Iterator<Item = usize>,
    ) -> f64 {
        let relative = |rows| curve.seconds(rows) / curve.seconds(1) / (truth(rows) / truth(1));
        rows.map(|rows| (relative(rows) - 1.0).abs())
            .fold(0.0, f64::max)
    }

    fn assert_monotone(curve: &CostCurve) {
        let seconds: Vec<f64> = (0..3000).map(|rows| curve.seconds(rows)).collect();
        assert!(seconds[1] > 0.0);
        // Rounding may differ between the pieces of the line.
        assert!(
            seconds
                .windows(2)
                .all(|two| two[0] <= two[1] * (1.0 + 1e-12))
        );
    }

    #[test]
    fn a_curve_is_learned_through_noise_while_the_speed_changes_by_a_factor_of_two() {
        for seed in 0..5 {
            let (mut noise, mut curve) = (Noise(seed), CostCurve::default());
            for step in 0..6000 {
                let speed = 1.5 + 0.5 * (step as f64 / 300.0).sin();
                let rows = 1 + noise.below(if step % 3 == 0 { 100 } else { 12 });
                curve.note(rows, 0.02 * speed * avx2(rows) * noise.factor(0.2));
            }
            assert_monotone(&curve);
            let error = worst(&curve, avx2, 1..=12);
            assert!(error < 0.07, "{error} with few rows");
            let error = worst(&curve, avx2, 13..=110);
            assert!(error < 0.15, "{error} with many rows");
        }
    }

    #[test]
    fn a_knot_that_was_not_seen_since_the_machine_slowed_keeps_its_place() {
        for (rounds, bound) in [(10, 0.08), (60, 0.02)] {
            let mut curve = CostCurve::default();
            for step in 0..rounds * 8 {
                curve.note(step % 8 + 1, avx2(step % 8 + 1));
            }
            let before = curve.clone();
            for _ in 0..500 {
                curve.note(1, 2.0);
            }
            assert!((curve.seconds(1) / 2.0 - 1.0).abs() < bound);
            let change = worst(&curve, |rows| before.seconds(rows), 1..=16);
            assert!(change < bound, "{change} after {rounds} rounds");
        }
    }

    #[test]
    fn the_scale_follows_the_machine_within_a_few_steps() {
        let mut curve = CostCurve::default();
        curve.calibrate(&[(1, 1.0), (8, 2.5)]);
        for _ in 0..10 {
            curve.note(1, 2.0);
        }
        assert!((curve.seconds(1) / 2.0 - 1.0).abs() < 0.1);
    }

    #[test]
    fn one_interrupted_step_changes_little() {
        let mut curve = CostCurve::default();
        for step in 0..400 {
            curve.note(step % 8 + 1, 0.02 * avx2(step % 8 + 1));
        }
        let before = curve.clone();
        curve.note(4, 10.0);
        assert!(worst(&curve, |rows| before.seconds(rows), 1..=16) < 0.03);
        for _ in 0..20 {
            curve.note(1, 0.02);
        }
        for rows in 1..=16 {
            let change = curve.seconds(rows) / before.seconds(rows);
            assert!((change - 1.0).abs() < 0.04, "{change} at {rows} rows");
        }
    }

    #[test]
    fn a_shape_is_recalled_at_the_machines_speed() {
        let mut before = CostCurve::default();
        for step in 0..2000 {
            before.note(1 + step % 12, 0.02 * avx2(1 + step % 12));
        }
        let learned = before.learned();
        let mut unknown = CostCurve::default();
        unknown.recall(&learned);
        assert!(!unknown.is_known());
        // Measured on a machine that is twice as slow, with an error of a fifth at 4 rows.
        let mut after = CostCurve::default();
        after.calibrate(&[(1, 0.04), (4, 0.04 * 1.2 * avx2(4)), (8, 0.04 * avx2(8))]);
        let wrong = worst(&after, avx2, 1..=12);
        after.recall(&learned);
        assert_monotone(&after);
        let error = worst(&after, avx2, 1..=12);
        assert!(error < 0.6 * wrong, "{error} instead of {wrong}");
        assert!((after.seconds(1) / 0.04 - 1.0).abs() < 0.05);
        // What is seen now counts more.
        for step in 0..3000 {
            after.note(1 + step % 8, 0.02 * (1 + step % 8) as f64);
        }
        assert!(worst(&after, |rows| rows as f64, 1..=8) < 0.1);
    }

    #[test]
    fn the_curve_never_falls_whatever_is_observed() {
        let mut noise = Noise(7);
        for _ in 0..200 {
            let mut curve = CostCurve::default();
            for _ in 0..noise.below(60) {
                let magnitude = noise.below(12);
                let rows = noise.below(1 << magnitude);
                let seconds = [0.0, f64::NAN, -1.0, f64::INFINITY, 1e-9, 1e9];
                let seconds = seconds.get(noise.below(50)).copied();
                curve.note(rows, seconds.unwrap_or_else(|| noise.unit()));
            }
            assert_monotone(&curve);
        }
    }

    #[test]
    fn steps_of_the_curve_are_kept() {
        let tiles = |rows: usize| 1.0 + 0.5 * ((rows - 1) / 8) as f64;
        let (mut noise, mut curve) = (Noise(3), CostCurve::default());
        for _ in 0..8000 {
            let rows = 1 + noise.below(16);
            curve.note(rows, tiles(rows) * noise.factor(0.2));
        }
        let error = worst(&curve, tiles, 1..=16);
        assert!(error < 0.05, "{error}");
    }

    /// Rows up to an edge cost the same, and beyond the last edge each number of rows has its own cost.
    #[test]
    fn edges_have_a_knot_each() {
        let edges = vec![1, 2, 4, 8, 12, 16, 24, 32];
        let truth = |rows: usize| match rows {
            ..=16 => 1.0,
            17..=24 => 1.5,
            25..=32 => 1.6,
            33.. => 2.0 + (rows - 33) as f64 / 31.0,
        };
        let mut curve = CostCurve::with_edges(edges);
        curve.calibrate(&[1, 16, 17, 32, 33, 64].map(|rows| (rows, truth(rows))));
        let error = worst(&curve, truth, 1..=64);
        assert!(error < 1e-9, "{error}");
        assert!(!curve.is_settled(20));
        let mut noise = Noise(5);
        for _ in 0..8000 {
            let rows = 1 + noise.below(64);
            curve.note(rows, truth(rows) * noise.factor(0.1));
        }
        let error = worst(&curve, truth, 1..=32);
        assert!(error < 0.07, "{error}");
        assert!(curve.is_settled(20) && curve.seconds(17) == curve.seconds(24));
        assert_monotone(&curve);
    }

    #[test]
    fn what_is_unknown_is_dear_at_first_and_then_lies_on_the_line() {
        let mut curve = CostCurve::default();
        assert!((curve.seconds(6) - 2.0).abs() < 1e-9);
        curve.note(1, 0.1);
        assert!((curve.seconds(6) - 0.2).abs() < 1e-9);
        curve.calibrate(&[(8, 0.25), (1, 0.1), (16, 0.45), (16, 0.35), (0, 1.0)]);
        assert!((curve.seconds(1) - 0.1).abs() < 1e-9);
        assert!((curve.seconds(12) - 0.325).abs() < 1e-9);
        assert!((curve.seconds(24) - 0.55).abs() < 1e-9);
    }
}
