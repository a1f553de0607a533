//! Drafting with a parallel head of the target, or a draft model, which guesses a block of tokens in one forward.

mod drawn;
mod guesses;
mod product;
#[cfg(test)]
mod tests;
mod walk;

use super::draft::{Draft, DraftRequest, Forecast};
use super::draft_model::RoundReads;
use super::drafter::Drafter;
use super::features::{MAX_NEW_STATES, joined};
use super::pool::{DraftPool, DraftSequence};
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::model::{Batch, DraftNetwork, ForwardOutput, Head, MaskedBlock, Model};
use std::ops::Range;
use std::time::Instant;

/// Drafts with a parallel head (DFlash, arXiv 2602.06036), whose guesses become a tree: the most
/// probable paths of the product of its distributions (DDTree, arXiv 2604.12989), or, if the head follows
/// paths (DSpark, arXiv 2607.05147), those that grow by its distributions after each of them.
///
/// A round is one forward for all sequences, whatever the depth of their drafts. It reads the target's
/// hidden states of what was committed since the last round, whose K and V stay in the pool, and a block
/// of the last token and masks, whose K and V leave it. The rows of a P-EAGLE head are those of EAGLE: the
/// block begins with the row of the last token. A sequence starts no later than the head's cached
/// prefix ends, because hidden states are not computed again.
///
/// A model of its own with a mask token (PARD, arXiv 2504.18583) reads the tokens that it has not seen, and masks after
/// them, as one causal span: the rows of the last token and of the masks predict the block. It begins a prompt as
/// [`DraftModel`](super::DraftModel) does, chunk by chunk.
pub struct BlockDrafter {
    pool: DraftPool,
    block: MaskedBlock,
    /// The features of rows with masks; only of a P-EAGLE head.
    mask: Option<Tensor>,
}

/// A request that takes part in a round.
#[derive(Debug, Clone, Copy)]
pub struct BlockRequest {
    /// Index of the request.
    place: usize,
    /// Number of tokens that its block predicts; 0 = a model only reads a part of the prompt.
    depth: usize,
}

impl BlockDrafter {
    /// A drafter over a parallel `head`, with an empty pool of `num_blocks` blocks. A prompt is read
    /// while the target computes it, at most `chunk` (at least 2) of its positions at a time.
    ///
    /// # Errors
    /// If it is another kind of head, or the device has no memory for the pool.
    pub fn new(
        head: Box<dyn Head>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        Self::over(DraftNetwork::Head(head), num_blocks, block_size, chunk)
    }

    /// As [`BlockDrafter::new`], but over a `model` that has a [mask token](foretoken_core::model::ModelInfo::mask_token).
    ///
    /// # Errors
    /// If it has none, or the device has no memory for the pool.
    pub fn of_model(
        model: Box<dyn Model>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        Self::over(DraftNetwork::Model(model), num_blocks, block_size, chunk)
    }

    fn over(
        draft: DraftNetwork,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        let block = draft.masked_block();
        let block = block.ok_or_else(|| Error::internal("this draft predicts no blocks"))?;
        let mask = draft
            .head()
            .and_then(|head| Some(head.fuse(head.mask_hidden()?)));
        let mask = mask.transpose()?;
        let pool = DraftPool::new(draft, num_blocks, block_size, chunk)?;
        Ok(Self { pool, block, mask })
    }

    /// Turns the prefix cache of the drafter's pool on or off. No block may be in use.
    pub fn with_prefix_cache(mut self, enabled: bool) -> Self {
        self.pool.network.blocks.set_prefix_cache(enabled);
        self
    }

    /// Number of tokens that the block of a request predicts.
    fn depth(&self, request: &DraftRequest<'_>) -> usize {
        let depth = request.model_length.min(self.block.max_depth());
        if request.max_siblings() == 1 {
            depth.min(request.nodes)
        } else {
            depth
        }
    }

