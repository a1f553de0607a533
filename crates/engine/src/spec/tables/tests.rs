use super::*;
use crate::spec::draft::{CacheScope, Source};
use foretoken_core::sampling::{Sampler, SamplingParams};
use std::ops::Range;

mod learning;
mod limits;

const MEMORY: usize = 1 << 22;

fn tables() -> Tables {
    Tables::new(MEMORY)
}

fn scope(scope: u64) -> DraftContext {
    DraftContext {
        scope: CacheScope(scope),
        prediction: [].into(),
        may_persist: false,
    }
}

fn propose(
    tables: &mut Tables,
    id: SeqId,
    tokens: &[u32],
    (length, nodes, width): (usize, usize, usize),
    context: &DraftContext,
) -> Draft {
    let mut sampler = Sampler::new(SamplingParams::default(), tokens);
    let request = DraftRequest {
        nodes,
        width,
        model_length: 0,
        ..DraftRequest::chain(id, tokens, length, &mut sampler, context)
    };
    let drafts = tables.propose(&mut [request]).expect("no device, no error");
    drafts.into_iter().next().expect("one request, one draft")
}

/// A running request that the target answers with a given text.
struct TableRun<'a> {
    id: SeqId,
    tokens: Vec<u32>,
    prompt_len: usize,
    answer: &'a [u32],
    context: DraftContext,
    /// Depth, nodes, and children of a node.
    limits: (usize, usize, usize),
    /// The target's best next tokens after a token.
    best: fn(u32) -> Vec<u32>,
}

impl<'a> TableRun<'a> {
    fn new(id: SeqId, prompt: &[u32], answer: &'a [u32], context: DraftContext) -> Self {
        Self {
            id,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            answer,
            context,
            limits: (8, 15, 8),
            best: |_| Vec::new(),
        }
    }

    fn is_done(&self) -> bool {
        self.tokens.len() == self.prompt_len + self.answer.len()
    }

    fn observe(&self, tables: &mut Tables, new: Range<usize>, fed: &[u32]) {
        let candidates: Vec<_> = fed.iter().map(|&fed| (fed, (self.best)(fed))).collect();
        tables.observe(&[Committed {
            candidates: &candidates,
            ..Committed::new(self.id, &self.tokens, self.prompt_len, new, &self.context)
        }]);
    }

    /// The prompt's forward.
    fn prefill(&mut self, tables: &mut Tables) {
        let computed = self.tokens.len();
        let fed = self.tokens.clone();
        if let Some(first) = self.answer.get(computed - self.prompt_len) {
            self.tokens.push(*first);
        }
        self.observe(tables, 0..computed, &fed);
    }

    /// One step: draft, verify, commit. Returns the draft and how many of its tokens stood.
    fn step(&mut self, tables: &mut Tables) -> (Draft, usize) {
        let draft = propose(tables, self.id, &self.tokens, self.limits, &self.context);
        let pending = self.tokens.len() - 1;
        let mut fed = vec![self.tokens[pending]];
        fed.extend(&draft.tokens);
        let (mut node, mut stood) = (None, 0);
        while !self.is_done() {
            let token = self.answer[self.tokens.len() - self.prompt_len];
            self.tokens.push(token);
            let child = (0..draft.len())
                .find(|&child| draft.parents[child] == node && draft.tokens[child] == token);
            let Some(child) = child else { break };
            node = Some(child as u16);
            stood += 1;
        }
        self.observe(tables, pending..pending + 1 + stood, &fed);
        (draft, stood)
    }

    /// Runs to the end; returns how many draft tokens stood and the steps.
    fn finish(mut self, tables: &mut Tables) -> (usize, usize) {
        self.prefill(tables);
        let (mut stood, mut steps) = (0, 0);
        while !self.is_done() {
            stood += self.step(tables).1;
            steps += 1;
        }
        tables.end(self.id);
        (stood, steps)
    }
}

