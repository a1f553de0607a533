//! What a draft model or a head keeps of each sequence, in a paged pool of its own.

mod disk;

use super::acceptance_model::{AcceptanceModel, History};
use super::calibration::{self, Calibration, RepeatedForward};
use super::displacement::Displacement;
use super::draft::{CacheScope, Committed, DraftCost, DraftRequest, Forecast, SeqId};
use super::features::{Features, MAX_UNREAD};
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockAllocator, BlockTable, KvStore, PrefixRoot};
use foretoken_core::model::{Batch, DraftNetwork, Head};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// A draft model or a head with a paged pool and a prefix cache, and the sequences in it.
///
/// It keeps no record of rounds: it compares the tokens of a sequence's rows with the committed tokens and
/// truncates the rows to their common prefix. A model's rows are those of the tokens. A head's begin with the
/// first position whose hidden states come: each has the states of a position and, if the head is EAGLE's,
/// the token after it, otherwise that of the position.
pub struct DraftPool {
    /// The network and its paged pool.
    pub network: PagedNetwork,
    /// What is kept of each sequence in the pool.
    pub sequences: HashMap<SeqId, DraftSequence>,
    /// Estimates of the probability that draft tokens stand.
    pub acceptance: AcceptanceModel,
}

/// The network and its pool.
pub struct PagedNetwork {
    pub draft: DraftNetwork,
    pub blocks: BlockAllocator,
    pub store: KvStore,
    /// Maximum number of rows of one sequence in one forward. On a CPU, a draft model reads no more of all long texts in a
    /// round.
    pub chunk: usize,
    pub cost: DraftCost,
    /// The forwards of the last proposal: their rows, as a [`Forecast`](super::Forecast) counts them, and their
    /// seconds. Forwards that would mislead about the cost of others may be missing.
    pub forwards: Vec<(usize, f64)>,
    /// Rows that were read ahead since the caller took this, and their seconds.
    pub read: (usize, f64),
    /// Positions from a head's states to the token of their row: 1 of an EAGLE head, which reads both, otherwise 0.
    token_offset: usize,
}

/// What is kept of one sequence.
#[derive(Default)]
pub struct DraftSequence {
    /// The tokens of the rows in the pool.
    pub tokens: Vec<u32>,
    pub table: BlockTable,
    /// What became of its drafts.
    pub history: History,
    /// The features of the head's rows. Only a head has them.
    pub features: Features,
}

impl DraftSequence {
    /// A head's rows whose states came and were not read.
    pub fn unread(&self) -> Range<usize> {
        self.tokens.len()..self.features.kept().end
    }

    /// Notes that a head has read the rows with these `tokens`, the first of all.
    pub fn has_read(&mut self, tokens: &[u32]) {
        self.tokens.extend(&tokens[self.tokens.len()..]);
        self.features.drop_before(tokens.len());
    }

    /// Truncates to the longest prefix shared with `tokens`. Their last token is always fed
    /// (again), for its logits.
    pub fn roll_back(&mut self, blocks: &mut BlockAllocator, tokens: &[u32]) {
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let both = self.tokens.iter().zip(known);
        let common = both.take_while(|(a, b)| a == b).count();
        let left = blocks.truncate_to(&mut self.table, common);
        self.tokens.truncate(left);
    }

    /// Frees what is in the pool. A head goes on with the states that it observes next.
    pub fn reset(&mut self, blocks: &mut BlockAllocator) {
        self.tokens.clear();
        self.features = Features::default();
        blocks.release(&mut self.table);
    }
}

impl PagedNetwork {
    /// Whether it is a head, which reads the target's hidden states.
    pub fn is_head(&self) -> bool {
        self.draft.head().is_some()
    }

    /// The features that a head makes of hidden states; see
    /// [`Head::fuse`](foretoken_core::model::Head::fuse).
    ///
    /// # Errors
    /// If it is no head, or the device failed.
    pub fn fuse(&self, states: &Tensor) -> Result<Tensor> {
        let head = self.draft.head();
        let head = head.ok_or_else(|| Error::internal("only a head reads hidden states"))?;
        head.fuse(states)
    }

