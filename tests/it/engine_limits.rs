//! The engine's limits on toy models: a bounded queue, cancelling, draining, options.

use crate::common::hooked::watched;
use crate::common::*;
use foretoken::engine::{self, EngineHandle, EngineOptions, Event, Request, Series, TokenOutput};
use foretoken::error::{Error, RequestErrorKind, Result};
use foretoken::sampling::{Acceptance, SamplingParams};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn is_queue_full<T>(result: Result<T>) -> bool {
    matches!(
        result,
        Err(Error::Request {
            kind: RequestErrorKind::QueueFull,
            ..
        })
    )
}

#[test]
fn the_queue_is_bounded_all_or_nothing() {
    let mut toy = Toy::default();
    toy.options.max_num_seqs = 1;
    toy.options.max_waiting = 3;
    let (engine, gate) = toy.start_gated();
    let closed = gate.lock().unwrap();
    let running = engine.submit(greedy(&[1], 5)).unwrap();
    wait_until("admission", || engine.stats().requests_running.get() == 1);
    let invalid = vec![greedy(&[1], 1), greedy(&[99], 1)];
    assert!(engine.submit_all(invalid).is_err());
    let two = engine.submit_all(vec![greedy(&[1], 1); 2]).unwrap();
    assert!(is_queue_full(engine.submit_all(vec![greedy(&[1], 1); 2])));
    let third = engine.submit(greedy(&[1], 1)).unwrap();
    assert!(is_queue_full(engine.submit(greedy(&[1], 1))));
    drop(closed);
    for receiver in two.into_iter().chain([running, third]) {
        collect(receiver);
    }
    assert_eq!(run(&engine, greedy(&[1], 1)).ids().len(), 1);
    assert_idle(&engine);
}

/// What `SECURITY.md` says of an answer that its client has not read, rounds included: under the rejection rule, drafts
/// have distributions.
#[test]
fn what_waits_for_a_client_is_small() {
    let mut toy = Toy::guessing(Guess::Toy(0.3));
    toy.options.spec = tree_limits(6, 15, 4);
    let engine = toy.start();
    let mut request = Request {
        include_rounds: true,
        acceptance: Some(Acceptance::Rejection),
        ..greedy(&[1], 40)
    };
    (request.params.temperature, request.params.seed) = (1.0, 3);
    let mut events = engine.submit(request).unwrap();
    let (mut bytes, mut tokens, mut drafted) = (0, 0, 0);
    while let Some(event) = events.blocking_recv() {
        // All that there is: what is added counts, too.
        let Event::Tokens {
            tokens: new,
            round,
            finish,
            spec: _,
            cached_tokens: _,
        } = event
        else {
            panic!("{event:?}")
        };
        let round = round.expect("a round");
        let nodes = round.nodes().len();
        bytes += size_of::<Event>() + new.capacity() * size_of::<TokenOutput>();
        bytes += size_of_val(round.nodes());
        (tokens, drafted) = (tokens + new.len(), drafted + nodes);
        if finish.is_some() {
            break;
        }
    }
    assert!(tokens == 40 && drafted > 40, "{tokens} {drafted}");
    assert!(bytes <= 250 * tokens + 16 * drafted, "{bytes}");
    assert_idle(&engine);
}

#[test]
fn who_leaves_the_queue_gives_up_the_place() {
    let mut toy = Toy::default();
    toy.options.max_num_seqs = 1;
    toy.options.max_waiting = 3;
    let (engine, gate) = toy.start_gated();
    let closed = gate.lock().unwrap();
    let running = engine.submit(greedy(&[1], 5)).unwrap();
    wait_until("admission", || engine.stats().requests_running.get() == 1);
    drop(engine.submit_all(vec![greedy(&[1], 1); 3]).unwrap());
    drop(closed);
    collect(running);
    assert_idle(&engine);
    let again = engine.submit_all(vec![greedy(&[1], 1); 3]).unwrap();
    again.into_iter().for_each(|events| drop(collect(events)));
    assert_idle(&engine);
}

