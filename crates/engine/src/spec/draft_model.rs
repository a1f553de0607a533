//! Drafting with a small model of the same vocabulary, or with a head of the target, token by token.

mod drafting;
mod drawn;

use super::draft::{Draft, DraftRequest, Forecast, SeqId};
use super::drafter::Drafter;
use super::features::{MAX_NEW_STATES, joined};
use super::pool::{DraftPool, DraftSequence, PagedNetwork};
use candle_core::Tensor;
use drafting::{Drafting, HeadInput};
use drawn::DeviceSteps;
use foretoken_core::error::Result;
use foretoken_core::kv::BlockKey;
use foretoken_core::model::{Batch, DraftNetwork, ForwardOutput, Head, Model};
use foretoken_kernels::parallel;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Instant;

/// Drafts with a draft model, level by level.
///
/// Its vocabulary may be smaller than the target's. A sequence with an id that it does not know
/// gets no draft.
///
/// A head reads, besides a token, the target's hidden states of the position before it. So its own
/// sequence begins with the second token, and it feeds what is committed with the states that it observes,
/// and what it drafts itself with its own outputs; the latter leaves its pool after the round (EAGLE-3,
/// Li et al. 2025, arXiv 2503.01840, section 3.1).
pub struct DraftModel {
    pool: DraftPool,
}

impl DraftModel {
    /// A drafter over a `model`, with an empty pool of `num_blocks` blocks and a prefix cache.
    ///
    /// A prompt is prefilled from the first draft request on, `chunk` (at least 2) rows per round of
    /// all requests together, so that no round takes longer than one chunk adds (on a GPU, of each);
    /// until the prompt is in the pool the drafts are empty. Those with the fewest rows to read come
    /// first.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn new(
        model: Box<dyn Model>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        let draft = DraftNetwork::Model(model);
        let pool = DraftPool::new(draft, num_blocks, block_size, chunk)?;
        Ok(Self { pool })
    }

    /// As [`DraftModel::new`], but over a `head` that predicts one token.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn of_head(
        head: Box<dyn Head>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        let draft = DraftNetwork::Head(head);
        let pool = DraftPool::new(draft, num_blocks, block_size, chunk)?;
        Ok(Self { pool })
    }

    /// Turns the prefix cache of the drafter's pool on or off. No block may be in use.
    pub fn with_prefix_cache(mut self, enabled: bool) -> Self {
        self.pool.network.blocks.set_prefix_cache(enabled);
        self
    }
}

/// What the requests of a round read of texts of which the model lacks more than a block.
pub struct RoundReads<'t> {
    /// The blocks that it lacked.
    blocks: Vec<BlockKey<'t>>,
    /// Rows that are left for others.
    rows: usize,
}

impl<'t> RoundReads<'t> {
    /// Whether another request may read `rows` rows, the first of which are those of `block`. If a request reads that block in
    /// this round, others share it in later ones.
    fn allow(&self, block: Option<BlockKey<'t>>, rows: usize) -> bool {
        rows <= self.rows && block.is_none_or(|block| !self.blocks.contains(&block))
    }

    /// Notes what a request reads.
    fn note(&mut self, block: Option<BlockKey<'t>>, rows: usize) {
        self.blocks.extend(block);
        self.rows -= rows;
    }
}

impl PagedNetwork {
    /// What a round of so many requests may read: a chunk, or on a GPU, for which rows are cheap, one of each request.
    pub fn round_reads<'t>(&self, requests: usize) -> RoundReads<'t> {
        let is_on_gpu = self.draft.model().device().is_cuda();
        let chunks = if is_on_gpu { requests } else { 1 };
        RoundReads {
            blocks: Vec::new(),
            rows: chunks * self.chunk,
        }
    }

    /// The place of a request in the order in which those of a round [begin](Self::begin): the rows to read, if they are
    /// more than a block. `fed` is the request's sequence.
    pub fn reading_order(&self, fed: Option<&DraftSequence>, request: &DraftRequest<'_>) -> usize {
        let fed = fed.map_or(0, |fed| fed.tokens.len());
        let unread = request.tokens.len().saturating_sub(fed);
        if unread > self.blocks.block_size() {
            unread
        } else {
            0
        }
    }

