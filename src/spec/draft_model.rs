//! Drafting with a small model of the same vocabulary, or with a head of the target.

mod drafting;
mod drawn;
mod growth;

use super::calibration::{self, Measured};
use super::draft::{
    CacheScope, Committed, Draft, DraftCost, DraftRequest, Drafter, Forecast, SeqId,
};
use super::features::{Features, MAX_NEW_STATES, MAX_UNREAD, joined};
use super::lessons::{History, Lessons};
use crate::error::{Error, Result};
use crate::kernels::parallel;
use crate::kv::{BlockAllocator, BlockKey, BlockTable, KvStore, PrefixRoot};
use crate::model::{Batch, DraftNetwork, Head, Model};
use candle_core::Tensor;
use drafting::{Drafting, Read};
use drawn::Drawn;
use std::collections::HashMap;
use std::time::Instant;

/// A draft model with its own paged pool. It keeps no record of rounds: it compares the tokens it
/// was fed with the committed tokens and truncates its pool to their common prefix.
///
/// Its vocabulary may be smaller than the target's. A sequence with an id that it does not know
/// gets no draft.
///
/// A head reads, besides a token, the target's hidden states of the position before it. So its own
/// sequence begins with the second token, and it feeds what is committed with the states that it observes,
/// and what it drafts itself with its own outputs; the latter leaves its pool after the round (EAGLE-3,
/// Li et al. 2025, arXiv 2503.01840, section 3.1).
pub struct DraftModel {
    network: Network,
    lessons: Lessons,
    fed: HashMap<SeqId, Fed>,
}

/// The model and its pool.
struct Network {
    draft: DraftNetwork,
    blocks: BlockAllocator,
    store: KvStore,
    /// Maximum number of rows of one sequence in one forward.
    chunk: usize,
    cost: DraftCost,
    /// Rows and seconds of the last proposal's forwards.
    forwards: Vec<(usize, f64)>,
}

/// What is kept of one sequence: the tokens in the pool, their blocks, and what became of its drafts.
#[derive(Default)]
struct Fed {
    tokens: Vec<u32>,
    table: BlockTable,
    history: History,
    /// Only of a head.
    features: Features,
}

impl DraftModel {
    /// A drafter over a `model`, with an empty pool of `num_blocks` blocks and a prefix cache.
    ///
    /// A prompt is prefilled from the first draft request on, `chunk` (at least 2) rows per round,
    /// so that no round takes longer than one chunk adds; until the prompt is in the pool the
    /// drafts are empty.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn new(
        model: Box<dyn Model>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        Self::over(DraftNetwork::Model(model), num_blocks, block_size, chunk)
    }

    /// The same over a `head` that predicts one token.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn of_head(
        head: Box<dyn Head>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        Self::over(DraftNetwork::Head(head), num_blocks, block_size, chunk)
    }

    fn over(
        draft: DraftNetwork,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        Ok(Self {
            network: Network {
                store: draft.model().new_kv(num_blocks, block_size)?,
                blocks: BlockAllocator::new(num_blocks, block_size).with_prefix_cache(true),
                draft,
                chunk: chunk.max(2),
                cost: DraftCost::default(),
                forwards: Vec::new(),
            },
            lessons: Lessons::default(),
            fed: HashMap::new(),
        })
    }

    /// The same, with or without a prefix cache.
    pub fn with_prefix_cache(mut self, enabled: bool) -> Self {
        self.network.blocks.set_prefix_cache(enabled);
        self
    }
}

impl Fed {
    /// Truncates to the longest prefix shared with `tokens`. Their last token is always fed
    /// (again), for its logits.
    fn roll_back(&mut self, blocks: &mut BlockAllocator, tokens: &[u32]) {
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let common = self
            .tokens
            .iter()
            .zip(known)
            .take_while(|(a, b)| a == b)
            .count();
        let left = blocks.truncate_to(&mut self.table, common);
        self.tokens.truncate(left);
    }

    /// Frees what is in the pool. A head goes on with the states that it observes next.
    fn reset(&mut self, blocks: &mut BlockAllocator) {
        self.tokens.clear();
        self.features = Features::default();
        blocks.release(&mut self.table);
    }
}

