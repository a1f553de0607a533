//! The runner's part in the prefix cache on disk.

use super::{Guard, Proposer, SequenceState, SpeculativeRunner};
use crate::prefix_disk::{Chain, Identities, PoolIdentity, PrefixDisk};
use crate::spec::calibration;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvStore;

impl SpeculativeRunner {
    /// What distinguishes the pools from those of other models. Call it first of all: it writes to the pools. `description`
    /// is that of the models and of how they are loaded.
    ///
    /// # Errors
    /// If the device failed.
    pub fn identities(&mut self, description: &str) -> Result<Identities> {
        let (target, store) = (&mut *self.target, &mut self.store);
        // The bytes of pools are the same wherever they are.
        let shape = target.kv_shape().on_one_device();
        let state_bytes = (self.states.as_ref()).map_or(0, |_| shape.bytes_per_state());
        let probe = calibration::probe(target, store, self.num_blocks, |_| ())?;
        let hidden_size = self.target.info().hidden_size;
        let draft = self.kept_drafter().and_then(|drafter| {
            let found = drafter.pool(|pool| pool.identity(hidden_size, description))?;
            let failed = |error: Error| {
                tracing::warn!(
                    "the drafter's part of the prefix cache is not kept on disk: {error}"
                )
            };
            found.map_err(failed).ok()
        });
        Ok(Identities {
            target: PoolIdentity {
                description: format!("{description} {shape:?}"),
                probe,
                block_bytes: self.store.block_bytes(),
                state_bytes,
            },
            draft,
        })
    }

    /// The tensors of the target's pool.
    pub fn store(&self) -> &KvStore {
        &self.store
    }

    /// The same, to be written to.
    pub fn store_mut(&mut self) -> &mut KvStore {
        &mut self.store
    }

    /// Hands over what the draft network has computed of a sequence.
    pub fn keep_draft(&self, disk: &PrefixDisk, state: &SequenceState) {
        let scope = state.draft_context.scope;
        if let Some(drafter) = self.kept_drafter() {
            drafter.pool(|pool| pool.keep(disk, state.id, scope, &state.tokens));
        }
    }

    /// Hands over the recurrent states that are known to all sequences.
    pub fn keep_states(&mut self, disk: &PrefixDisk) {
        let store = &self.store;
        if let Some(states) = &mut self.states {
            states.keep_copies(|root, tokens, slot| {
                disk.keep_state(root, tokens, || store.read_state(slot))
            });
        }
    }

    /// Whether the draft network lacks some of the first `most` blocks of a sequence that is about to begin with it.
    pub fn draft_lacks_blocks(&self, state: &SequenceState, most: usize) -> bool {
        let lacks = self.kept_drafter().and_then(|drafter| {
            drafter.pool(|pool| pool.lacks_blocks(state.id, &state.tokens, most))
        });
        lacks.unwrap_or(false)
    }

    /// The blocks of the draft network with which a sequence could begin, and the number of those that are in memory.
    /// `None` if it drafts nothing with a network.
    pub fn draft_chain(
        &mut self,
        disk: &PrefixDisk,
        state: &SequenceState,
    ) -> Option<(Chain, usize)> {
        let is_read = self.proposers.first_mut()?.is_read(state);
        let drafter = self.kept_drafter().filter(|_| is_read)?;
        let scope = state.draft_context.scope;
        drafter.pool(|pool| pool.chain(disk, scope, &state.tokens))?
    }

    /// Makes blocks of the draft network known; see `take_in`.
    pub fn take_in_draft(&self, chain: &Chain, first: usize, blocks: &[Vec<u8>]) -> bool {
        let drafter = self.kept_drafter();
        let taken =
            drafter.and_then(|drafter| drafter.pool(|pool| pool.take_in(chain, first, blocks)));
        taken.unwrap_or(false)
    }

    /// Makes the recurrent state after so many blocks of `chain` known. Returns whether it is.
    pub fn take_in_state(&mut self, chain: &Chain, after: usize, state: &[u8]) -> bool {
        let store = &mut self.store;
        let tokens = &chain.tokens[..after * store.block_size];
        let write = |slot| store.write_state(slot, state).is_ok();
        let states = self.states.as_mut();
        states.is_some_and(|states| states.add_copy(chain.root, tokens, write))
    }

    /// The drafter whose pool is kept: not one whose network changes.
    fn kept_drafter(&self) -> Option<&Guard> {
        let drafter = self.proposers.first().map(Proposer::drafter);
        drafter.filter(|drafter| !drafter.learns())
    }
}
