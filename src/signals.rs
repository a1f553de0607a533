//! The requests to end that reach a process: signals on Unix, events of the console on Windows.

use crate::error::{Error, Result};
pub use system::{HangUp, Interrupt, Terminate};

/// Listens for Ctrl-C, which from now on does not end the process. Needs a runtime.
///
/// # Errors
/// `Setup`, if the system refuses it.
pub fn interrupt() -> Result<Interrupt> {
    system::interrupt().map_err(|e| refused(&e))
}

/// Listens for SIGTERM, on Windows for Ctrl-Break, the end of the console and that of the system. None of them ends the
/// process from now on. Needs a runtime.
///
/// # Errors
/// `Setup`, if the system refuses it.
pub fn terminate() -> Result<Terminate> {
    system::terminate().map_err(|e| refused(&e))
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
