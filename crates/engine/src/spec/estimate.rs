//! How probable it is that a draft token stands: counts of what came true, by features of the token.

use super::learned::{LearnedCount, MAX_ENTRIES};
use std::collections::HashMap;

/// Most features of a draft token.
pub const MAX_FEATURES: usize = 3;

/// Observations at which a count is halved, so that old ones are forgotten.
const MAX_COUNT: f32 = 2048.0;

/// Weight of a less specific estimate, in observations.
const PARENT_WEIGHT: f32 = 4.0;

/// Standard deviations from an estimate to the highest probability that is hoped for.
const INTERVAL: f32 = 1.64;

/// Tokens of a kind that what was seen at another time counts as, at most.
const RECALLED: f32 = 64.0;

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

    /// The highest probability that what was seen of such tokens allows: the upper end of a one-sided interval of 95%, by
    /// the normal approximation.
    ///
    /// # Panics
    /// If there are more than [`MAX_FEATURES`].
    pub fn hope(&self, features: &[u8]) -> f32 {
        let p = self.probability(features);
        let key = prefixes(features).last();
        let n = key
            .and_then(|key| self.counts.get(&key))
            .map_or(0.0, |count| count.n);
        let deviation = (p * (1.0 - p) / (n + PARENT_WEIGHT)).sqrt();
        (p + INTERVAL * deviation).min(MAX_PROBABILITY)
    }

    /// What was seen, to [recall](Estimator::recall) it later: of the most frequent kinds.
    pub fn learned(&self) -> Vec<LearnedCount> {
        let counts = self.counts.iter();
        let mut learned: Vec<_> = counts
            .map(|((len, features), count)| LearnedCount {
                features: features[..usize::from(*len)].to_vec(),
                hits: count.hits,
                n: count.n,
            })
            .collect();
        learned.sort_by(|a, b| {
            b.n.total_cmp(&a.n)
                .then_with(|| a.features.cmp(&b.features))
        });
        learned.truncate(MAX_ENTRIES);
        learned.sort_by(|a, b| a.features.cmp(&b.features));
        learned
    }

    /// Takes what was seen at another time in the place of what is known: as at most [`RECALLED`] tokens of a kind, so that
    /// it soon yields to what is seen now.
    pub fn recall(&mut self, learned: &[LearnedCount]) {
        for one in learned.iter().filter(|one| one.is_valid(MAX_FEATURES)) {
            let factor = (RECALLED / one.n).min(1.0);
            let count = Count {
                hits: factor * one.hits,
                n: factor * one.n,
            };
            if let Some(key) = prefixes(&one.features).last() {
                self.counts.insert(key, count);
            }
        }
    }

    /// Notes whether a token with these features, whose parent stood, stood.
    ///
    /// # Panics
    /// If there are more than [`MAX_FEATURES`].
    pub fn note(&mut self, features: &[u8], stood: bool) {
        self.add(features, f32::from(stood), 1.0);
    }

    /// Notes `n` tokens with these features, of which `hits` stood.
    ///
    /// # Panics
    /// If there are more than [`MAX_FEATURES`].
    pub fn add(&mut self, features: &[u8], hits: f32, n: f32) {
        for key in prefixes(features) {
            let count = self.counts.entry(key).or_default();
            count.n += n;
            count.hits += hits;
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

    /// No more is kept than is read again, and that is what was seen most.
    #[test]
    fn the_most_frequent_kinds_are_kept() {
        let mut estimator = Estimator::new(0.5);
        for i in 0..5000u32 {
            let [a, b, ..] = i.to_le_bytes();
            estimator.add(&[a, b], 1.0, 1.0 + (i % 7) as f32);
        }
        let learned = estimator.learned();
        assert_eq!(learned.len(), MAX_ENTRIES);
        assert!(learned.is_sorted_by(|a, b| a.features < b.features));
        // 714 of each seven kinds were seen least.
        assert!(learned.iter().all(|one| one.n >= 2.0));
    }

    #[test]
    fn hope_ends_with_what_is_seen() {
        let mut estimator = Estimator::new(0.7);
        assert_eq!(estimator.hope(&[1, 1]), MAX_PROBABILITY);
        let mut hopes = Vec::new();
        for _ in 0..5 {
            estimator.add(&[1, 1], 6.0, 20.0);
            hopes.push(estimator.hope(&[1, 1]));
            assert!(
                hopes
                    .iter()
                    .all(|&hope| hope > estimator.probability(&[1, 1]))
            );
        }
        assert!(hopes.is_sorted_by(|a, b| a > b), "{hopes:?}");
        assert!(hopes[4] < 0.4, "{hopes:?}");
        assert!(estimator.hope(&[1, 2]) > hopes[4], "what was not seen");
    }

    #[test]
    fn what_was_learned_is_recalled_and_yields() {
        let mut before = Estimator::new(0.15);
        for i in 0..1000 {
            before.note(&[1, 2], i % 2 == 0);
            before.note(&[1, 3], i % 4 == 0);
        }
        let mut after = Estimator::new(0.15);
        after.recall(&before.learned());
        for features in [&[1, 2][..], &[1, 3], &[1, 9]] {
            let difference = before.probability(features) - after.probability(features);
            assert!(difference.abs() < 0.03, "{features:?}: {difference}");
        }
        for _ in 0..200 {
            after.note(&[1, 2], false);
        }
        assert!(after.probability(&[1, 2]) < 0.2);
        let of = |features: &[u8], hits, n| LearnedCount {
            features: features.to_vec(),
            hits,
            n,
        };
        let mut same = before.clone();
        same.recall(&[
            of(&[], 1.0, 2.0),
            of(&[1, 2, 3, 4], 1.0, 2.0),
            of(&[1], 3.0, 2.0),
            of(&[1], f32::NAN, 2.0),
            of(&[1], -1.0, f32::INFINITY),
            of(&[1], 0.0, 0.0),
        ]);
        assert_eq!(same.learned(), before.learned());
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
