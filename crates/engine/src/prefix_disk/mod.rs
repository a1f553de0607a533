//! The prefix cache on disk: blocks of K and V, and recurrent states, in files that later requests find, also those of
//! a later process.
//!
//! The engine's thread hands over copies of blocks when they are full, and takes in those that a request can begin with.
//! Two other threads write and read the files. Whatever fails here costs the time of computing a prompt again, and
//! nothing else.

mod folder;
mod format;
mod reader;
mod writer;

use super::stats::Stats;
use crate::cache_key::CacheKey;
use crate::spec::SeqId;
use folder::Folder;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockAllocator, BlockName, BlockTable, KvStore, PrefixRoot};
use format::{Entry, HEADER_BYTES};
use reader::Reader;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};
use writer::Writer;

pub use reader::{Chain, ChainStates, Found, Wanted};

/// Time that the engine waits to learn that there is nothing of a text, as nearly always. Then the request begins in the
/// same step.
const FIRST_WAIT: Duration = Duration::from_millis(2);
/// Time without an answer of the disk after which a sequence goes on without it: about what one that stands still takes to
/// start.
const MAX_SILENCE: Duration = Duration::from_secs(10);

/// What makes the contents of a pool usable by another process: bytes that differ where these do.
#[derive(Debug)]
pub struct PoolIdentity {
    /// What distinguishes the model and how it is computed.
    pub description: String,
    /// K and V of some tokens.
    pub probe: Vec<u8>,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes of a recurrent state; 0 = there are none.
    pub state_bytes: usize,
}

/// The pools whose contents are kept.
#[derive(Debug)]
pub struct Identities {
    pub target: PoolIdentity,
    /// `None` = there is no draft network, or what it computes is not kept.
    pub draft: Option<PoolIdentity>,
}

/// The name of a pool, and the bytes of what it keeps.
#[derive(Debug, Clone, Copy)]
pub struct NamedPool {
    name: BlockName,
    bytes: usize,
}

/// What is read for a sequence.
struct Load {
    id: SeqId,
    wanted: Wanted,
    found: Receiver<Found>,
    /// What was received and not taken.
    arrived: Option<Found>,
    /// When something arrived last, or the load began.
    heard: Instant,
    is_over: bool,
}

/// The prefix cache on disk, as the engine's thread has it.
pub struct PrefixDisk {
    /// What is read; one sequence at a time. Dropped first, so that the reader does not wait for it to be taken.
    load: Option<Load>,
    /// Where a load that took too long will answer. Until then nothing else is read. Dropped before the reader, too.
    late: Option<Receiver<Found>>,
    folder: Arc<Folder>,
    writer: Writer,
    reader: Reader,
    target: NamedPool,
    states: Option<NamedPool>,
    draft: Option<NamedPool>,
    block_size: usize,
}

impl PrefixDisk {
    /// Opens the folder at `path` for at most `limit` bytes of files, of pools with blocks of `block_size` tokens.
    ///
    /// # Errors
    /// `Setup`, in one line: the folder cannot be used, or has no room for a block.
    pub fn open(
        path: &Path,
        limit: u64,
        block_size: usize,
        identities: &Identities,
        stats: &Arc<Stats>,
    ) -> Result<Self> {
        let folder = Arc::new(Folder::open(path)?);
        let named = |kind: &str, pool: &PoolIdentity, bytes: usize| NamedPool {
            name: folder.key().name(
                "pool",
                &[
                    kind.as_bytes(),
                    pool.description.as_bytes(),
                    &block_size.to_le_bytes(),
                    &bytes.to_le_bytes(),
                    &pool.probe,
                ],
            ),
            bytes,
        };
        let target = &identities.target;
        let states = (target.state_bytes > 0).then(|| named("state", target, target.state_bytes));
        let draft = identities.draft.as_ref();
        let draft = draft.map(|draft| named("draft", draft, draft.block_bytes));
        let target = named("target", target, target.block_bytes);
        let pools = [Some(target), states, draft].into_iter().flatten();
        let largest = pools.map(|pool| HEADER_BYTES + pool.bytes).max();
        let largest = largest.unwrap_or(0) as u64;
        if largest > limit {
            return Err(Error::setup(format!(
                "--prefix-cache-disk-size {limit}: one file takes {largest} bytes: raise it"
            )));
        }
        Ok(Self {
            writer: Writer::start(folder.clone(), limit, stats.clone())?,
            reader: Reader::start(folder.clone())?,
            folder,
            target,
            states,
            draft,
            block_size,
            load: None,
            late: None,
        })
    }

