//! How an engine ends: by itself, or because it is asked to.

use crate::common::hooked::watched;
use crate::common::server::doomed;
use crate::common::*;
use crate::engine_faults::{options, outcome, start};
use foretoken::engine::EngineHandle;
use foretoken::error::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn ended(engine: &EngineHandle) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(engine.ended())
}

#[test]
fn an_engine_whose_pools_are_in_disorder_says_so_and_leaves_nobody_waiting() {
    let engine = doomed();
    let both = vec![greedy(&[1], 200), greedy(&[2], 3)];
    for events in engine.submit_all(both).unwrap() {
        assert!(outcome(events).1.is_some());
    }
    let why = "draft pool: block 0 is lost";
    assert_eq!(ended(&engine).unwrap_err().to_string(), why);
    let refused = engine.submit(greedy(&[1], 1)).unwrap_err();
    assert_eq!(refused.to_string(), why);
}

#[test]
fn an_engine_that_is_asked_to_end_does_so_without_an_error() {
    let engine = Toy::default().start();
    run(&engine, greedy(&[1], 5));
    engine.drain();
    assert!(ended(&engine).is_ok());
}

/// Takes its time to go, as the memory of a device does.
struct Slow(Arc<AtomicBool>);

impl Drop for Slow {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(300));
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Whatever it does, and also after all it did: nothing of the model is left.
#[test]
fn who_joins_an_engine_sees_its_end() {
    for waits in [false, true] {
        let is_gone = Arc::<AtomicBool>::default();
        let slow = Slow(is_gone.clone());
        let target = watched(toy_model(0.0), move |_| {
            let _of_the_model = &slow;
            std::thread::sleep(Duration::from_millis(10));
            Ok(())
        });
        let engine = start(target, None, options());
        let mut events = engine.submit(greedy(&[1, 2], 200)).unwrap();
        assert!(events.blocking_recv().is_some());
        if waits {
            drop(events);
            engine.drain();
            assert!(ended(&engine).is_ok());
        }
        let other = engine.clone();
        assert!(engine.join(Duration::from_secs(60)));
        assert!(is_gone.load(Ordering::SeqCst) && other.has_ended());
        // Again, and by others.
        assert!(other.join(Duration::ZERO));
        assert!(engine.submit(greedy(&[1], 1)).is_err());
    }
}

#[test]
fn an_engine_that_hangs_is_not_waited_for_without_end() {
    let (begin, has_begun) = std::sync::mpsc::channel();
    let (go, hangs) = std::sync::mpsc::channel::<()>();
    let target = watched(toy_model(0.0), move |_| {
        let _ = (begin.send(()), hangs.recv());
        Ok(())
    });
    let engine = start(target, None, options());
    let _events = engine.submit(greedy(&[1, 2], 200)).unwrap();
    has_begun.recv().unwrap();
    assert!(!engine.join(Duration::from_millis(100)));
    assert!(!engine.has_ended());
    drop(go);
    assert!(ended(&engine).is_ok());
}
