//! What the guesses of a draft model or a head are worth, learned from what became of them.

use crate::spec::draft::Draft;
use crate::spec::estimate::{Estimator, RequestBias};
use crate::spec::learned::LearnedDrafts;
use foretoken_core::model::DraftNetwork;

/// Upper bounds of the buckets of a guess's probability under the draft model.
const PROBS: [f32; 13] = [
    0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96, 0.99,
];
/// Ranks among siblings that are told apart.
const RANKS: usize = 4;
/// Observations that a guess's own probability is worth before anything is known.
const PRIOR_WEIGHT: usize = 10;
/// Probability that a level of the draft has the right token, before anything is known.
const PRIOR: f32 = 0.7;
/// What of the guesses of a block remains right from one depth to the next, if nothing else is known: of a head that
/// guesses along paths, and of one that guesses each token without the others.
const FOLLOWING: f32 = 0.95;
const INDEPENDENT: f32 = 0.88;
/// Levels that a rate of a head's training counts as, and one that is usual.
const MEASURED_WEIGHT: f32 = 24.0;
const USUAL_WEIGHT: f32 = 4.0;
/// The acceptance rate of the coupled rule over the overlap of the distributions, about.
const COUPLED: f32 = 0.95;
/// Tokens before a draft that show whether the text before it is still the same.
const CONTEXT: usize = 8;

/// Estimates for all requests of one draft model.
#[derive(Debug)]
pub struct AcceptanceModel {
    /// Whether a guess stands if its parent does: by sampled or greedy and rank, then by probability.
    nodes: Estimator,
    /// Whether a level has the right token: by sampled or greedy, then by depth.
    levels: Estimator,
}

/// What is known about one request.
#[derive(Debug, Default)]
pub struct History {
    nodes: RequestBias,
    levels: RequestBias,
    /// The last draft.
    record: Option<DraftRecord>,
}

#[derive(Debug)]
struct DraftRecord {
    guesses: Guesses,
    is_sampled: bool,
    /// Number of tokens before the draft, and the last of them.
    base: usize,
    context: Vec<u32>,
}

#[derive(Debug)]
enum Guesses {
    /// A draft, with an estimate for each node.
    Tree(Draft, Vec<Estimate>),
    /// The guesses for each depth, whatever comes before them.
    Levels(Vec<Level>),
}

/// Tokens that are guessed for one depth.
pub type Level = Vec<(u32, Estimate)>;

/// The estimate for one guess.
#[derive(Debug, Clone, Copy)]
pub struct Estimate {
    features: [u8; 2],
    /// Probability that it stands if its parent does, over all requests.
    prob: f32,
    /// Probability that the guess stands if its parent does, adjusted to this request.
    pub adjusted: f32,
}

/// The estimates as they apply to one request.
#[derive(Debug, Clone, Copy)]
pub struct AcceptanceView<'a> {
    acceptance: &'a AcceptanceModel,
    bias: RequestBias,
    is_sampled: bool,
}

impl Default for AcceptanceModel {
    /// A guess is believed to be as probable as the draft model says.
    fn default() -> Self {
        let mut nodes = Estimator::new(PRIOR);
        for (bucket, bound) in PROBS.iter().chain(&[1.0]).enumerate() {
            for (sampled, rank) in (0..2 * RANKS).map(|i| (i / RANKS == 1, i % RANKS)) {
                let features = [class(sampled, rank), bucket as u8];
                let hits = (bound * PRIOR_WEIGHT as f32) as usize;
                (0..PRIOR_WEIGHT).for_each(|i| nodes.note(&features, i < hits));
            }
        }
        Self {
            nodes,
            levels: Estimator::new(PRIOR),
        }
    }
}

/// The bucket of the first feature.
fn class(is_sampled: bool, rank: usize) -> u8 {
    (rank.min(RANKS - 1) + if is_sampled { RANKS } else { 0 }) as u8
}

