use super::super::cost::tests::Noise;
use super::super::pool::DraftPool;
use super::super::step::{StepOutput, gained};
use super::super::target_cost::tests::dense;
use super::traces::{TracedHead, ZEN5, rates};
use super::*;
use crate::spec::DraftModel;
use crate::spec::draft::{CacheScope, Committed, Source};
use foretoken_core::error::Result;
use foretoken_core::model::toy::ToyModel;
use foretoken_core::sampling::{Acceptance, NoToken, Sampler, SamplingParams};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Drafts two tokens with this score each; counts the requests.
struct Counting {
    score: f32,
    asked: Arc<AtomicUsize>,
}

impl Drafter for Counting {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        self.asked.fetch_add(requests.len(), Ordering::Relaxed);
        let mut draft = Draft::default();
        draft.push(1, self.score, Source::Own);
        draft.push(2, self.score, Source::Own);
        Ok(vec![draft; requests.len()])
    }
}

pub(super) fn state(temperature: f32, acceptance: Acceptance) -> SequenceState {
    let params = SamplingParams::at(temperature);
    SequenceState {
        tokens: vec![1, 2, 3],
        kv_len: 2,
        acceptance,
        ..SequenceState::new(1, vec![1, 2], params)
    }
}

/// A step of one row with a draft of at most `nodes` tokens.
pub(super) fn input(state: &mut SequenceState, nodes: usize) -> StepInput<'_> {
    StepInput {
        rows: 1,
        sample: true,
        nodes,
        length: nodes,
        width: 1,
        may_draft: true,
        prompt_scores: 0..0,
        pooled: 0..0,
        state,
    }
}

/// Runs 200 steps of one sequence; returns how often the drafter was asked, and how many of its
/// tokens were verified.
fn run(score: f32, state: &mut SequenceState, draft_seconds: f64) -> (usize, usize) {
    let asked = Arc::new(AtomicUsize::new(0));
    let drafter = Counting {
        score,
        asked: asked.clone(),
    };
    let mut proposer = Proposer::new(Box::new(drafter), BudgetMode::Adaptive);
    let mut verified = 0;
    for _ in 0..200 {
        let mut inputs = [input(&mut *state, 4)];
        let draft = proposer.propose(&mut inputs, 10).remove(0).draft;
        verified += draft.len();
        let rows = draft.len() as f64;
        proposer.note_step(&StepCost {
            sequences: 1,
            base_rows: 1,
            draft_nodes: draft.len(),
            tokens: 1,
            target_seconds: 1e-3 * (1.0 + 0.2 * rows),
            draft_seconds,
            ..StepCost::default()
        });
    }
    (asked.load(Ordering::Relaxed), verified)
}

/// A drafter whose guesses are not worth their rows is asked rarely where asking takes long, and
/// always where it takes next to nothing.
#[test]
fn looking_in_vain_is_limited() {
    let coupled = || state(0.0, Acceptance::Coupled);
    let (asked, verified) = run(0.01, &mut coupled(), 1e-4);
    assert_eq!(verified, 0);
    assert!((29..40).contains(&asked), "{asked}");
    assert_eq!(run(0.01, &mut coupled(), 1e-7), (200, 0));
    let (asked, verified) = run(0.9, &mut coupled(), 1e-7);
    assert!(asked > 100 && verified > 100, "{asked}, {verified}");
}

/// Tokens that a grammar forces are drafted first and without the drafter, which continues them.
#[test]
fn forced_tokens_come_first() {
    let mut sequence = state(0.0, Acceptance::Coupled);
    let params = SamplingParams {
        grammar: Some(pattern("efgh[a-d]{5}")),
        ..sequence.sampler.params().clone()
    };
    sequence.sampler = Sampler::new(params, &[1, 2]);
    sequence.tokens = vec![1, 2];
    for (nodes, want) in [
        (2, vec![4, 5]),
        (4, vec![4, 5, 6, 7]),
        (5, vec![4, 5, 6, 7, 1]),
        (9, vec![4, 5, 6, 7, 1, 2]),
    ] {
        let asked = Arc::new(AtomicUsize::new(0));
        let drafter = Counting {
            score: 0.5,
            asked: asked.clone(),
        };
        let mut proposer = Proposer::new(Box::new(drafter), BudgetMode::Fixed);
        let mut inputs = [input(&mut sequence, nodes)];
        let draft = proposer.propose(&mut inputs, 10).remove(0).draft;
        assert_eq!(draft.tokens, want);
        assert!(draft.is_chain());
        assert_eq!(
            draft.scores[..nodes.min(4)],
            [1.0, 1.0, 1.0, 1.0][..nodes.min(4)]
        );
        assert_eq!(asked.load(Ordering::Relaxed), usize::from(nodes > 4));
        assert_eq!(sequence.sampler.output_len(), 0);
    }
}

