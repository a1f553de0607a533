//! The thread that writes files, so that no step waits for a disk.

use super::folder::Folder;
use super::format::Entry;
use crate::stats::Stats;
use foretoken_core::error::{Error, Result};
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that may wait to be written.
const MAX_QUEUED: usize = 256 << 20;
/// Time without files after one could not be written.
const PAUSE: Duration = Duration::from_secs(60);
/// Time in which what waits is written when the engine ends.
const MAX_LAST_TIME: Duration = Duration::from_secs(10);
/// The files are looked at again after so many parts of the limit were written: others may write to the folder, too.
const LOOKS_PER_LIMIT: u64 = 16;

/// What the thread is to do.
enum Job {
    Write {
        entry: Entry,
        /// Without whose file the entry would not be found.
        parent: Option<Entry>,
        contents: Vec<u8>,
    },
    /// These were used.
    Touch(Vec<Entry>),
}

impl Job {
    /// Bytes of what waits.
    fn bytes(&self) -> usize {
        match self {
            Self::Write { contents, .. } => contents.len(),
            Self::Touch(entries) => size_of_val(&entries[..]),
        }
    }
}

/// What both threads know.
#[derive(Default)]
struct Shared {
    /// Bytes that wait.
    queued: AtomicUsize,
    /// Grows when files could not be written, at most once in [`PAUSE`]: what comes after a lost file is lost, too, so
    /// that a later loss tells of it.
    losses: AtomicU64,
    /// When files are written again, after one could not be.
    paused_until: Mutex<Option<Instant>>,
    /// When the rest is dropped, once the engine has ended.
    end: Mutex<Option<Instant>>,
}

/// The queue of files that are to be written. When it is dropped, most of them are.
pub struct Writer {
    /// `None` once it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl Writer {
    /// Starts the thread, which keeps the files in the folder within `limit` bytes.
    ///
    /// # Errors
    /// `Setup`, if there can be no thread.
    pub fn start(folder: Arc<Folder>, limit: u64, stats: Arc<Stats>) -> Result<Self> {
        let (sender, jobs) = channel();
        let shared = Arc::<Shared>::default();
        let mut writing = Writing {
            folder,
            limit,
            stats,
            shared: shared.clone(),
            used: 0,
            unseen: 0,
            told: None,
            has_failed: false,
        };
        let thread = std::thread::Builder::new()
            .name("prefix-write".into())
            .spawn(move || writing.run(&jobs))
            .map_err(|e| Error::setup(format!("cannot start a thread: {e}")))?;
        Ok(Self {
            jobs: Some(sender),
            thread: Some(thread),
            shared,
        })
    }

    /// Whether so many bytes can wait, too, and files can be written.
    pub fn has_room(&self, bytes: usize) -> bool {
        let queued = self.shared.queued.load(Ordering::Relaxed);
        let paused = lock(&self.shared.paused_until);
        (queued == 0 || queued + bytes <= MAX_QUEUED)
            && paused.is_none_or(|until| Instant::now() >= until)
    }

    /// A number that grows when files were lost that should have been written.
    pub fn losses(&self) -> u64 {
        self.shared.losses.load(Ordering::Relaxed)
    }

    /// Has the file of `entry` written, if its parent has one.
    pub fn write(&self, entry: Entry, parent: Option<Entry>, contents: Vec<u8>) {
        self.send(Job::Write {
            entry,
            parent,
            contents,
        });
    }

    /// Notes that these entries were used, if that can wait, too.
    pub fn touch(&self, entries: Vec<Entry>) {
        let job = Job::Touch(entries);
        let bytes = job.bytes();
        if bytes > 0 && self.shared.queued.load(Ordering::Relaxed) + bytes <= MAX_QUEUED {
            self.send(job);
        }
    }

    fn send(&self, job: Job) {
        (self.shared.queued).fetch_add(job.bytes(), Ordering::Relaxed);
        // If the thread has panicked, nothing is kept any more.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        *lock(&self.shared.end) = Some(Instant::now() + MAX_LAST_TIME);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It has nobody to tell.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of the thread.
struct Writing {
    folder: Arc<Folder>,
    limit: u64,
    stats: Arc<Stats>,
    shared: Arc<Shared>,
    /// Bytes of all files when they were last looked at, and of those that this thread has written since.
    used: u64,
    unseen: u64,
    /// When `losses` has grown.
    told: Option<Instant>,
    has_failed: bool,
}

impl Writing {
    fn run(&mut self, jobs: &Receiver<Job>) {
        self.look();
        for job in jobs {
            (self.shared.queued).fetch_sub(job.bytes(), Ordering::Relaxed);
            match job {
                Job::Write {
                    entry,
                    parent,
                    contents,
                } => {
                    let is_lost = self.is_over() || self.is_paused();
                    if is_lost || !self.write(&entry, parent.as_ref(), &contents) {
                        self.tell_loss();
                        self.stats.prefix_cache_disk_dropped.inc();
                    }
                }
                Job::Touch(entries) => {
                    for entry in entries {
                        if self.is_over() {
                            break;
                        }
                        self.folder.touch(&entry);
                    }
                }
            }
        }
    }

    fn is_over(&self) -> bool {
        lock(&self.shared.end).is_some_and(|end| Instant::now() > end)
    }

    /// Has blocks offered again. Not after each loss: where the limit has no room for a text, something is always lost.
    fn tell_loss(&mut self) {
        if self.told.is_none_or(|told| told.elapsed() >= PAUSE) {
            self.told = Some(Instant::now());
            self.shared.losses.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn is_paused(&self) -> bool {
        lock(&self.shared.paused_until).is_some_and(|until| Instant::now() < until)
    }

    /// Writes a file, unless it is there. Returns whether it is now.
    fn write(&mut self, entry: &Entry, parent: Option<&Entry>, contents: &[u8]) -> bool {
        if parent.is_some_and(|parent| !self.folder.has(parent)) {
            return false;
        }
        // Seldom, and not to be trusted: a block is handed over where the one before it was missing or damaged.
        if self.folder.read(entry, contents.len()).is_some() {
            return true;
        }
        match self.folder.write(entry, contents) {
            Ok(bytes) => {
                self.used += bytes;
                self.unseen += bytes;
                (self.stats.prefix_cache_disk_written_bytes).inc_by(contents.len() as u64);
                if std::mem::take(&mut self.has_failed) {
                    tracing::info!("the prefix cache is written to disk again");
                }
                if self.used > self.limit || self.unseen > self.limit / LOOKS_PER_LIMIT {
                    self.look();
                }
                self.note_used();
                true
            }
            Err(error) => {
                self.pause(&error);
                false
            }
        }
    }

    /// Adds up the files, and removes the oldest ones if they are too many.
    fn look(&mut self) {
        match self.folder.evict(self.limit) {
            Ok(used) => (self.used, self.unseen) = (used, 0),
            Err(error) => self.pause(&error),
        }
        self.note_used();
    }

    fn note_used(&self) {
        let used = i64::try_from(self.used).unwrap_or(i64::MAX);
        self.stats.prefix_cache_disk_bytes.set(used);
    }

    /// Writes nothing for a while.
    fn pause(&mut self, error: &io::Error) {
        *lock(&self.shared.paused_until) = Some(Instant::now() + PAUSE);
        if !std::mem::replace(&mut self.has_failed, true) {
            let root = self.folder.root().display();
            tracing::warn!(
                "the prefix cache is not written to {root}, and is tried again every {} s: {error}",
                PAUSE.as_secs()
            );
        }
    }
}

#[cfg(test)]
mod tests;