impl AcceptanceView<'_> {
    /// The estimate for the guess with this rank among its siblings and this probability under the
    /// draft model.
    pub fn estimate(&self, rank: usize, prob: f32) -> Estimate {
        let bucket = PROBS.partition_point(|&bound| bound <= prob) as u8;
        let features = [class(self.is_sampled, rank), bucket];
        let prob = self.acceptance.nodes.probability(&features);
        Estimate {
            features,
            prob,
            adjusted: self.bias.adjust(prob),
        }
    }
}

impl AcceptanceModel {
    /// What is known of a network's guesses before the first one: how often they were right in its training, or else what
    /// is usual of its layout.
    pub fn of(network: &DraftNetwork) -> Self {
        let mut model = Self::default();
        let head = network.head();
        if let Some(rates) = head.and_then(|head| head.rates()) {
            model.begin(&rates.greedy, &rates.sampled, MEASURED_WEIGHT);
        } else if let Some(block) = network.masked_block() {
            let follows = head.is_some_and(|head| head.follows_paths());
            let decline = if follows { FOLLOWING } else { INDEPENDENT };
            let depths = 0..block.max_depth() as i32;
            let rates: Vec<f32> = depths.map(|depth| PRIOR * decline.powi(depth)).collect();
            model.begin(&rates, &rates, USUAL_WEIGHT);
        }
        model
    }

    /// Begins with the rates at which levels have the right token, as if so many had been seen of each.
    fn begin(&mut self, greedy: &[f32], sampled: &[f32], weight: f32) {
        for (is_sampled, rates, share) in [(false, greedy, 1.0), (true, sampled, COUPLED)] {
            for (depth, rate) in (1..=u8::MAX).zip(rates) {
                let hits = share * rate * weight;
                self.levels
                    .add(&[u8::from(is_sampled), depth], hits, weight);
            }
        }
    }

    /// Writes what was seen.
    pub fn learned(&self, to: &mut LearnedDrafts) {
        to.nodes = self.nodes.learned();
        to.levels = self.levels.learned();
    }

    /// Begins with what was seen at another time.
    pub fn recall(&mut self, learned: &LearnedDrafts) {
        self.nodes.recall(&learned.nodes);
        self.levels.recall(&learned.levels);
    }

    /// The estimates for a request with this history.
    pub fn view(&self, history: &History, is_sampled: bool) -> AcceptanceView<'_> {
        AcceptanceView {
            acceptance: self,
            bias: history.nodes,
            is_sampled,
        }
    }

    /// Probability that a draft has the right tokens down to depth 1, 2, ..., `length`.
    pub fn forecast(&self, history: &History, is_sampled: bool, length: usize) -> Vec<f32> {
        let stands = |depth: usize| {
            let features = [u8::from(is_sampled), depth.min(255) as u8];
            history.levels.adjust(self.levels.probability(&features))
        };
        let path = (1..=length).scan(1.0, |path, depth| {
            *path *= stands(depth);
            Some(*path)
        });
        path.collect()
    }

    /// The highest probability that a draft has the right first token that what is known allows.
    pub fn hope(&self, history: &History, is_sampled: bool) -> f32 {
        let hope = self.levels.hope(&[u8::from(is_sampled), 1]);
        history.levels.adjust(hope)
    }

    /// Learns from the tokens that came after the last draft; all `tokens` of the request.
    pub fn learn(&mut self, history: &mut History, tokens: &[u32]) {
        let Some(record) = history.record.take() else {
            return;
        };
        let DraftRecord {
            guesses,
            base,
            is_sampled,
            ..
        } = record;
        if tokens.len() <= base || !tokens[..base].ends_with(&record.context) {
            return;
        }
        let mut at = None;
        for (depth, &token) in (1..).zip(&tokens[base..]) {
            let mut right = None;
            let siblings = guesses.after(depth, at);
            if siblings.is_empty() {
                return;
            }
            for (node, guess, estimate) in siblings {
                let stood = guess == token;
                self.nodes.note(&estimate.features, stood);
                history.nodes.note(estimate.prob, stood);
                right = right.or(stood.then_some(node));
            }
            let features = [u8::from(is_sampled), depth.min(255) as u8];
            let expected = self.levels.probability(&features);
            self.levels.note(&features, right.is_some());
            history.levels.note(expected, right.is_some());
            if right.is_none() {
                return;
            }
            at = right;
        }
    }
}

