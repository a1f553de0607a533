//! A draft in the target's tokens, made of a draft in joint ids.

use super::super::draft::{Draft, Source};
use super::encoding::Ending;
use super::vocabulary::JointVocabulary;

/// A draft of the target's tokens, and what is remembered of it until the text shows which of them stand.
pub struct TranslatedDraft {
    /// Length of the sequence before it.
    pub base: usize,
    pub draft: Draft,
    kinds: Vec<TokenKind>,
    /// The draft model's probability of each token after those before it.
    probs: Vec<f32>,
}

/// How a target token came out of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TokenKind {
    /// It is a draft token, and not made of several, or of parts.
    same: bool,
    /// The draft ends with it, so that its word may go on.
    last: bool,
}

impl TokenKind {
    fn place(self) -> usize {
        usize::from(self.same) + 2 * usize::from(self.last)
    }
}

/// How often the tokens of each kind stand, relative to what the draft model expects of its own tokens.
#[derive(Debug, Default)]
pub struct Rates([Rate; 4]);

#[derive(Debug, Default, Clone, Copy)]
struct Rate {
    stood: f64,
    expected: f64,
}

/// Weight, in tokens, of the assumption that they stand as often as expected.
const PRIOR: f64 = 16.0;
/// Per token, so that about the last thousand count.
const DECAY: f64 = 0.999;

impl Rates {
    fn of(&self, kind: TokenKind) -> f64 {
        let Rate { stood, expected } = self.0[kind.place()];
        (stood + PRIOR) / (expected + PRIOR)
    }

    fn add(&mut self, kind: TokenKind, stood: bool, expected: f32) {
        let rate = &mut self.0[kind.place()];
        rate.stood = rate.stood * DECAY + f64::from(u8::from(stood));
        rate.expected = rate.expected * DECAY + f64::from(expected);
    }

    /// Rate at which tokens of all kinds stand, relative to what the draft model expects.
    pub fn overall(&self) -> f64 {
        let sum = |of: fn(&Rate) -> f64| self.0.iter().map(of).sum::<f64>();
        (sum(|rate| rate.stood) + PRIOR) / (sum(|rate| rate.expected) + PRIOR)
    }

    /// Compares a proposal with the sequence's `tokens` that came instead.
    pub fn learn(&mut self, proposal: &TranslatedDraft, tokens: &[u32]) {
        let draft = &proposal.draft;
        let mut node = None;
        for &token in tokens.iter().skip(proposal.base) {
            let mut next = None;
            for child in draft.children(node) {
                let stood = draft.tokens[child] == token;
                self.add(proposal.kinds[child], stood, proposal.probs[child]);
                next = next.or(stood.then_some(child));
            }
            if next.is_none() {
                break;
            }
            node = next;
        }
    }
}

impl TranslatedDraft {
    /// Translates `draft`, in the joint ids of `vocabulary`, for a sequence of `base` tokens that ends
    /// with `ending`.
    pub fn new(
        vocabulary: &JointVocabulary,
        rates: &Rates,
        draft: &Draft,
        base: usize,
        ending: Ending<'_>,
    ) -> Self {
        let mut proposal = Self {
            base,
            draft: Draft::default(),
            kinds: Vec::new(),
            probs: Vec::new(),
        };
        let is_leaf = |&node: &usize| draft.children(Some(node)).next().is_none();
        let mut leaves: Vec<usize> = (0..draft.len()).filter(is_leaf).collect();
        leaves.sort_by(|&a, &b| draft.scores[b].total_cmp(&draft.scores[a]));
        for leaf in leaves {
            let tokens = tokens_of(vocabulary, draft, &draft.path(Some(leaf)), ending);
            proposal.add(rates, &draft.scores, &tokens);
        }
        proposal
    }

    /// Adds the tokens of one path, each with its kind and the draft's node in which it ends, below those
    /// that other paths begin with.
    fn add(&mut self, rates: &Rates, scores: &[f32], tokens: &[(u32, TokenKind, usize)]) {
        let mut parent: Option<usize> = None;
        let mut before = 1.0;
        for &(token, kind, node) in tokens {
            // The token stands if all draft tokens do that it has a part of.
            let prob = if before > 0.0 {
                (scores[node] / before).min(1.0)
            } else {
                0.0
            };
            before = scores[node];
            let same = |&child: &usize| self.draft.tokens[child] == token;
            let known = self.draft.children(parent).find(same);
            parent = known.or_else(|| {
                let above = parent.map_or(1.0, |parent| self.draft.scores[parent]);
                let stands = (f64::from(prob) * rates.of(kind)).min(1.0);
                self.kinds.push(kind);
                self.probs.push(prob);
                let (score, parent) = (above * stands as f32, parent.map(|parent| parent as u16));
                let node = self.draft.add(token, parent, score, Source::Model);
                Some(usize::from(node))
            });
        }
    }

