//! What commands say on stdout and stderr.

use crate::error::{Error, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::time::{Duration, Instant};

/// Time between two lines about progress where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// A progress bar of length `len` on stderr, hidden if stderr is not a terminal. `template` is in indicatif's
/// syntax.
pub fn bar(template: &str, len: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(len).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// The progress of a long command on stderr: a bar on a terminal, otherwise a line every ten seconds.
pub struct Progress {
    bar: ProgressBar,
    what: &'static str,
    unit: &'static str,
    started: Instant,
    said: Instant,
}

impl Progress {
    /// The progress of `what`, which takes `len` steps. The steps are called `unit`.
    pub fn new(what: &'static str, unit: &'static str, len: u64) -> Self {
        let template = format!("{what} {{wide_bar}} {{pos}}/{{len}} {unit} {{msg}}, {{eta}} left");
        let started = Instant::now();
        Self {
            bar: bar(&template, len),
            what,
            unit,
            started,
            said: started,
        }
    }

    /// A step is done; `message` says more of it.
    pub fn step(&mut self, message: impl Into<String>) {
        let message = message.into();
        self.bar.set_message(message.clone());
        self.bar.inc(1);
        if self.bar.is_hidden() && self.said.elapsed() >= BETWEEN_LINES {
            self.said = Instant::now();
            // The work is worth more than its progress.
            let _ = writeln!(
                io::stderr(),
                "{}",
                self.line(&message, self.started.elapsed())
            );
        }
    }

    /// Progress after `elapsed` time, in a line.
    fn line(&self, message: &str, elapsed: Duration) -> String {
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let (what, unit) = (self.what, self.unit);
        let left = elapsed.as_secs_f64() / done.max(1) as f64 * all.saturating_sub(done) as f64;
        let comma = if message.is_empty() { "" } else { ", " };
        format!("{what}: {done} of {all} {unit}{comma}{message}, about {left:.0} s left")
    }

    /// The bar, beside which lines can be written.
    pub fn bar(&self) -> &ProgressBar {
        &self.bar
    }

    /// All is done.
    pub fn end(self) {
        self.bar.finish_and_clear();
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::ProgressDrawTarget;

    #[test]
    fn progress_is_a_line_every_ten_seconds() {
        let mut progress = Progress::new("training", "steps", 40);
        for _ in 0..10 {
            progress.step("loss 1.5");
        }
        assert_eq!(
            progress.line("loss 1.5", Duration::from_secs(20)),
            "training: 10 of 40 steps, loss 1.5, about 60 s left"
        );
        assert_eq!(progress.said, progress.started);
        let earlier = Instant::now().checked_sub(BETWEEN_LINES);
        let earlier = earlier.expect("this machine runs for ten seconds");
        progress.said = earlier;
        progress.bar.set_draw_target(ProgressDrawTarget::hidden());
        progress.step("");
        // The line was written, and the next one is due in ten seconds.
        assert!(progress.said > earlier);
    }
}
