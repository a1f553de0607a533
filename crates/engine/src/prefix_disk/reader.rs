//! The thread that looks for files and reads them, so that no step waits for a disk.

use super::folder::Folder;
use super::format::Entry;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockName, PrefixRoot};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// Bytes of blocks that come together, and how many such parts wait at most.
const PART_BYTES: usize = 8 << 20;
const MAX_PARTS: usize = 4;

/// The first tokens of a sequence, and the names of their blocks in one pool.
#[derive(Debug)]
pub struct Chain {
    pub root: PrefixRoot,
    pub tokens: Vec<u32>,
    /// One for each full block of `tokens`.
    pub names: Vec<BlockName>,
    /// The pool of the blocks, and the bytes of one.
    pub pool: BlockName,
    pub bytes: usize,
}

impl Chain {
    /// The block of index `depth`.
    pub fn entry(&self, depth: usize) -> Entry {
        Entry {
            pool: self.pool,
            name: self.names[depth],
            depth,
        }
    }
}

/// The states after the blocks of a chain.
#[derive(Debug)]
pub struct ChainStates {
    /// One for each block: the name of the state after it.
    pub names: Vec<BlockName>,
    pub pool: BlockName,
    /// Bytes of a state.
    pub bytes: usize,
    /// Number of blocks after which there is a state in memory.
    pub known: usize,
}

/// What a sequence could begin with, if there are files of it.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// The target's blocks, and the number of those that are in memory.
    pub target: Arc<Chain>,
    pub known: usize,
    /// For a target with recurrent states: without one after them, blocks are of no use.
    pub states: Option<Arc<ChainStates>>,
    /// The same of a draft network.
    pub draft: Option<(Arc<Chain>, usize)>,
}

/// Something that was read.
#[derive(Debug)]
pub enum Found {
    /// The target's blocks, from the block `first` on.
    Target { first: usize, blocks: Vec<Vec<u8>> },
    /// A draft network's blocks.
    Draft { first: usize, blocks: Vec<Vec<u8>> },
    /// The state after so many of the target's blocks.
    State { after: usize, state: Vec<u8> },
}

impl Found {
    /// Bytes that were read.
    pub fn bytes(&self) -> u64 {
        let bytes: usize = match self {
            Self::Target { blocks, .. } | Self::Draft { blocks, .. } => {
                blocks.iter().map(Vec::len).sum()
            }
            Self::State { state, .. } => state.len(),
        };
        bytes as u64
    }
}

struct Job {
    wanted: Wanted,
    found: SyncSender<Found>,
}

/// The queue of what is looked for.
pub struct Reader {
    /// `None` once it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    /// Starts the thread.
    ///
    /// # Errors
    /// `Setup`, if there can be no thread.
    pub fn start(folder: Arc<Folder>) -> Result<Self> {
        let (sender, jobs) = channel::<Job>();
        let thread = std::thread::Builder::new()
            .name("prefix-read".into())
            .spawn(move || {
                for job in jobs {
                    // An error says that nobody waits for it any more.
                    let _ = read(&folder, &job);
                }
            })
            .map_err(|e| Error::setup(format!("cannot start a thread: {e}")))?;
        Ok(Self {
            jobs: Some(sender),
            thread: Some(thread),
        })
    }

    /// Has `wanted` looked for. What there is comes in order; then the channel ends.
    pub fn read(&self, wanted: Wanted) -> Receiver<Found> {
        let (found, receiver) = sync_channel(MAX_PARTS);
        // Without the thread the channel ends at once.
        let _ = (self.jobs.as_ref()).map(|jobs| jobs.send(Job { wanted, found }));
        receiver
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It has nobody to tell.
            let _ = thread.join();
        }
    }
}

/// Nobody waits for what is read.
struct Gone;

fn read(folder: &Folder, job: &Job) -> Result<(), Gone> {
    let Wanted {
        target,
        known,
        states,
        draft,
    } = &job.wanted;
    let state = match states {
        None => None,
        Some(states) => match state(folder, target, *known, states) {
            None => return Ok(()),
            found => found,
        },
    };
    let all = target.names.len();
    let end = state.as_ref().map_or(all, |(after, _)| *after);
    blocks(folder, target, *known..end, |first, blocks| {
        send(job, Found::Target { first, blocks })
    })?;
    if let Some((after, state)) = state {
        send(job, Found::State { after, state })?;
    }
    if let Some((chain, known)) = draft {
        let end = end.min(chain.names.len());
        blocks(folder, chain, *known..end, |first, blocks| {
            send(job, Found::Draft { first, blocks })
        })?;
    }
    Ok(())
}

/// The state after most blocks of those of which there are files, and their number; `None` if memory has as much.
fn state(
    folder: &Folder,
    chain: &Chain,
    known: usize,
    states: &ChainStates,
) -> Option<(usize, Vec<u8>)> {
    let rest = known..chain.names.len();
    let blocks = known + rest.take_while(|&i| folder.has(&chain.entry(i))).count();
    (states.known + 1..=blocks).rev().find_map(|after| {
        let entry = Entry {
            pool: states.pool,
            name: states.names[after - 1],
            depth: after,
        };
        Some((after, folder.read(&entry, states.bytes)?))
    })
}

/// Reads blocks in order, as many as there are files of, and passes them on in parts, each with the index of its first
/// block.
fn blocks(
    folder: &Folder,
    chain: &Chain,
    range: Range<usize>,
    pass: impl Fn(usize, Vec<Vec<u8>>) -> Result<(), Gone>,
) -> Result<(), Gone> {
    let count = (PART_BYTES / chain.bytes.max(1)).max(1);
    let mut first = range.start;
    while first < range.end {
        let end = range.end.min(first + count);
        let part = (first..end).map_while(|i| folder.read(&chain.entry(i), chain.bytes));
        let part: Vec<Vec<u8>> = part.collect();
        let is_whole = part.len() == end - first;
        if !part.is_empty() {
            pass(first, part)?;
        }
        if !is_whole {
            break;
        }
        first = end;
    }
    Ok(())
}

/// Hands over what was found. Waits while enough waits to be taken.
fn send(job: &Job, found: Found) -> Result<(), Gone> {
    job.found.send(found).map_err(|_| Gone)
}