/// The grammar of a regular expression over ids that are letters from `a`; the last ends a text.
fn pattern(regex: &str) -> foretoken_core::sampling::Grammar {
    use foretoken_text::grammar::{Compiler, GrammarSource, toy::ToyTokens};
    let letters = ToyTokens::new((b'a'..=b'j').map(|letter| [letter]), &[9]);
    let source = GrammarSource::Regex(regex.into());
    let grammar = Compiler::new(Arc::new(letters)).compile("regex", &source);
    grammar.expect("a good pattern")
}

/// The first forward of a draft model reads a prompt in memory that nobody has touched. If it were all
/// that is known, one row would look so dear that nothing were drafted that could correct it.
#[test]
fn a_slow_first_forward_does_not_make_drafts_dear() {
    let model = Box::new(ToyModel::new(32, 256, 5, 0.0));
    let drafter = DraftModel::new(model, 64, 4, 64).unwrap();
    let mut proposer = Proposer::new(Box::new(drafter), BudgetMode::Adaptive);
    assert!(!proposer.budget().draft_cost().is_known());
    proposer.calibrate(16);
    let cost = proposer.budget().draft_cost();
    let one = cost.seconds(1);
    cost.note(27, 100.0 * one);
    assert!(cost.seconds(1) < 1.5 * one, "{one} {}", cost.seconds(1));
}

/// Under the rejection rule the size of a sampled request's draft must not depend on its tokens.
#[test]
fn a_fixed_draft_is_never_cut() {
    let mut sampled = state(1.0, Acceptance::Rejection);
    assert_eq!(run(0.01, &mut sampled, 1e-4), (200, 400));
    let mut greedy = state(0.0, Acceptance::Rejection);
    assert_eq!(run(0.01, &mut greedy, 1e-4).1, 0);
}

/// What a drafter is told of the sequences, in order.
#[derive(Debug, Clone, PartialEq)]
enum Told {
    Asked(SeqId),
    Observed(SeqId, std::ops::Range<usize>),
    Ended(SeqId),
}

/// Observes late.
#[derive(Default)]
struct Late(Arc<Mutex<Vec<Told>>>);

impl Drafter for Late {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let asked = requests.iter().map(|request| Told::Asked(request.id));
        self.0.lock().unwrap().extend(asked);
        Ok(vec![Draft::default(); requests.len()])
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        let observed = committed.iter();
        let observed = observed.map(|one| Told::Observed(one.id, one.new.clone()));
        self.0.lock().unwrap().extend(observed);
    }

    fn observes_late(&self) -> bool {
        true
    }

    fn end(&mut self, id: SeqId) {
        self.0.lock().unwrap().push(Told::Ended(id));
    }
}

/// What is not needed for the next draft is observed beside the next forward, or before the draft or the end that
/// needs it: each position once and in order.
#[test]
fn who_is_not_asked_is_observed_late() {
    use Told::{Asked, Ended, Observed};
    let drafter = Late::default();
    let told = drafter.0.clone();
    let told = || std::mem::take(&mut *told.lock().unwrap());
    let mut proposer = Proposer::new(Box::new(drafter), BudgetMode::Fixed);
    let [mut first, mut second] = [1, 2].map(|id| SequenceState {
        id,
        ..state(0.0, Acceptance::Coupled)
    });
    // A step that drafts for the first sequence, and for the second where `both`; returns what is told before and
    // while the forward runs, and after it.
    let mut step = |first: &mut SequenceState, second: &mut SequenceState, both: bool| {
        let mut inputs = [input(first, 4), input(second, if both { 4 } else { 0 })];
        proposer.propose(&mut inputs, 10);
        let before = told();
        proposer.observe_late(&inputs);
        let beside = told();
        for state in [&mut *first, &mut *second] {
            state.kv_len += 1;
            state.tokens.push(3);
        }
        let committed =
            [&*first, &*second].map(|state| state.committed(state.kv_len - 1..state.kv_len));
        proposer.observe(&committed);
        [before, beside, told()]
    };
    let of = |told: [Vec<Told>; 3], want: [Vec<Told>; 3]| assert_eq!(told, want);
    let one = step(&mut first, &mut second, false);
    of(one, [vec![Asked(1)], vec![], vec![Observed(1, 2..3)]]);
    let two = step(&mut first, &mut second, false);
    let late = vec![Observed(2, 2..3)];
    of(two, [vec![Asked(1)], late, vec![Observed(1, 3..4)]]);
    let three = step(&mut first, &mut second, true);
    let before = vec![Observed(2, 3..4), Asked(1), Asked(2)];
    let after = vec![Observed(1, 4..5), Observed(2, 4..5)];
    of(three, [before, vec![], after]);
    step(&mut first, &mut second, false);
    proposer.end(&first);
    proposer.end(&second);
    assert_eq!(told(), [Ended(1), Observed(2, 5..6), Ended(2)]);
}

