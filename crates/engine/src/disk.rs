//! What the engine does for the prefix cache on disk: hands over what a step has computed, and takes in what a waiting
//! sequence can begin with.

use super::Engine;
use super::prefix_disk::{Found, PrefixDisk, Wanted, take_in};
use super::scheduler::{Beginnings, ScheduledSequence};
use super::sequence::Sequence;
use super::stats::Stats;
use crate::spec::{SeqId, SpeculativeRunner};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time of a step in which blocks are taken in, while others wait.
const MAX_TIME: Duration = Duration::from_millis(50);
/// Time after which an engine that waits for a disk alone looks at what has arrived.
const WAIT: Duration = Duration::from_millis(5);

impl Engine {
    /// Hands over the full blocks of a running sequence.
    pub(super) fn keep_blocks(&mut self, index: usize) {
        if let Some(disk) = &self.disk {
            let (blocks, sequence) = self.scheduler.cached(index);
            let state = &sequence.state;
            if is_kept(sequence) {
                let (store, table) = (self.runner.store(), &state.table);
                let root = state.prefix_root();
                disk.keep(disk.target(), store, blocks, table, root, &state.tokens);
            }
        }
    }

    /// Hands over what the draft network computed in the step of `plan`.
    pub(super) fn keep_drafts(&mut self, plan: &[ScheduledSequence]) {
        if let Some(disk) = &self.disk {
            for planned in plan {
                let sequence = &self.scheduler.running[planned.index];
                if is_kept(sequence) {
                    self.runner.keep_draft(disk, &sequence.state);
                }
            }
        }
    }

    /// Hands over the recurrent states that a step made known.
    pub(super) fn keep_states(&mut self) {
        if let Some(disk) = &self.disk {
            self.runner.keep_states(disk);
        }
    }

    /// Takes in some of what was read. When that is all, nothing is held for the sequence any more.
    pub(super) fn take_from_disk(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        let waiting = &self.scheduler.waiting.sequences;
        disk.abandon_unless(|id| waiting.keys().any(|&(_, waiting)| waiting == id));
        let held = disk.reads_for();
        disk.drop_late();
        let (started, stats) = (Instant::now(), &self.shared.stats);
        while started.elapsed() < MAX_TIME
            && let Some((wanted, found)) = disk.take()
        {
            let is_taken = match &found {
                Found::Target { first, blocks } => {
                    let (target, store) = (&wanted.target, self.runner.store_mut());
                    let is_taken =
                        take_in(self.scheduler.blocks_mut(), store, target, *first, blocks);
                    if is_taken {
                        let tokens = blocks.len() * disk.block_size();
                        stats.prefix_cache_disk_hits.inc_by(tokens as u64);
                    }
                    is_taken
                }
                Found::Draft { first, blocks } => {
                    let draft = wanted.draft.as_ref();
                    draft.is_some_and(|(chain, _)| self.runner.take_in_draft(chain, *first, blocks))
                }
                Found::State { after, state } => {
                    self.runner.take_in_state(&wanted.target, *after, state)
                }
            };
            stats.prefix_cache_disk_read_bytes.inc_by(found.bytes());
            if !is_taken {
                disk.abandon_unless(|_| false);
            }
        }
        // There may be no room for it for a long time yet.
        if let Some(id) = held.filter(|_| disk.reads_for().is_none()) {
            self.runner.release(id);
        }
    }

    /// Waits for what is read, while there is nothing else to do.
    pub(super) fn wait_for_disk(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.wait(WAIT);
        }
    }
}

/// Whether what is computed of a sequence is kept. What a model made of it that fails may not be what it should be.
fn is_kept(sequence: &Sequence) -> bool {
    sequence.state.draft_context.may_persist && sequence.ended != Some("error")
}

/// The beginnings of sequences, as the models and the disk allow them.
pub struct EngineBeginnings<'a> {
    pub runner: &'a mut SpeculativeRunner,
    pub disk: Option<&'a mut PrefixDisk>,
    pub stats: &'a Stats,
    /// See `Engine::concerned`.
    pub concerned: &'a mut Vec<SeqId>,
}

impl Beginnings for EngineBeginnings<'_> {
    fn resume(&mut self, sequence: &Sequence, cached: usize) -> usize {
        self.concerned.push(sequence.state.id);
        let state = &sequence.state;
        let resumed = self.runner.resume(state, cached, sequence.may_draft());
        self.concerned.clear();
        resumed
    }

    fn release(&mut self, sequence: &Sequence) {
        self.runner.release(sequence.state.id);
    }

    fn awaits(&mut self, sequence: &mut Sequence, cached: usize, resumed: usize) -> bool {
        let Some(disk) = self.disk.as_deref_mut() else {
            return false;
        };
        let block_size = disk.block_size();
        let most = sequence.max_cached() / block_size;
        let (state, known) = (&sequence.state, cached / block_size);
        let (runner, stats) = (&mut *self.runner, self.stats);
        let (may_draft, has_all) = (sequence.may_draft(), resumed / block_size >= most);
        let may_have_more = || disk.draft().is_some() && runner.draft_lacks_blocks(state, most);
        if !is_kept(sequence) || has_all && !(may_draft && may_have_more()) {
            return false;
        }
        disk.is_awaited(state.id, &mut sequence.has_looked, |disk| {
            let tokens = &state.tokens[..most * block_size];
            let target = disk.chain(disk.target(), state.prefix_root(), tokens);
            let looked_up = tokens.len() - known * block_size;
            stats.prefix_cache_disk_queries.inc_by(looked_up as u64);
            let draft = may_draft.then(|| runner.draft_chain(disk, state)).flatten();
            Wanted {
                states: (disk.states(&target, resumed / block_size))
                    .filter(|_| !has_all)
                    .map(Arc::new),
                target: Arc::new(target),
                known,
                draft: draft.map(|(chain, known)| (Arc::new(chain), known)),
            }
        })
    }
}
