//! The engine's edges on toy models: a bounded queue, cancelling, draining, options.

use crate::common::*;
use foretoken::engine::{EngineHandle, EngineOptions};
use foretoken::error::{Error, RequestErrorKind};
use std::time::{Duration, Instant};

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < patience, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn is_queue_full<T>(result: foretoken::error::Result<T>) -> bool {
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
    let target = toy_model(0.0);
    let gate = target.gate.clone();
    let engine = toy.start_with(target);
    let closed = gate.lock().unwrap();
    let running = engine.submit(greedy(&[1], 5)).unwrap();
    wait_for("admission", || engine.stats().requests_running.get() == 1);
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

#[test]
fn dropping_the_receiver_cancels() {
    let toy = Toy {
        num_blocks: 64,
        ..Toy::default()
    };
    let target = toy_model(0.0);
    let gate = target.gate.clone();
    let engine = toy.start_with(target);
    let closed = gate.lock().unwrap();
    let receivers: Vec<_> = (0..20)
        .map(|i| engine.submit(greedy(&[i], 250)).unwrap())
        .collect();
    wait_for("the batch", || engine.stats().requests_running.get() > 0);
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
    wait_for("the end", || engine.has_ended());

    let idle = Toy::default().start();
    idle.drain();
    wait_for("the end of an idle engine", || idle.has_ended());
}

#[test]
fn options_that_cannot_work_are_refused() {
    let mut toy = Toy::default();
    toy.options.max_num_batched_tokens = 79;
    let drafter = foretoken::spec::NgramDrafter::new(1, 2);
    let spawn = |options, blocks| {
        let target = Box::new(toy_model(0.0));
        foretoken::engine::spawn(target, Some(Box::new(drafter.clone())), blocks, 1, options)
    };
    let message = |result: Result<EngineHandle, Error>| match result {
        Err(Error::Setup(message)) => message,
        _ => panic!("accepted"),
    };
    assert!(message(spawn(toy.options, 64)).contains("max-num-batched-tokens (79)"));
    assert!(message(spawn(EngineOptions::default(), 1)).contains("--kv-cache-memory"));
}