/// The end of a text may be among the tokens of a draft. What comes after it is often easy to guess, and no gain.
#[test]
fn nothing_is_gained_after_the_end_of_a_text() {
    let mut sequence = state(0.0, Acceptance::Coupled);
    let params = SamplingParams {
        stop_token_ids: vec![7],
        ..sequence.sampler.params().clone()
    };
    sequence.sampler = Sampler::new(params, &[1, 2]);
    let inputs = [input(&mut sequence, 4)];
    let tokens = |tokens: &[u32]| {
        let tokens = tokens.to_vec();
        let output = StepOutput {
            tokens,
            ..StepOutput::default()
        };
        gained(&inputs, &[Ok(output)])
    };
    assert_eq!((tokens(&[5, 6, 8]), tokens(&[])), (3, 0));
    assert_eq!((tokens(&[5, 7, 7, 8]), tokens(&[7, 1])), (2, 1));
    assert_eq!(gained(&inputs, &[Err(NoToken::NotFinite)]), 0);
}

/// A head that has so many rows of each text in its pool.
struct Holding(TracedHead, usize);

impl Drafter for Holding {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        self.0.propose(requests)
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        self.0.pool()
    }

    fn resume(&mut self, _: SeqId, _: &[u32], _: CacheScope, len: usize) -> usize {
        len.min(self.1)
    }
}

/// On a machine where a step of 16 rows takes as long as 4.8 of one row.
fn with_head_of(rows: usize) -> Proposer {
    let head = TracedHead::new(Vec::new(), ZEN5, Noise(1), Some(rates()));
    let head = Holding(head, rows);
    let mut proposer = Proposer::new(Box::new(head), BudgetMode::Adaptive);
    let costs = [(1, 1.0), (4, 1.2), (8, 2.4), (16, 4.8)];
    proposer.budget().target().calibrate(&dense(&costs));
    let of_head = costs.map(|(rows, seconds)| (rows, 0.1 * seconds));
    proposer.budget().draft_cost().calibrate(&of_head);
    proposer
}

/// A target without recurrent states.
fn all(len: usize) -> usize {
    len
}

/// What only the target has cached of a text is computed again for a head where that takes less time than drafts save.
#[test]
fn a_long_cached_prompt_is_not_computed_again_for_a_head() {
    let mut proposer = with_head_of(0);
    for (cached, resumed) in [(40, 0), (150, 0), (16_000, 16_000)] {
        let sequence = SequenceState {
            tokens: vec![1; cached + 1],
            kv_len: 0,
            ..state(0.0, Acceptance::Coupled)
        };
        assert_eq!(proposer.resume(&sequence, cached, all), resumed, "{cached}");
        proposer.end(&sequence);
    }
}

/// A recurrent target begins at a state, which may be long before what the head lacks: all of that is weighed.
#[test]
fn a_long_cached_prompt_is_not_computed_again_from_an_early_state() {
    let mut proposer = with_head_of(15_950);
    let sequence = SequenceState {
        tokens: vec![1; 16_001],
        kv_len: 0,
        ..state(0.0, Acceptance::Coupled)
    };
    for (early, resumed) in [(15_920, 15_920), (0, 16_000)] {
        let mut begins = 0;
        let of_target = |len: usize| {
            begins = if len == 16_000 { len } else { early };
            begins
        };
        let found = proposer.resume(&sequence, 16_000, of_target);
        assert_eq!((found, begins), (resumed, resumed), "{early}");
        proposer.end(&sequence);
    }
}

/// A head reads the texts of the few that have room, however many others wait for it.
#[test]
fn who_waits_for_room_is_no_load() {
    let mut proposer = with_head_of(0);
    let sequence = |id| SequenceState {
        id,
        kv_len: 0,
        ..state(0.0, Acceptance::Coupled)
    };
    for id in 1..31 {
        proposer.resume(&sequence(id), 0, all);
        proposer.release(id);
    }
    let next = sequence(33);
    proposer.resume(&next, 0, all);
    assert!(proposer.is_read(&next));
    // Those that begin together are read only if drafts of all of them pay.
    for id in 65..95 {
        proposer.resume(&sequence(id), 0, all);
    }
    let last = sequence(95);
    proposer.resume(&last, 0, all);
    assert!(!proposer.is_read(&last));
}
