//! What commands say on stdout and stderr.

use crate::error::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// A progress bar of length `len` on stderr, hidden if stderr is not a terminal. `template` is in indicatif's
/// syntax.
pub fn bar(template: &str, len: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Writes a line about the progress of a command to stdout. Errors are ignored: the work is worth more, and
/// its result is in a file.
pub fn say(line: impl Display) {
    let _ = write(&format!("{line}\n"));
}

/// Writes the result of a command to stdout. A reader that has gone is not an error.
///
/// # Errors
/// `Setup`, if stdout cannot be written to, for example because the disk is full.
pub fn print(result: impl Display) -> Result<()> {
    match write(&result.to_string()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::setup(format!("cannot write to stdout: {e}")))
        }
        _ => Ok(()),
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
