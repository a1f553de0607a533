//! Non-blocking output to stderr or stdout, which may be full, closed, or a pipe that nobody reads.
//!
//! A dedicated thread writes the lines. Callers add a line to a queue of at most
//! [`MAX_QUEUED_BYTES`] and continue. Lines that do not fit, or cannot be written, are dropped and
//! counted, and a notice reports them as soon as a line can be written again.

use chrono::{SecondsFormat, Utc};
use foretoken::config::LogFormat;
use prometheus::IntCounter;
use serde_json::json;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;
use tracing::Level;

/// Maximum bytes of queued lines.
const MAX_QUEUED_BYTES: usize = 256 << 10;
/// Maximum time that [`LineWriter::flush`] waits for the reader.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Writes lines without waiting for the reader. Clones share one queue.
#[derive(Clone)]
pub struct LineWriter {
    queue: Sender<LogMessage>,
    queued_bytes: Arc<AtomicUsize>,
    /// Whether the thread is writing, and may wait for the reader.
    is_writing: Arc<AtomicBool>,
    dropped: IntCounter,
    /// Whether log lines are JSON objects.
    json: Arc<AtomicBool>,
}

enum LogMessage {
    /// A line with its line break.
    Line(Vec<u8>),
    /// Signals that all earlier lines have been written or dropped.
    Flush(SyncSender<()>),
}

impl LineWriter {
    /// Starts the thread that writes to `out`.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn new(out: impl Write + Send + 'static) -> io::Result<Self> {
        let (queue, messages) = channel();
        let dropped = IntCounter::new("foretoken:log_lines_dropped_total", "Log lines dropped")
            .map_err(io::Error::other)?;
        let writer = Self {
            queue,
            queued_bytes: Arc::default(),
            is_writing: Arc::default(),
            dropped,
            json: Arc::default(),
        };
        let (queued_bytes, is_writing) = (writer.queued_bytes.clone(), writer.is_writing.clone());
        let (dropped, json) = (writer.dropped.clone(), writer.json.clone());
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || {
                write_lines(out, &messages, &queued_bytes, &is_writing, &dropped, &json)
            })?;
        Ok(writer)
    }

    /// Sets the form of the lines that [`LineWriter::note`], panics and dropped lines make from now on;
    /// before, it is text.
    pub fn set_format(&self, format: LogFormat) {
        let json = format == LogFormat::Json;
        self.json.store(json, Ordering::SeqCst);
    }

    /// Queues a log line of the program itself, not of a library: `prefix` and `message` as text, or an
    /// object with the message and the level.
    pub fn note(&self, level: Level, prefix: &str, message: &str) {
        if self.json.load(Ordering::SeqCst) {
            self.line(&json_line(level, message))
        } else {
            self.line(&format!("{prefix}{message}"))
        }
    }

    /// Queues `text` and a line break, or counts it as dropped.
    pub fn line(&self, text: &str) {
        self.queue([text.as_bytes(), b"\n"].concat());
    }

    fn queue(&self, line: Vec<u8>) {
        let bytes = line.len();
        let fits = |queued: usize| (queued + bytes <= MAX_QUEUED_BYTES).then_some(queued + bytes);
        let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
        let queued = self.queued_bytes.fetch_update(set, fetch, fits);
        if queued.is_err() || self.queue.send(LogMessage::Line(line)).is_err() {
            self.dropped.inc();
        }
    }

    /// Waits until all lines so far are written, for the reader at most [`FLUSH_TIMEOUT`] or a little longer.
    pub fn flush(&self) {
        let (done, written) = sync_channel(1);
        if self.queue.send(LogMessage::Flush(done)).is_err() {
            return;
        }
        // On a timeout nobody reads, and the lines are lost; or the thread has had no processor yet, on a busy machine.
        while written.recv_timeout(FLUSH_TIMEOUT) == Err(RecvTimeoutError::Timeout)
            && !self.is_writing.load(Ordering::SeqCst)
        {}
    }

    /// Lines dropped so far.
    pub fn dropped(&self) -> &IntCounter {
        &self.dropped
    }

    /// Installs a panic hook that writes to this queue: the default hook blocks on stderr.
    pub fn take_panics(&self) {
        let log = self.clone();
        std::panic::set_hook(Box::new(move |panic| {
            if foretoken::error::catching() {
                return;
            }
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed");
            let trace = Backtrace::capture();
            let trace = match trace.status() {
                BacktraceStatus::Captured => format!("\n{trace}"),
                _ => String::new(),
            };
            log.note(Level::ERROR, "", &format!("thread '{name}' {panic}{trace}"));
            if name == "main" {
                log.flush();
            }
        }));
    }
}

