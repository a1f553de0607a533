//! Intervals of speed-ups, by a paired bootstrap over prompts. No clock and no engine here.

use crate::sampling::mix;
use serde::Serialize;
use std::ops::AddAssign;

/// Share of errors of all intervals of a report's temperature together.
pub const ERROR: f64 = 0.05;
/// Resamples of an interval: more if fewer than this number are beyond its ends, and fewer if they have more draws
/// together than this.
const RESAMPLES: usize = 10_000;
const MIN_BEYOND: f64 = 2.0;
const MAX_DRAWS: usize = 20_000_000;
const MIN_RESAMPLES: usize = 1_000;
/// The seed of all resamples: the same measurements have the same interval.
const SEED: u64 = 0x666f_7265_746f_6b65;

/// The smallest number of pairs that have an interval which misses with probability `error`: of fewer, all can agree by
/// chance. If nothing differs, n pairs do in 2 of 2^n runs.
pub fn min_pairs(error: f64) -> usize {
    let pairs = (2.0 / error).log2().ceil() as usize;
    // One pair has no variance.
    pairs.max(2)
}

/// A range of values, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

/// Tokens, and the seconds that they took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Work {
    pub tokens: f64,
    pub seconds: f64,
}

impl Work {
    fn rate(self) -> f64 {
        self.tokens / self.seconds
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.seconds += other.seconds;
    }
}

/// The same prompt, or group of prompts, decoded in two ways, one shortly after the other.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Pair {
    pub plain: Work,
    pub speculative: Work,
}

impl Interval {
    /// The range of `values`; `None` if there are none, or one is no number.
    pub fn range(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut range: Option<Self> = None;
        for value in values {
            if !value.is_finite() {
                return None;
            }
            let Self { low, high } = range.unwrap_or(Self {
                low: value,
                high: value,
            });
            range = Some(Self {
                low: low.min(value),
                high: high.max(value),
            });
        }
        range
    }

    /// The interval that misses the speed-up of such pairs with probability `error`, about; `None` if there are fewer
    /// than [`min_pairs`], or too few for so small an `error` and a bounded number of resamples, or one was not
    /// measured.
    ///
    /// Whole pairs are drawn with replacement, so what one prompt costs in both ways stays together. The percentiles
    /// are those of the expanded percentile interval, since plain ones are too narrow for few pairs (Hesterberg 2014,
    /// What teachers should know about the bootstrap).
    pub fn of(pairs: &[Pair], error: f64) -> Option<Self> {
        let count = pairs.len();
        if count < min_pairs(error) {
            return None;
        }
        let tail = expanded_tail(error, count);
        let resamples = resamples(tail, count)?;
        let mut state = SEED;
        let mut speed_ups: Vec<f64> = (0..resamples)
            .map(|_| {
                let (mut plain, mut speculative) = (Work::default(), Work::default());
                for _ in 0..count {
                    state = state.wrapping_add(1);
                    let place = (u128::from(mix(state)) * count as u128) >> 64;
                    let pair = &pairs[place as usize];
                    plain += pair.plain;
                    speculative += pair.speculative;
                }
                speculative.rate() / plain.rate()
            })
            .collect();
        if !speed_ups.iter().all(|ratio| ratio.is_finite()) {
            return None;
        }
        speed_ups.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let place = (share * (resamples - 1) as f64).round() as usize;
            speed_ups[place.min(resamples - 1)]
        };
        Some(Self {
            low: at(tail),
            high: at(1.0 - tail),
        })
    }

    /// Whether it includes `value`.
    #[cfg(test)]
    pub fn includes(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }
}

/// Number of resamples of `count` pairs for an interval with a share `tail` of them below it, and above it. `None` =
/// their draws would be too many: the ends would be the extremes of fewer resamples, whatever the share is.
fn resamples(tail: f64, count: usize) -> Option<usize> {
    let wanted = RESAMPLES.max((MIN_BEYOND / tail).ceil() as usize);
    let resamples = wanted.min((MAX_DRAWS / count).max(MIN_RESAMPLES));
    let is_beyond = (tail * (resamples - 1) as f64).round() >= 1.0;
    is_beyond.then_some(resamples)
}

/// Share of the resamples below an interval of `count` pairs, and above it: as far out in a normal distribution as
/// `error / 2` is in Student's, for a variance that is too small by 1 in `count`.
fn expanded_tail(error: f64, count: usize) -> f64 {
    let freedom = (count - 1) as f64;
    normal_tail(student_quantile(error / 2.0, count - 1) * (count as f64 / freedom).sqrt())
}

/// The value that Student's distribution of `freedom` exceeds with probability `tail`.
fn student_quantile(tail: f64, freedom: usize) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    while student_tail(high, freedom) > tail {
        high *= 2.0;
    }
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if student_tail(middle, freedom) > tail {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

/// The probability that Student's distribution of `freedom` exceeds `t`, at least 0: the finite series of Abramowitz
/// and Stegun, 26.7.3 and 26.7.4; from 200 degrees on, the normal distribution's.
fn student_tail(t: f64, freedom: usize) -> f64 {
    const NEARLY_NORMAL: usize = 200;
    if freedom >= NEARLY_NORMAL {
        return normal_tail(t);
    }
    let angle = (t / (freedom as f64).sqrt()).atan();
    let (sine, cosine) = angle.sin_cos();
    let is_odd = freedom % 2 == 1;
    let mut term = if is_odd { cosine } else { 1.0 };
    let mut sum = 0.0;
    let first = usize::from(is_odd);
    for step in (first..freedom.saturating_sub(1)).step_by(2) {
        sum += term;
        term *= cosine * cosine * (step + 1) as f64 / (step + 2) as f64;
    }
    let within = if is_odd {
        (angle + sine * sum) * std::f64::consts::FRAC_2_PI
    } else {
        sine * sum
    };
    (1.0 - within) / 2.0
}

/// The probability that the normal distribution exceeds `x`, at least 0, to 8 decimals: Abramowitz and Stegun, 26.2.17.
fn normal_tail(x: f64) -> f64 {
    const FACTORS: [f64; 5] = [
        0.319_381_530,
        -0.356_563_782,
        1.781_477_937,
        -1.821_255_978,
        1.330_274_429,
    ];
    let t = 1.0 / (1.0 + 0.231_641_9 * x);
    let series = FACTORS.iter().rev().fold(0.0, |sum, f| (sum + f) * t);
    series * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// What a measurement says about a way of drafting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is faster than plain decoding.
    Helps,
    /// It is slower.
    Costs,
    /// It differs by less than 3%.
    Neither,
    /// No draft token was accepted, so it cannot be faster, whatever the clock says.
    NothingAccepted,
    /// The interval does not say, or there is none.
    Undecided,
}

impl Verdict {
    /// Reads the `interval` of a speed-up. `accepts` says whether draft tokens were accepted.
    pub fn of(interval: Option<Interval>, accepts: bool) -> Self {
        match interval {
            Some(interval) if interval.high < 1.0 => Self::Costs,
            _ if !accepts => Self::NothingAccepted,
            Some(interval) if interval.low > 1.0 => Self::Helps,
            Some(interval) if interval.low >= 0.97 && interval.high <= 1.03 => Self::Neither,
            _ => Self::Undecided,
        }
    }

    /// The verdict in words.
    pub fn words(self) -> &'static str {
        match self {
            Self::Helps => "helps",
            Self::Costs => "costs",
            Self::Neither => "neither helps nor costs",
            Self::NothingAccepted => "no draft token was accepted",
            Self::Undecided => "undecided",
        }
    }
}

#[cfg(test)]
mod tests;