impl Network {
    /// Whether the model is a head, which reads the target's hidden states.
    fn is_head(&self) -> bool {
        self.draft.head().is_some()
    }

    /// The tokens that the model reads, of all `tokens` of a sequence.
    fn tokens_of<'a>(&self, fed: &Fed, tokens: &'a [u32]) -> &'a [u32] {
        match self.is_head() {
            true => fed.features.tokens_of(tokens),
            false => tokens,
        }
    }

    /// What decides K and V in the pool besides the tokens that the model reads, of all `tokens` of a sequence.
    fn root(&self, scope: CacheScope, tokens: &[u32]) -> PrefixRoot {
        scope.root(tokens.first().copied().filter(|_| self.is_head()))
    }

    /// Lets a sequence that has nothing else in the pool begin with what the pool has cached of `tokens`, but
    /// not of the last one, which is fed for its logits.
    fn find(&mut self, fed: &mut Fed, root: PrefixRoot, tokens: &[u32]) {
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let prefix = self.blocks.find(root, known);
        let len = self.blocks.adopt(&mut fed.table, &prefix);
        if len > fed.tokens.len() {
            fed.tokens = tokens[..len].to_vec();
        }
    }

    /// Makes room for the rows of a request. Returns false if there is no room, or if the model cannot
    /// continue these tokens, or if another request reads the same block in this round, which is then
    /// shared; `reading` has those blocks.
    fn begin<'t>(
        &mut self,
        fed: &mut Fed,
        request: &DraftRequest<'t>,
        reading: &mut Vec<BlockKey<'t>>,
    ) -> bool {
        let tokens = self.tokens_of(fed, request.tokens);
        if tokens.is_empty() || self.is_head() && fed.features.kept().end != tokens.len() {
            return false;
        }
        fed.roll_back(&mut self.blocks, tokens);
        if !self.is_head() {
            let root = self.root(request.context.scope, tokens);
            self.find(fed, root, tokens);
            let is_long = tokens.len() - fed.tokens.len() > self.blocks.block_size();
            let block = self.blocks.next_block(fed.table.known(), root, tokens);
            if let Some(block) = block.filter(|_| is_long) {
                if reading.contains(&block) {
                    return false;
                }
                reading.push(block);
            }
        }
        let config = self.draft.model().config();
        let knows = |&id: &u32| (id as usize) < config.vocab_size;
        let (len, new) = (tokens.len(), &tokens[fed.tokens.len()..]);
        let last_position = len + request.model_depth - 1;
        let has_states = !self.is_head() || fed.features.kept().start <= fed.tokens.len();
        if last_position > config.max_position_embeddings || !new.iter().all(knows) || !has_states {
            fed.reset(&mut self.blocks);
            return false;
        }
        let rows = len + drafting::max_fed(request);
        self.blocks.reserve(&mut fed.table, rows).is_ok()
    }

    /// Lets a head read what it observed, so that little is left to read when a draft is requested, and few
    /// states are kept. The full blocks of a prompt are read at once: others may share them.
    ///
    /// # Errors
    /// If there is no room, or the device failed.
    fn read_ahead(&mut self, fed: &mut Fed, tokens: &[u32], is_prompt: bool) -> Result<()> {
        let known = fed.features.kept().end.min(tokens.len());
        // The last token is fed when a draft is requested, for its logits.
        let last = known.min(tokens.len().saturating_sub(1));
        let (block, caches) = (self.blocks.block_size(), self.blocks.has_prefix_cache());
        let max_unread = self.chunk.min(if caches { MAX_UNREAD } else { self.chunk });
        loop {
            let start = fed.tokens.len();
            let end = match known.saturating_sub(start) {
                unread if unread > max_unread => last,
                _ if is_prompt && caches => last / block * block,
                _ => start,
            };
            if end <= start {
                return Ok(());
            }
            let rows = start..end.min(start + self.chunk);
            let states = fed.features.of_rows(rows.clone())?;
            self.blocks
                .reserve(&mut fed.table, rows.end)
                .map_err(|_| Error::internal("the head's pool is full"))?;
            let mut batch = Batch::default();
            let new = &tokens[rows.clone()];
            let block_size = self.blocks.block_size();
            batch.push_span(new, &[], rows.start, &fed.table, block_size);
            batch.features = Some(self.fuse(&states)?);
            self.draft.model_mut().forward(&batch, &mut self.store)?;
            fed.tokens.extend(new);
            fed.features.drop_before(rows.end);
        }
    }

    fn fuse(&self, states: &Tensor) -> Result<Tensor> {
        let head = self.draft.head();
        let head = head.ok_or_else(|| Error::internal("only a head reads hidden states"))?;
        head.fuse(states)
    }

    /// The features of a forward's rows: the target's are fused, all at once if there are only those.
    fn features(&self, read: Vec<Read>) -> Result<Tensor> {
        let all_target = read.iter().map(|read| match read {
            Read::Target(states) => Some(states.clone()),
            Read::Own(_) => None,
        });
        if let Some(states) = all_target.collect::<Option<Vec<_>>>() {
            return self.fuse(&joined(states)?);
        }
        let features = read.into_iter().map(|read| match read {
            Read::Target(states) => self.fuse(&states),
            Read::Own(features) => Ok(features),
        });
        joined(features.collect::<Result<_>>()?)
    }

    /// One forward that feeds each sequence of `open` what it has not seen, and drafts for those that
    /// have seen all. Returns the largest number of rows of a sequence. Tokens that a GPU draws are
    /// added to `drawn`.
    fn step(
        &mut self,
        drafting: &mut [Drafting<'_, '_>],
        open: &[usize],
        drawn: &mut Vec<Drawn>,
    ) -> Result<usize> {
        let started = Instant::now();
        let mut batch = Batch::default();
        let (mut complete, mut longest) = (Vec::new(), 0);
        let mut read = Vec::new();
        for &i in open {
            let before = batch.tokens.len();
            let block_size = self.blocks.block_size();
            if self.is_head() {
                read.push(drafting[i].read(self.chunk)?);
            }
            if drafting[i].feed(&mut batch, self.chunk, block_size) > 0 {
                complete.push(i);
            }
            longest = longest.max(batch.tokens.len() - before);
        }
        if self.is_head() {
            batch.features = Some(self.features(read)?);
        }
        if let Some(last) = drawn.last() {
            batch.drawn = Some(last.fed_to(open)?);
        }
        let output = self.draft.model_mut().forward(&batch, &mut self.store)?;
        if self.is_head()
            && let Some(hidden) = &output.hidden
        {
            let mut row = 0;
            for &i in &complete {
                let asked = drafting[i].asked();
                drafting[i].note_outputs(hidden.narrow(0, row, asked)?)?;
                row += asked;
            }
        }
        if output.is_on_gpu() && !complete.iter().any(|&i| drafting[i].has_masks()) {
            if !complete.is_empty() {
                drawn.push(Drawn::new(&output, drafting, complete)?);
            }
        } else {
            // On a GPU too, if masks are needed: they are in the memory of the host.
            let vocab = self.draft.model().config().vocab_size;
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
        }
        let seconds = started.elapsed().as_secs_f64();
        self.forwards.push((batch.tokens.len(), seconds));
        Ok(longest)
    }

    fn draft_all(&mut self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let started = Instant::now();
        let (mut longest, mut is_on_gpu) = (0, false);
        let mut drawn: Vec<Drawn> = Vec::new();
        loop {
            let all = 0..drafting.len();
            let open: Vec<usize> = all.filter(|&i| drafting[i].is_open()).collect();
            // Tokens that a GPU drew go into the next step without a copy to the host, if the step
            // needs nothing else and no penalties depend on them.
            if !drawn
                .last()
                .is_some_and(|last| last.suffices(drafting, &open))
            {
                drawn.drain(..).try_for_each(|one| one.read(drafting))?;
                if open.iter().any(|&i| !drafting[i].is_open()) {
                    continue;
                }
            }
            if open.is_empty() {
                break;
            }
            longest = longest.max(self.step(drafting, &open, &mut drawn)?);
            is_on_gpu |= !drawn.is_empty();
        }
        let (seconds, steps) = (started.elapsed().as_secs_f64(), self.forwards.len());
        if is_on_gpu {
            // The host does not wait for single forwards there.
            let share = seconds / steps.max(1) as f64;
            self.forwards.iter_mut().for_each(|one| one.1 = share);
        }
        // A prompt's rows would distort the cost of a draft step; two rows are the catch-up after a
        // round in which every draft token was accepted. A head reads all accepted tokens again.
        let few = match self.is_head() {
            true => MAX_NEW_STATES,
            false => 2,
        };
        if longest <= few {
            self.cost.steps += steps as u64;
            self.cost.step_seconds += seconds;
        }
        Ok(())
    }
}