impl Guesses {
    /// The guesses at `depth`, from 1, after node `at` of a tree: node, token, and estimate.
    fn after(&self, depth: usize, at: Option<usize>) -> Vec<(usize, u32, Estimate)> {
        match self {
            Self::Tree(draft, estimates) => {
                let guess = |node: usize| (node, draft.tokens[node], estimates[node]);
                draft.children(at).map(guess).collect()
            }
            Self::Levels(levels) => {
                let level = levels.get(depth - 1).into_iter().flatten().enumerate();
                level.map(|(i, &(token, of))| (i, token, of)).collect()
            }
        }
    }
}

impl History {
    /// Remembers a draft that follows `tokens`, to learn from it.
    pub fn propose(
        &mut self,
        tokens: &[u32],
        is_sampled: bool,
        draft: Draft,
        estimates: Vec<Estimate>,
    ) {
        let guesses = Guesses::Tree(draft, estimates);
        self.remember(tokens, is_sampled, guesses);
    }

    /// Remembers guesses for each depth after `tokens`, to learn from them. The guesses do not depend on the
    /// depths before.
    pub fn propose_levels(&mut self, tokens: &[u32], is_sampled: bool, levels: Vec<Level>) {
        self.remember(tokens, is_sampled, Guesses::Levels(levels));
    }

