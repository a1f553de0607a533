//! The coupled draw: target and draft draw the token of a position with the same random numbers.
//!
//! The token at a position is the argmax over x of log p(x) + g(x), where g are Gumbel numbers that are
//! addressed by (seed, position, x). So it is distributed as p (the Gumbel-max trick), and a draft that
//! draws from its own q with the same g tends to draw the same token (Daliri, Musco and Suresh 2024,
//! arXiv 2408.07978, section 3). [`gumbel_max`] computes it.

use super::{Dist, NoToken, Sampler, adjusted, vocab, weights};
use foretoken_kernels::sample::gumbel_max;

/// A token that a draft model proposes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guess {
    /// The token id.
    pub token: u32,
    /// Probability that the target draws the token, as far as the draft knows; see [`guess`]. A token that a
    /// GPU draws has the draft's own probability instead.
    pub prob: f32,
}

/// Scores of one row among which a guess's share is its probability.
const CONTENDERS: usize = 8;

/// Draws the target's token from one row of raw logits, `[vocab_size]`, with the random numbers of
/// `key` (see [`Rng::key`](super::Rng::key)). A greedy request gets the largest logit.
///
/// # Errors
/// If no token can be chosen.
pub fn choose(logits: &[f32], sampler: &Sampler, key: u64) -> Result<u32, NoToken> {
    match weights(logits, sampler)? {
        Dist::Point(token) => Ok(token),
        Dist::Dense(mut weights) => {
            gumbel_max(&mut weights, key);
            let winner = vocab::max(&weights).and_then(|best| vocab::place(&weights, best));
            winner.ok_or(NoToken::NotFinite)
        }
    }
}

/// The `count` tokens that a draft model with these logits expects [`choose`] to return, the likeliest
/// first: those with the largest log q(x) + g(x), which are a sample of q without replacement (the
/// Gumbel-top-k trick; Kool, van Hoof and Welling 2019, arXiv 1903.06059). Of greedy requests the largest
/// logits. There may be fewer.
///
/// Since the noise is known, q(x) is not the probability that the target draws x: a token that leads by far
/// is nearly certain, however improbable it was. If log p differs from log q by independent standard Gumbel
/// numbers, x is drawn with its share of q(x) e^g(x) among all tokens (the Gumbel-max trick once more); the
/// few largest are nearly all. Of greedy requests it is the draft's probability at temperature 1.
///
/// # Errors
/// If no token can be chosen.
pub fn guess(
    logits: &[f32],
    sampler: &Sampler,
    key: u64,
    count: usize,
) -> Result<Vec<Guess>, NoToken> {
    match weights(logits, sampler)? {
        Dist::Point(first) => {
            let mut adjusted = adjusted(logits, sampler)?;
            let tokens = vocab::largest(&adjusted, count);
            let max = adjusted[first as usize];
            vocab::weights(&mut adjusted, max, 1.0);
            let sum = vocab::sum(&adjusted);
            Ok(shares(&adjusted, sum, tokens))
        }
        Dist::Dense(mut scores) => {
            gumbel_max(&mut scores, key);
            let mut tokens = vocab::largest(&scores, count.max(CONTENDERS));
            // One of weight 0 is never drawn.
            tokens.retain(|&id| scores[id as usize] > 0.0);
            let sum = tokens.iter().map(|&id| f64::from(scores[id as usize]));
            let sum = sum.sum();
            tokens.truncate(count);
            Ok(shares(&scores, sum, tokens))
        }
    }
}

/// Each of `tokens` with its share of `sum`.
fn shares(weights: &[f32], sum: f64, tokens: Vec<u32>) -> Vec<Guess> {
    let prob = |id: u32| (f64::from(weights[id as usize]) / sum) as f32;
    let guess = |token| Guess {
        token,
        prob: prob(token),
    };
    tokens.into_iter().map(guess).collect()
}

/// The ids of the `count` largest logits, largest first.
pub fn best(logits: &[f32], count: usize) -> Vec<u32> {
    vocab::largest(logits, count)
}

