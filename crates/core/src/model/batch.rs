//! The rows of a forward.

use super::adapter::{Adapter, AdapterRows};
use crate::error::{Error, Result};
use crate::kv::BlockTable;
use candle_core::Tensor;
use foretoken_kernels::{KeptState, Span, StateRows};
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of nodes of a draft tree: the number of bits of an ancestor mask.
pub const MAX_TREE_NODES: usize = 64;

/// Rows of many sequences, computed in one forward. Row `i` is `tokens[i]` at `positions[i]`; its
/// key and value go to pool slot `slots[i]`.
#[derive(Debug, Default, Clone)]
pub struct Batch {
    /// Token ids, one per row.
    pub tokens: Vec<u32>,
    /// Replaces `tokens`, `[rows]` u32, if a GPU drew them and the host has not read them.
    pub drawn: Option<Tensor>,
    /// What an EAGLE head reads of each row besides its token, `[rows, hidden_size]` in the compute dtype: the
    /// [fused](super::Head::fuse) hidden states of the target at the position before, or the head's own features.
    /// `None` = zeros. Other models do not read it.
    pub features: Option<Tensor>,
    /// What a parallel head reads of the batch's first rows instead of their tokens, `[first rows, hidden_size]` in
    /// the compute dtype: the [fused](super::Head::fuse) hidden states of the target there. The head computes only K
    /// and V of these rows. `None` = no such rows. Other models do not read it.
    pub context_features: Option<Tensor>,
    /// Position of each row in its sequence, from 0.
    pub positions: Vec<u32>,
    /// Pool slot of each row: `block * block_size + offset`.
    pub slots: Vec<u32>,
    /// Rows, ascending, whose K and V are in the pool already. Only a head that [drafts in
    /// place](super::Head::drafts_in_place) has such rows.
    pub written: Vec<u32>,
    /// Rows at the end that belong to no sequence: they have a token and a position, but neither slot nor span. Only
    /// forwards that are recorded have such rows.
    pub padding: usize,
    /// The spans into which the rows are divided, in row order.
    pub spans: Vec<Span>,
    /// The rows of each sequence, if layers of the model keep states; see [`Batch::keep_state`]. Empty if all
    /// sequences begin here, and nothing of them is kept.
    pub states: Vec<StateRows>,
    /// The rows that have adapters, ascending. The others are the base model's.
    pub adapters: Vec<AdapterRows>,
    /// Rows whose logits are requested, ascending.
    pub logits: Vec<u32>,
    /// Rows whose last hidden states are requested, ascending: what the output layer would read.
    pub last_hidden: Vec<u32>,
    /// Requested hidden states. Their layers are the same in all forwards of a model.
    pub taps: Option<Taps>,
}

/// The block that a parallel head takes besides hidden states: the last token of a sequence, and a row with the
/// mask token for each token that the head is to predict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskedBlock {
    /// Maximum number of its rows, from 2 to [`MAX_TREE_NODES`].
    pub size: usize,
    /// The id of the mask token.
    pub mask: u32,
    /// Whether each row predicts the token after its position, the first one included (DSpark); otherwise the
    /// rows with masks predict their own (DFlash).
    pub from_anchor: bool,
}

impl MaskedBlock {
    /// The block of a draft model with this [mask token](super::ModelInfo::mask_token), as its authors' code limits it.
    pub fn of_model(mask: u32) -> Self {
        Self {
            size: 32,
            mask,
            from_anchor: true,
        }
    }

    /// Number of tokens that the largest block predicts.
    pub fn max_depth(&self) -> usize {
        self.size - usize::from(!self.from_anchor)
    }

    /// Number of rows of a block that predicts `depth` tokens.
    pub fn rows(&self, depth: usize) -> usize {
        depth + usize::from(!self.from_anchor)
    }
}

/// The hidden states that a forward returns: those of all these layers for all these rows.
///
/// The hidden state of a row at tap `i` is the residual stream that enters layer `i`, numbered as in
/// EAGLE-3 (Li et al. 2025) and Hugging Face's `hidden_states[i]`: 0 = the token's embedding, the
/// number of layers = the input of the final norm.
#[derive(Debug, Default, Clone)]
pub struct Taps {
    /// Ascending, without duplicates.
    pub layers: Vec<usize>,
    /// Ascending, without duplicates.
    pub rows: Vec<u32>,
}

/// Whether each node of a draft follows the one before it; see [`Batch::push_span`].
pub fn is_chain(parents: &[Option<u16>]) -> bool {
    let mut nodes = parents.iter().enumerate();
    nodes.all(|(node, parent)| parent.map(usize::from) == node.checked_sub(1))
}

