//! The requests to end that reach a process: signals on Unix, events of the console on Windows.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
pub use system::{HangUp, Interrupt, Terminate};
use tokio::runtime;

/// Whether Ctrl-C is listened for by somebody who ends in order.
static INTERRUPT_TAKEN: AtomicBool = AtomicBool::new(false);
/// The same of SIGTERM.
static TERMINATE_TAKEN: AtomicBool = AtomicBool::new(false);

/// What a shell calls the end by SIGINT and by SIGTERM.
const INTERRUPTED: u8 = 130;
const TERMINATED: u8 = 143;

/// Lets SIGINT and SIGTERM end the process by `exit`, if it is the first one, as a container starts it: the kernel does so for
/// any process but that one. It ends until [`interrupt`] and [`terminate`] listen, so a container that loads a model can be stopped.
///
/// # Errors
/// `Setup`, if the system refuses it.
pub fn end_first_process(exit: fn(u8) -> !) -> Result<()> {
    match std::process::id() {
        1 => end_until_taken(exit),
        _ => Ok(()),
    }
}

fn end_until_taken(exit: fn(u8) -> !) -> Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| refused(&e))?;
    let listening = {
        let _inside = runtime.enter();
        system::interrupt().and_then(|interrupt| Ok((interrupt, system::terminate()?)))
    };
    let (mut interrupt, mut terminate) = listening.map_err(|e| refused(&e))?;
    let wait = async move {
        loop {
            let (taken, code) = tokio::select! {
                _ = interrupt.recv() => (&INTERRUPT_TAKEN, INTERRUPTED),
                _ = terminate.recv() => (&TERMINATE_TAKEN, TERMINATED),
            };
            if !taken.load(Ordering::SeqCst) {
                exit(code);
            }
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    let spawned = thread.spawn(move || runtime.block_on(wait));
    spawned.map(drop).map_err(|e| refused(&e))
}

/// Listens for Ctrl-C, which from now on does not end the process. Needs a runtime.
///
/// # Errors
/// `Setup`, if the system refuses it.
pub fn interrupt() -> Result<Interrupt> {
    let listening = system::interrupt().map_err(|e| refused(&e))?;
    INTERRUPT_TAKEN.store(true, Ordering::SeqCst);
    Ok(listening)
}

/// Listens for SIGTERM, on Windows for Ctrl-Break, the end of the console and that of the system. None of them ends the
/// process from now on. Needs a runtime.
///
/// # Errors
/// `Setup`, if the system refuses it.
pub fn terminate() -> Result<Terminate> {
    let listening = system::terminate().map_err(|e| refused(&e))?;
    TERMINATE_TAKEN.store(true, Ordering::SeqCst);
    Ok(listening)
}

/// Listens for SIGHUP, with which servers are asked to read files again; it does not end the process from now on. On
/// Windows, it never comes. Needs a runtime.
///
/// # Errors
/// `Setup`, if the system refuses it.
pub fn hang_up() -> Result<HangUp> {
    system::hang_up().map_err(|e| refused(&e))
}

fn refused(e: &std::io::Error) -> Error {
    Error::setup(format!("cannot wait for signals: {e}"))
}

#[cfg(unix)]
mod system {
    use std::io;
    use tokio::signal::unix::{Signal, SignalKind, signal};

    /// SIGINT.
    pub type Interrupt = Signal;
    /// SIGTERM.
    pub type Terminate = Signal;
    /// SIGHUP.
    pub type HangUp = Signal;

    pub fn interrupt() -> io::Result<Interrupt> {
        signal(SignalKind::interrupt())
    }

    pub fn terminate() -> io::Result<Terminate> {
        signal(SignalKind::terminate())
    }

    pub fn hang_up() -> io::Result<HangUp> {
        signal(SignalKind::hangup())
    }
}

#[cfg(windows)]
mod system {
    use std::io;
    use tokio::signal::windows::{CtrlBreak, CtrlC, CtrlClose, CtrlShutdown};
    use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_shutdown};

    /// Ctrl-C.
    pub type Interrupt = CtrlC;

    /// What ends a process of the console otherwise. After the last two, Windows gives it a few seconds.
    #[derive(Debug)]
    pub struct Terminate {
        break_key: CtrlBreak,
        console: CtrlClose,
        system: CtrlShutdown,
    }

    /// What Windows does not have.
    #[derive(Debug)]
    pub struct HangUp;

    impl HangUp {
        /// Waits for ever.
        pub async fn recv(&mut self) -> Option<()> {
            std::future::pending().await
        }
    }

    pub fn hang_up() -> io::Result<HangUp> {
        Ok(HangUp)
    }

    pub fn interrupt() -> io::Result<Interrupt> {
        ctrl_c()
    }

    pub fn terminate() -> io::Result<Terminate> {
        Ok(Terminate {
            break_key: ctrl_break()?,
            console: ctrl_close()?,
            system: ctrl_shutdown()?,
        })
    }

    impl Terminate {
        /// Waits for the next of them.
        pub async fn recv(&mut self) -> Option<()> {
            tokio::select! {
                event = self.break_key.recv() => event,
                event = self.console.recv() => event,
                event = self.system.recv() => event,
            }
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, ExitStatus, Stdio};
    use std::time::Duration;

    /// What the process that is a first one for the test does: it is "load" or "serve".
    const PART: &str = "FORETOKEN_TEST_SIGNALS";
    const LONG: Duration = Duration::from_secs(60);

    fn exit(code: u8) -> ! {
        std::process::exit(code.into())
    }

    /// Takes signals as the first process of a container does.
    fn be_first(part: &str) {
        end_until_taken(exit).unwrap();
        if part == "load" {
            println!("\nready");
            std::thread::sleep(LONG);
        }
        let runtime = runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(async {
            let mut signals = terminate().unwrap();
            println!("\nready");
            signals.recv().await;
            println!("ends in order");
            // The other thread has had its time.
            tokio::time::sleep(Duration::from_millis(200)).await;
        });
    }

    /// How such a process ends at `signal`, and what it says then.
    fn ends(test: &str, part: &str, signal: &str) -> (ExitStatus, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(PART, part)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().any(|line| line.unwrap() == "ready"));
        let pid = child.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &pid]).status();
        assert!(sent.unwrap().success());
        let said: Vec<_> = lines.map_while(std::io::Result::ok).collect();
        (child.wait().unwrap(), said.join("\n"))
    }

    #[test]
    fn signals_end_the_first_process_until_somebody_takes_them() {
        if let Ok(part) = std::env::var(PART) {
            be_first(&part);
            return;
        }
        let this = std::thread::current().name().unwrap().to_owned();
        for (signal, code) in [("TERM", TERMINATED), ("INT", INTERRUPTED)] {
            let (status, _) = ends(&this, "load", signal);
            assert_eq!(status.code(), Some(code.into()), "{status}");
        }
        let (status, said) = ends(&this, "serve", "TERM");
        assert!(said.contains("ends in order"), "{said}");
        assert_eq!((status.code(), status.signal()), (Some(0), None), "{said}");
        // Nobody has taken this one.
        let (status, _) = ends(&this, "serve", "INT");
        assert_eq!(status.code(), Some(INTERRUPTED.into()), "{status}");
    }
}
