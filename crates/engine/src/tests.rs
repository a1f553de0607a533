use super::start::{build, start};
use super::*;
use foretoken_core::model::toy::ToyModel;
use foretoken_core::sampling::SamplingParams;

fn engine(max_num_seqs: usize) -> (Engine, EngineHandle) {
    let options = EngineOptions {
        max_num_seqs,
        ..EngineOptions::default()
    };
    let model = Box::new(ToyModel::new(32, 256, 11, 0.0));
    build(model, Vec::new(), 64, 4, options).unwrap()
}

fn requests() -> Vec<Request> {
    let request = |first: u32| Request {
        prompt: (first..first + 5).collect(),
        max_tokens: Some(20),
        params: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        ..Request::default()
    };
    (1..5).map(request).collect()
}

/// An engine of which `max_num_seqs` of these requests have begun.
fn busy(max_num_seqs: usize) -> (Engine, EngineHandle, Vec<Events>) {
    let (mut engine, handle) = engine(max_num_seqs);
    let all = handle.submit_all(requests()).unwrap();
    assert!(engine.receive().unwrap());
    engine.step().unwrap();
    assert_eq!(engine.scheduler.running.len(), max_num_seqs);
    (engine, handle, all)
}

/// A bug makes the planning of a step panic, and nobody knows whom it concerns: those who run fail, and those
/// who wait get their texts.
#[test]
fn a_plan_that_panics_fails_those_who_run() {
    let texts = || {
        let (engine, handle) = engine(4);
        let all = handle.submit_all(requests()).unwrap();
        handle.drain();
        engine.run().unwrap();
        let texts = all.into_iter().map(Events::blocking_collect);
        texts.map(|text| text.unwrap().ids()).collect::<Vec<_>>()
    };
    let (mut engine, handle, all) = busy(2);
    // No sequence has more tokens in the pool than it has.
    engine.scheduler.running[1].state.kv_len = 1000;
    handle.drain();
    engine.run().unwrap();
    for (place, (events, want)) in all.into_iter().zip(texts()).enumerate() {
        let text = events.blocking_collect();
        if place >= 2 {
            assert_eq!(text.unwrap().ids(), want);
        } else {
            let error = text.unwrap_err().to_string();
            assert!(error.starts_with("the step panicked: "), "{error}");
        }
    }
    assert_eq!(
        handle
            .stats()
            .requests_finished
            .with_label_values(&["error"])
            .get(),
        2
    );
}

/// If not even the end of those who fail can be recorded, the engine ends, says why, and leaves nobody waiting.
#[test]
fn a_panic_that_nothing_contains_ends_the_engine() {
    let (mut engine, handle, all) = busy(2);
    // No sequence has a longer prompt than it has tokens.
    engine.scheduler.running[0].state.prompt_len = 1000;
    start(engine).unwrap();
    for events in all {
        assert!(events.blocking_collect().is_err());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let error = runtime.unwrap().block_on(handle.ended()).unwrap_err();
    let why = "the engine thread panicked: attempt to subtract with overflow";
    assert_eq!(error.to_string(), why);
    let refused = handle.submit_all(requests()).unwrap_err();
    assert_eq!(refused.to_string(), why);
}