#[cfg(test)]
mod tests {
    use super::super::{Rng, SamplingParams, distribution, mix};
    use super::*;

    const VOCAB: usize = 40;

    fn logits(seed: u64) -> Vec<f32> {
        let uniform = |i: usize| (mix(seed ^ mix(i as u64)) >> 40) as f32 / (1 << 24) as f32;
        (0..VOCAB).map(|i| 6. * uniform(i)).collect()
    }

    fn sampler(params: &SamplingParams) -> Sampler {
        Sampler::new(params.clone(), &[1, 2, 3])
    }

    fn filters() -> [SamplingParams; 4] {
        let base = SamplingParams::default();
        [
            base.clone(),
            SamplingParams {
                temperature: 0.6,
                top_p: 0.9,
                ..base.clone()
            },
            SamplingParams {
                top_k: 7,
                min_p: 0.05,
                repetition_penalty: 1.3,
                ..base.clone()
            },
            SamplingParams {
                temperature: 2.0,
                logit_bias: vec![(4, 3.0), (5, -100.0)],
                ..base
            },
        ]
    }

    fn total_variation(counts: &[f64], dist: &Dist) -> f64 {
        let n: f64 = counts.iter().sum();
        let distance = |(id, count): (usize, &f64)| (count / n - dist.prob(id as u32)).abs();
        counts.iter().enumerate().map(distance).sum::<f64>() / 2.0
    }

    /// Over seeds at one position and over positions under one seed.
    #[test]
    fn tokens_are_distributed_as_the_target() {
        const ROUNDS: usize = 200_000;
        let logits = logits(1);
        for params in filters() {
            let sampler = sampler(&params);
            let dist = distribution(&logits, &sampler).unwrap();
            for over_seeds in [true, false] {
                let mut counts = [0.0; VOCAB];
                for i in 0..ROUNDS {
                    let (seed, position) = if over_seeds { (i as u64, 9) } else { (3, i) };
                    let key = Rng { seed, position }.key(0);
                    counts[choose(&logits, &sampler, key).unwrap() as usize] += 1.0;
                }
                let distance = total_variation(&counts, &dist);
                assert!(distance < 0.012, "{params:?}: total variation {distance}");
            }
        }
    }

    /// Two neighbouring positions are independent: the joint distribution is the product.
    #[test]
    fn positions_are_independent() {
        let logits = &logits(2)[..6];
        let sampler = sampler(&SamplingParams::default());
        let dist = distribution(logits, &sampler).unwrap();
        let (mut joint, rounds) = (vec![0.0; 36], 400_000);
        for i in 0..rounds {
            let rng = Rng::at(11, 2 * i);
            let draw = |offset| choose(logits, &sampler, rng.key(offset)).unwrap() as usize;
            joint[6 * draw(0) + draw(1)] += 1.0;
        }
        let product = |at: usize| dist.prob(at as u32 / 6) * dist.prob(at as u32 % 6);
        let distance = |(at, count): (usize, &f64)| (count / rounds as f64 - product(at)).abs();
        let total: f64 = joint.iter().enumerate().map(distance).sum::<f64>() / 2.0;
        assert!(total < 0.005, "total variation {total}");
    }

    /// A draft that has the target's logits always guesses right; one with other logits guesses right
    /// about as often as the best rule could (the overlap of p and q), and at least (1 - d) / (1 + d)
    /// of the time, d their total variation (Daliri et al., Theorem 2).
    #[test]
    fn drafts_guess_what_the_target_draws() {
        const ROUNDS: usize = 20_000;
        let (target, noise) = (logits(3), logits(4));
        for params in filters() {
            let sampler = sampler(&params);
            for share in [0.0, 0.2, 0.5] {
                let mixed = target.iter().zip(&noise).map(|(a, b)| a + share * b);
                let draft: Vec<f32> = mixed.collect();
                let p = distribution(&target, &sampler).unwrap();
                let q = distribution(&draft, &sampler).unwrap();
                let ids = 0..VOCAB as u32;
                let overlap: f64 = ids.map(|id| p.prob(id).min(q.prob(id))).sum();
                let right = (0..ROUNDS).filter(|&position| {
                    let key = Rng { seed: 5, position }.key(0);
                    let guess = guess(&draft, &sampler, key, 1).unwrap()[0];
                    guess.token == choose(&target, &sampler, key).unwrap()
                });
                let rate = right.count() as f64 / ROUNDS as f64;
                let bound = overlap / (2.0 - overlap);
                assert!(rate > bound - 0.01, "{rate}, bound {bound}");
                assert!(rate < overlap + 0.01, "{rate}, overlap {overlap}");
                assert!(share > 0.0 || rate == 1.0, "{rate}");
            }
        }
    }

