//! The engine on toy models: it is lossless under any mix of requests, leaks nothing and keeps its limits.

use crate::common::grammar::{grammars, thoughts};
use crate::common::*;
use foretoken::engine::{EngineHandle, EngineOptions, Events, Request, StepLimits};
use foretoken::sampling::{Acceptance, Grammar, Mask, SamplingParams, ThoughtLimit, mix};
use foretoken::spec::BudgetMode;
use std::sync::Arc;

/// Random numbers for building test cases.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % below as u64) as usize
    }

    pub fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.roll(choices.len())].clone()
    }

    pub fn prompt(&mut self, longest: usize) -> Vec<u32> {
        // A small alphabet, so that n-grams repeat.
        (0..1 + self.roll(longest))
            .map(|_| self.roll(4) as u32)
            .collect()
    }

    pub fn params(&mut self) -> SamplingParams {
        let few = Arc::new(Mask::of(&[0, 1, 2, 3, 4, 5, 7, 20, 31]));
        let words = vec![vec![2], vec![3, 1], vec![0, 0, 1], vec![7, 7]];
        SamplingParams {
            temperature: self.of(&[0.0, 0.0, 0.7, 1.0]),
            top_k: self.of(&[0, 0, 5]),
            top_p: self.of(&[1.0, 1.0, 0.8]),
            min_p: self.of(&[0.0, 0.0, 0.1]),
            repetition_penalty: self.of(&[1.0, 1.0, 1.3]),
            presence_penalty: self.of(&[0.0, 0.0, 0.5]),
            frequency_penalty: self.of(&[0.0, 0.0, 0.5]),
            logit_bias: self.of(&[vec![], vec![], vec![(3, 2.0), (4, -5.0)]]),
            seed: self.roll(1000) as u64,
            min_tokens: self.of(&[0, 0, 6]),
            ignore_eos: self.roll(2) == 0,
            stop_token_ids: self.of(&[vec![], vec![7]]),
            allowed: self.of(&[None, None, None, Some(few)]),
            bad_words: self.of(&[vec![], vec![], words]).into(),
            grammar: None,
            thought: None,
        }
    }

    /// The grammar of every third request.
    pub fn grammar(&mut self) -> Option<Grammar> {
        let grammar = self.of(grammars());
        (self.roll(3) == 0).then_some(grammar)
    }

    /// The limit on the thought of every second request. It takes no number, so that what follows is the same.
    pub fn thought(&self) -> Option<ThoughtLimit> {
        let mut dice = Self(self.0 ^ 0x7468_6f75);
        let limit = ThoughtLimit {
            marks: dice.of(thoughts()),
            max_tokens: dice.roll(9),
            is_open: dice.roll(4) > 0,
        };
        (dice.roll(2) == 0).then_some(limit)
    }

    pub fn request(&mut self, spec_length: usize) -> Request {
        let prompt_logprobs = self.of(&[None, None, None, Some(2)]);
        let mut request = Request {
            prompt: self.prompt(40),
            params: self.params(),
            max_tokens: Some(1 + self.roll(24)),
            logprobs: self.of(&[None, Some(1)]),
            prompt_logprobs,
            spec_length: self.of(&[None, None, Some(0), Some(1), Some(spec_length)]),
            synthetic_acceptance: self.of(&[None, None, None, Some(0.6)]),
            acceptance: self.of(&[None, None, None, Some(Acceptance::Rejection)]),
            ..Request::default()
        };
        // Tokens that nobody verified follow no grammar.
        let grammar = self.grammar();
        request.params.grammar = grammar.filter(|_| request.synthetic_acceptance.is_none());
        if request.params.grammar.is_some() {
            // Together they may leave no token.
            (request.params.allowed, request.params.bad_words) = (None, Arc::default());
        }
        request
    }

    /// An engine that usually runs short of blocks, rows and sequence slots.
    pub fn toy(&mut self) -> Toy {
        let spec_length = 1 + self.roll(5);
        let max_num_seqs = 1 + self.roll(6);
        let block_size = 1 + self.roll(5);
        Toy {
            guess: self.of(&[
                Guess::Ngram,
                Guess::Lookahead,
                Guess::Toy(0.0),
                Guess::Toy(0.4),
                Guess::Toy(1.0),
            ]),
            num_blocks: (70 + self.roll(100)).div_ceil(block_size),
            block_size,
            eos: vec![5],
            interruptions: None,
            options: EngineOptions {
                max_num_seqs,
                max_num_batched_tokens: 1 + self.roll(50),
                spec: tree_limits(spec_length, 1 + self.roll(12), 1 + self.roll(4)),
                spec_budget: self.of(&[BudgetMode::Fixed, BudgetMode::Adaptive]),
                step_limits: StepLimits {
                    scored_rows: 1 + self.roll(12),
                    draft_rows: 1 + self.roll(12),
                    looks: 1 + self.roll(4),
                },
                ..EngineOptions::default()
            },
        }
    }
}