impl Batch {
    /// Adds the rows of one sequence after `context` tokens in the pool: `tokens` are a chain and then
    /// the nodes of a tree, one for each of `parents`. A parent is the index of an earlier node; `None`
    /// = the last token of the chain. The K and V of row `i` go to position `context + i` of `table`,
    /// which has room for all rows; a node's position in the sequence depends on its depth.
    ///
    /// Without branches the rows are one causal span. With branches, the tree and the last token of the
    /// chain are one span, so that they share one pass over the context (if the mask has a bit left for
    /// that token); the rest of the chain is a causal span before it, and part of its context.
    ///
    /// # Panics
    /// If there are more parents than tokens, or more than [`MAX_TREE_NODES`] with branches, or a
    /// parent does not come before its node.
    pub fn push_span(
        &mut self,
        tokens: &[u32],
        parents: &[Option<u16>],
        context: usize,
        table: &BlockTable,
        block_size: usize,
    ) {
        let (start, chain) = (self.tokens.len(), tokens.len() - parents.len());
        let place = |row: usize| table.slot(context + row, block_size);
        self.tokens.extend_from_slice(tokens);
        self.slots.extend((0..tokens.len()).map(place));
        let mut push = |rows: Range<usize>, tree: Option<Vec<u64>>| {
            let end = (context + rows.end).div_ceil(block_size);
            self.spans.push(Span {
                rows: start + rows.start..start + rows.end,
                context: context + rows.start,
                blocks: table.blocks()[..end].to_vec(),
                tree,
            });
        };
        let position = |row: usize| (context + row) as u32;
        if is_chain(parents) {
            push(0..tokens.len(), None);
            self.positions.extend((0..tokens.len()).map(position));
            return;
        }
        assert!(parents.len() <= MAX_TREE_NODES, "{} nodes", parents.len());
        let root = usize::from(chain > 0 && parents.len() < MAX_TREE_NODES);
        let (masks, depths) = masks(parents, root);
        if chain > root {
            push(0..chain - root, None);
        }
        push(chain - root..tokens.len(), Some(masks));
        self.positions.extend((0..chain).map(position));
        let nodes = depths.into_iter().map(|depth| position(chain + depth));
        self.positions.extend(nodes);
    }

    /// Says which state the last `rows` rows go on with, of which the last are the nodes of `parents`: those of one
    /// [`Batch::push_span`].
    pub fn keep_state(&mut self, rows: usize, parents: &[Option<u16>], kept: KeptState) {
        self.states.push(StateRows {
            rows: self.tokens.len() - rows..self.tokens.len(),
            parents: parents.to_vec(),
            kept: Some(kept),
        });
    }

    /// Gives the last `rows` rows an adapter. Those of the same one before them share its products.
    pub fn adapt(&mut self, rows: usize, adapter: &Arc<dyn Adapter>) {
        let end = self.tokens.len();
        let rows = end - rows..end;
        match self.adapters.last_mut() {
            Some(last) if last.rows.end == rows.start && Arc::ptr_eq(&last.adapter, adapter) => {
                last.rows.end = end;
            }
            _ => self.adapters.push(AdapterRows {
                rows,
                adapter: adapter.clone(),
            }),
        }
    }

    /// The rows by sequence, for layers that keep states.
    ///
    /// # Errors
    /// If sequences do not begin here, and nobody said which states they go on with.
    pub fn state_rows(&self) -> Result<Vec<StateRows>> {
        if !self.states.is_empty() {
            return Ok(self.states.clone());
        }
        let of_span = |span: &Span| {
            let begins = span.context == 0 && span.tree.is_none();
            begins.then(|| StateRows {
                rows: span.rows.clone(),
                parents: Vec::new(),
                kept: None,
            })
        };
        let all: Option<Vec<StateRows>> = self.spans.iter().map(of_span).collect();
        all.ok_or_else(|| Error::internal("a sequence goes on without its recurrent state"))
    }

    /// Adds consecutive rows of one sequence that all see one another, after `context` tokens in the pool;
    /// otherwise as a chain in [`Batch::push_span`].
    ///
    /// # Panics
    /// If there are none, or more than [`MAX_TREE_NODES`].
    pub fn push_block(
        &mut self,
        tokens: &[u32],
        context: usize,
        table: &BlockTable,
        block_size: usize,
    ) {
        let rows = tokens.len();
        assert!((1..=MAX_TREE_NODES).contains(&rows), "{rows} rows");
        self.push_span(tokens, &[], context, table, block_size);
        if let Some(span) = self.spans.last_mut() {
            span.tree = Some(all_see_all(rows));
        }
    }
}

/// The mask of each of `rows` rows that all see one another.
fn all_see_all(rows: usize) -> Vec<u64> {
    vec![u64::MAX >> (MAX_TREE_NODES - rows); rows]
}

