//! A fault costs as little as possible: a draft, a request, a step, and only in the last resort the
//! engine.

use crate::common::hooked::{edited, watched};
use crate::common::*;
use crate::engine::{Dice, is_lossless, submit_in_groups};
use foretoken::engine::{
    self, CollectedEvents, EndObserver, EngineHandle, EngineOptions, Events, Request, SequenceEnd,
};
use foretoken::error::{Error, RequestErrorKind, Result};
use foretoken::model::Model;
use foretoken::model::toy::ToyModel;
use foretoken::sampling::{SamplingParams, mix};
use foretoken::spec::{DraftModel, Drafter};
use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

const BLOCKS: usize = 128;
const BLOCK_SIZE: usize = 4;

/// A toy that calls `before` before each forward with its number, from 0.
fn faulty(
    toy: ToyModel,
    mut before: impl FnMut(usize) -> Result<()> + Send + 'static,
) -> Box<dyn Model> {
    let mut forwards = 0..;
    watched(toy, move |_| before(forwards.next().unwrap()))
}

/// A toy whose rows of `token` have a NaN among their logits.
fn poisoned(token: u32, noise: f32) -> Box<dyn Model> {
    edited(toy_model(noise), move |batch, row, logits| {
        if batch.tokens[row] == token {
            logits[row % VOCAB] = f32::NAN;
        }
    })
}

fn draft_of(model: Box<dyn Model>) -> Box<dyn Drafter> {
    Box::new(DraftModel::new(model, BLOCKS, BLOCK_SIZE, 64).unwrap())
}

pub fn options() -> EngineOptions {
    Toy::default().options
}

pub fn start(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    options: EngineOptions,
) -> EngineHandle {
    engine::spawn(target, drafter, BLOCKS, BLOCK_SIZE, options).unwrap()
}

/// The generated ids and, if the request failed, the error.
pub fn outcome(mut events: Events) -> (Vec<u32>, Option<Error>) {
    let mut completion = CollectedEvents::default();
    while completion.finish.is_none() {
        let event = events.blocking_recv().expect("a last event");
        if let Err(error) = completion.add(event) {
            return (completion.ids(), Some(error));
        }
    }
    (completion.ids(), None)
}

fn finished(engine: &EngineHandle, reason: &str) -> u64 {
    let finished = &engine.stats().requests_finished;
    finished.with_label_values(&[reason]).get()
}

/// Everything this process logs after the first access.
static LOG: LazyLock<Arc<Mutex<Vec<u8>>>> = LazyLock::new(|| {
    struct Writer(Arc<Mutex<Vec<u8>>>);
    impl Write for Writer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = Arc::<Mutex<Vec<u8>>>::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::WARN)
        .with_writer(move || Writer(writer.clone()))
        .init();
    log
});

/// Number of log lines that contain `text`.
fn logged(text: &str) -> usize {
    let log = String::from_utf8(LOG.lock().unwrap().clone()).unwrap();
    log.lines().filter(|line| line.contains(text)).count()
}

fn prompts() -> Vec<Vec<u32>> {
    (0..10u64)
        .map(|i| {
            let len = 1 + mix(i) % 30;
            (0..len).map(|at| (mix(100 * i + at) % 4) as u32).collect()
        })
        .collect()
}

/// Seeded sampling parameters that include penalties, which depend on the text.
fn penalized(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 0.8,
        top_p: 0.9,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        logit_bias: vec![(30, 2.0), (2, -1.0)],
        seed,
        ..Default::default()
    }
}

/// A drafter that fails again and again in the middle of drafts, while its sequences have tokens in
/// its pool.
#[test]
fn a_drafter_that_fails_costs_its_draft_and_one_warning() {
    LazyLock::force(&LOG);
    let before = |forward: usize| match forward % 31 {
        5 | 17 => Err(Error::internal("the draft's device sneezes")),
        _ => Ok(()),
    };
    let draft = draft_of(faulty(toy_model(0.3), before));
    let engine = start(Box::new(toy_model(0.0)), Some(draft), options());
    let requests: Vec<Request> = prompts().iter().map(|p| greedy(p, 40)).collect();
    let receivers = engine.submit_all(requests.clone()).unwrap();
    let mut accepted = 0;
    for (request, receiver) in requests.iter().zip(receivers) {
        let answer = collect(receiver);
        assert_eq!(answer.ids(), reference(&mut toy_model(0.0), request));
        accepted += answer.spec.accepted;
    }
    assert!(
        accepted > 20,
        "only {accepted} accepted: it failed too often"
    );
    assert_idle(&engine);
    assert_eq!(logged("the draft's device sneezes"), 1);
}

