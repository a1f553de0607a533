//! Draft trees through the whole engine: the generated text does not depend on the tree.

use crate::common::*;
use crate::engine::{Dice, assert_distributed_as_the_target, few_ids, is_lossless};
use foretoken::engine::{self, EngineHandle, EngineOptions, Request, SpecLimits};
use foretoken::error::Result;
use foretoken::model::Model;
use foretoken::sampling::{Acceptance, Dist, Purpose, Rng, choose, distribution, mix};
use foretoken::spec::{Draft, DraftRequest, Drafter, Source};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Drafts random trees and chains that depend on the tokens alone: some nodes are drawn from the
/// target itself, some are random ids, and some are drawn from a model that is often wrong.
pub struct RandomTrees {
    target: Box<dyn Model>,
    noisy: Box<dyn Model>,
    /// Logits by model (true = the target) and context.
    known: HashMap<(bool, Vec<u32>), Vec<f32>>,
    /// Number of drafts with branches.
    pub branched: Arc<AtomicUsize>,
}

impl RandomTrees {
    /// Most nodes are drawn from `noisy`.
    pub fn new(target: Box<dyn Model>, noisy: Box<dyn Model>) -> Self {
        Self {
            target,
            noisy,
            known: HashMap::new(),
            branched: Arc::default(),
        }
    }

    fn logits(&mut self, is_target: bool, context: &[u32]) -> &[f32] {
        let Self { target, noisy, .. } = self;
        let model = if is_target { target } else { noisy };
        let known = self.known.entry((is_target, context.to_vec()));
        known.or_insert_with(|| last_logits(model.as_mut(), context))
    }

    fn draft(&mut self, request: &mut DraftRequest<'_>) -> Draft {
        let hash = |hash: u64, &id: &u32| mix(hash ^ u64::from(id));
        let mut dice = Dice(request.tokens.iter().fold(1, hash));
        let rng = Rng::at(request.sampler.params().seed, request.tokens.len());
        let is_chain = dice.roll(4) == 0;
        let mut draft = Draft::default();
        // Sometimes more nodes than requested; the engine cuts them off.
        for node in 0..dice.roll(request.nodes + 3) {
            let parent = match is_chain {
                true => node.checked_sub(1),
                false => dice.roll(node + 1).checked_sub(1),
            };
            let kind = dice.roll(4);
            let wrong = dice.roll(self.target.info().vocab_size) as u32;
            let siblings = draft.parents.iter();
            let parent_id = parent.map(|parent| parent as u16);
            let lane = siblings.filter(|&&other| other == parent_id).count();
            let path = draft.path_tokens(parent);
            let context = [request.tokens, &path].concat();
            let logits = self.logits(kind == 1, &context);
            let (q, drawn) = request.sampler.after(&path, |sampler| {
                let q = distribution(logits, sampler);
                (q, choose(logits, sampler, rng.key(path.len())))
            });
            let (Ok(q), Ok(drawn)) = (q, drawn) else {
                assert!(request.sampler.has_grammar() && !path.is_empty());
                // After a token that the grammar does not allow, it allows none.
                break;
            };
            let drawn = match request.acceptance {
                Acceptance::Rejection => q.sample(rng.uniform(path.len(), Purpose::Draft, lane)),
                Acceptance::Coupled => drawn,
            };
            let (token, q) = match kind {
                0 => (wrong, Dist::Point(wrong)),
                1 => (drawn, Dist::Point(drawn)),
                _ => (drawn, q),
            };
            draft.add(token, parent_id, 0.5, Source::Model);
            if request.acceptance == Acceptance::Rejection {
                draft.dists.push(q.into());
            }
        }
        self.branched
            .fetch_add(usize::from(!draft.is_chain()), Ordering::Relaxed);
        draft
    }
}

impl Drafter for RandomTrees {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        Ok(requests.iter_mut().map(|r| self.draft(r)).collect())
    }
}

fn trees() -> RandomTrees {
    RandomTrees::new(Box::new(toy_model(0.0)), Box::new(toy_model(0.5)))
}

fn start(toy: &Toy, drafter: RandomTrees) -> EngineHandle {
    let target = Box::new(toy_model(0.0).with_eos(&toy.eos));
    let drafter = Some(Box::new(drafter) as Box<dyn Drafter>);
    engine::spawn(
        target,
        drafter,
        toy.num_blocks,
        toy.block_size,
        EngineOptions {
            spec: SpecLimits {
                nodes: 6,
                topk: 3,
                ..toy.options.spec
            },
            ..toy.options.clone()
        },
    )
    .unwrap()
}