/// A request cannot queue prompts without end; a small pool is no reason to refuse short ones.
#[test]
fn the_prompts_of_a_request_are_limited_together() {
    let mut toy = Toy::default();
    toy.options.max_waiting = 10_000;
    let engine = toy.start();
    let limit = engine.limits().max_prompt_tokens;
    assert_eq!(limit, 1 << 17);
    let prompt = [1; 128];
    let many = |count: usize| vec![greedy(&prompt, 1); count];
    let error = engine.submit_all(many(limit / 128 + 1)).unwrap_err();
    assert!(
        error.to_string().contains("may have at most 131072"),
        "{error}"
    );
    assert!(matches!(
        error,
        Error::Request {
            kind: RequestErrorKind::Invalid,
            ..
        }
    ));
    drop(engine.submit_all(many(limit / 128)).unwrap());
    assert_idle(&engine);
}

#[test]
fn dropping_the_receiver_cancels() {
    let toy = Toy {
        num_blocks: 64,
        ..Toy::default()
    };
    let (engine, gate) = toy.start_gated();
    let closed = gate.lock().unwrap();
    let receivers: Vec<_> = (0..20)
        .map(|i| engine.submit(greedy(&[i], 250)).unwrap())
        .collect();
    wait_until("the batch", || engine.stats().requests_running.get() > 0);
    drop(receivers);
    drop(closed);
    assert_idle(&engine);
    let aborted = engine
        .stats()
        .requests_finished
        .with_label_values(&["abort"])
        .get();
    assert_eq!(aborted, 20);
}

/// A request that arrives during the last step ends like those that run, not as if the engine had broken.
#[test]
fn an_abort_reaches_requests_that_nobody_has_taken() {
    let toy = Toy::default();
    let (engine, gate) = toy.start_gated();
    let closed = gate.lock().unwrap();
    let runs = engine.submit(greedy(&[1], 250)).unwrap();
    wait_until("the batch", || engine.stats().requests_running.get() > 0);
    let arrives = engine.submit(greedy(&[2], 250)).unwrap();
    engine.abort();
    drop(closed);
    for events in [runs, arrives] {
        let error = events.blocking_collect().unwrap_err();
        let is_shutdown = matches!(
            error,
            Error::Request {
                kind: RequestErrorKind::ShuttingDown,
                ..
            }
        );
        assert!(is_shutdown, "{error}");
    }
}

#[test]
fn draining_finishes_what_runs_and_refuses_the_rest() {
    let engine = Toy::default().start();
    let receiver = engine.submit(greedy(&[1], 100)).unwrap();
    engine.drain();
    let refused = engine.submit(greedy(&[1], 1));
    let Err(Error::Request { kind, .. }) = refused else {
        panic!("accepted while draining")
    };
    assert_eq!(kind, RequestErrorKind::ShuttingDown);
    assert_eq!(collect(receiver).ids().len(), 100);
    wait_until("the end", || engine.has_ended());

    let idle = Toy::default().start();
    idle.drain();
    wait_until("the end of an idle engine", || idle.has_ended());
}

/// A request that comes in parts is accepted as a whole: its further parts wait for places in a full queue, and come
/// although the engine drains.
#[test]
fn further_parts_of_a_request_are_accepted() {
    let mut toy = Toy::default();
    toy.options.max_num_seqs = 1;
    toy.options.max_waiting = 2;
    let (engine, gate) = toy.start_gated();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.unwrap();
    let mut series = Series::begin(&engine).unwrap();
    let part = |tokens| vec![greedy(&[1], tokens); 2];
    let first = runtime.block_on(series.submit_all(part(1))).unwrap();
    for events in first {
        assert_eq!(collect(events).ids().len(), 1);
    }
    assert_idle(&engine);

    let closed = gate.lock().unwrap();
    let running = engine.submit(greedy(&[1], 5)).unwrap();
    wait_until("admission", || engine.stats().requests_running.get() == 1);
    let others = engine.submit_all(part(1)).unwrap();
    let other = Series::begin(&engine).unwrap();
    let refused = |mut other: Series| runtime.block_on(other.submit_all(part(1)));
    assert!(is_queue_full(refused(other)), "a first part");
    let next = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let part = series.submit_all(vec![greedy(&[1], 3); 2]);
        let events = runtime.unwrap().block_on(part).unwrap();
        let lengths = events.into_iter().map(|one| collect(one).ids().len());
        lengths.sum::<usize>()
    });
    engine.drain();
    assert!(engine.submit(greedy(&[1], 1)).is_err());
    assert!(Series::begin(&engine).is_err());
    drop(closed);
    assert_eq!(next.join().unwrap(), 6);
    for events in others.into_iter().chain([running]) {
        collect(events);
    }
    wait_until("the end", || engine.has_ended());
}