/// Texts without drafts equal those of plain decoding, also when sampled.
#[test]
fn a_drafter_that_always_fails_is_none() {
    let before = |_: usize| Err(Error::internal("no draft's device"));
    let draft = draft_of(faulty(toy_model(0.3), before));
    let engine = start(Box::new(toy_model(0.0)), Some(draft), options());
    for (seed, prompt) in (0..).zip(&prompts()) {
        let request = Request {
            params: penalized(seed),
            ..greedy(prompt, 30)
        };
        let answer = run(&engine, request.clone());
        assert_eq!(answer.ids(), reference(&mut toy_model(0.0), &request));
        assert_eq!(answer.spec.drafted, 0);
    }
    assert_idle(&engine);
}

/// A target with 32 ids and a draft model with 24 of them: a sequence with another id in its context
/// gets no drafts, other sequences still do, and the draft model ignores biases of ids it lacks.
#[test]
fn ids_beyond_the_drafts_vocabulary_end_its_context() {
    let draft = || {
        let model = ToyModel::new(24, MAX_LEN, SEED, 0.0);
        draft_of(Box::new(model))
    };
    let engine = start(Box::new(toy_model(0.0)), Some(draft()), options());
    // Keeps every text within the 24 ids, except those biased toward 30.
    let within: Vec<(u32, f32)> = (24..32).map(|id| (id, -100.0)).collect();
    let request = |prompt: &[u32], bias: &[(u32, f32)], temperature, seed| Request {
        params: SamplingParams {
            temperature,
            seed,
            logit_bias: bias.to_vec(),
            frequency_penalty: 0.2,
            ..Default::default()
        },
        ..greedy(prompt, 30)
    };
    let toward_30 = [&within[..6], &[(30, 3.0)]].concat();
    let mut requests = Vec::new();
    for (seed, prompt) in (0..).zip(&prompts()) {
        for temperature in [0.0, 1.0] {
            let unknown = [&prompt[..], &[30, 2]].concat();
            requests.push((true, request(prompt, &within, temperature, seed)));
            requests.push((false, request(&unknown, &within, temperature, seed)));
            requests.push((true, request(prompt, &toward_30, temperature, seed)));
        }
    }
    let all = requests.iter().map(|(_, request)| request.clone());
    let receivers = engine.submit_all(all.collect()).unwrap();
    let (mut drafted, mut left) = (0, 0);
    for ((known, request), receiver) in requests.iter().zip(receivers) {
        let answer = collect(receiver);
        let plain = !known || request.params.is_greedy();
        if plain {
            let want = reference(&mut toy_model(0.0), request);
            assert_eq!(answer.ids(), want, "{request:?}");
        } else {
            // Compare with the same request alone.
            let alone = start(Box::new(toy_model(0.0)), Some(draft()), options());
            assert_eq!(answer.ids(), run(&alone, request.clone()).ids());
        }
        if *known {
            drafted += answer.spec.drafted;
            left += usize::from(answer.ids().contains(&30));
        } else {
            assert_eq!(answer.spec.drafted, 0, "{request:?}");
        }
    }
    assert!(drafted > 300, "only {drafted} drafted");
    assert!(left > 5, "only {left} texts left the draft's vocabulary");
    assert_idle(&engine);
}

/// The other way around: an id outside the target's vocabulary is never drafted.
#[test]
fn ids_beyond_the_targets_vocabulary_end_a_draft() {
    let target = || Box::new(ToyModel::new(24, MAX_LEN, SEED, 0.0));
    let engine = start(
        target(),
        Some(draft_of(Box::new(toy_model(0.0)))),
        options(),
    );
    for prompt in prompts() {
        let answer = run(&engine, greedy(&prompt, 40));
        assert_eq!(
            answer.ids(),
            reference(&mut *target(), &greedy(&prompt, 40))
        );
    }
    assert_idle(&engine);
}

