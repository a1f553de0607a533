//! A draft network's part in the prefix cache on disk.

use super::DraftPool;
use crate::prefix_disk::{Chain, PoolIdentity, PrefixDisk, take_in};
use crate::spec::calibration;
use crate::spec::draft::{CacheScope, SeqId};
use candle_core::Tensor;
use foretoken_core::error::Result;

impl DraftPool {
    /// What distinguishes the pool from those of other networks. A head gets made-up states of a target of `hidden_size`.
    /// Writes to the pool, in which no sequence may have blocks.
    ///
    /// # Errors
    /// If the device failed.
    pub fn identity(&mut self, hidden_size: usize, description: &str) -> Result<PoolIdentity> {
        let network = &mut self.network;
        let num_blocks = network.blocks.num_blocks();
        let rows = calibration::probe_rows(network.draft.model(), &network.store, num_blocks);
        let fused = match network.draft.head() {
            None => None,
            Some(head) => {
                let width = head.reads().len() * hidden_size;
                let values = (0..rows * width).map(|i| (i * 7919 % 255) as f32 / 127. - 1.);
                let states = Tensor::from_iter(values, head.device())?;
                Some(head.fuse(&states.reshape((rows, width))?)?)
            }
        };
        let is_after = network.token_offset > 0;
        let (model, store) = (network.draft.model_mut(), &mut network.store);
        let probe = calibration::probe(model, store, num_blocks, |batch| {
            if is_after {
                batch.features = fused;
            } else {
                batch.context_features = fused;
            }
        })?;
        Ok(PoolIdentity {
            description: format!(
                "{description} {:?}",
                network.draft.model().kv_shape().on_one_device()
            ),
            probe,
            block_bytes: network.store.block_bytes(),
            state_bytes: 0,
        })
    }

    /// Hands over the blocks of a sequence, whose `tokens` are all of its tokens.
    pub fn keep(&mut self, disk: &PrefixDisk, id: SeqId, scope: CacheScope, tokens: &[u32]) {
        let network = &mut self.network;
        let root = network.root(scope, tokens);
        let Some((pool, sequence)) = disk.draft().zip(self.sequences.get(&id)) else {
            return;
        };
        let rows = tokens.get(network.token_offset..).unwrap_or_default();
        let (blocks, table) = (&mut network.blocks, &sequence.table);
        // Of a model with other tokens, nobody would look for them.
        if !blocks.nameless(table).is_empty() && rows.starts_with(&sequence.tokens) {
            disk.keep(pool, &network.store, blocks, table, root, &sequence.tokens);
        }
    }

    /// The tokens of the rows with which a sequence of `tokens` could begin. The last row is fed in any case.
    fn first_rows<'t>(&self, tokens: &'t [u32]) -> &'t [u32] {
        let rows = self.network.token_offset..tokens.len().saturating_sub(1);
        tokens.get(rows).unwrap_or_default()
    }

    /// Whether a sequence of `tokens` that is about to begin lacks some of the first `most` blocks with which it could.
    pub fn lacks_blocks(&self, id: SeqId, tokens: &[u32], most: usize) -> bool {
        let count = |rows: &[u32]| rows.len() / self.network.blocks.block_size();
        let most = most.min(count(self.first_rows(tokens)));
        let begun = self.sequences.get(&id);
        begun.is_some_and(|begun| count(&begun.tokens) < most)
    }

    /// The blocks with which a sequence of `tokens` could begin, and the number of those that the pool has.
    pub fn chain(
        &self,
        disk: &PrefixDisk,
        scope: CacheScope,
        tokens: &[u32],
    ) -> Option<(Chain, usize)> {
        let network = &self.network;
        let (root, rows) = (network.root(scope, tokens), self.first_rows(tokens));
        let known = network.blocks.find(root, rows).blocks().len();
        Some((disk.chain(disk.draft()?, root, rows), known))
    }

    /// Makes blocks known; see `take_in()`.
    pub fn take_in(&mut self, chain: &Chain, first: usize, contents: &[Vec<u8>]) -> bool {
        let network = &mut self.network;
        take_in(
            &mut network.blocks,
            &mut network.store,
            chain,
            first,
            contents,
        )
    }
}
