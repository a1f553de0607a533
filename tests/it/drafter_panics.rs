//! A drafter's panic costs drafts: no text, no request, no block.

use crate::common::*;
use foretoken::engine::{self, EngineHandle, Request};
use foretoken::error::Result;
use foretoken::model::Model;
use foretoken::sampling::{Acceptance, SamplingParams};
use foretoken::spec::{
    BudgetMode, CacheScope, Committed, Draft, DraftModel, DraftPool, DraftRequest, Drafter,
    Forecast, SeqId,
};
use std::sync::atomic::{AtomicUsize, Ordering};

const BLOCKS: usize = 48;
const BLOCK_SIZE: usize = 4;

/// A draft model that panics in one of its calls, after `left` of them went well.
struct Panicking {
    model: DraftModel,
    call: &'static str,
    left: AtomicUsize,
}

const CALLS: [&str; 10] = [
    "propose",
    "forecast",
    "pool",
    "taps",
    "candidates",
    "resume",
    "observe",
    "forget",
    "end",
    "check_invariants",
];

impl Panicking {
    fn at(&self, call: &str) {
        if self.call == call && self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            panic!("in {call}, as the test wants");
        }
    }
}

impl Drafter for Panicking {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let drafts = self.model.propose(requests);
        // What a drafter pushes it may leave there.
        requests[0].sampler.push(1);
        self.at("propose");
        drafts
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        self.at("forecast");
        self.model.forecast(request)
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        self.at("pool");
        self.model.pool()
    }

    fn taps(&mut self) -> &[usize] {
        self.at("taps");
        self.model.taps()
    }

    fn candidates(&self) -> usize {
        self.at("candidates");
        self.model.candidates()
    }

    fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        self.at("resume");
        self.model.resume(id, tokens, scope, len)
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        self.at("observe");
        self.model.observe(committed);
    }

    fn forget(&mut self, id: SeqId) {
        self.at("forget");
        self.model.forget(id);
    }

    fn end(&mut self, id: SeqId) {
        self.at("end");
        self.model.end(id);
    }

    fn check_invariants(&mut self) -> Result<(), String> {
        self.at("check_invariants");
        self.model.check_invariants()
    }
}

/// An engine whose drafter panics in the `nth` of its calls of this name, from 0.
fn start(call: &'static str, nth: usize) -> EngineHandle {
    let model: Box<dyn Model> = Box::new(toy_model(0.3));
    let drafter = Panicking {
        model: DraftModel::new(model, BLOCKS, BLOCK_SIZE, 64).unwrap(),
        call,
        left: AtomicUsize::new(nth),
    };
    let mut options = Toy::default().options;
    options.spec_budget = BudgetMode::Adaptive;
    options.calibrate = true;
    let drafter: Option<Box<dyn Drafter>> = Some(Box::new(drafter));
    let target = Box::new(toy_model(0.0));
    engine::spawn(target, drafter, BLOCKS, BLOCK_SIZE, options).unwrap()
}

/// Requests that together need more blocks than there are.
fn requests() -> Vec<Request> {
    let params = |seed: u64| SamplingParams {
        temperature: (seed % 2) as f32,
        frequency_penalty: 0.3,
        seed,
        ..SamplingParams::default()
    };
    let request = |seed: u64| Request {
        params: params(seed),
        acceptance: Some(Acceptance::Coupled),
        ..greedy(&[1, 2, 3, 1, 2, 3, 1, seed as u32], 40)
    };
    (0..12).map(request).collect()
}

fn reset_prefix_cache(engine: &EngineHandle) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let done = runtime.unwrap().block_on(engine.reset_prefix_cache());
    done.expect("the engine goes on");
}

/// Whatever the drafter was doing: every text is the target's own, no request fails, all blocks come back, and
/// from then on the drafter is off.
#[test]
fn a_drafter_that_panics_costs_its_drafts() {
    for (call, nth) in CALLS.iter().flat_map(|&call| [(call, 0), (call, 3)]) {
        let engine = start(call, nth);
        let once = ["taps", "candidates"].contains(&call);
        let panics = i64::from(nth == 0 || !once);
        let mut rounds = 0;
        // How often the budget asks for drafts depends on how fast this machine is at the moment.
        while rounds < 2 || rounds < 100 && engine.stats().drafter_off.get() < panics {
            rounds += 1;
            let receivers = engine.submit_all(requests()).unwrap();
            for (request, receiver) in requests().iter().zip(receivers) {
                let want = reference(&mut toy_model(0.0), request);
                assert_eq!(collect(receiver).ids(), want, "{call} {nth}");
            }
            assert_idle(&engine);
            reset_prefix_cache(&engine);
        }
        let stats = engine.stats();
        assert!(stats.preemptions.get() > 0, "{call} {nth}");
        assert_eq!(stats.drafter_off.get(), panics, "{call} {nth}");
        let drafted = stats.spec_draft_tokens.get();
        run(&engine, requests().remove(0));
        let goes_on = engine.stats().spec_draft_tokens.get() > drafted;
        assert!(panics == 0 || !goes_on, "{call} {nth}: it drafted again");
    }
}