/// Each call writes one line, as tracing-subscriber does.
impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.queue(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A line without fields, in the form of tracing-subscriber's JSON.
fn json_line(level: Level, message: &str) -> String {
    let timestamp = Utc::now().to_rfc3339_opts(SecondsFormat::Micros, true);
    let level = level.as_str();
    json!({"timestamp": timestamp, "level": level, "message": message, "target": "foretoken"})
        .to_string()
}

/// The body of the thread: writes until all [`LineWriter`]s are dropped.
fn write_lines(
    mut out: impl Write,
    messages: &Receiver<LogMessage>,
    queued_bytes: &AtomicUsize,
    is_writing: &AtomicBool,
    dropped: &IntCounter,
    json: &AtomicBool,
) {
    // Dropped lines that a notice has reported.
    let mut reported = 0;
    for message in messages {
        match message {
            LogMessage::Line(line) => {
                let missing = dropped.get() - reported;
                let notice = match missing {
                    0 => String::new(),
                    _ => {
                        let said = format!("{missing} log lines dropped");
                        let said = if json.load(Ordering::SeqCst) {
                            json_line(Level::WARN, &said)
                        } else {
                            said
                        };
                        said + "\n"
                    }
                };
                is_writing.store(true, Ordering::SeqCst);
                let written = out
                    .write_all(notice.as_bytes())
                    .map(|()| reported += missing)
                    .and_then(|()| out.write_all(&line))
                    .and_then(|()| out.flush());
                is_writing.store(false, Ordering::SeqCst);
                if written.is_err() {
                    dropped.inc();
                }
                queued_bytes.fetch_sub(line.len(), Ordering::SeqCst);
            }
            // The caller of `flush` may have timed out.
            LogMessage::Flush(done) => drop(done.send(())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Output whose reader can block (while `text` is locked) and whose disk can be full.
    #[derive(Clone, Default)]
    struct Reader {
        text: Arc<Mutex<Vec<u8>>>,
        full: Arc<Mutex<bool>>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut text = self.text.lock().unwrap();
            if *self.full.lock().unwrap() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            text.extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Waits until all lines so far are written, however long that takes.
    fn wait(log: &LineWriter) {
        let (done, written) = sync_channel(1);
        log.queue.send(LogMessage::Flush(done)).unwrap();
        written.recv().unwrap();
    }

    fn lines(text: &[u8]) -> Vec<String> {
        let text = String::from_utf8(text.to_vec()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn writers_do_not_block_and_the_reader_gets_a_notice_of_dropped_lines() {
        let reader = Reader::default();
        let log = LineWriter::new(reader.clone()).unwrap();
        let stuck = reader.text.lock().unwrap();
        let line = "x".repeat(1023);
        for _ in 0..300 {
            log.line(&line);
        }
        // The queue holds 256 lines, including the one that is being written.
        assert_eq!(log.dropped().get(), 44);
        log.flush();
        drop(stuck);
        wait(&log);
        log.line("the last");
        wait(&log);
        let text = lines(&reader.text.lock().unwrap());
        assert_eq!(text.iter().filter(|text| **text == line).count(), 256);
        let notices = text
            .iter()
            .filter_map(|line| line.strip_suffix(" log lines dropped"));
        let missing: Vec<u64> = notices.map(|n| n.parse().unwrap()).collect();
        assert_eq!(missing.iter().sum::<u64>(), 44, "{missing:?}");
        assert_eq!(text.len(), 256 + missing.len() + 1);
        assert_eq!(text.last().unwrap(), "the last");
    }

    #[test]
    fn the_last_line_is_written_although_the_thread_begins_late() {
        let (queue, messages) = channel();
        let log = LineWriter {
            queue,
            queued_bytes: Arc::default(),
            is_writing: Arc::default(),
            dropped: IntCounter::new("dropped", "Log lines dropped").unwrap(),
            json: Arc::default(),
        };
        let (reader, late) = (Reader::default(), log.clone());
        let out = reader.clone();
        std::thread::spawn(move || {
            std::thread::sleep(FLUSH_TIMEOUT * 3 / 2);
            let (queued_bytes, is_writing) = (&late.queued_bytes, &late.is_writing);
            write_lines(
                out,
                &messages,
                queued_bytes,
                is_writing,
                &late.dropped,
                &late.json,
            );
        });
        log.line("error: the last");
        log.flush();
        assert_eq!(lines(&reader.text.lock().unwrap()), ["error: the last"]);
    }

    #[test]
    fn lines_of_the_program_itself_and_notices_can_be_json() {
        let reader = Reader::default();
        let log = LineWriter::new(reader.clone()).unwrap();
        log.note(Level::ERROR, "error: ", "as \"text\"");
        log.set_format(LogFormat::Json);
        wait(&log);
        *reader.full.lock().unwrap() = true;
        log.note(Level::ERROR, "error: ", "lost");
        wait(&log);
        *reader.full.lock().unwrap() = false;
        log.note(Level::ERROR, "error: ", "of\ntwo lines");
        wait(&log);
        let text = lines(&reader.text.lock().unwrap());
        assert_eq!(text.len(), 3, "{text:?}");
        assert_eq!(text[0], "error: as \"text\"");
        let said = [("WARN", "1 log lines dropped"), ("ERROR", "of\ntwo lines")];
        for (line, (level, message)) in text[1..].iter().zip(said) {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(line["level"], level, "{line}");
            assert_eq!(line["message"], message, "{line}");
            let at = line["timestamp"].as_str().unwrap();
            assert!(at.ends_with('Z') && at.len() == 27, "{at}");
        }
    }

    #[test]
    fn lines_lost_to_a_full_disk_are_reported_once_there_is_room() {
        let reader = Reader::default();
        let log = LineWriter::new(reader.clone()).unwrap();
        *reader.full.lock().unwrap() = true;
        log.line("one");
        log.line("two");
        wait(&log);
        *reader.full.lock().unwrap() = false;
        log.line("three");
        log.line("four");
        wait(&log);
        let text = lines(&reader.text.lock().unwrap());
        assert_eq!(text, ["2 log lines dropped", "three", "four"]);
        assert_eq!(log.dropped().get(), 2);
    }
}