/// A request whose target logits have NaN fails and keeps the tokens it already sent; the other
/// requests of the step continue.
#[test]
fn logits_that_are_not_finite_fail_their_request_alone() {
    const POISON: u32 = 17;
    for drafter in [
        None,
        Some(draft_of(Box::new(toy_model(0.3)))),
        Some(draft_of(poisoned(9, 0.3))),
    ] {
        let drafts = drafter.is_some();
        let engine = start(poisoned(POISON, 0.0), drafter, options());
        let mut requests: Vec<Request> = prompts().iter().map(|p| greedy(p, 25)).collect();
        requests.push(greedy(&[1, POISON], 5));
        requests.push(greedy(&[1, POISON, 2], 5));
        let receivers = engine.submit_all(requests.clone()).unwrap();
        let mut failures = 0;
        for (request, receiver) in requests.iter().zip(receivers) {
            let whole = reference(&mut toy_model(0.0), request);
            let until = whole.iter().position(|&id| id == POISON);
            let last = request.prompt.last() == Some(&POISON);
            let (ids, error) = outcome(receiver);
            match until.filter(|&at| at + 1 < whole.len()) {
                _ if last => assert!(ids.is_empty()),
                // Tokens that the failed step had accepted are lost.
                Some(at) => assert!(ids == whole[..ids.len()] && ids.len() <= at + 1),
                None => assert_eq!(ids, whole),
            }
            let fails = last || until.is_some_and(|at| at + 1 < whole.len());
            assert_eq!(error.is_some(), fails, "{request:?}: {error:?}");
            if let Some(error) = error {
                failures += 1;
                assert!(matches!(&error, Error::Internal(_)), "{error:?}");
                assert_eq!(error.to_string(), "the model's logits are not finite");
            }
        }
        assert!((2..requests.len() as u64).contains(&failures), "{failures}");
        assert_eq!(engine.stats().nonfinite_logits.get(), failures);
        assert_eq!(finished(&engine, "error"), failures);
        assert_idle(&engine);
        assert_eq!(engine.stats().spec_draft_tokens.get() > 0, drafts);
    }
}

/// Non-finite logits give no log-probabilities of a prompt either.
#[test]
fn prompt_scores_that_are_not_finite_fail_their_request() {
    let engine = start(poisoned(17, 0.0), None, options());
    let request = |prompt: &[u32]| Request {
        prompt_logprobs: Some(1),
        ..greedy(prompt, 3)
    };
    let (_, error) = outcome(engine.submit(request(&[1, 17, 2])).unwrap());
    let expected = "the model's logits are not finite";
    assert_eq!(error.unwrap().to_string(), expected);
    assert_eq!(run(&engine, request(&[1, 2])).prompt.len(), 2);
    assert_idle(&engine);
}

/// A draft model that sometimes gives NaN has shorter drafts, without any other effect.
#[test]
fn a_draft_that_is_not_finite_ends() {
    let engine = start(
        Box::new(toy_model(0.0)),
        Some(draft_of(poisoned(9, 0.2))),
        options(),
    );
    let mut accepted = 0;
    for prompt in prompts() {
        let request = greedy(&prompt, 40);
        let answer = run(&engine, request.clone());
        assert_eq!(answer.ids(), reference(&mut toy_model(0.0), &request));
        accepted += answer.spec.accepted;
    }
    assert!(accepted > 20, "{accepted}");
    assert_eq!(engine.stats().nonfinite_logits.get(), 0);
    assert_idle(&engine);
}

#[test]
fn a_request_that_forbids_every_token_is_told_so() {
    let engine = Toy::default().start();
    let nothing: Vec<(u32, f32)> = (0..VOCAB as u32)
        .map(|id| (id, f32::NEG_INFINITY))
        .collect();
    for temperature in [0.0, 1.0] {
        for (bias, stop, min_tokens) in
            [(nothing.clone(), vec![], 0), (vec![], (0..32).collect(), 2)]
        {
            let mut request = greedy(&[1, 2], 5);
            request.params.temperature = temperature;
            request.params.logit_bias = bias;
            request.params.stop_token_ids = stop;
            request.params.min_tokens = min_tokens;
            let (ids, error) = outcome(engine.submit(request).unwrap());
            let Some(Error::Request { kind, message, .. }) = error else {
                panic!("{error:?}")
            };
            assert_eq!((kind, ids.len()), (RequestErrorKind::Invalid, 0));
            assert!(message.contains("leave no token"), "{message}");
        }
    }
    assert_eq!(engine.stats().nonfinite_logits.get(), 0);
    assert_idle(&engine);
}