/// Whether the text of `request` is a function of the request alone.
pub fn is_lossless(request: &Request) -> bool {
    let coupled = request.acceptance.unwrap_or_default() == Acceptance::Coupled;
    request.synthetic_acceptance.is_none() && (coupled || request.params.is_greedy())
}

/// Submits the requests, one to five at a time. Some clients, whose events are `None`, disconnect at once.
pub fn submit_in_groups(
    dice: &mut Dice,
    engine: &EngineHandle,
    requests: &[Request],
) -> Vec<Option<Events>> {
    let (mut rest, mut all) = (requests, Vec::new());
    while !rest.is_empty() {
        let (group, left) = rest.split_at((1 + dice.roll(5)).min(rest.len()));
        let events = engine.submit_all(group.to_vec()).unwrap().into_iter();
        all.extend(events.map(|events| (dice.roll(5) > 0).then_some(events)));
        rest = left;
    }
    all
}

/// Promises 1, 2, 3 and 6 over random schedules of thousands of requests: whatever is admitted,
/// chunked, interrupted, drafted, rejected, preempted and cancelled around it, a request, greedy or sampled,
/// generates the tokens of the reference, which uses no engine; and in the end every block is free.
/// (In debug builds the engine checks its invariants after every step.) Sampled requests under the
/// rejection rule, and those with synthetic acceptance, have texts that depend on the drafts.
#[test]
fn random_schedules_are_lossless_and_leak_nothing() {
    let (mut preemptions, mut interrupted) = (0, 0);
    for case in 0..400 {
        let mut dice = Dice(case);
        let mut toy = dice.toy();
        if case % 3 == 0 {
            toy.interrupt(case);
        }
        let engine = toy.start();
        // Runs each request alone, with the same drafter, for what the reference does not have.
        let roomy = Toy {
            num_blocks: 512,
            ..toy.clone()
        }
        .start();
        let requests: Vec<Request> = (0..12)
            .map(|_| {
                let mut request = dice.request(toy.options.spec.length);
                request.params.thought = dice.thought();
                request
            })
            .collect();
        let receivers = submit_in_groups(&mut dice, &engine, &requests);
        for (request, receiver) in requests.into_iter().zip(receivers) {
            let Some(receiver) = receiver else { continue };
            let answer = collect(receiver);
            let alone = run(&roomy, request.clone());
            assert_eq!(answer.prompt, alone.prompt, "case {case}");
            if is_lossless(&request) {
                assert_eq!(
                    answer.tokens, alone.tokens,
                    "case {case}: {request:?} on {toy:?}"
                );
                assert_eq!(answer.finish, alone.finish, "case {case}");
                let mut model = toy_model(0.0).with_eos(&toy.eos);
                let want = reference(&mut model, &request);
                assert_eq!(answer.ids(), want, "case {case}: {request:?} on {toy:?}");
            }
        }
        assert_idle(&engine);
        assert_idle(&roomy);
        preemptions += engine.stats().preemptions.get();
        let both = [&engine, &roomy].map(|engine| engine.stats().interrupted_tokens.get());
        interrupted += both.iter().sum::<u64>();
    }
    assert!(
        preemptions > 100,
        "only {preemptions} preemptions: the pools were too roomy"
    );
    assert!(
        interrupted > 1000,
        "only {interrupted} tokens were interrupted"
    );
}