    /// Makes room for the rows of a request and for `drafted` rows after them. Returns false if there is no room, or if the model cannot
    /// continue these tokens, or if `reads`, what other requests read in this round, leaves nothing for it.
    pub fn begin<'t>(
        &mut self,
        fed: &mut DraftSequence,
        request: &DraftRequest<'t>,
        drafted: usize,
        reads: &mut RoundReads<'t>,
    ) -> bool {
        let tokens = self.tokens_of(fed, request.tokens);
        if tokens.is_empty() || self.is_head() && fed.features.kept().end != tokens.len() {
            return false;
        }
        fed.roll_back(&mut self.blocks, tokens);
        let root = self.root(request.context.scope, tokens);
        if !self.is_head() {
            self.find(fed, root, tokens);
        }
        let config = self.draft.model().info();
        let knows = |&id: &u32| (id as usize) < config.vocab_size;
        let (len, new) = (tokens.len(), &tokens[fed.tokens.len()..]);
        let last_position = len + request.model_length - 1;
        let has_states = !self.is_head() || fed.features.kept().start <= fed.tokens.len();
        if last_position > config.max_position_embeddings || !new.iter().all(knows) || !has_states {
            fed.reset(&mut self.blocks);
            return false;
        }
        let (mut block, mut read) = (None, 0);
        if !self.is_head() && new.len() > self.blocks.block_size() {
            block = self.blocks.next_block(fed.table.known(), root, tokens);
            read = new.len().min(self.chunk);
        }
        let begins = reads.allow(block, read)
            && (self.blocks.reserve(&mut fed.table, len + drafted)).is_ok();
        if begins {
            reads.note(block, read);
        }
        begins
    }

    /// The features of a forward's rows: the target's are fused, all at once if there are only those.
    fn features(&self, read: Vec<HeadInput>) -> Result<Tensor> {
        let all_target = read.iter().map(|read| match read {
            HeadInput::Target(states) => Some(states.clone()),
            HeadInput::Own(_) => None,
        });
        if let Some(states) = all_target.collect::<Option<Vec<_>>>() {
            return self.fuse(&joined(states)?);
        }
        let features = read.into_iter().map(|read| match read {
            HeadInput::Target(states) => self.fuse(&states),
            HeadInput::Own(features) => Ok(features),
        });
        joined(features.collect::<Result<_>>()?)
    }

    /// Forwards that feed each sequence of `open` what it has not seen, and draft for those that have seen all. Returns the
    /// largest number of rows of a sequence.
    fn step(&mut self, drafting: &mut [Drafting<'_, '_>], open: Vec<usize>) -> Result<usize> {
        let (started, before) = (Instant::now(), self.forwards.len());
        let is_on_gpu = self.draft.model().device().is_cuda();
        let may_draft = open.iter().any(|&i| drafting[i].may_draft());
        let needs_host = open.iter().any(|&i| drafting[i].needs_host());
        // On the host on a GPU, too, if its kernels do not have all that a request asks for.
        let longest = if is_on_gpu && may_draft && !needs_host {
            self.draft_on_device(drafting, open)
        } else {
            self.draft_on_host(drafting, &open)
        }?;
        let own = &mut self.forwards[before..];
        let seconds = started.elapsed().as_secs_f64() / own.len().max(1) as f64;
        own.iter_mut().for_each(|one| one.1 = seconds);
        Ok(longest)
    }

    /// The forward that feeds the sequences of `open` next, without features, and those of them that it drafts for. The last
    /// number is the largest number of rows of a sequence.
    fn feed(
        &self,
        drafting: &mut [Drafting<'_, '_>],
        open: &[usize],
    ) -> (Batch, Vec<usize>, usize) {
        let mut batch = Batch::default();
        let (mut complete, mut longest) = (Vec::new(), 0);
        for &i in open {
            let before = batch.tokens.len();
            if drafting[i].feed(&mut batch, self.chunk, self.blocks.block_size()) > 0 {
                complete.push(i);
            }
            longest = longest.max(batch.tokens.len() - before - drafting[i].num_staged());
        }
        (batch, complete, longest)
    }

    /// As [`feed`](Self::feed), with the features that a head reads.
    fn feed_with_features(
        &self,
        drafting: &mut [Drafting<'_, '_>],
        open: &[usize],
    ) -> Result<(Batch, Vec<usize>, usize)> {
        let mut features = None;
        if self.is_head() {
            let read = open.iter().map(|&i| drafting[i].read(self.chunk));
            features = Some(self.features(read.collect::<Result<_>>()?)?);
        }
        let (batch, complete, longest) = self.feed(drafting, open);
        Ok((Batch { features, ..batch }, complete, longest))
    }

    /// One forward, whose tokens the host chooses.
    fn draft_on_host(
        &mut self,
        drafting: &mut [Drafting<'_, '_>],
        open: &[usize],
    ) -> Result<usize> {
        let (batch, complete, longest) = self.feed_with_features(drafting, open)?;
        self.forwards.push((batch.tokens.len(), 0.0));
        let output = self.draft.model_mut().forward(&batch, &mut self.store)?;
        note_outputs(drafting, &complete, &output)?;
        let vocab = self.draft.model().info().vocab_size;
        output.read(|mut logits| {
            let all = drafting.iter_mut().enumerate();
            let ready = all.filter(|(i, _)| complete.binary_search(i).is_ok());
            let mut parts = Vec::with_capacity(complete.len());
            for (_, one) in ready {
                let (rows, rest) = logits.split_at(one.asked() * vocab);
                logits = rest;
                parts.push((one, rows));
            }
            parallel::map(&mut parts, |(one, rows)| one.expand(rows.chunks(vocab)));
        })?;
        Ok(longest)
    }

    /// Forwards whose tokens a GPU draws, as many as need nothing of each other that only the host can compute. It waits for
    /// the tokens of all of them at once.
    fn draft_on_device(
        &mut self,
        drafting: &mut [Drafting<'_, '_>],
        mut open: Vec<usize>,
    ) -> Result<usize> {
        // Those that go on are then the first rows of every forward.
        open.sort_by_key(|&i| Reverse(drafting[i].levels_left()));
        let (batch, mut complete, longest) = self.feed_with_features(drafting, &open)?;
        let mut steps = DeviceSteps::default();
        steps.push(batch, drafting, &complete);
        loop {
            open.retain(|&i| drafting[i].is_open());
            if open.is_empty() || !open.iter().all(|&i| drafting[i].goes_on_unread()) {
                break;
            }
            let batch;
            (batch, complete, _) = self.feed(drafting, &open);
            steps.push(batch, drafting, &complete);
        }
        self.forwards.extend(steps.rows().map(|rows| (rows, 0.0)));
        let (output, drawn) = steps.run(self.draft.model_mut(), &mut self.store)?;
        note_outputs(drafting, &complete, &output)?;
        drawn.read(drafting)?;
        Ok(longest)
    }

    fn draft_all(&mut self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let (started, mut longest) = (Instant::now(), 0);
        loop {
            let all = 0..drafting.len();
            let open: Vec<usize> = all.filter(|&i| drafting[i].is_open()).collect();
            if open.is_empty() {
                break;
            }
            longest = longest.max(self.step(drafting, open)?);
        }
        let (seconds, steps) = (started.elapsed().as_secs_f64(), self.forwards.len());
        // A prompt's rows would distort the cost of a draft step; two rows are the catch-up after a
        // round in which every draft token was accepted. A head reads all accepted tokens again.
        let few = if self.is_head() { MAX_NEW_STATES } else { 2 };
        if longest <= few {
            self.cost.steps += steps as u64;
            self.cost.step_seconds += seconds;
        }
        Ok(())
    }
}