    /// The key of the folder.
    pub fn key(&self) -> &CacheKey {
        self.folder.key()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// The target's pool.
    pub fn target(&self) -> NamedPool {
        self.target
    }

    /// The pool of the draft network, if it is kept.
    pub fn draft(&self) -> Option<NamedPool> {
        self.draft
    }

    /// Hands over the known blocks of `table` that have no name, as far as there is room, and names them. They hold the
    /// first of `tokens`.
    pub fn keep(
        &self,
        pool: NamedPool,
        store: &KvStore,
        blocks: &mut BlockAllocator,
        table: &BlockTable,
        root: PrefixRoot,
        tokens: &[u32],
    ) {
        // What was not written is offered again, and so is what comes after it, which cannot be found without it.
        blocks.forget_names_before(self.writer.losses());
        for depth in blocks.nameless(table) {
            if !self.writer.has_room(pool.bytes) {
                return;
            }
            let before = depth.checked_sub(1).map(|i| table.known()[i]);
            let parent = match before {
                None => None,
                Some(block) => match blocks.name(block) {
                    Some(name) => Some(name),
                    None => return,
                },
            };
            let last = parent.unwrap_or_else(|| self.key().root(pool.name, root));
            let own = &tokens[depth * self.block_size..][..self.block_size];
            let (name, block) = (self.key().after(last, own), table.known()[depth]);
            let contents = match store.read_block(block) {
                Ok(contents) => contents,
                Err(error) => return tracing::debug!("a block is not kept on disk: {error}"),
            };
            let entry = |name, depth| Entry {
                pool: pool.name,
                name,
                depth,
            };
            let parent = parent.map(|name| entry(name, depth - 1));
            self.writer.write(entry(name, depth), parent, contents);
            blocks.set_name(block, name);
        }
    }

    /// Hands over the target's state after `tokens`, which are whole blocks. Returns whether there was room.
    pub fn keep_state(
        &self,
        root: PrefixRoot,
        tokens: &[u32],
        state: impl FnOnce() -> Result<Vec<u8>>,
    ) -> bool {
        let Some(states) = self.states else {
            return true;
        };
        if !self.writer.has_room(states.bytes) {
            return false;
        }
        let names = self.names(self.target, root, tokens);
        if let Some(&last) = names.last() {
            let contents = match state() {
                Ok(contents) => contents,
                Err(error) => {
                    tracing::debug!("a state is not kept on disk: {error}");
                    return true;
                }
            };
            let depth = names.len();
            let parent = Entry {
                pool: self.target.name,
                name: last,
                depth: depth - 1,
            };
            let entry = Entry {
                pool: states.name,
                name: self.state_name(last),
                depth,
            };
            self.writer.write(entry, Some(parent), contents);
        }
        true
    }

    /// Notes that a request begins with the first `count` blocks of `table`.
    pub fn note_use(&self, blocks: &BlockAllocator, table: &BlockTable, count: usize) {
        let used = table.known().iter().take(count).enumerate();
        let entry = |(depth, &block): (usize, &u32)| {
            Some(Entry {
                pool: self.target.name,
                name: blocks.name(block)?,
                depth,
            })
        };
        // The first block becomes the youngest.
        self.writer.touch(used.rev().filter_map(entry).collect());
    }

    /// The blocks of a pool that hold `tokens`.
    pub fn chain(&self, pool: NamedPool, root: PrefixRoot, tokens: &[u32]) -> Chain {
        Chain {
            root,
            tokens: tokens.to_vec(),
            names: self.names(pool, root, tokens),
            pool: pool.name,
            bytes: pool.bytes,
        }
    }

    /// The states after the blocks of `target`. In memory, there is one after `known` blocks.
    pub fn states(&self, target: &Chain, known: usize) -> Option<ChainStates> {
        let states = self.states?;
        let names = target.names.iter().map(|&name| self.state_name(name));
        Some(ChainStates {
            names: names.collect(),
            pool: states.name,
            bytes: states.bytes,
            known,
        })
    }

    fn names(&self, pool: NamedPool, root: PrefixRoot, tokens: &[u32]) -> Vec<BlockName> {
        self.key().chain(pool.name, root, tokens, self.block_size)
    }

    fn state_name(&self, block: BlockName) -> BlockName {
        self.key().name("state", &[&block.0])
    }

    /// Whether the sequence `id` waits for what is on disk. If it `has_looked`, it does not begin to; otherwise it does
    /// if nothing is read for another one, and what it wants is read. It waits no more once nothing arrived for
    /// `MAX_SILENCE`.
    pub fn is_awaited(
        &mut self,
        id: SeqId,
        has_looked: &mut bool,
        wanted: impl FnOnce(&Self) -> Wanted,
    ) -> bool {
        self.drop_late();
        if let Some(load) = &self.load {
            return load.id == id;
        }
        if *has_looked || self.late.is_some() {
            return false;
        }
        *has_looked = true;
        let wanted = wanted(self);
        self.load = Some(Load {
            id,
            found: self.reader.read(wanted.clone()),
            wanted,
            arrived: None,
            heard: Instant::now(),
            is_over: false,
        });
        self.wait(FIRST_WAIT);
        let is_empty = |load: &Load| load.is_over && load.arrived.is_none();
        self.load.take_if(|load| is_empty(load)).is_none()
    }

    /// The sequence for which something is read, or was read and not taken.
    pub fn reads_for(&self) -> Option<SeqId> {
        self.load.as_ref().map(|load| load.id)
    }

    /// Drops a load that takes too long. Notes whether the reader has answered since.
    pub fn drop_late(&mut self) {
        self.late
            .take_if(|late| !matches!(late.try_recv(), Err(TryRecvError::Empty)));
        // In a long step, parts arrive that nobody has looked at.
        self.wait(Duration::ZERO);
        let is_late = |load: &mut Load| {
            let is_silent = load.arrived.is_none() && !load.is_over;
            is_silent && load.heard.elapsed() >= MAX_SILENCE
        };
        if let Some(load) = self.load.take_if(is_late) {
            tracing::debug!("the prefix cache on disk does not answer: nothing is read for now");
            self.late = Some(load.found);
        }
    }

    /// Waits until something was read, or nothing more is, up to `time`. Returns at once if nothing is read.
    pub fn wait(&mut self, time: Duration) {
        if let Some(load) = self.load.as_mut().filter(|load| load.arrived.is_none()) {
            match load.found.recv_timeout(time) {
                Ok(found) => (load.arrived, load.heard) = (Some(found), Instant::now()),
                Err(RecvTimeoutError::Disconnected) => load.is_over = true,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// The next part of what was read, and what it is of.
    pub fn take(&mut self) -> Option<(Wanted, Found)> {
        let load = self.load.as_mut()?;
        let found = load.arrived.take().or_else(|| {
            let received = load.found.try_recv();
            load.is_over = matches!(received, Err(TryRecvError::Disconnected));
            received.ok()
        });
        if found.is_some() {
            load.heard = Instant::now();
        }
        let wanted = load.wanted.clone();
        if found.is_none() {
            self.load.take_if(|load| load.is_over);
        }
        Some((wanted, found?))
    }

    /// Stops to read for a sequence that does not wait any more, or for which there is no room.
    pub fn abandon_unless(&mut self, mut waits: impl FnMut(SeqId) -> bool) {
        self.load.take_if(|load| !waits(load.id));
    }
}

/// Makes blocks that were read known, from the block `first` of `chain` on. Returns whether all of them are.
pub fn take_in(
    blocks: &mut BlockAllocator,
    store: &mut KvStore,
    chain: &Chain,
    first: usize,
    contents: &[Vec<u8>],
) -> bool {
    let block_size = blocks.block_size();
    let end = first + contents.len();
    let known = blocks.find(chain.root, &chain.tokens[..first * block_size]);
    if known.blocks().len() < first {
        return false;
    }
    let mut table = BlockTable::default();
    blocks.adopt(&mut table, &known);
    let is_reserved = blocks.reserve(&mut table, end * block_size).is_ok();
    let new = table.blocks()[first..].iter().zip(contents);
    let is_written = is_reserved
        && new.into_iter().all(|(&block, contents)| {
            let written = store.write_block(block, contents);
            written
                .inspect_err(|e| tracing::warn!("a block of the disk does not fit: {e}"))
                .is_ok()
        });
    if is_written {
        let tokens = &chain.tokens[..end * block_size];
        blocks.cache(&mut table, chain.root, tokens);
        for (&block, &name) in table.known().iter().zip(&chain.names) {
            blocks.set_name(block, name);
        }
    }
    let is_known = table.known().len() == end;
    blocks.release(&mut table);
    is_known
}

#[cfg(test)]
mod tests;