    /// The tokens of a sequence's rows, of all its `tokens`.
    pub fn tokens_of<'t>(&self, sequence: &DraftSequence, tokens: &'t [u32]) -> &'t [u32] {
        if self.is_head() {
            sequence.features.tokens_of(tokens, self.token_offset)
        } else {
            tokens
        }
    }

    /// Whether a head can read all rows of a sequence with `tokens`, up to that whose states are the last to
    /// come before the last token is verified.
    pub fn has_states(&self, sequence: &DraftSequence, tokens: &[u32]) -> bool {
        let kept = sequence.features.kept();
        kept.end + 1 == tokens.len() + self.token_offset && kept.start <= sequence.tokens.len()
    }

    /// What decides K and V in the pool besides the tokens of the rows. `tokens` are all tokens of a sequence.
    pub fn root(&self, scope: CacheScope, tokens: &[u32]) -> PrefixRoot {
        scope.root(tokens.first().copied().filter(|_| self.token_offset > 0))
    }

    /// Lets a sequence that has nothing else in the pool begin with what the pool has cached of the rows with
    /// `tokens`, but not of the last one, which is fed for its logits.
    pub fn find(&mut self, sequence: &mut DraftSequence, root: PrefixRoot, tokens: &[u32]) {
        let known = &tokens[..tokens.len().saturating_sub(1)];
        let prefix = self.blocks.find(root, known);
        let len = self.blocks.adopt(&mut sequence.table, &prefix);
        if len > sequence.tokens.len() {
            sequence.tokens = tokens[..len].to_vec();
        }
    }

    /// Lets a head read what it observed, so that little is left to read when a draft is requested, and few
    /// states are kept. The full blocks of a prompt are read at once: others may share them.
    ///
    /// # Errors
    /// If there is no room, or the device failed.
    fn read_ahead(
        &mut self,
        sequence: &mut DraftSequence,
        tokens: &[u32],
        is_prompt: bool,
    ) -> Result<()> {
        let known = sequence.features.kept().end.min(tokens.len());
        // The last token is fed when a draft is requested, for its logits.
        let last = known.min(tokens.len().saturating_sub(1));
        let (block_size, caches) = (self.blocks.block_size(), self.blocks.has_prefix_cache());
        let max_unread = self.chunk.min(if caches { MAX_UNREAD } else { self.chunk });
        loop {
            let start = sequence.tokens.len();
            let end = match known.saturating_sub(start) {
                unread if unread > max_unread => last,
                _ if is_prompt && caches => last / block_size * block_size,
                _ => start,
            };
            if end <= start {
                return Ok(());
            }
            let rows = start..end.min(start + self.chunk);
            let states = sequence.features.of_rows(rows.clone())?;
            (self.blocks.reserve(&mut sequence.table, rows.end))
                .map_err(|_| Error::internal("the head's pool is full"))?;
            let mut batch = Batch::default();
            let (new, table) = (&tokens[rows.clone()], &sequence.table);
            batch.push_span(new, &[], rows.start, table, block_size);
            let started = Instant::now();
            let fused = self.fuse(&states)?;
            let field = if self.token_offset > 0 {
                &mut batch.features
            } else {
                &mut batch.context_features
            };
            *field = Some(fused);
            self.draft.model_mut().forward(&batch, &mut self.store)?;
            self.read.0 += new.len();
            self.read.1 += started.elapsed().as_secs_f64();
            sequence.has_read(&tokens[..rows.end]);
        }
    }
}

impl DraftPool {
    /// An empty pool of `num_blocks` blocks for `draft`, which reads at most `chunk` (at least 2) rows of a
    /// sequence in a forward.
    ///
    /// # Errors
    /// If the device has no memory for the pool.
    pub fn new(
        draft: DraftNetwork,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        if draft.model().kv_shape().is_recurrent() {
            return Err(Error::setup(
                "a model with linear attention or Mamba cannot draft, because its states are not cut back: give --draft-model a head or a model that has attention in all layers, or leave out --draft-model and --drafter self",
            ));
        }
        // The rows of P-EAGLE, which predicts blocks, are EAGLE's, too.
        let is_eagle = (draft.head())
            .is_some_and(|head| head.masked_block().is_none() || head.mask_hidden().is_some());
        let acceptance = AcceptanceModel::of(&draft);
        Ok(Self {
            network: PagedNetwork {
                store: draft.model().new_kv(num_blocks, block_size)?,
                blocks: BlockAllocator::new(num_blocks, block_size).with_prefix_cache(true),
                draft,
                chunk: chunk.max(2),
                cost: DraftCost::default(),
                forwards: Vec::new(),
                read: (0, 0.0),
                token_offset: usize::from(is_eagle),
            },
            sequences: HashMap::new(),
            acceptance,
        })
    }

    /// Lets `head`, which has the shape of the one before it, draft from now on. What that one has computed
    /// would mislead it, so running sequences go on with the states that come next.
    pub fn replace_head(&mut self, head: Box<dyn Head>) {
        for sequence in self.sequences.values_mut() {
            sequence.reset(&mut self.network.blocks);
        }
        self.reset_prefix_cache();
        self.network.draft = DraftNetwork::Head(head);
    }

    /// See [`Drafter::taps`](super::Drafter::taps).
    pub fn taps(&self) -> &[usize] {
        let head = self.network.draft.head();
        head.map_or(&[][..], |head| head.reads())
    }

    /// The numbers of rows that forwards of the network are rounded up to, ascending; empty if they are not.
    pub fn edges(&self) -> Vec<usize> {
        calibration::edges(self.network.draft.model())
    }