/// Shows that repeats go on, in scopes of their own.
fn learn_repeats(tables: &mut Tables) {
    for id in 1000..1040 {
        let text: Vec<u32> = [7, 8, 9].repeat(10);
        TableRun::new(id, &text[..3], &text[3..], scope(id)).finish(tables);
    }
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((self.0 >> 33) % u64::from(limit)) as u32
    }
}

/// Text in which each token has a usual successor, with exceptions in one of `rare` cases.
fn text(random: &mut Random, vocab: u32, rare: u32, len: usize) -> Vec<u32> {
    let mut text = vec![random.below(vocab)];
    while text.len() < len {
        let last = text[text.len() - 1];
        let usual = (last * 7 + 3) % vocab;
        let is_rare = random.below(rare) == 0;
        text.push(if is_rare { random.below(vocab) } else { usual });
    }
    text
}

#[test]
fn own_text_goes_on_as_before_also_in_cycles() {
    let mut tables = tables();
    let draft = propose(&mut tables, 1, &[1, 2, 3, 4, 5, 1, 2], (1, 4, 8), &scope(0));
    assert_eq!((draft.tokens, draft.sources), (vec![3], vec![Source::Own]));
    learn_repeats(&mut tables);
    let draft = propose(
        &mut tables,
        2,
        &[7, 8, 9].repeat(8)[..20],
        (7, 7, 8),
        &scope(0),
    );
    assert_eq!(
        draft.tokens,
        [9, 7, 8, 9, 7, 8, 9],
        "longer than the text has been so far"
    );
    assert!(draft.scores[6] > 0.5, "{:?}", draft.scores);
}

#[test]
fn the_pool_drafts_what_others_were_answered() {
    let mut tables = tables();
    let answer: Vec<u32> = (100..120).collect();
    assert_eq!(
        TableRun::new(1, &[1, 2], &answer, scope(0))
            .finish(&mut tables)
            .0,
        0
    );
    let draft = propose(&mut tables, 2, &[5, 100, 101], (4, 4, 8), &scope(0));
    assert_eq!(draft.tokens[0], 102);
    assert_eq!(draft.sources[0], Source::Pool);
    let prompt = propose(&mut tables, 3, &[1], (4, 4, 8), &scope(0));
    assert!(prompt.is_empty(), "prompts are not answers");
    let (stood, steps) = TableRun::new(4, &[1, 3], &answer, scope(0)).finish(&mut tables);
    assert!(stood >= 8 && steps < 12, "{stood} in {steps}");
}

#[test]
fn candidates_of_earlier_rows_are_drafted() {
    let mut tables = tables();
    let best = |fed| vec![fed + 1, fed + 50];
    let mut run = TableRun::new(1, &[1, 2, 3], &[4, 9, 4, 5], scope(0));
    run.best = best;
    run.prefill(&mut tables);
    let draft = propose(&mut tables, 2, &[77, 2], (3, 9, 8), &scope(0));
    assert_eq!((draft.tokens[0], draft.sources[0]), (3, Source::Recycled));
    assert!(draft.tokens.contains(&52), "the second best too: {draft:?}");
    let (draft, _) = run.step(&mut tables);
    assert!(draft.is_empty(), "4 was not fed yet: {draft:?}");
    let (_, _) = run.step(&mut tables);
    let (draft, _) = run.step(&mut tables);
    assert!(draft.tokens.contains(&5), "and now it was: {draft:?}");
}

#[test]
fn a_token_of_several_sources_is_one_node() {
    let mut tables = tables();
    tables.pool.add(Owner::Scope(0), &[1, 2, 3]);
    tables.pool.recycle(0, 2, &[3, 4]);
    let draft = propose(&mut tables, 1, &[1, 2, 3, 9, 1, 2], (1, 9, 8), &scope(0));
    assert_eq!(draft.tokens, [3, 4]);
    assert_eq!(draft.sources, [Source::Own, Source::Recycled]);
}