/// Ancestor masks of `root` (0 or 1) rows from which all nodes descend and of the nodes after them,
/// and the depths of the nodes, from 0.
fn masks(parents: &[Option<u16>], root: usize) -> (Vec<u64>, Vec<usize>) {
    let mut masks = vec![1; root];
    let mut depths: Vec<usize> = Vec::with_capacity(parents.len());
    for (node, parent) in parents.iter().enumerate() {
        let (seen, depth) = match parent.map(usize::from) {
            None => (root as u64, 0),
            Some(parent) => (masks[root + parent], depths[parent] + 1),
        };
        masks.push(seen | 1 << (root + node));
        depths.push(depth);
    }
    (masks, depths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::BlockAllocator;

    const BLOCK_SIZE: usize = 4;

    /// The rows of one sequence after a row of another.
    fn batch(chain: usize, parents: &[Option<u16>], context: usize) -> (Batch, BlockTable) {
        let mut blocks = BlockAllocator::new(64, BLOCK_SIZE);
        let (mut other, mut table) = (BlockTable::default(), BlockTable::default());
        let rows = chain + parents.len();
        blocks.reserve(&mut other, 1).unwrap();
        blocks.reserve(&mut table, context + rows).unwrap();
        let mut batch = Batch::default();
        batch.push_span(&[9], &[], 0, &other, BLOCK_SIZE);
        let tokens: Vec<u32> = (0..rows as u32).collect();
        batch.push_span(&tokens, parents, context, &table, BLOCK_SIZE);
        assert_eq!(batch.tokens[1..], tokens);
        let slots = (context..context + rows).map(|at| table.slot(at, BLOCK_SIZE));
        assert!(batch.slots[1..].iter().copied().eq(slots));
        (batch, table)
    }

    #[test]
    fn a_chain_is_one_causal_span() {
        for parents in [&[][..], &[None], &[None, Some(0), Some(1)]] {
            let (batch, table) = batch(3, parents, 5);
            let rows = 3 + parents.len();
            assert!(batch.positions[1..].iter().copied().eq(5..5 + rows as u32));
            let [_, span] = &batch.spans[..] else {
                panic!("{batch:?}")
            };
            assert_eq!((span.rows.clone(), span.context), (1..1 + rows, 5));
            assert_eq!((&span.blocks[..], &span.tree), (table.blocks(), &None));
        }
    }

    /// 0 -> 1 -> 3, 0 -> 2, and a second root 4.
    #[test]
    fn a_tree_sees_the_last_of_the_chain_and_its_ancestors() {
        let parents = [None, Some(0), Some(0), Some(1), None];
        let (batch, table) = batch(3, &parents, 6);
        assert_eq!(batch.positions[1..], [6, 7, 8, 9, 10, 10, 11, 9]);
        let [_, chain, tree] = &batch.spans[..] else {
            panic!("{batch:?}")
        };
        assert_eq!((chain.rows.clone(), chain.context), (1..3, 6));
        assert_eq!(
            (&chain.blocks[..], &chain.tree),
            (&table.blocks()[..2], &None)
        );
        assert_eq!((tree.rows.clone(), tree.context), (3..9, 8));
        assert_eq!(tree.blocks, table.blocks());
        let masks = [0b1, 0b11, 0b111, 0b1011, 0b10111, 0b100001];
        assert_eq!(tree.tree.as_deref(), Some(&masks[..]));
    }

    #[test]
    fn the_rows_of_a_block_see_one_another() {
        let mut table = BlockTable::default();
        BlockAllocator::new(64, BLOCK_SIZE)
            .reserve(&mut table, 70)
            .unwrap();
        for rows in [1, 3, 64] {
            let mut batch = Batch::default();
            batch.push_block(&vec![7; rows], 5, &table, BLOCK_SIZE);
            let span = &batch.spans[0];
            assert_eq!((span.rows.clone(), span.context), (0..rows, 5));
            for (row, other) in (0..64).flat_map(|row| (0..64).map(move |other| (row, other))) {
                assert!(row >= rows || span.sees(row, other) == (other < rows));
            }
            assert!(batch.positions.iter().copied().eq(5..5 + rows as u32));
        }
    }

    /// A tree with one node per mask bit leaves no bit for the row before it.
    #[test]
    fn the_largest_tree_stands_alone() {
        let parents: Vec<Option<u16>> = (0..64).map(|i: u16| i.checked_sub(2)).collect();
        let (batch, _) = batch(1, &parents, 0);
        let spans: Vec<_> = batch.spans[1..]
            .iter()
            .map(|span| (span.rows.clone(), span.context))
            .collect();
        assert_eq!(spans, [(1..2, 0), (2..66, 1)]);
        let masks = batch.spans[2].tree.as_ref().unwrap();
        let even = masks[62];
        assert_eq!((even, masks[63]), (0x5555_5555_5555_5555, even << 1));
        assert_eq!(batch.positions[63..], [31, 32, 32]);
    }
}
