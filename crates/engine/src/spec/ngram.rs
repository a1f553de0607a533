//! Drafting without a model: prompt lookup.

use super::draft::{Draft, DraftRequest, Source};
use super::drafter::Drafter;
use foretoken_core::error::Result;

/// Estimated probability that a copied token stands if the one before it does: half of the matches of
/// two tokens predict the next one (SmolLM2 on Spec-Bench).
const STANDS: f32 = 0.5;

/// Positions that are looked at in one step, of all requests together: less than half a millisecond.
const MAX_LOOKED_AT: usize = 1 << 19;

/// Copies what followed the same n-gram earlier in the request's own tokens (prompt lookup decoding, Saxena
/// 2023), or in the output that it predicts. The longest n-gram wins; among equal lengths, the prediction,
/// then the latest position.
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

    /// The end in `text`, before its last token, of the longest n-gram with which `tokens` end, with its
    /// length; of equal ones the latest. Only the last `reach` positions are looked at.
    fn find(&self, tokens: &[u32], text: &[u32], reach: usize) -> Option<(usize, usize)> {
        let mut found = None;
        let mut least = self.min;
        for end in (1..text.len()).rev().take(reach) {
            let equal = text[..end].iter().rev().zip(tokens.iter().rev());
            let n = equal.take(self.max).take_while(|(a, b)| a == b).count();
            if n >= least {
                (found, least) = (Some((end, n)), n + 1);
            }
            if n == self.max {
                break;
            }
        }
        found
    }

    /// At most `length` tokens to continue `tokens`, and where they are from. Only the last `reach` positions
    /// are looked at, of the tokens and of the prediction.
    fn lookup<'a>(
        &self,
        tokens: &'a [u32],
        prediction: &'a [u32],
        length: usize,
        reach: usize,
    ) -> (&'a [u32], Source) {
        let own = self.find(tokens, tokens, reach);
        let predicted = self.find(tokens, prediction, reach);
        let own_n = own.map_or(0, |(_, n)| n);
        let (text, end, n, source) = match (predicted, own) {
            (Some((end, n)), _) if n >= own_n => (prediction, end, n, Source::Prediction),
            (_, Some((end, n))) => (tokens, end, n, Source::Own),
            (_, None) => return (&[], Source::Own),
        };
        let (earlier, later) = (&text[..end - n], &tokens[..tokens.len() - n]);
        let longer = earlier.iter().rev().zip(later.iter().rev());
        let trust = n + longer.take(length).take_while(|(a, b)| a == b).count();
        let follows = &text[end..];
        (&follows[..length.min(trust).min(follows.len())], source)
    }
}

impl Drafter for NgramDrafter {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let texts = 2 * requests.len();
        let draft = |request: &DraftRequest<'_>| {
            let mut draft = Draft::default();
            let mut score = 1.0;
            let length = request.length.min(request.nodes);
            let prediction = &request.context.prediction;
            let (tokens, source) =
                self.lookup(request.tokens, prediction, length, MAX_LOOKED_AT / texts);
            for &token in tokens {
                score *= STANDS;
                draft.push(token, score, source);
            }
            draft
        };
        Ok(requests.iter().map(draft).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = usize::MAX;

    #[test]
    fn copies_what_followed_the_longest_latest_match() {
        let drafter = NgramDrafter::new(2, 3);
        let lookup = |tokens: &[u32], length| {
            let (found, source) = drafter.lookup(tokens, &[], length, ALL);
            assert_eq!(source, Source::Own);
            found.to_vec()
        };
        assert_eq!(lookup(&[1, 2, 3, 4, 5, 1, 2, 3], 2), [4, 5]);
        assert_eq!(lookup(&[9, 2, 3, 4, 8, 2, 3, 5, 2, 3], 1), [5]);
        assert_eq!(lookup(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1), [7]);
        assert_eq!(lookup(&[7, 7, 7, 7], 5), [7]);
        let repeated = [1, 2, 3, 4, 5, 9, 8, 7, 6, 1, 2, 3, 4, 5];
        // Five equal tokens, five more; two equal, two more; one is below min.
        assert_eq!(lookup(&repeated, 9), [9, 8, 7, 6, 1]);
        assert_eq!(lookup(&[8, 2, 3, 4, 5, 6, 9, 2, 3], 9), [4, 5]);
        assert!(lookup(&[1, 2, 3, 2], 5).is_empty());
        assert!(lookup(&[1], 5).is_empty() && lookup(&[], 5).is_empty());
    }

    #[test]
    fn a_prediction_is_copied_from_unless_a_longer_match_is_in_the_text() {
        let drafter = NgramDrafter::new(2, 3);
        let tokens = [1, 2, 3, 4, 9, 2, 3];
        let predicted = |prediction: &[u32], length| {
            let (found, source) = drafter.lookup(&tokens, prediction, length, ALL);
            (found.to_vec(), source)
        };
        let (copied, own) = (Source::Prediction, Source::Own);
        assert_eq!(predicted(&[2, 3, 7, 8], 5), (vec![7, 8], copied));
        // Four equal tokens, four more.
        let long = [4, 9, 2, 3, 5, 5, 5, 5, 5];
        assert_eq!(predicted(&long, 9), (vec![5; 4], copied));
        assert_eq!(predicted(&[3, 7], 5), (vec![4, 9], own));
        // It ends there.
        assert_eq!(predicted(&[9, 2, 3], 5), (vec![4, 9], own));
        let longer = [9, 2, 3, 4, 9, 2, 3];
        let (found, source) = drafter.lookup(&longer, &[2, 3, 7], 1, ALL);
        assert_eq!((found, source), (&[4][..], Source::Own));
    }

    #[test]
    fn only_the_last_positions_are_looked_at() {
        let drafter = NgramDrafter::new(2, 3);
        let tokens = [1, 2, 5, 0, 0, 0, 1, 2];
        for (reach, want) in [(5, None), (6, Some((2, 2))), (ALL, Some((2, 2)))] {
            assert_eq!(drafter.find(&tokens, &tokens, reach), want, "{reach}");
        }
    }
}