impl Drafter for DraftModel {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let mut drafts = vec![Draft::default(); requests.len()];
        for request in requests.iter() {
            self.fed.entry(request.id).or_default();
        }
        let states = self.fed.iter_mut().map(|(&id, fed)| (id, fed));
        let mut states: HashMap<SeqId, &mut Fed> = states.collect();
        let (mut drafting, mut reading) = (Vec::with_capacity(requests.len()), Vec::new());
        self.network.forwards.clear();
        for (place, request) in requests.iter_mut().enumerate() {
            if request.model_depth > 0
                && let Some(fed) = states.remove(&request.id)
                && self.network.begin(fed, request, &mut reading)
            {
                let tokens = self.network.tokens_of(fed, request.tokens);
                let chunk = self.network.chunk;
                let is_head = self.network.is_head();
                let one = Drafting::new(place, request, tokens, fed, &self.lessons, chunk);
                drafting.push(one.of_a_head(is_head));
            }
        }
        self.network.draft_all(&mut drafting)?;
        for one in drafting {
            let place = one.place;
            drafts[place] = one.finish();
        }
        Ok(drafts)
    }

    fn taps(&self) -> &[usize] {
        self.network.draft.head().map_or(&[], Head::reads)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        let unknown = Fed::default();
        let fed = self.fed.get(&request.id).unwrap_or(&unknown);
        let is_sampled = !request.sampler.params().is_greedy();
        let path = self
            .lessons
            .forecast(&fed.history, is_sampled, request.length);
        let tokens = self.network.tokens_of(fed, request.tokens);
        let pending = tokens.len().saturating_sub(fed.tokens.len());
        Some(Forecast {
            path,
            pending: pending.clamp(1, self.network.chunk),
            at_once: false,
        })
    }

    fn calibrate(&mut self) -> Result<Measured> {
        let Network {
            draft,
            blocks,
            store,
            ..
        } = &mut self.network;
        calibration::measure(draft.model_mut(), store, blocks.num_blocks())
    }

    fn forwards(&self) -> &[(usize, f64)] {
        &self.network.forwards
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for committed in committed {
            if let Some(hidden) = &committed.hidden {
                let fed = self.fed.entry(committed.id).or_default();
                let position = committed.new.start;
                if !matches!(fed.features.add(position, hidden.clone()), Ok(true)) {
                    fed.reset(&mut self.network.blocks);
                }
            }
            if let Some(fed) = self.fed.get_mut(&committed.id) {
                let tokens = self.network.tokens_of(fed, committed.tokens);
                self.lessons.learn(&mut fed.history, tokens);
                fed.roll_back(&mut self.network.blocks, tokens);
                let is_prompt = committed.new.end <= committed.prompt_len;
                if let Err(error) = self.network.read_ahead(fed, tokens, is_prompt) {
                    tracing::debug!("a head goes on without what came before: {error}");
                    fed.reset(&mut self.network.blocks);
                }
                if !self.network.is_head() || fed.features.are_whole() {
                    let root = (self.network).root(committed.context.scope, committed.tokens);
                    let blocks = &mut self.network.blocks;
                    blocks.cache(&mut fed.table, root, &fed.tokens);
                }
            }
        }
    }

    fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        let fed = self.fed.entry(id).or_default();
        let root = self.network.root(scope, tokens);
        if !self.network.is_head() {
            self.network.find(fed, root, tokens);
            return len;
        }
        // Row i has the token after position i.
        self.network.find(fed, root, &tokens[1..]);
        fed.features = Features::after(fed.tokens.len());
        len.min(fed.tokens.len())
    }

    fn reset_prefix_cache(&mut self) {
        self.network.blocks.reset_prefix_cache();
    }

    fn forget(&mut self, id: SeqId) {
        if let Some(mut fed) = self.fed.remove(&id) {
            self.network.blocks.release(&mut fed.table);
        }
    }

    fn cost(&self) -> DraftCost {
        self.network.cost
    }

    fn kv_usage(&self) -> f64 {
        self.network.blocks.usage()
    }

    fn check_invariants(&self) -> Result<(), String> {
        let held = self.fed.values().map(|fed| &fed.table);
        self.network.blocks.check_invariants(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::toy::ToyModel;
    use crate::sampling::Acceptance;
    use crate::sampling::{Sampler, SamplingParams};
    use crate::spec::draft::DraftContext;

    fn drafter(chunk: usize) -> DraftModel {
        DraftModel::new(Box::new(ToyModel::new(32, 256, 5, 0.0)), 64, 4, chunk).unwrap()
    }

    fn propose(drafter: &mut DraftModel, tokens: &[u32], prompt_len: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(SamplingParams::default(), &tokens[..prompt_len]);
        tokens[prompt_len..].iter().for_each(|&id| sampler.push(id));
        let request = DraftRequest {
            id: 1,
            tokens,
            length: 4,
            model_depth: 4,
            nodes: 4,
            width: 1,
            min_score: 0.0,
            is_fixed: false,
            position: tokens.len(),
            sampler: &mut sampler,
            acceptance: Acceptance::Coupled,
            context: &DraftContext::default(),
        };
        drafter.propose(&mut [request]).unwrap().remove(0).tokens
    }

    #[test]
    fn calibration_measures_the_model_and_leaves_nothing() {
        let mut drafter = drafter(16);
        let measured = drafter.calibrate().unwrap();
        let rows: Vec<usize> = measured.iter().map(|&(rows, _)| rows).collect();
        assert_eq!(rows, [1, 2, 4, 6, 8, 16]);
        assert!(measured.iter().all(|&(_, seconds)| seconds > 0.0));
        assert_eq!(drafter.kv_usage(), 0.0);
        drafter.check_invariants().unwrap();
    }

    /// After any outcome of a round, the next draft equals that of a drafter that sees the sequence
    /// for the first time.
    #[test]
    fn rolls_back_to_the_common_prefix() {
        for observed in [false, true] {
            for kept in 0..=4 {
                let mut tokens = vec![3, 1, 4, 1, 5];
                let mut used = drafter(64);
                let draft = propose(&mut used, &tokens, 4);
                tokens.extend(&draft[..kept]);
                tokens.push(31 - draft.get(kept).copied().unwrap_or(0) % 2);
                if observed {
                    let committed = Committed {
                        id: 1,
                        tokens: &tokens,
                        prompt_len: 4,
                        new: 4..5 + kept,
                        hidden: None,
                        candidates: &[],
                        context: &DraftContext::default(),
                    };
                    used.observe(&[committed]);
                    assert!(used.network.blocks.num_free() >= 64 - tokens.len().div_ceil(4));
                }
                let fresh = propose(&mut drafter(64), &tokens, 4);
                assert_eq!(propose(&mut used, &tokens, 4), fresh, "{kept} kept");
                assert_eq!(used.check_invariants(), Ok(()));
                used.forget(1);
                assert_eq!((used.check_invariants(), used.kv_usage()), (Ok(()), 0.0));
            }
        }
    }

    /// A long prompt is fed by chunks, one per round; after that the drafts are those of a drafter
    /// that sees everything at once.
    #[test]
    fn a_long_prompt_is_prefilled_by_chunks() {
        let mut tokens: Vec<u32> = (0..50).map(|i| i % 32).collect();
        let mut used = drafter(20);
        for round in 1..8 {
            tokens.push(round);
            let draft = propose(&mut used, &tokens, 50);
            assert_eq!(draft.is_empty(), round < 3, "round {round}");
            let at_once = propose(&mut drafter(64), &tokens, 50);
            assert!(round < 3 || draft == at_once, "round {round}");
        }
    }

    #[test]
    fn no_room_is_an_empty_draft() {
        let model = Box::new(ToyModel::new(32, 256, 5, 0.0));
        let mut small = DraftModel::new(model, 2, 4, 64).unwrap();
        assert!(propose(&mut small, &[1; 6], 5).is_empty());
        assert_eq!(propose(&mut small, &[1; 5], 4).len(), 4);
    }
}