    fn remember(&mut self, tokens: &[u32], is_sampled: bool, guesses: Guesses) {
        self.record = Some(DraftRecord {
            guesses,
            is_sampled,
            base: tokens.len(),
            context: tokens[tokens.len().saturating_sub(CONTEXT)..].to_vec(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::draft::Source;
    use foretoken_core::sampling::mix;

    /// Siblings with these tokens and probabilities, and their estimates.
    fn siblings(guesses: &[(u32, f32)], view: &AcceptanceView<'_>) -> (Draft, Vec<Estimate>) {
        let (mut draft, mut estimates) = (Draft::default(), Vec::new());
        for (rank, &(token, prob)) in guesses.iter().enumerate() {
            let estimate = view.estimate(rank, prob);
            draft.add(token, None, estimate.adjusted, Source::Model);
            estimates.push(estimate);
        }
        (draft, estimates)
    }

    /// Proposes two guesses of which the first is right with probability `rate`; returns their scores.
    fn round(
        acceptance: &mut AcceptanceModel,
        history: &mut History,
        rate: f64,
        number: u64,
    ) -> [f32; 2] {
        let guesses = [(1, 0.75), (2, 0.2)];
        let (draft, estimates) = siblings(&guesses, &acceptance.view(history, true));
        let scores = [draft.scores[0], draft.scores[1]];
        let is_right = (mix(number) >> 11) as f64 / (1u64 << 53) as f64 <= rate;
        let mut tokens = vec![7, 8, 9];
        history.propose(&tokens, true, draft, estimates);
        tokens.push(if is_right { 1 } else { 5 });
        acceptance.learn(history, &tokens);
        scores
    }

    #[test]
    fn estimates_come_true() {
        let mut acceptance = AcceptanceModel::default();
        let mut history = History::default();
        let first = round(&mut acceptance, &mut history, 0.3, 0)[0];
        assert!(
            (first - 0.8).abs() < 0.1,
            "the model's own probability: {first}"
        );
        let mut last = [0.0; 2];
        for number in 1..3000 {
            last = round(&mut acceptance, &mut history, 0.3, number);
        }
        assert!((last[0] - 0.3).abs() < 0.08, "{last:?}");
        assert!(last[1] < 0.02, "the second guess was never right: {last:?}");
        let path = acceptance.forecast(&history, true, 2);
        assert!((path[0] - 0.3).abs() < 0.08, "{path:?}");
        // A request that is not like the others.
        let mut other = History::default();
        for number in 0..200 {
            last = round(&mut acceptance, &mut other, 1.0, number);
        }
        assert!(last[0] > 0.8, "{last:?}");
        assert!(acceptance.forecast(&other, true, 1)[0] > 0.8);
    }

    /// Each depth teaches as long as all depths before it had the right token, whichever guess it was.
    #[test]
    fn levels_teach_down_to_the_first_wrong_one() {
        let (mut acceptance, mut history) = (AcceptanceModel::default(), History::default());
        let before = acceptance.forecast(&history, false, 4);
        for _ in 0..300 {
            let view = acceptance.view(&history, false);
            let level = |token| {
                vec![
                    (token, view.estimate(0, 0.75)),
                    (token + 1, view.estimate(1, 0.2)),
                ]
            };
            let levels = [10, 20, 30, 40].map(level).to_vec();
            history.propose_levels(&[7, 8, 9], false, levels);
            acceptance.learn(&mut history, &[7, 8, 9, 10, 21, 5, 40]);
        }
        let after = acceptance.forecast(&history, false, 4);
        assert!(after[1] > 0.9 && after[2] < 0.1, "{after:?}");
        let fourth = |path: &[f32]| path[3] / path[2];
        assert!(fourth(&after) > 0.5 * fourth(&before), "{after:?}");
        let view = acceptance.view(&history, false);
        let half = view.estimate(0, 0.75).prob;
        assert!((half - 1.0 / 3.0).abs() < 0.1, "{half}");
    }

    /// Tokens that are not the continuation of the draft's text teach nothing, and neither does a
    /// draft twice.
    #[test]
    fn only_its_own_continuation_teaches() {
        let mut acceptance = AcceptanceModel::default();
        let mut history = History::default();
        let before = acceptance.forecast(&history, true, 1);
        for tokens in [&[7, 8][..], &[7, 8, 9], &[7, 8, 3, 1]] {
            let (draft, estimates) = siblings(&[(1, 0.5)], &acceptance.view(&history, true));
            history.propose(&[7, 8, 9], true, draft, estimates);
            acceptance.learn(&mut history, tokens);
            acceptance.learn(&mut history, &[7, 8, 9, 5]);
        }
        assert_eq!(acceptance.forecast(&history, true, 1), before);
    }

    /// A head that was measured in its training is believed, and what is seen is believed more.
    #[test]
    fn what_training_measured_is_where_estimates_begin() {
        let mut acceptance = AcceptanceModel::default();
        acceptance.begin(&[0.53, 0.48, 0.46], &[0.4, 0.3], MEASURED_WEIGHT);
        let history = History::default();
        let close = |path: &[f32], want: &[f32]| {
            let both = path.iter().zip(want);
            assert!(both.clone().all(|(a, b)| (a - b).abs() < 0.05), "{path:?}");
        };
        let greedy = [0.53, 0.53 * 0.48, 0.53 * 0.48 * 0.46];
        close(&acceptance.forecast(&history, false, 4), &greedy);
        close(&acceptance.forecast(&history, true, 2), &[0.38, 0.11]);
        let hope = acceptance.hope(&history, false);
        assert!((0.6..0.75).contains(&hope), "{hope}");
        let mut learned = LearnedDrafts::default();
        for _ in 0..300 {
            let mut history = History::default();
            let estimate = acceptance.view(&history, false).estimate(0, 0.5);
            history.propose_levels(&[1, 2], false, vec![vec![(3, estimate)]]);
            acceptance.learn(&mut history, &[1, 2, 9]);
        }
        assert!(acceptance.hope(&history, false) < 0.15);
        acceptance.learned(&mut learned);
        let mut later = AcceptanceModel::default();
        later.recall(&learned);
        assert!(later.forecast(&history, false, 1)[0] < 0.15);
        assert!(later.hope(&history, false) < 0.25);
    }
}