    /// Keeps the most probable tokens: at most `nodes`, and none deeper than `length`.
    pub fn limit(&mut self, length: usize, nodes: usize) {
        let draft = &self.draft;
        let mut depths: Vec<usize> = Vec::with_capacity(draft.len());
        for parent in &draft.parents {
            depths.push(parent.map_or(1, |parent| depths[usize::from(parent)] + 1));
        }
        let shallow = |&node: &usize| depths[node] <= length;
        let mut best: Vec<usize> = (0..draft.len()).filter(shallow).collect();
        // The sort is stable, so a parent stays before a child with the same score.
        best.sort_by(|&a, &b| draft.scores[b].total_cmp(&draft.scores[a]));
        best.truncate(nodes);
        let mut keep = vec![false; draft.len()];
        best.iter().for_each(|&node| keep[node] = true);
        let kept = |node: &usize| keep[*node];
        let kinds = (0..keep.len()).filter(kept).map(|node| self.kinds[node]);
        self.kinds = kinds.collect();
        let probs = (0..keep.len()).filter(kept).map(|node| self.probs[node]);
        self.probs = probs.collect();
        self.draft.retain(&keep);
    }
}

/// The target's tokens of a path of `draft`, each with its kind and the node in which it ends.
fn tokens_of(
    vocabulary: &JointVocabulary,
    draft: &Draft,
    path: &[usize],
    ending: Ending<'_>,
) -> Vec<(u32, TokenKind, usize)> {
    let mut text = Vec::new();
    // Where each of the path's tokens ends in the text.
    let mut ends = Vec::with_capacity(path.len());
    let mut special = None;
    for &node in path {
        let Some(id) = vocabulary.of_draft(draft.tokens[node]) else {
            break;
        };
        if vocabulary.draft.is_special(id) {
            // Such as the end of the text: nothing after it is worth a guess.
            special = Some(node);
            break;
        }
        text.extend_from_slice(vocabulary.draft.bytes(id));
        ends.push(text.len());
    }
    let (mut tokens, mut start) = (Vec::with_capacity(path.len()), 0);
    for (token, end) in encode_after(vocabulary, ending, &text) {
        let place = ends.partition_point(|&e| e < end);
        let whole = start == 0 || ends.binary_search(&start).is_ok();
        let kind = TokenKind {
            same: whole && draft.tokens[path[place]] == token,
            last: end == text.len() && special.is_none(),
        };
        tokens.push((token, kind, path[place]));
        start = end;
    }
    if let Some(node) = special
        && start == text.len()
        && let Some(token) = vocabulary.of_target(draft.tokens[node])
    {
        let (same, last) = (true, false);
        tokens.push((token, TokenKind { same, last }, node));
    }
    tokens
}

