//! How probable it is that a draft token stands: counts of what came true, by features of the token.

use std::collections::HashMap;

/// Most features of a draft token.
pub const MAX_FEATURES: usize = 3;

/// Observations at which a count is halved, so that old ones are forgotten.
const MAX_COUNT: f32 = 2048.0;

/// Weight of a less specific estimate, in observations.
const PARENT_WEIGHT: f32 = 4.0;

/// Maximum of an estimate: nothing is certain.
const MAX_PROBABILITY: f32 = 0.99;

/// Probability that a draft token stands, given that its parent stands, learned from counts.
///
/// A token has up to [`MAX_FEATURES`] features, each the number of a bucket, the most telling one
/// first. Each prefix of the features has its own counts, and an estimate is drawn towards that of
/// the next shorter prefix: p = (hits + 4 * p of the shorter one) / (n + 4). So a rare combination
/// starts from what is known about the more general case. (The mean of
/// a hierarchical Dirichlet model, MacKay and Peto 1995, with a fixed weight.)
///
/// It keeps one count per combination of buckets seen; use few buckets.
#[derive(Debug, Clone)]
pub struct Estimator {
    prior: f32,
    counts: HashMap<(u8, [u8; MAX_FEATURES]), Count>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Count {
    hits: f32,
    n: f32,
}

impl Estimator {
    /// An estimator that has seen nothing; `prior` is the probability of a token of unknown kind.
    pub fn new(prior: f32) -> Self {
        Self {
            prior,
            counts: HashMap::new(),
        }
    }

    /// Estimated probability that a token with these features stands if its parent does.
    ///
    /// # Panics
    /// If there are more than [`MAX_FEATURES`].
    pub fn probability(&self, features: &[u8]) -> f32 {
        let mut p = self.prior;
        for key in prefixes(features) {
            let Some(count) = self.counts.get(&key) else {
                break;
            };
            p = (count.hits + PARENT_WEIGHT * p) / (count.n + PARENT_WEIGHT);
        }
        p.min(MAX_PROBABILITY)
    }

    /// Notes whether a token with these features, whose parent stood, stood.
    ///
    /// # Panics
    /// If there are more than [`MAX_FEATURES`].
    pub fn note(&mut self, features: &[u8], stood: bool) {
        for key in prefixes(features) {
            let count = self.counts.entry(key).or_default();
            count.n += 1.0;
            count.hits += f32::from(stood);
            if count.n >= MAX_COUNT {
                count.n /= 2.0;
                count.hits /= 2.0;
            }
        }
    }
}

/// Length and features of each prefix, the shortest first.
fn prefixes(features: &[u8]) -> impl Iterator<Item = (u8, [u8; MAX_FEATURES])> {
    assert!(features.len() <= MAX_FEATURES, "a token has few features");
    (1..=features.len()).map(|len| {
        let mut prefix = [0; MAX_FEATURES];
        prefix[..len].copy_from_slice(&features[..len]);
        (len as u8, prefix)
    })
}

/// How much more, or less, probable the draft tokens of one request are than those of all requests.
///
/// It shifts the log-odds of each estimate. The shift is learned token by token as in a logistic
/// regression with that one parameter: by Newton steps whose curvature is exponentially averaged and
/// begins with a weight on no shift. Where nothing comes true, estimates go towards 0; where the text
/// repeats itself, towards 1.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestBias {
    log_odds: f32,
    curvature: f32,
}

impl RequestBias {
    /// Curvature that stands against the first steps; 4 is that of 16 tokens of probability 1/2.
    const PRIOR_WEIGHT: f32 = 4.0;
    /// Weight of the past, per token.
    const DECAY: f32 = 0.99;
    const MIN: f32 = -6.0;
    const MAX: f32 = 4.0;

    /// The estimate `p` of an [`Estimator`], adjusted to this request.
    pub fn adjust(&self, p: f32) -> f32 {
        let p = p.clamp(1.0 - MAX_PROBABILITY, MAX_PROBABILITY);
        let odds = p / (1.0 - p) * self.log_odds.exp();
        odds / (1.0 + odds)
    }

    /// Notes whether a token with the estimate `p`, not adjusted, stood; its parent did.
    pub fn note(&mut self, p: f32, stood: bool) {
        let p = self.adjust(p);
        self.curvature = self.curvature * Self::DECAY + p * (1.0 - p);
        let step = (f32::from(stood) - p) / (self.curvature + Self::PRIOR_WEIGHT);
        self.log_odds = (self.log_odds + step).clamp(Self::MIN, Self::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_known_at_first_and_counts_take_over() {
        let mut estimator = Estimator::new(0.15);
        assert_eq!(estimator.probability(&[1, 2, 3]), 0.15);
        estimator.note(&[1], true);
        let once = (1.0 + 4.0 * 0.15) / 5.0;
        assert_eq!(estimator.probability(&[1]), once);
        assert_eq!(estimator.probability(&[2]), 0.15);
        for i in 0..1000 {
            estimator.note(&[1], i % 4 == 0);
        }
        assert!((estimator.probability(&[1]) - 0.25).abs() < 0.01);
    }

    #[test]
    fn what_is_rare_starts_from_what_is_more_general() {
        let mut estimator = Estimator::new(0.15);
        for i in 0..400 {
            estimator.note(&[1, 2], i % 2 == 0);
        }
        let general = estimator.probability(&[1]);
        assert_eq!(estimator.probability(&[1, 7]), general);
        estimator.note(&[1, 7], false);
        let once = estimator.probability(&[1, 7]);
        assert!(
            once < general && once > 0.7 * general,
            "{once} of {general}"
        );
        assert_eq!(
            estimator.probability(&[3, 2]),
            0.15,
            "the first feature leads"
        );
    }

    #[test]
    fn counts_follow_change() {
        let mut estimator = Estimator::new(0.15);
        for _ in 0..100_000 {
            estimator.note(&[1], true);
        }
        assert!(estimator.probability(&[1]) <= MAX_PROBABILITY);
        for _ in 0..4 * MAX_COUNT as usize {
            estimator.note(&[1], false);
        }
        assert!(estimator.probability(&[1]) < 0.1);
    }

    #[test]
    fn a_bias_finds_the_odds_of_its_request() {
        for (base, actual) in [(0.5, 0.0), (0.3, 0.6), (0.8, 0.4), (0.6, 0.98), (0.2, 0.2)] {
            let mut bias = RequestBias::default();
            assert!((bias.adjust(base) - base).abs() < 1e-6);
            let mut due = 0.0;
            for _ in 0..400 {
                due += actual;
                let stood = due >= 1.0;
                due -= f32::from(stood);
                bias.note(base, stood);
            }
            let found = bias.adjust(base);
            assert!((found - actual).abs() < 0.1, "{base}, {actual}: {found}");
        }
    }

    #[test]
    fn a_bias_keeps_the_order_and_stays_a_probability() {
        let mut bias = RequestBias::default();
        for stood in [false, true] {
            for _ in 0..10_000 {
                bias.note(0.5, stood);
            }
            let adjusted = [0.0, 0.1, 0.5, 0.9, 1.0].map(|p| bias.adjust(p));
            assert!(adjusted.is_sorted(), "{adjusted:?}");
            assert!(
                adjusted.iter().all(|p| (0.0..1.0).contains(p)),
                "{adjusted:?}"
            );
        }
    }
}