/// Gives the sequences of `of` what a head put out in their rows of logits, which follow one another.
fn note_outputs(
    drafting: &mut [Drafting<'_, '_>],
    of: &[usize],
    output: &ForwardOutput,
) -> Result<()> {
    let Some(features) = &output.features else {
        return Ok(());
    };
    let mut row = 0;
    for &i in of {
        let asked = drafting[i].asked();
        drafting[i].note_outputs(features.narrow(0, row, asked)?)?;
        row += asked;
    }
    Ok(())
}

impl Drafter for DraftModel {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let mut drafts = vec![Draft::default(); requests.len()];
        let DraftPool {
            network,
            sequences,
            acceptance,
        } = &mut self.pool;
        for request in requests.iter() {
            sequences.entry(request.id).or_default();
        }
        let states = sequences.iter_mut().map(|(&id, fed)| (id, fed));
        let mut states: HashMap<SeqId, &mut DraftSequence> = states.collect();
        let mut drafting = Vec::with_capacity(requests.len());
        let mut reads = network.round_reads(requests.len());
        network.forwards.clear();
        let mut requests: Vec<_> = requests.iter_mut().enumerate().collect();
        requests.sort_by_key(|(_, request)| {
            let fed = states.get(&request.id).map(|fed| &**fed);
            network.reading_order(fed, request)
        });
        for (place, request) in requests {
            if request.model_length > 0
                && let Some(fed) = states.remove(&request.id)
                && network.begin(fed, request, drafting::max_fed(request), &mut reads)
            {
                let tokens = network.tokens_of(fed, request.tokens);
                let one = Drafting::new(place, request, tokens, fed, acceptance, network.chunk);
                let model = network.draft.model();
                let stages = !network.is_head() && model.device().is_cpu();
                let stages = stages.then_some(model.info().vocab_size);
                drafting.push(one.of_a_head(network.draft.head()).staged(stages));
            }
        }
        network.draft_all(&mut drafting)?;
        for one in drafting {
            let place = one.place;
            drafts[place] = one.finish();
        }
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        let DraftPool {
            network, sequences, ..
        } = &self.pool;
        let unknown = DraftSequence::default();
        let fed = sequences.get(&request.id).unwrap_or(&unknown);
        let tokens = network.tokens_of(fed, request.tokens);
        let pending = tokens.len().saturating_sub(fed.tokens.len());
        let pending = pending.clamp(1, network.chunk);
        Some(self.pool.forecast(request, request.length, pending))
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        Some(&mut self.pool)
    }
}

#[cfg(test)]
mod tests;