    /// Measures what a forward of at most `max_rows` rows costs by its number of rows. Called at most once, before
    /// anything else.
    ///
    /// # Errors
    /// If the device failed.
    pub fn calibrate(&mut self, max_rows: usize) -> Result<Calibration> {
        let network = &mut self.network;
        let num_blocks = network.blocks.num_blocks();
        let (model, store) = (network.draft.model_mut(), &mut network.store);
        // Drafts are tokens that differ.
        calibration::measure(model, store, num_blocks, false, max_rows)
    }

    /// Measures what the head's forwards cost the target's, of which `target` runs one and returns its seconds. Called as
    /// [`DraftPool::calibrate`].
    ///
    /// # Errors
    /// If a device failed.
    pub fn measure_displacement(
        &mut self,
        target: impl FnMut() -> Result<f64>,
    ) -> Result<Displacement> {
        let network = &mut self.network;
        let num_blocks = network.blocks.num_blocks();
        let (model, store) = (network.draft.model_mut(), &mut network.store);
        // A step's token, and one that was guessed.
        let mut head = RepeatedForward::new(model, store, num_blocks, 2)?;
        Displacement::measure(target, || head.run())
    }

    /// The forecast of a draft down to depth `length` for which a forward must compute `pending` rows first.
    pub fn forecast(&self, request: &DraftRequest<'_>, length: usize, pending: usize) -> Forecast {
        let unknown = History::default();
        let sequence = self.sequences.get(&request.id);
        let history = sequence.map_or(&unknown, |sequence| &sequence.history);
        self.forecast_by(history, request.is_sampled(), length, pending)
    }

    /// As [`DraftPool::forecast`], but for requests of which nothing is known: a greedy and a sampled one.
    pub fn typical(&self, length: usize) -> [Forecast; 2] {
        let unknown = History::default();
        [false, true].map(|sampled| self.forecast_by(&unknown, sampled, length, 1))
    }

    fn forecast_by(
        &self,
        history: &History,
        is_sampled: bool,
        length: usize,
        pending: usize,
    ) -> Forecast {
        let block = self.network.draft.masked_block();
        let length = block.map_or(length, |block| length.min(block.max_depth()));
        Forecast {
            path: self.acceptance.forecast(history, is_sampled, length),
            hope: self.acceptance.hope(history, is_sampled),
            pending,
            at_once: block.is_some(),
        }
    }

    /// See [`Drafter::resume`](super::Drafter::resume).
    pub fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        let network = &mut self.network;
        let sequence = self.sequences.entry(id).or_default();
        let root = network.root(scope, tokens);
        network.find(sequence, root, &tokens[network.token_offset..]);
        if !network.is_head() {
            return len;
        }
        // Hidden states are not cached, only what a head made of them.
        sequence.features = Features::after(sequence.tokens.len());
        len.min(sequence.tokens.len())
    }

    /// See [`Drafter::observe`](super::Drafter::observe).
    pub fn observe(&mut self, committed: &[Committed<'_>]) {
        let network = &mut self.network;
        for committed in committed {
            if let Some(hidden) = &committed.hidden {
                let sequence = self.sequences.entry(committed.id).or_default();
                let start = committed.new.start;
                let added = sequence.features.add(start, hidden.clone());
                if !matches!(added, Ok(true)) {
                    sequence.reset(&mut network.blocks);
                    // Nothing precedes them now; if the device fails, none is there.
                    let _ = sequence.features.add(start, hidden.clone());
                }
            }
            let Some(sequence) = self.sequences.get_mut(&committed.id) else {
                continue;
            };
            let tokens = network.tokens_of(sequence, committed.tokens);
            self.acceptance.learn(&mut sequence.history, tokens);
            sequence.roll_back(&mut network.blocks, tokens);
            let is_prompt = committed.new.end <= committed.prompt_len;
            if let Err(error) = network.read_ahead(sequence, tokens, is_prompt) {
                tracing::debug!("a head goes on without what came before: {error}");
                sequence.reset(&mut network.blocks);
            }
            if !network.is_head() || sequence.features.are_whole() {
                let root = network.root(committed.context.scope, committed.tokens);
                let blocks = &mut network.blocks;
                blocks.cache(&mut sequence.table, root, &sequence.tokens);
            }
        }
    }

    /// Frees what is kept of a sequence.
    pub fn forget(&mut self, id: SeqId) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            self.network.blocks.release(&mut sequence.table);
        }
    }

    /// Forgets the prefixes that are cached.
    pub fn reset_prefix_cache(&mut self) {
        self.network.blocks.reset_prefix_cache();
    }

    /// Fraction of the blocks in use, 0 to 1.
    pub fn usage(&self) -> f64 {
        self.network.blocks.usage()
    }

    /// Checks that the pool holds exactly the sequences that are kept.
    ///
    /// # Errors
    /// The inconsistency found.
    pub fn check_invariants(&self) -> Result<(), String> {
        let held = self.sequences.values().map(|sequence| &sequence.table);
        self.network.blocks.check_invariants(held)
    }
}