#[test]
fn options_that_cannot_work_are_refused() {
    let options = EngineOptions::default;
    let rowless = EngineOptions {
        max_num_batched_tokens: 0,
        ..options()
    };
    let placeless = EngineOptions {
        max_num_seqs: 0,
        ..options()
    };
    let drafter = foretoken::spec::NgramDrafter::new(1, 2);
    let spawn = |options, blocks| {
        let target = Box::new(toy_model(0.0));
        foretoken::engine::spawn(target, Some(Box::new(drafter.clone())), blocks, 1, options)
    };
    let message = |result: Result<EngineHandle>| match result {
        Err(Error::Setup(message)) => message,
        _ => panic!("accepted"),
    };
    for (options, blocks, needle) in [
        (rowless, 64, "max-num-batched-tokens must be at least 1"),
        (placeless, 64, "max-num-seqs must be at least 1"),
        (options(), 1, "--kv-cache-memory"),
    ] {
        let said = message(spawn(options, blocks));
        assert!(said.contains(needle), "{said}");
    }
}

/// Who embeds the engine is told, as clients are.
#[test]
fn sampling_parameters_that_mean_nothing_are_refused() {
    let engine = Toy::default().start();
    type Change = fn(&mut SamplingParams);
    let changes: [(&str, Change); 8] = [
        ("temperature", |params| params.temperature = -0.1),
        ("temperature", |params| params.temperature = f32::NAN),
        ("top_p", |params| params.top_p = 1.1),
        ("top_p", |params| params.top_p = f32::NAN),
        ("min_p", |params| params.min_p = -0.1),
        ("repetition_penalty", |params| {
            params.repetition_penalty = 0.0
        }),
        ("presence_penalty", |params| {
            params.presence_penalty = f32::INFINITY
        }),
        ("frequency_penalty", |params| {
            params.frequency_penalty = f32::NAN
        }),
    ];
    for (field, change) in changes {
        let mut request = greedy(&[1, 2], 3);
        change(&mut request.params);
        let error = engine.submit(request).unwrap_err();
        assert_eq!(error.param().as_deref(), Some(field), "{error}");
        assert!(error.to_string().contains("must be within"), "{error}");
    }
    assert_idle(&engine);
}

/// Six rows for twenty requests, which take turns without drafts: each generates the same tokens as
/// when it has the engine to itself, with drafts.
#[test]
fn texts_do_not_depend_on_the_rows_of_a_step() {
    for guess in [Guess::Ngram, Guess::Toy(0.4), Guess::Nothing] {
        let mut toy = Toy::guessing(guess);
        toy.options.spec = chains(5);
        toy.options.max_num_seqs = 20;
        toy.options.max_num_batched_tokens = 6;
        let engine = toy.start();
        let requests: Vec<Request> = (0..20)
            .map(|i| {
                let prompt: Vec<u32> = (0..1 + i * 7 % 30).map(|at| at as u32 % 5).collect();
                match i % 3 {
                    0 => greedy(&prompt, 30),
                    _ => sampled(&prompt, 30, i),
                }
            })
            .collect();
        let crowd = engine.submit_all(requests.clone()).unwrap();
        let crowd: Vec<_> = crowd.into_iter().map(collect).collect();
        for (request, answer) in requests.into_iter().zip(crowd) {
            let alone = run(&engine, request.clone());
            assert_eq!(answer.tokens, alone.tokens, "{guess:?}: {request:?}");
            assert_eq!(answer.tokens.len(), 30);
        }
        assert_idle(&engine);
    }
}

