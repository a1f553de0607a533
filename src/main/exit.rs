//! The end of the process.

use std::ffi::c_int;
use std::io::Write;

unsafe extern "C" {
    safe fn _exit(code: c_int) -> !;
}

/// Ends the process without tearing libraries down, for a thread that hangs may still use them.
pub fn at_once(code: u8) -> ! {
    // Who reads stdout may be gone.
    let _ = std::io::stdout().flush();
    _exit(code.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finish;
    use crate::hooked;
    use crate::log::LineWriter;
    use foretoken::engine::{self, EngineOptions, EngineThread, Request};
    use foretoken::error::Error;
    use foretoken::model::toy::ToyModel;
    use std::process::Command;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Set in the process whose engine hangs.
    const HANGS: &str = "FORETOKEN_TEST_HANGS";

    unsafe extern "C" {
        safe fn atexit(function: extern "C" fn()) -> c_int;
    }

    extern "C" fn tear_down() {
        println!("libraries are torn down");
    }

    /// An error while the engine is in a step that does not end.
    fn end_while_it_hangs() -> u8 {
        let log = LineWriter::new(std::io::stderr()).unwrap();
        let (begins, begun) = channel();
        let model = hooked::watched(ToyModel::new(32, 64, 1, 0.0), move |_| {
            begins.send(()).unwrap();
            loop {
                std::thread::park();
            }
        });
        let engine = engine::spawn(model, None, 16, 4, EngineOptions::default()).unwrap();
        let thread = EngineThread::new(engine, Duration::from_millis(100));
        let request = Request {
            prompt: vec![1, 2],
            ..Request::default()
        };
        let _events = thread.submit(request).unwrap();
        begun.recv().unwrap();
        atexit(tear_down);
        drop(thread);
        finish(Err(Error::setup("a text is not the same")), &log)
    }

    #[test]
    fn libraries_are_not_torn_down_under_an_engine_that_hangs() {
        if std::env::var_os(HANGS).is_some() {
            std::process::exit(end_while_it_hangs().into());
        }
        let this = std::thread::current().name().unwrap().to_owned();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &this, "--nocapture"])
            .env(HANGS, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(!said.contains("torn down"), "{said}");
        assert_eq!(child.status.code(), Some(2), "{said}");
        let said = String::from_utf8_lossy(&child.stderr);
        assert_eq!(said, "error: a text is not the same\n");
    }
}