/// Promises 4, 6 and 7 over random schedules with faults: a forward of the target errs, panics or is slow, and
/// so does a draft model's. A request gets the tokens of the reference, up to its error if it was in a
/// step of the target that failed; and in the end every block is free.
#[test]
fn random_schedules_with_faults_cost_only_those_who_were_in_them() {
    let (mut failed, mut whole) = (0, 0);
    for case in 0..150 {
        let mut dice = Dice(9_000_000 + case);
        let toy = dice.toy();
        let faults = |salt: u64, rare: usize| {
            let mut dice = Dice(10_000_000 + 2 * case + salt);
            move |_: usize| match dice.roll(rare) {
                0 => Err(Error::internal("as the test wants")),
                1 => panic!("as the test wants"),
                2 => {
                    std::thread::sleep(Duration::from_micros(300));
                    Ok(())
                }
                _ => Ok(()),
            }
        };
        let target = faulty(toy_model(0.0).with_eos(&toy.eos), faults(0, 60));
        let draft = DraftModel::new(
            faulty(toy_model(0.3), faults(1, 12)),
            toy.num_blocks,
            toy.block_size,
            16,
        );
        let drafter: Box<dyn Drafter> = Box::new(draft.unwrap());
        let engine = engine::spawn(
            target,
            Some(drafter),
            toy.num_blocks,
            toy.block_size,
            toy.options.clone(),
        );
        let engine = engine.unwrap();
        let requests: Vec<Request> = (0..12)
            .map(|_| dice.request(toy.options.spec.length))
            .collect();
        let receivers = submit_in_groups(&mut dice, &engine, &requests);
        for (request, receiver) in requests.iter().zip(receivers) {
            let Some(receiver) = receiver else { continue };
            let (ids, error) = outcome(receiver);
            let want = reference(&mut toy_model(0.0).with_eos(&toy.eos), request);
            failed += usize::from(error.is_some());
            whole += usize::from(error.is_none());
            if is_lossless(request) {
                let upto = if error.is_some() {
                    ids.len()
                } else {
                    want.len()
                };
                assert_eq!(ids, want[..upto], "case {case}: {request:?}");
            }
        }
        assert_idle(&engine);
    }
    assert!(
        failed > 100 && whole > 500,
        "{failed} failed, {whole} did not"
    );
}

/// A forward of the target panics: the requests of that step fail, and the engine continues with the
/// others, whose texts are complete.
#[test]
fn a_step_that_panics_fails_those_who_were_in_it() {
    let panics = |forward: usize| match forward {
        5 => panic!("as the test wants"),
        _ => Ok(()),
    };
    for drafter in [None, Some(draft_of(Box::new(toy_model(0.3))))] {
        let mut options = options();
        options.max_num_seqs = 3;
        let target = toy_model(0.0);
        let gate = target.gate.clone();
        let engine = start(faulty(target, panics), drafter, options);
        let requests: Vec<Request> = prompts().iter().map(|p| greedy(p, 40)).collect();
        // All requests are queued before the first step ends.
        let closed = gate.lock().unwrap();
        let receivers = engine.submit_all(requests.clone()).unwrap();
        drop(closed);
        let mut failures = 0;
        for (request, receiver) in requests.iter().zip(receivers) {
            let want = reference(&mut toy_model(0.0), request);
            let (ids, error) = outcome(receiver);
            match error {
                None => assert_eq!(ids, want),
                Some(error) => {
                    failures += 1;
                    assert_eq!(ids, want[..ids.len()]);
                    let text = error.to_string();
                    assert!(text.ends_with("panicked: as the test wants"), "{text}");
                }
            }
        }
        assert_eq!(failures, 3, "as many as run at a time");
        assert_eq!(finished(&engine, "error"), 3);
        assert_idle(&engine);
        let request = greedy(&[3, 1], 20);
        let want = reference(&mut toy_model(0.0), &request);
        assert_eq!(run(&engine, request).ids(), want);
    }
}

/// Panics when it is told of the end.
#[derive(Debug)]
struct Shocked;

impl EndObserver for Shocked {
    fn ended(&self, _: SequenceEnd) {
        panic!("as the test wants");
    }
}

#[test]
fn a_watch_that_panics_costs_nobody_anything() {
    let engine = start(Box::new(toy_model(0.0)), None, options());
    let requests = prompts().into_iter().map(|prompt| Request {
        watch: Some(Arc::new(Shocked)),
        ..greedy(&prompt, 20)
    });
    let requests: Vec<Request> = requests.collect();
    let receivers = engine.submit_all(requests.clone()).unwrap();
    for (request, receiver) in requests.iter().zip(receivers) {
        let want = reference(&mut toy_model(0.0), request);
        assert_eq!(collect(receiver).ids(), want);
    }
    assert_idle(&engine);
}