/// A running text waits for another's prompt no longer than the limit; a prompt that no other text
/// waits for is read in chunks of half of it, for those that arrive, until what is left fits the limit. A
/// busy machine makes rows slower and chunks shorter, never longer.
#[test]
fn a_prompt_keeps_running_texts_waiting_for_a_moment_only() {
    const ROW: Duration = Duration::from_millis(2);
    let start = |max_prompt_wait| {
        let forwards = Arc::new(Mutex::new(Vec::new()));
        let options = EngineOptions {
            max_num_batched_tokens: MAX_LEN,
            max_prompt_wait,
            no_prefix_caching: true,
            ..EngineOptions::default()
        };
        let seen = forwards.clone();
        let target = watched(toy_model(0.0), move |batch| {
            seen.lock().unwrap().push(batch.tokens.len());
            std::thread::sleep(ROW * batch.tokens.len() as u32);
            Ok(())
        });
        let engine = foretoken::engine::spawn(target, None, 256, 4, options).unwrap();
        (engine, forwards)
    };
    let prompt: Vec<u32> = (0..200).map(|at| at % 9).collect();
    let want = reference(&mut toy_model(0.0), &greedy(&prompt, 3));
    // A row takes 2 ms: 40 prompt rows, and the decoding one.
    for (wait, rows, alone) in [(ROW * 40, 41, 20), (PROMPT_WAIT, 201, 200)] {
        let (engine, forwards) = start(wait);
        let both = vec![greedy(&[1], 20), greedy(&prompt, 3)];
        let mut both = engine.submit_all(both).unwrap().into_iter().map(collect);
        assert_eq!(both.next().unwrap().tokens.len(), 20);
        assert_eq!(both.next().unwrap().ids(), want);
        let beside = std::mem::take(&mut *forwards.lock().unwrap());
        assert!(beside.iter().all(|&seen| seen <= rows), "{beside:?}");
        assert_eq!(run(&engine, greedy(&prompt, 3)).ids(), want);
        let mut chunks = forwards.lock().unwrap().clone();
        chunks.retain(|&seen| seen > 1);
        let last = chunks.pop().unwrap();
        assert!(last < rows, "{chunks:?}, {last}");
        assert!(chunks.iter().all(|&seen| seen <= alone), "{chunks:?}");
        assert_eq!(chunks.is_empty(), alone == 200, "{chunks:?}, {last}");
        assert_idle(&engine);
    }
}

/// The log-probabilities of prompts are computed a few rows at a time, however many prompts end in a step; and
/// they do not depend on how few.
#[test]
fn no_step_scores_more_rows_than_it_may() {
    let scored = |prompt: &[u32]| Request {
        prompt_logprobs: Some(2),
        ..greedy(prompt, 0)
    };
    let prompts: Vec<Vec<u32>> = (0..64)
        .map(|i| (0..30).map(|at| (i + at * at) % VOCAB as u32).collect())
        .collect();
    let scores = |scored_rows: usize| {
        let mut toy = Toy::default();
        toy.options.max_num_batched_tokens = 2048;
        toy.options.step_limits.scored_rows = scored_rows;
        let most = Arc::new(AtomicUsize::new(0));
        let seen = most.clone();
        let target = watched(toy_model(0.0), move |batch| {
            seen.fetch_max(batch.logits.len(), Ordering::SeqCst);
            Ok(())
        });
        let engine = engine::spawn(target, None, 512, 4, toy.options).unwrap();
        let requests = prompts.iter().map(|prompt| scored(prompt)).collect();
        let all = engine.submit_all(requests).unwrap().into_iter();
        let scores: Vec<_> = all.map(|events| collect(events).prompt).collect();
        assert_idle(&engine);
        // All are there before the second step.
        assert_eq!(most.load(Ordering::SeqCst), scored_rows);
        scores
    };
    let want = scores(256);
    assert!(want.iter().all(|scores| scores.len() == 30));
    for scored_rows in [1, 7, 29, 30] {
        assert_eq!(scores(scored_rows), want, "{scored_rows}");
    }
}