#[test]
fn greedy_parity_for_every_drafter_and_length() {
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| Dice(100 + i).prompt(60)).collect();
    let want: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| reference(&mut toy_model(0.0), &greedy(prompt, 40)))
        .collect();
    for guess in [
        Guess::Nothing,
        Guess::Ngram,
        Guess::Toy(0.0),
        Guess::Toy(0.3),
        Guess::Toy(1.0),
    ] {
        for spec_length in [1, 3, 8] {
            let mut toy = Toy::guessing(guess);
            toy.options.spec = chains(spec_length);
            toy.options.max_num_batched_tokens = 16 * 9;
            let engine = toy.start();
            let requests = prompts
                .iter()
                .chain(&prompts)
                .map(|p| greedy(p, 40))
                .collect();
            let receivers = engine.submit_all(requests).unwrap();
            for (receiver, want) in receivers.into_iter().zip(want.iter().chain(&want)) {
                let answer = collect(receiver);
                assert_eq!(&answer.ids(), want, "{guess:?}, K = {spec_length}");
                match guess {
                    Guess::Nothing => assert_eq!(answer.spec.drafted, 0),
                    Guess::Toy(0.0) => assert_eq!(answer.spec.alpha(), 1.0),
                    Guess::Toy(1.0) => assert!(answer.spec.alpha() < 0.3),
                    _ => {}
                }
            }
            assert_idle(&engine);
        }
    }
}

/// A perfect draft is accepted completely: a round gives K + 1 tokens, so the target runs that much
/// less often. Fails if the draft model does not process its last token after such a round.
#[test]
fn a_perfect_draft_saves_target_steps() {
    let engine = Toy::guessing(Guess::Toy(0.0)).start();
    let answer = run(&engine, greedy(&[1, 2, 3], 41));
    // One token from the prompt, then rounds of five.
    assert_eq!((answer.spec.rounds, answer.spec.accepted), (8, 32));
    assert_eq!(answer.spec.drafted, 32);
    assert_eq!(answer.spec.mean_accepted_length(), 5.0);
}

/// The draft's q goes through the request's whole sampling pipeline, over a context that grows with
/// the draft: a draft model that is the target itself is always accepted, whatever the parameters.
#[test]
fn a_perfect_draft_is_accepted_under_every_parameter() {
    let engine = Toy::guessing(Guess::Toy(0.0)).start();
    assert_always_accepted(&engine);
}

/// Checks that all drafts are accepted, at every temperature and with penalties.
pub fn assert_always_accepted(engine: &EngineHandle) {
    for case in 0..60 {
        let mut dice = Dice(case);
        let request = Request {
            params: SamplingParams {
                repetition_penalty: 1.5,
                frequency_penalty: 0.5,
                ..dice.params()
            },
            ..greedy(&dice.prompt(20), 25)
        };
        let answer = run(engine, request.clone());
        assert_eq!(answer.spec.accepted, answer.spec.tested, "{request:?}");
    }
    assert_idle(engine);
}

/// Leviathan et al. 2023, Appendix A.1, and the coupled rule, through the whole engine: with a draft
/// that is often wrong, tokens at every position of a round have the target's distribution.
#[test]
fn sampled_tokens_are_distributed_as_the_target() {
    for acceptance in [Acceptance::Coupled, Acceptance::Rejection] {
        let model = Box::new(few_ids(0.6));
        let drafter = foretoken::spec::DraftModel::new(model, 256, 4, 64).unwrap();
        assert_distributed_as_the_target(Box::new(drafter), 4, acceptance);
    }
}

/// The same with a draft model that draws ids which the target does not have, and from which its drafts end.
#[test]
fn ids_that_only_the_draft_has_favour_no_token() {
    let model = foretoken::model::toy::ToyModel::new(9, MAX_LEN, SEED, 0.6);
    let drafter = foretoken::spec::DraftModel::new(Box::new(model), 256, 4, 64).unwrap();
    assert_distributed_as_the_target(Box::new(drafter), 4, Acceptance::Rejection);
}

/// A toy with few enough ids to count samples.
pub fn few_ids(noise: f32) -> foretoken::model::toy::ToyModel {
    foretoken::model::toy::ToyModel::new(6, MAX_LEN, SEED, noise)
}