#[test]
fn a_prediction_is_drafted_for_its_request() {
    let mut tables = tables();
    let context = DraftContext {
        scope: CacheScope(0),
        prediction: (200..260).collect(),
        may_persist: false,
    };
    let mut answer: Vec<u32> = (200..260).collect();
    answer[30] = 7;
    let mut run = TableRun::new(1, &[1, 2, 3], &answer, context);
    run.prefill(&mut tables);
    let mut stood = 0;
    while !run.is_done() {
        let (draft, new) = run.step(&mut tables);
        assert!(
            draft
                .sources
                .iter()
                .all(|source| *source == Source::Prediction)
        );
        stood += new;
    }
    assert!(stood >= 40, "{stood} of 59");
    tables.end(1);
    // 230 was predicted after 229, and the answer was another.
    let answered = propose(&mut tables, 2, &[1, 229], (1, 4, 8), &scope(0));
    assert_eq!(answered.tokens, [7]);
    let predicted = propose(&mut tables, 3, &[1, 230], (1, 4, 8), &scope(0));
    assert!(predicted.is_empty(), "a prediction is no text of others");
}

#[test]
fn scopes_share_no_token() {
    let mut tables = tables();
    let secret: Vec<u32> = (500..540).collect();
    let mut run = TableRun::new(1, &[500, 501, 502], &secret, scope(1));
    run.best = |fed| vec![fed + 1, fed + 100];
    run.context.prediction = secret.clone().into();
    run.finish(&mut tables);
    for len in 1..secret.len() {
        let inside = propose(&mut tables, 2, &secret[..len], (8, 64, 8), &scope(1));
        assert!(!inside.is_empty(), "of the scope itself");
        let outside = propose(&mut tables, 3, &secret[..len], (8, 64, 8), &scope(2));
        assert!(outside.is_empty(), "{outside:?}");
        tables.forget(2);
        tables.forget(3);
    }
}

#[test]
fn a_corpus_is_shared_by_all() {
    let mut tables = tables();
    tables.preload(&[1, 2, 3, 4]);
    for id in 0..3 {
        let draft = propose(&mut tables, id, &[9, 2], (1, 2, 8), &scope(id));
        assert_eq!((draft.tokens, draft.sources), (vec![3], vec![Source::Pool]));
    }
}

#[test]
fn trees_keep_their_limits_and_the_best_comes_first() {
    let mut random = Random(9);
    for width in [1, 2, 8] {
        let mut tables = Tables::new(MEMORY);
        for id in 0..40 {
            let answer = text(&mut random, 20, 3, 60);
            let mut run = TableRun::new(id, &[1, 2, 3], &answer, scope(u64::from(random.below(3))));
            run.best = |fed| (0..8).map(|rank| (fed * 7 + 3 + rank) % 20).collect();
            run.prefill(&mut tables);
            while !run.is_done() {
                let (depth, nodes) = (1 + random.below(8) as usize, 1 + random.below(30) as usize);
                run.limits = (depth, nodes, width);
                let (draft, _) = run.step(&mut tables);
                assert!(draft.len() <= nodes);
                let mut children = vec![0; draft.len() + 1];
                let mut depths = vec![0; draft.len() + 1];
                for node in 0..draft.len() {
                    let parent = draft.parents[node].map_or(0, |parent| 1 + usize::from(parent));
                    assert!(parent <= node, "a parent comes first");
                    children[parent] += 1;
                    depths[node + 1] = depths[parent] + 1;
                    assert!(depths[node + 1] <= depth);
                    let above = draft.parents[node].map_or(1.0, |p| draft.scores[usize::from(p)]);
                    assert!(draft.scores[node] <= above && draft.scores[node] >= 0.02);
                    assert!(node == 0 || draft.scores[node] <= draft.scores[node - 1]);
                    let same = |other: &usize| {
                        (draft.parents[*other], draft.tokens[*other])
                            == (draft.parents[node], draft.tokens[node])
                    };
                    assert_eq!((0..draft.len()).find(same), Some(node), "siblings differ");
                }
                assert!(children.iter().all(|count| *count <= width));
            }
            tables.end(id);
        }
    }
}

