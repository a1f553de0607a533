//! Whether one head is better than another on the same rows.

use std::fmt;

/// Fewer examples prove nothing.
pub const MIN_EXAMPLES: usize = 8;
/// A gain must be this many of its standard errors...
const ERRORS: f64 = 2.0;
/// ...and this share of the tokens of a round: a switch costs the cached prefixes.
const MIN_SHARE: f64 = 0.01;

/// The worth of a head's drafts in an example.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Expected accepted tokens of a draft, summed over the positions.
    pub accepted: f64,
    pub positions: f64,
}

/// The gain of one head over another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    /// Expected accepted tokens of a draft of the other head.
    pub before: f64,
    /// Expected accepted tokens of a draft of this head.
    pub after: f64,
    /// Standard error of the difference.
    pub error: f64,
}

impl Gain {
    /// Measures the gain of the heads with the first scores over those with the second scores, from both scores of
    /// each example. `None` if there are too few examples. A pair differs less than two examples do, so the error is
    /// that of the differences (as of a ratio, because examples differ in length: Cochran 1977, section 6.4).
    pub fn of(pairs: &[(Score, Score)]) -> Option<Self> {
        let count = pairs.len() as f64;
        let positions: f64 = pairs.iter().map(|(one, _)| one.positions).sum();
        if pairs.len() < MIN_EXAMPLES || positions == 0.0 {
            return None;
        }
        let mean = |of: fn(&(Score, Score)) -> f64| pairs.iter().map(of).sum::<f64>() / positions;
        let (after, before) = (mean(|pair| pair.0.accepted), mean(|pair| pair.1.accepted));
        let rest = |(one, other): &(Score, Score)| {
            one.accepted - other.accepted - (after - before) * one.positions
        };
        let squares: f64 = pairs.iter().map(|pair| rest(pair).powi(2)).sum();
        Some(Self {
            before,
            after,
            error: (squares * count / (count - 1.0)).sqrt() / positions,
        })
    }

    /// Whether the head is better than the other, beyond chance.
    pub fn is_better(&self) -> bool {
        let margin = (ERRORS * self.error).max(MIN_SHARE * (1.0 + self.before));
        self.after - self.before > margin
    }

    /// Whether the head is worse than the other, beyond chance.
    pub fn is_worse(&self) -> bool {
        let turned = Self {
            before: self.after,
            after: self.before,
            error: self.error,
        };
        turned.is_better()
    }
}

impl fmt::Display for Gain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            before,
            after,
            error,
        } = self;
        write!(
            f,
            "{after:.3} accepted tokens a draft instead of {before:.3} (standard error {error:.3})"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(count: usize, gain: f64, noise: f64) -> Vec<(Score, Score)> {
        let score = |accepted| Score {
            accepted,
            positions: 10.0,
        };
        let pair = |i: usize| {
            let sign = if i.is_multiple_of(2) { 1.0 } else { -1.0 };
            let before = 5.0 + i as f64;
            (score(before + 10.0 * (gain + sign * noise)), score(before))
        };
        (0..count).map(pair).collect()
    }

    #[test]
    fn a_gain_counts_if_it_is_more_than_chance_and_more_than_a_switch_costs() {
        let gain = |count, gain, noise| Gain::of(&pairs(count, gain, noise));
        assert_eq!(gain(MIN_EXAMPLES - 1, 0.5, 0.0), None);
        let sure = gain(16, 0.1, 0.02).unwrap();
        assert!(sure.is_better() && !sure.is_worse(), "{sure:?}");
        assert!((sure.after - sure.before - 0.1).abs() < 1e-9, "{sure:?}");
        // Each difference is the mean plus or minus the noise: its error is known.
        let error = 0.02 / 15f64.sqrt();
        assert!((sure.error - error).abs() < 1e-9, "{sure:?}");
        let unsure = gain(16, 0.1, 0.3).unwrap();
        assert!(!unsure.is_better() && !unsure.is_worse(), "{unsure:?}");
        let small = gain(16, 0.01, 0.0).unwrap();
        assert!(!small.is_better(), "{small:?}");
        let worse = gain(16, -0.1, 0.02).unwrap();
        assert!(worse.is_worse() && !worse.is_better(), "{worse:?}");
    }
}