/// As with chains: over thousands of rounds, beside other requests, with chunks, preemption and too
/// few blocks, a request, greedy or sampled, generates the tokens of the reference, which uses no
/// engine. A commit that does not move K and V fails at once.
#[test]
fn random_schedules_with_trees_are_lossless_and_leak_nothing() {
    let (mut preemptions, mut rounds, mut accepted) = (0, 0, 0);
    let mut branched = 0;
    for case in 0..150 {
        let mut dice = Dice(1_000_000 + case);
        let toy = Toy {
            eos: vec![5],
            ..dice.toy()
        };
        let drafter = trees();
        let count = drafter.branched.clone();
        let engine = start(&toy, drafter);
        let roomy = Toy {
            num_blocks: 512,
            ..toy.clone()
        };
        let roomy = start(&roomy, trees());
        let requests: Vec<Request> = (0..12)
            .map(|_| dice.request(toy.options.spec.length))
            .collect();
        let receivers = engine.submit_all(requests.clone()).unwrap();
        for (request, receiver) in requests.into_iter().zip(receivers) {
            let answer = collect(receiver);
            let alone = run(&roomy, request.clone());
            let what = format!("case {case}: {request:?} on {toy:?}");
            assert_eq!(answer.prompt, alone.prompt, "{what}");
            if is_lossless(&request) {
                assert_eq!(answer.tokens, alone.tokens, "{what}");
                assert_eq!(answer.finish, alone.finish, "{what}");
                let mut model = toy_model(0.0).with_eos(&toy.eos);
                assert_eq!(answer.ids(), reference(&mut model, &request), "{what}");
            }
            rounds += answer.spec.rounds;
            accepted += answer.spec.accepted;
        }
        assert_idle(&engine);
        assert_idle(&roomy);
        preemptions += engine.stats().preemptions.get();
        branched += count.load(Ordering::Relaxed);
    }
    let seen =
        format!("{preemptions} preemptions, {rounds} rounds, {accepted} accepted, {branched}");
    assert!(preemptions > 30 && rounds > 4000, "{seen}");
    assert!(accepted > 2000 && branched > 2000, "{seen}");
}

/// A token's log-probabilities come from the row of its parent, wherever that row is.
#[test]
fn logprobs_do_not_depend_on_trees() {
    let request = Request {
        logprobs: Some(2),
        ..greedy(&[4, 5], 100)
    };
    let plain = Toy::guessing(Guess::Nothing);
    let plain = run(&plain.start(), request.clone());
    let answer = run(&start(&Toy::default(), trees()), request);
    assert!(answer.spec.accepted > 10, "{:?}", answer.spec);
    assert_eq!(answer.tokens, plain.tokens);
}

/// The coupled rule, and SpecInfer's rule (siblings, most of them drawn from q, each tested against
/// what the previous one left of p), through the whole engine.
#[test]
fn tokens_sampled_with_trees_are_distributed_as_the_target() {
    for acceptance in [Acceptance::Coupled, Acceptance::Rejection] {
        let drafter = RandomTrees::new(Box::new(few_ids(0.0)), Box::new(few_ids(0.6)));
        assert_distributed_as_the_target(Box::new(drafter), 6, acceptance);
    }
}

/// Decisions are counted by the rank of the draft token among its siblings.
#[test]
fn ranks_of_siblings_are_counted() {
    let mut toy = Toy::guessing(Guess::Tables);
    toy.options.spec = tree_limits(4, 12, 4);
    let engine = toy.start();
    let (mut all, mut later) = (0, 0);
    for seed in 0..20 {
        let mut request = sampled(&[1, 2, 3], 100, seed);
        if seed % 2 == 1 {
            request.acceptance = Some(Acceptance::Rejection);
        }
        let spec = run(&engine, request).spec;
        assert_eq!(spec.ranks[0].tested, spec.tested);
        let accepted = spec.ranks.iter().map(|rank| rank.accepted);
        assert_eq!(accepted.sum::<usize>(), spec.accepted);
        let tested = spec.ranks.map(|rank| rank.tested);
        assert!(tested.is_sorted_by(|a, b| a >= b), "{tested:?}");
        all += tested[0];
        later += spec.ranks[1..]
            .iter()
            .map(|rank| rank.accepted)
            .sum::<usize>();
        assert!(tested[1] > 0);
    }
    assert!(all > 500 && later > 5, "{all}, {later}");
}