/// Samples many texts of `max_tokens` from [`few_ids`] without noise, with the drafts of `drafter`,
/// and checks their distribution.
pub fn assert_distributed_as_the_target(
    drafter: Box<dyn foretoken::spec::Drafter>,
    max_tokens: usize,
    acceptance: Acceptance,
) {
    const VOCAB: usize = 6;
    const REQUESTS: u64 = 30_000;
    let toy = Toy::default();
    let options = EngineOptions {
        // As many as the pools have room for: most of a step's time does not depend on how many there are.
        max_num_seqs: 48,
        max_num_batched_tokens: 512,
        max_waiting: REQUESTS as usize,
        acceptance,
        ..toy.options.clone()
    };
    let target = Box::new(few_ids(0.0));
    let engine = foretoken::engine::spawn(target, Some(drafter), 256, 4, options).unwrap();
    let params = SamplingParams {
        temperature: 1.3,
        presence_penalty: 0.7,
        ..Default::default()
    };
    let requests = (0..REQUESTS).map(|seed| Request {
        params: SamplingParams {
            seed: mix(seed),
            ..params.clone()
        },
        ..greedy(&[1, 2, 3], max_tokens)
    });
    let receivers = engine.submit_all(requests.collect()).unwrap();
    // Counts of the third output token after each pair: the second position of the first round,
    // reached by acceptance or after the round ended.
    let mut counts = vec![[0f64; VOCAB]; VOCAB * VOCAB];
    let (mut tested, mut accepted) = (0, 0);
    for receiver in receivers {
        let answer = collect(receiver);
        let ids = answer.ids();
        counts[ids[0] as usize * VOCAB + ids[1] as usize][ids[2] as usize] += 1.0;
        tested += answer.spec.tested;
        accepted += answer.spec.accepted;
    }
    let alpha = accepted as f64 / tested as f64;
    assert!((0.3..0.95).contains(&alpha), "alpha {alpha} tests nothing");
    let mut distance = 0.0;
    for (pair, counts) in counts.iter().enumerate() {
        let tokens = [1, 2, 3, (pair / VOCAB) as u32, (pair % VOCAB) as u32];
        let row = last_logits(&mut few_ids(0.0), &tokens);
        let p = foretoken::sampling::distribution(&row, &sampler(&params, &tokens, 3)).unwrap();
        let n: f64 = counts.iter().sum();
        let tv = (0..VOCAB)
            .map(|t| (counts[t] - n * p.prob(t as u32)).abs())
            .sum::<f64>()
            / 2.0;
        distance += tv / REQUESTS as f64;
    }
    // 36 contexts of about 800 samples each: chance alone gives about 0.02; accepting every draft
    // gives 0.1 or more.
    assert!(distance < 0.035, "mean total variation {distance}");
}

#[test]
fn a_seed_gives_the_same_text_whatever_else_runs() {
    let toy = Toy {
        num_blocks: 40,
        ..Toy::default()
    };
    let (engine, gate) = toy.start_gated();
    let request = sampled(&[1, 2, 3, 4, 5], 60, 42);
    let alone = run(&engine, request.clone());
    for crowd in 1..6 {
        // All are there before the first step ends.
        let closed = gate.lock().unwrap();
        let noise: Vec<_> = (0..crowd * 3)
            .map(|i| engine.submit(sampled(&[i as u32], 70, i)).unwrap())
            .collect();
        drop(closed);
        assert_eq!(run(&engine, request.clone()).ids(), alone.ids(), "{crowd}");
        noise
            .into_iter()
            .for_each(|receiver| drop(collect(receiver)));
    }
    assert!(
        engine.stats().preemptions.get() > 0,
        "there was no pressure"
    );
    assert_ne!(
        run(&engine, sampled(&[1, 2, 3, 4, 5], 60, 43)).ids(),
        alone.ids()
    );
    assert_idle(&engine);
}

/// No step is larger than the budget, and a long prompt does not stop decoding sequences.
#[test]
fn long_prompts_are_chunked_beside_decoding() {
    let mut toy = Toy::default();
    toy.options.max_num_seqs = 4;
    toy.options.max_num_batched_tokens = 30;
    let target = toy_model(0.0);
    let largest = target.largest_forward.clone();
    let engine = toy.start_with(target);
    let decoding = engine.submit(greedy(&[1], 200)).unwrap();
    let long = engine.submit(greedy(&[2; 200], 2)).unwrap();
    assert_eq!(
        collect(decoding).ids(),
        reference(&mut toy_model(0.0), &greedy(&[1], 200))
    );
    collect(long);
    let largest = largest.load(std::sync::atomic::Ordering::Relaxed);
    assert!(largest <= 30, "a step had {largest} rows");
}
