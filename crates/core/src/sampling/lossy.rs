//! Rules that let draft tokens stand which the target did not draw. Their texts are not the target's: a request
//! must ask for them by name.

use super::{Dist, NoToken, Sampler, adjusted, distribution, vocab};

/// When a draft token stands that is not the token of the coupled draw. The coupled draw's own token always does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LossyRule {
    /// If p(x) > min(threshold, alpha exp(-H(p))), H the entropy of p in nats (Medusa, Cai et al. 2024,
    /// section 2.3.1). At temperature 0, p has one token and nothing else stands.
    Typical {
        /// The largest value of the bound on p(x), in [0, 1].
        threshold: f32,
        /// The factor of exp(-H(p)) in the bound on p(x), in [0, 1].
        alpha: f32,
    },
    /// So often that no token comes with a probability above p(x) / lenience (Leviathan et al. 2023, A.5).
    ///
    /// There a token stands with probability min(1, p(x) / (lenience q(x))). Here q is not known, and the
    /// coupled draw already yields x with probability p(x), so that x stands in its place with probability
    /// min(1, p(x) (1 / lenience - 1) / (1 - p(x))): whatever the drafts are, P(x) is at most
    /// p(x) + (1 - p(x)) times that, which is p(x) / lenience or 1. A token that no model drew (q = 1) is
    /// accepted exactly as often as in A.5, others less often.
    ///
    /// At temperature 0, x stands if p(x) >= lenience max p, both at temperature 1.
    Lenient {
        /// The divisor of p(x) in the bound on P(x), in (0, 1]; 1 is lossless.
        lenience: f32,
    },
}

impl LossyRule {
    /// The name in requests, usage and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Typical { .. } => "typical",
            Self::Lenient { .. } => "lenient",
        }
    }

    /// Which of `siblings`, draft tokens none of which the target drew from this row of raw logits, stands in
    /// the place of the drawn token: the first that may. `uniform` has a number in [0, 1) for each of them that
    /// nothing else depends on. p is the request's distribution, so what its grammar, its masks or its filters
    /// exclude never stands.
    ///
    /// # Errors
    /// If no token can be chosen.
    pub fn stands(
        self,
        logits: &[f32],
        sampler: &Sampler,
        siblings: &[u32],
        uniform: impl Fn(usize) -> f64,
    ) -> Result<Option<usize>, NoToken> {
        let p = match (distribution(logits, sampler)?, self) {
            (Dist::Point(_), Self::Typical { .. }) => return Ok(None),
            (Dist::Point(best), Self::Lenient { lenience }) => {
                let mut weights = adjusted(logits, sampler)?;
                let max = weights[best as usize];
                vocab::weights(&mut weights, max, 1.0);
                // The largest weight is 1.
                let weight = |token: u32| weights.get(token as usize).copied().unwrap_or(0.0);
                return Ok(siblings.iter().position(|&x| weight(x) >= lenience));
            }
            (dense, _) => dense,
        };
        let place = match self {
            Self::Typical { threshold, alpha } => {
                let bound = f64::from(threshold).min(f64::from(alpha) * (-entropy(&p)).exp());
                siblings.iter().position(|&x| p.prob(x) > bound)
            }
            Self::Lenient { lenience } => {
                let more = 1.0 / f64::from(lenience) - 1.0;
                let mut numbered = siblings.iter().enumerate();
                numbered.position(|(sibling, &x)| {
                    uniform(sibling) * (1.0 - p.prob(x)) < p.prob(x) * more
                })
            }
        };
        Ok(place)
    }
}

/// The entropy of `p`, in nats.
fn entropy(p: &Dist) -> f64 {
    let Dist::Dense(probs) = p else { return 0.0 };
    let positive = probs.iter().map(|&p| f64::from(p)).filter(|&p| p > 0.0);
    -positive.map(|p| p * p.ln()).sum::<f64>()
}

#[cfg(test)]
mod tests;
