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
/// A cost that was learned at another time counts as at most this many times what is measured now, and at least its inverse:
/// of rows that seem too dear none would ever be tried.
const MAX_RECALLED: f64 = 8.0;
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
        let measured = self.clone();
        let one = self.interpolate(1.0, |knot| knot.cost);
        for known in learned {
            let rows = self.padded(known.rows);
            let here = measured.interpolate(rows as f64, |knot| knot.cost);
            let cost = (one * known.cost).clamp(here / MAX_RECALLED, here * MAX_RECALLED);
            let at = self.knot(rows);
            let knot = &mut self.knots[at];
            let weight = known.seen.min(CALIBRATED);
            let share = f64::from(weight) / f64::from(knot.seen + weight).max(1.0);
            knot.rows += share * (rows as f64 - knot.rows);
            knot.cost += share * (cost - knot.cost);
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
pub(super) mod tests;