#[test]
fn a_models_draft_goes_on_at_its_leaves() {
    let mut tables = tables();
    learn_repeats(&mut tables);
    let context = scope(0);
    let tokens = [7, 8, 9, 7];
    let mut sampler = Sampler::new(SamplingParams::default(), &tokens);
    let mut request = DraftRequest {
        nodes: 5,
        width: 8,
        model_length: 0,
        ..DraftRequest::chain(2, &tokens, 4, &mut sampler, &context)
    };
    let mut draft = Draft::default();
    draft.add(8, None, 0.9, Source::Model);
    draft.add(9, Some(0), 0.9, Source::Model);
    draft.add(5, None, 0.1, Source::Model);
    tables.extend(&request, &mut draft);
    assert_eq!(draft.tokens, [8, 9, 5, 7, 8]);
    assert_eq!(draft.parents, [None, Some(0), None, Some(1), Some(3)]);
    assert_eq!(draft.sources[3], Source::Own);
    assert!(
        draft.scores[3] < 0.9 && draft.scores[3] > 0.5,
        "{:?}",
        draft.scores
    );
    tables.extend(&request, &mut draft);
    assert_eq!(draft.len(), 5, "no room");
    draft.retain(&[true, true, true, false, false]);
    request.min_score = 0.95;
    tables.extend(&request, &mut draft);
    assert_eq!(draft.len(), 3, "not what the budget would prune");
}

#[test]
fn a_preempted_request_is_counted_once() {
    let mut tables = tables();
    let answer = [30, 31, 32, 33, 34, 35];
    let mut run = TableRun::new(1, &[1, 2, 3], &answer, scope(0));
    run.prefill(&mut tables);
    run.step(&mut tables);
    tables.forget(1);
    assert!(tables.requests.is_empty());
    let computed = run.tokens.len() - 1;
    run.observe(&mut tables, 0..2, &[]);
    run.observe(&mut tables, 2..computed, &[]);
    while !run.is_done() {
        run.step(&mut tables);
    }
    tables.end(1);
    for at in 0..4 {
        let [first, second, third] = [answer[at], answer[at + 1], answer[at + 2]];
        let found = tables.pool.guesses(0, &[second, first]);
        assert_eq!((found[0].token, found[0].count, found.len()), (third, 1, 1));
    }
    assert!(tables.requests.is_empty());
}

#[test]
fn strange_observations_are_survived() {
    let mut tables = tables();
    let mut run = TableRun::new(1, &[1, 2, 3], &[4, 5, 6], scope(0));
    run.prompt_len = 100;
    for (start, end) in [(0, 0), (5, 2), (0, 1000), (7, 7), (usize::MAX, usize::MAX)] {
        let new = start..end;
        run.observe(&mut tables, new, &[1]);
        propose(&mut tables, 1, &run.tokens, (3, 3, 8), &run.context);
        propose(&mut tables, 1, &run.tokens[..1], (3, 3, 8), &run.context);
    }
    propose(&mut tables, 2, &[], (3, 3, 8), &run.context);
    tables.end(1);
    tables.end(9);
    tables.forget(9);
}

#[test]
fn a_flood_of_requests_stays_within_the_memory() {
    let bytes = 200_000;
    let mut tables = Tables::new(bytes);
    let mut random = Random(11);
    for id in 0..3000 {
        let answer: Vec<u32> = (0..20).map(|_| random.below(100_000)).collect();
        let mut run = TableRun::new(id, &[1, 2, 3], &answer, scope(u64::from(random.below(500))));
        run.best = |fed| (fed..fed + 8).collect();
        run.finish(&mut tables);
        tables.check_invariants().expect("within the memory");
        assert!(tables.requests.is_empty());
    }
    assert!(tables.pool.bytes() > bytes / 4);
}