/// The target's tokens of `text` after `ending`, each with the offset at which it ends.
fn encode_after(
    vocabulary: &JointVocabulary,
    ending: Ending<'_>,
    text: &[u8],
) -> Vec<(u32, usize)> {
    let target = &vocabulary.target;
    let Ending { words, begins } = ending;
    let mut all: Vec<u8> = Vec::new();
    words.iter().for_each(|&id| all.extend(target.bytes(id)));
    let known = all.len();
    all.extend_from_slice(text);
    let encoded = target.encode(&all, begins);
    let same =
        encoded.len() >= words.len() && encoded.iter().zip(words).all(|((id, _), word)| id == word);
    if !same {
        // The words before would be encoded in another way if the text went on like that.
        return target.encode(text, begins && known == 0);
    }
    let rest = encoded[words.len()..].iter();
    rest.map(|&(id, end)| (id, end - known)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::tests::WordTokenizer;
    use super::*;

    const TARGET: [&str; 12] = [
        "<end>", "a", "b", " a", " ab", " abc", "c", " c", "?c3", "?a9", "é", " ",
    ];
    const DRAFT: [&str; 10] = [
        " a", "b", "</s>", "c", " c", "<tool>", "?c3", "?a9", " é", " ",
    ];

    fn vocabulary() -> JointVocabulary {
        let words = |tokens: &[&str]| Box::new(WordTokenizer::new(tokens, false));
        JointVocabulary::new(words(&TARGET), words(&DRAFT), TARGET.len(), DRAFT.len())
    }

    /// A draft of the draft's tokens, each with the node before it; every one is as probable as the other.
    fn draft(nodes: &[(&str, Option<u16>)]) -> Draft {
        let vocabulary = vocabulary();
        let mut draft = Draft::default();
        for &(name, parent) in nodes {
            let id = DRAFT.iter().position(|&token| token == name).unwrap();
            let before = parent.map_or(1.0, |parent| draft.scores[usize::from(parent)]);
            let joint = vocabulary.joint(id as u32).unwrap();
            draft.add(joint, parent, before * 0.5, Source::Model);
        }
        draft
    }

    fn chain(names: &[&str]) -> Draft {
        let above = |i: usize| i.checked_sub(1).map(|i| i as u16);
        let nodes: Vec<_> = names
            .iter()
            .enumerate()
            .map(|(i, &name)| (name, above(i)))
            .collect();
        draft(&nodes)
    }

    fn after(words: &[&str], draft: &Draft) -> TranslatedDraft {
        let id = |word: &&str| TARGET.iter().position(|token| token == word).unwrap() as u32;
        let words: Vec<u32> = words.iter().map(id).collect();
        let ending = Ending {
            words: &words,
            begins: false,
        };
        TranslatedDraft::new(&vocabulary(), &Rates::default(), draft, 3, ending)
    }

    fn names(proposal: &TranslatedDraft) -> Vec<(&str, Option<u16>)> {
        let draft = &proposal.draft;
        let nodes = draft.tokens.iter().zip(&draft.parents);
        nodes
            .map(|(&id, &parent)| (TARGET[id as usize], parent))
            .collect()
    }

    #[test]
    fn tokens_are_joined_and_split_where_the_target_does() {
        let joined = after(&[], &chain(&[" a", "b", " c"]));
        assert_eq!(names(&joined), [(" ab", None), (" c", Some(0))]);
        // `b` must stand for ` ab` to stand.
        assert_eq!(joined.draft.scores, [0.25, 0.125]);
        let same: Vec<_> = joined
            .kinds
            .iter()
            .map(|kind| (kind.same, kind.last))
            .collect();
        assert_eq!(same, [(false, false), (true, true)]);
        let split = after(&[], &chain(&[" é", "b"]));
        let each = [(" ", None), ("é", Some(0)), ("b", Some(1))];
        assert_eq!(names(&split), each);
        assert_eq!(split.draft.scores, [0.5, 0.5, 0.25]);
    }

    #[test]
    fn the_word_before_goes_on() {
        // ` a` + `b` is ` ab`, which the target did not say.
        let go_on = chain(&["b", " c"]);
        assert_eq!(
            names(&after(&[" a"], &go_on)),
            [("b", None), (" c", Some(0))]
        );
        assert_eq!(names(&after(&[" ab"], &chain(&[" a"]))), [(" a", None)]);
        assert_eq!(
            names(&after(&[" c"], &go_on)),
            [("b", None), (" c", Some(0))]
        );
    }

    /// A character may be cut at both ends.
    #[test]
    fn bytes_are_no_text_yet() {
        let cut = after(&["?c3"], &chain(&["?a9", "b", "?c3"]));
        assert_eq!(
            names(&cut),
            [("?a9", None), ("b", Some(0)), ("?c3", Some(1))]
        );
        let whole = after(&[], &chain(&["?c3", "?a9"]));
        assert_eq!(names(&whole), [("é", None)]);
    }

    #[test]
    fn the_end_of_the_text_is_the_targets() {
        let end = after(&[], &chain(&["c", "</s>", "c"]));
        assert_eq!(names(&end), [("c", None), ("<end>", Some(0))]);
        assert!(!end.kinds[0].last);
        // One that the target does not have ends the draft.
        assert_eq!(
            names(&after(&[], &chain(&["c", "<tool>", "c"]))),
            [("c", None)]
        );
    }

    #[test]
    fn paths_share_what_they_begin_with() {
        let tree = [
            (" c", None),
            (" a", Some(0)),
            ("b", Some(1)),
            ("c", Some(1)),
            ("c", Some(0)),
        ];
        let mut tree = draft(&tree);
        tree.scores[3] = 0.2;
        let mut proposal = after(&[], &tree);
        let all = [
            (" c", None),
            ("c", Some(0)),
            (" a", Some(0)),
            ("c", Some(2)),
            (" ab", Some(0)),
        ];
        assert_eq!(names(&proposal), all);
        assert_eq!(proposal.draft.scores, [0.5, 0.25, 0.25, 0.2, 0.125]);
        proposal.limit(2, 4);
        assert_eq!(names(&proposal), [all[0], all[1], all[2], all[4]]);
        proposal.limit(8, 2);
        assert_eq!(names(&proposal), all[..2]);
        assert_eq!((proposal.kinds.len(), proposal.probs.len()), (2, 2));
    }

    /// Kinds that stand less often than the draft model expects get lower scores.
    #[test]
    fn scores_are_learned_by_kind() {
        let mut rates = Rates::default();
        let joined = || after(&[], &chain(&[" a", "b", " c"]));
        for round in 0..1000 {
            // ` ab` stands in one round of ten, after which ` c` always does.
            let next = if round % 10 == 0 { 4 } else { 5 };
            rates.learn(&joined(), &[1, 1, 1, next, 7]);
        }
        let ending = Ending {
            words: &[],
            begins: false,
        };
        let draft = chain(&[" a", "b", " c"]);
        let learned = TranslatedDraft::new(&vocabulary(), &rates, &draft, 3, ending)
            .draft
            .scores;
        assert!((0.09..0.13).contains(&learned[0]), "{learned:?}");
        assert!(
            (0.7..1.0).contains(&(learned[1] / learned[0])),
            "{learned:?}"
        );
    }
}