    /// Where the target is the draft and independent Gumbel noise, guesses stand as often as they say, and
    /// what they say is worth more than the draft's own probability: it tells sure guesses from others.
    #[test]
    fn guesses_know_how_probable_they_are() {
        const ROUNDS: usize = 60_000;
        const BUCKETS: usize = 10;
        let sampler = sampler(&SamplingParams::default());
        // As peaked as those of a language model.
        let draft: Vec<f32> = logits(7).iter().map(|logit| 2.0 * logit).collect();
        let q = distribution(&draft, &sampler).unwrap();
        let (mut counts, mut losses) = ([[0.0f64; 3]; BUCKETS], [0.0f64; 2]);
        for position in 0..ROUNDS {
            let noise = |id: usize| {
                let unit = (mix(position as u64 ^ mix(id as u64 + 99)) >> 11) as f64 + 0.5;
                -(-(unit / (1u64 << 53) as f64).ln()).ln()
            };
            let target = draft.iter().enumerate();
            let target: Vec<f32> = target.map(|(id, l)| l + noise(id) as f32).collect();
            let key = Rng { seed: 5, position }.key(0);
            let drawn = choose(&target, &sampler, key).unwrap();
            let mut loss = |which: usize, prob: f64, stood: bool| {
                losses[which] -= if stood { prob.ln() } else { (1.0 - prob).ln() };
            };
            for guess in guess(&draft, &sampler, key, 3).unwrap() {
                let (prob, stood) = (f64::from(guess.prob), guess.token == drawn);
                let bucket = &mut counts[((prob * BUCKETS as f64) as usize).min(BUCKETS - 1)];
                *bucket = [
                    bucket[0] + 1.0,
                    bucket[1] + prob,
                    bucket[2] + f64::from(stood),
                ];
                loss(0, prob, stood);
                loss(1, q.prob(guess.token), stood);
            }
        }
        for [n, expected, stood] in counts {
            // The contenders are not all tokens, so each is a little too sure.
            assert!(
                (expected - stood) / n.max(1.0) < 0.05,
                "{n} {expected} {stood}"
            );
            assert!(
                (stood - expected) / n.max(1.0) < 0.01,
                "{n} {expected} {stood}"
            );
        }
        assert!(counts.iter().all(|bucket| bucket[0] > 500.0), "{counts:?}");
        assert!(losses[0] < 0.8 * losses[1], "{losses:?}");
    }

    #[test]
    fn siblings_are_distinct_and_begin_with_the_guess() {
        let logits = logits(6);
        let greedy = SamplingParams::at(0.0);
        for params in filters().iter().chain([&greedy]) {
            let sampler = sampler(params);
            for position in 0..200 {
                let key = Rng { seed: 1, position }.key(0);
                let siblings = guess(&logits, &sampler, key, 4).unwrap();
                let first = guess(&logits, &sampler, key, 1).unwrap()[0];
                assert_eq!(siblings[0], first);
                assert_eq!(first.token, choose(&logits, &sampler, key).unwrap());
                for (i, one) in siblings.iter().enumerate() {
                    assert!(siblings[..i].iter().all(|other| other.token != one.token));
                    assert!(one.prob > 0.0 && one.prob <= 1.0);
                }
            }
        }
        assert_eq!(best(&[1., 3., 2.], 2), [1, 2]);
    }
}
