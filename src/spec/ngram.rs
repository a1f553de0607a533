//! Drafting without a model: prompt lookup.

use super::draft::{Draft, DraftRequest, Drafter, Source};
use crate::error::Result;

/// Estimated probability that a copied token stands if the one before it does: half of the matches of
/// two tokens predict the next one (SmolLM2 on Spec-Bench).
const STANDS: f32 = 0.5;

/// Copies what followed the same n-gram earlier in the request's own tokens (prompt lookup
/// decoding, Saxena 2023). The longest n-gram wins; among equal lengths, the latest position.
///
/// A draft is at most as long as its match, counted back beyond `max`: two equal tokens are often
/// chance, and each rejected draft token costs a row of the target's forward.
#[derive(Debug, Clone)]
pub struct NgramDrafter {
    min: usize,
    max: usize,
}

impl NgramDrafter {
    /// Looks for n-grams of `max` down to `min` tokens; `1 <= min <= max`.
    pub fn new(min: usize, max: usize) -> Self {
        assert!(1 <= min && min <= max, "n-grams need 1 <= min <= max");
        Self { min, max }
    }

    fn lookup<'a>(&self, tokens: &'a [u32], length: usize) -> &'a [u32] {
        let longest = self.max.min(tokens.len().saturating_sub(1));
        for n in (self.min..=longest).rev() {
            let (before, ngram) = (&tokens[..tokens.len() - 1], &tokens[tokens.len() - n..]);
            if let Some(start) = before.windows(n).rposition(|window| window == ngram) {
                let earlier = tokens[..start].iter().rev();
                let later = tokens[..tokens.len() - n].iter().rev();
                let longer = earlier.zip(later).take_while(|(a, b)| a == b);
                let trust = n + longer.take(length).count();
                let follows = &tokens[start + n..];
                return &follows[..length.min(trust).min(follows.len())];
            }
        }
        &[]
    }
}

impl Drafter for NgramDrafter {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let draft = |request: &DraftRequest<'_>| {
            let mut draft = Draft::default();
            let mut score = 1.0;
            let length = request.length.min(request.nodes);
            for &token in self.lookup(request.tokens, length) {
                score *= STANDS;
                draft.push(token, score, Source::Own);
            }
            draft
        };
        Ok(requests.iter().map(draft).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_what_followed_the_longest_latest_match() {
        let drafter = NgramDrafter::new(2, 3);
        assert_eq!(drafter.lookup(&[1, 2, 3, 4, 5, 1, 2, 3], 2), [4, 5]);
        assert_eq!(drafter.lookup(&[9, 2, 3, 4, 8, 2, 3, 5, 2, 3], 1), [5]);
        assert_eq!(drafter.lookup(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7]);
        assert_eq!(drafter.lookup(&[7, 7, 7, 7], 5), [7]);
        let repeated = [1, 2, 3, 4, 5, 9, 8, 7, 6, 1, 2, 3, 4, 5];
        assert_eq!(
            drafter.lookup(&repeated, 9),
            [9, 8, 7, 6, 1],
            "five equal tokens, five more"
        );
        assert_eq!(
            drafter.lookup(&[8, 2, 3, 4, 5, 6, 9, 2, 3], 9),
            [4, 5],
            "two equal, two more"
        );
        assert!(
            drafter.lookup(&[1, 2, 3, 2], 5).is_empty(),
            "one token is below min"
        );
        assert!(drafter.lookup(&[1], 5).is_empty());
    }
}
