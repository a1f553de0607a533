use super::start::{build, start};
use super::*;
use crate::spec::{BudgetMode, CacheScope, Draft, DraftContext, DraftModel, DraftRequest, Drafter};
use foretoken_core::model::toy::ToyModel;
use foretoken_core::sampling::SamplingParams;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

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
        params: SamplingParams::at(0.0),
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

/// A request that is sent while the thread ends, after it has looked for the last one: nobody takes it. It is refused as those
/// that come later are.
#[test]
fn a_request_that_nobody_takes_any_more_is_refused() {
    for drains in [true, false] {
        let (engine, handle) = engine(1);
        let all = handle.submit_all(requests()).unwrap();
        if drains {
            handle.drain();
        }
        drop(engine);
        for events in all {
            let error = events.blocking_collect().unwrap_err();
            let want = if drains {
                Error::shutting_down()
            } else {
                // It ends unasked, and has not told why.
                Error::internal("the engine has ended")
            };
            assert_eq!(error.to_string(), want.to_string());
        }
        let permits = &handle.shared.permits;
        assert_eq!(permits.available_permits(), handle.limits().max_waiting);
        handle.submit_all(requests()).unwrap_err();
        let reason = if drains { "abort" } else { "error" };
        let finished = &handle.stats().requests_finished;
        assert_eq!(finished.with_label_values(&[reason]).get(), 4);
    }
}

/// Holds something for each sequence that is about to begin.
struct Holding(Arc<Mutex<HashSet<SeqId>>>);

impl Drafter for Holding {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        Ok(vec![Draft::default(); requests.len()])
    }

    fn resume(&mut self, id: SeqId, _: &[u32], _: CacheScope, len: usize) -> usize {
        self.0.lock().unwrap().insert(id);
        len
    }

    fn forget(&mut self, id: SeqId) {
        self.0.lock().unwrap().remove(&id);
    }
}

/// A request whose beginning was on disk may wait for a place in the batch after that: nothing is held for it then.
#[test]
fn who_waits_for_a_place_after_the_disk_holds_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let options = EngineOptions {
        max_num_seqs: 1,
        prefix_cache_disk: Some(folder.path().into()),
        spec: SpecLimits {
            length: 4,
            ..SpecLimits::default()
        },
        ..EngineOptions::default()
    };
    let held = Arc::<Mutex<HashSet<SeqId>>>::default();
    let model = Box::new(ToyModel::new(32, 256, 11, 0.0));
    let drafter: Box<dyn Drafter> = Box::new(Holding(held.clone()));
    let (mut engine, handle) = build(model, vec![drafter], 64, 4, options).unwrap();
    let submit = |prompt: Range<u32>| {
        let request = Request {
            prompt: prompt.collect(),
            max_tokens: Some(20),
            draft_context: DraftContext {
                may_persist: true,
                ..DraftContext::default()
            },
            ..Request::default()
        };
        handle.submit(request).unwrap()
    };
    // Six blocks of 4 tokens, of 8 bytes each.
    let before = submit(0..24);
    assert!(engine.receive().unwrap());
    while !engine.scheduler.is_idle() {
        engine.step().unwrap();
    }
    before.blocking_collect().unwrap();
    let written = &handle.stats().prefix_cache_disk_written_bytes;
    while written.get() < 6 * 4 * 8 {
        thread::sleep(Duration::from_millis(1));
    }
    engine.reset_prefix_cache();
    // The first waits for the disk, and the second takes the only place.
    let (first, second) = (submit(0..24), submit(5..29));
    assert!(engine.receive().unwrap());
    engine.step().unwrap();
    assert_eq!(engine.scheduler.running[0].state.id, 2);
    assert!(held.lock().unwrap().contains(&1));
    let reads = |engine: &Engine| engine.disk.as_ref().and_then(PrefixDisk::reads_for);
    while reads(&engine) == Some(1) {
        engine.take_from_disk();
        thread::sleep(Duration::from_millis(1));
    }
    engine.step().unwrap();
    assert_eq!(engine.scheduler.waiting.sequences.len(), 1);
    assert!(!held.lock().unwrap().contains(&1));
    handle.drain();
    engine.run().unwrap();
    assert_eq!(first.blocking_collect().unwrap().cached_tokens, 20);
    second.blocking_collect().unwrap();
}

/// What a draft model has read is on disk. It is found there although the target has the whole prompt in memory.
#[test]
fn a_draft_model_finds_on_disk_what_it_lacks_alone() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        let options = EngineOptions {
            prefix_cache_disk: Some(folder.path().into()),
            spec: SpecLimits {
                length: 4,
                ..SpecLimits::default()
            },
            spec_budget: BudgetMode::Fixed,
            ..EngineOptions::default()
        };
        let toy = || Box::new(ToyModel::new(32, 256, 11, 0.0));
        let drafter = DraftModel::new(toy(), 64, 4, 64).unwrap();
        let drafter: Box<dyn Drafter> = Box::new(drafter);
        build(toy(), vec![drafter], 64, 4, options).unwrap()
    };
    let run = |engine: &mut Engine, handle: &EngineHandle| {
        let request = Request {
            prompt: (0..24).collect(),
            max_tokens: Some(20),
            draft_context: DraftContext {
                may_persist: true,
                ..DraftContext::default()
            },
            ..Request::default()
        };
        let events = handle.submit(request).unwrap();
        assert!(engine.receive().unwrap());
        while !engine.scheduler.is_idle() {
            engine.step().unwrap();
        }
        events.blocking_collect().unwrap()
    };
    let (mut engine, handle) = start();
    let text = run(&mut engine, &handle).ids();
    handle.drain();
    engine.run().unwrap();

    let (mut engine, handle) = start();
    let stats = handle.stats();
    let read = || {
        let bytes = &stats.prefix_cache_disk_read_bytes;
        (stats.prefix_cache_disk_hits.get(), bytes.get())
    };
    assert_eq!(run(&mut engine, &handle).cached_tokens, 20);
    let (hits, bytes) = read();
    assert_eq!(hits, 20);
    engine.runner.reset_prefix_cache();
    let again = run(&mut engine, &handle);
    assert_eq!((again.ids(), again.cached_tokens), (text, 20));
    let (hits_again, bytes_again) = read();
    assert!(hits_again == hits && bytes_again > bytes, "{bytes_again}");
    // Now both have all in memory.
    run(&mut engine, &handle);
    assert_eq!(read(), (hits, bytes_again));
    handle.drain();
    engine.run().unwrap();
}