    /// Makes room for a block of a request; returns the number of tokens that it predicts. `None` if there is no room, or
    /// not all states of the tokens before the last are there; `reads` is that of
    /// [`PagedNetwork::begin`](super::pool::PagedNetwork).
    fn begin<'t>(
        &mut self,
        request: &DraftRequest<'t>,
        reads: &mut RoundReads<'t>,
    ) -> Option<usize> {
        let depth = self.depth(request);
        let (network, sequences) = (&mut self.pool.network, &mut self.pool.sequences);
        if !network.is_head() {
            let sequence = sequences.entry(request.id).or_default();
            if !network.begin(sequence, request, depth - 1, reads) {
                return None;
            }
            let unread = request.tokens.len() - sequence.tokens.len();
            return Some(if unread > network.chunk { 0 } else { depth });
        }
        let sequence = sequences.get_mut(&request.id)?;
        let tokens = network.tokens_of(sequence, request.tokens);
        let has_states = network.has_states(sequence, tokens);
        let vocab_size = network.draft.model().info().vocab_size;
        let is_known = (tokens.last()).is_some_and(|&last| (last as usize) < vocab_size);
        let rows = tokens.len().saturating_sub(1) + self.block.rows(depth);
        let may_draft = has_states && is_known;
        (may_draft && network.blocks.reserve(&mut sequence.table, rows).is_ok()).then_some(depth)
    }

    /// The rows of a sequence with `tokens` that its round reads.
    fn unread(&self, sequence: &DraftSequence, tokens: &[u32]) -> Range<usize> {
        let network = &self.pool.network;
        if network.is_head() {
            return sequence.unread();
        }
        let start = sequence.tokens.len();
        start..tokens.len().min(start + network.chunk)
    }

    /// The logits of all blocks, one round after the other.
    fn forward(
        &mut self,
        requests: &[DraftRequest<'_>],
        rounds: &[BlockRequest],
    ) -> Result<ForwardOutput> {
        let batch = match &self.mask {
            Some(mask) => self.eagle_batch(requests, rounds, mask)?,
            None if self.pool.network.is_head() => self.block_batch(requests, rounds)?,
            None => self.causal_batch(requests, rounds),
        };
        let network = &mut self.pool.network;
        let head = network.draft.model_mut();
        head.forward(&batch, &mut network.store)
    }

    /// The rows of all states, then the blocks, since the head computes less for the former.
    fn block_batch(&self, requests: &[DraftRequest<'_>], rounds: &[BlockRequest]) -> Result<Batch> {
        let (network, sequences) = (&self.pool.network, &self.pool.sequences);
        let (mut batch, block_size) = (Batch::default(), network.blocks.block_size());
        let of = |round: &BlockRequest| {
            let request = &requests[round.place];
            sequences.get(&request.id).map(|of| (request, of))
        };
        let mut states: Vec<Tensor> = Vec::new();
        for (request, sequence) in rounds.iter().filter_map(of) {
            let rows = sequence.unread();
            if !rows.is_empty() {
                states.push(sequence.features.of_rows(rows.clone())?);
                let tokens = &network.tokens_of(sequence, request.tokens)[rows.clone()];
                batch.push_span(tokens, &[], rows.start, &sequence.table, block_size);
            }
        }
        if !states.is_empty() {
            batch.context_features = Some(network.fuse(&joined(states)?)?);
        }
        for round in rounds {
            let Some((request, sequence)) = of(round) else {
                continue;
            };
            let mut tokens = vec![self.block.mask; self.block.rows(round.depth)];
            tokens[0] = request.tokens[request.tokens.len() - 1];
            let (context, table) = (sequence.features.kept().end, &sequence.table);
            batch.push_block(&tokens, context, table, block_size);
            let end = batch.tokens.len() as u32;
            batch.logits.extend(end - round.depth as u32..end);
        }
        Ok(batch)
    }

    /// The batch of causal spans. It has, of each round, the rows that are not read, of which the last one predicts the
    /// first token, and the rows with masks.
    fn causal_batch(&self, requests: &[DraftRequest<'_>], rounds: &[BlockRequest]) -> Batch {
        let (network, sequences) = (&self.pool.network, &self.pool.sequences);
        let (mut batch, block_size) = (Batch::default(), network.blocks.block_size());
        for round in rounds {
            let request = &requests[round.place];
            let Some(sequence) = sequences.get(&request.id) else {
                continue;
            };
            let all = network.tokens_of(sequence, request.tokens);
            let rows = self.unread(sequence, all);
            let mut tokens = all[rows.clone()].to_vec();
            tokens.resize(rows.len() + round.depth.saturating_sub(1), self.block.mask);
            batch.push_span(&tokens, &[], rows.start, &sequence.table, block_size);
            let end = batch.tokens.len() as u32;
            batch.logits.extend(end - round.depth as u32..end);
        }
        batch
    }

    /// The batch of an EAGLE-like head: causal spans, where the features of rows with masks are `mask`.
    fn eagle_batch(
        &self,
        requests: &[DraftRequest<'_>],
        rounds: &[BlockRequest],
        mask: &Tensor,
    ) -> Result<Batch> {
        let mut batch = self.causal_batch(requests, rounds);
        let (mut states, mut counts) = (Vec::new(), Vec::new());
        for round in rounds {
            if let Some(sequence) = self.pool.sequences.get(&requests[round.place].id) {
                let rows = sequence.unread();
                states.push(sequence.features.of_rows(rows.clone())?);
                counts.push((rows.len(), round.depth - 1));
            }
        }
        let (read, mut at) = (self.pool.network.fuse(&joined(states)?)?, 0);
        let mut features = Vec::new();
        for (rows, masks) in counts {
            features.push(read.narrow(0, at, rows)?);
            features.extend(std::iter::repeat_n(mask.clone(), masks));
            at += rows;
        }
        batch.features = Some(joined(features)?);
        Ok(batch)
    }

    /// The draft of each round, of a head that follows paths.
    fn walk(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        rounds: &[BlockRequest],
        output: &ForwardOutput,
    ) -> Result<Vec<Draft>> {
        let DraftPool {
            network,
            sequences,
            acceptance,
        } = &mut self.pool;
        let Some(head) = network.draft.head() else {
            return Ok(Vec::new());
        };
        let (mut parts, mut left) = (Vec::with_capacity(rounds.len()), rounds.iter().peekable());
        for (place, request) in requests.iter_mut().enumerate() {
            if let Some(round) = left.next_if(|round| round.place == place)
                && let Some(sequence) = sequences.get(&request.id)
            {
                let view = acceptance.view(&sequence.history, request.is_sampled());
                parts.push((request, *round, view));
            }
        }
        let walked = walk::walk(head, output, parts)?;
        let drafts = rounds.iter().zip(walked).map(|(round, walked)| {
            let request = &requests[round.place];
            if let Some(sequence) = sequences.get_mut(&request.id) {
                let tokens = network.tokens_of(sequence, request.tokens);
                let (history, sampled) = (&mut sequence.history, request.is_sampled());
                history.propose(tokens, sampled, walked.all, walked.estimates);
            }
            walked.draft
        });
        Ok(drafts.collect())
    }

    /// Learns what a forward cost, if no sequence read more than `most_unread` rows, which are few; all sequences read
    /// `unread` rows.
    fn note_forward(
        &mut self,
        rounds: &[BlockRequest],
        (most_unread, unread): (usize, usize),
        seconds: f64,
    ) {
        if most_unread <= MAX_NEW_STATES {
            let blocks = rounds.iter().map(|round| self.block.rows(round.depth));
            let mut rows: usize = blocks.sum();
            if !self.pool.network.is_head() {
                // A head's rows of states cost little: of each layer only K and V, and no logits.
                rows += unread - rounds.len();
            }
            let network = &mut self.pool.network;
            network.forwards.push((rows, seconds));
            network.cost.steps += 1;
            network.cost.step_seconds += seconds;
        }
    }
}

impl Drafter for BlockDrafter {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let started = Instant::now();
        let mut drafts = vec![Draft::default(); requests.len()];
        self.pool.network.forwards.clear();
        let mut rounds: Vec<BlockRequest> = Vec::new();
        let network = &self.pool.network;
        let mut reads = network.round_reads(requests.len());
        let mut order: Vec<_> = requests.iter().enumerate().collect();
        order.sort_by_key(|(_, request)| {
            network.reading_order(self.pool.sequences.get(&request.id), request)
        });
        for (place, request) in order {
            if request.model_length > 0 {
                let depth = self.begin(request, &mut reads);
                rounds.extend(depth.map(|depth| BlockRequest { place, depth }));
            }
        }
        rounds.sort_by_key(|round| round.place);
        if rounds.is_empty() {
            return Ok(drafts);
        }
        let output = self.forward(requests, &rounds)?;
        let head = self.pool.network.draft.head();
        let found = if head.is_some_and(Head::follows_paths) {
            self.walk(requests, &rounds, &output)?
        } else {
            self.guess_rounds(requests, &rounds, &output)?
        };
        let (mut most_unread, mut unread) = (0, 0);
        for (round, draft) in rounds.iter().zip(found) {
            let request = &requests[round.place];
            let rows = self.pool.sequences.get(&request.id).map(|sequence| {
                let tokens = self.pool.network.tokens_of(sequence, request.tokens);
                self.unread(sequence, tokens)
            });
            let (network, sequences) = (&mut self.pool.network, &mut self.pool.sequences);
            if let (Some(rows), Some(sequence)) = (rows, sequences.get_mut(&request.id)) {
                most_unread = most_unread.max(rows.len());
                unread += rows.len();
                let tokens = network.tokens_of(sequence, request.tokens);
                let read = if network.is_head() {
                    tokens.len() - 1
                } else {
                    rows.end
                };
                sequence.has_read(&tokens[..read]);
                // The block leaves the pool.
                network.blocks.truncate_to(&mut sequence.table, read);
            }
            drafts[round.place] = draft;
        }
        self.note_forward(
            &rounds,
            (most_unread, unread),
            started.elapsed().as_secs_f64(),
        );
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        let network = &self.pool.network;
        let fed = self.pool.sequences.get(&request.id);
        let fed = fed.map_or(0, |sequence| sequence.tokens.len());
        let pending = match network.is_head() {
            true => 1,
            false => {
                let pending = request.tokens.len().saturating_sub(fed);
                pending.clamp(1, network.chunk)
            }
        };
        Some(self.pool.forecast(request, request.length, pending))
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        Some(&mut self.pool)
    }
}
