//! Drafting with a parallel head of the target, which guesses a block of tokens in one forward.

mod product;

use super::calibration::{self, Measured};
use super::draft::{
    CacheScope, Committed, Draft, DraftCost, DraftDist, DraftRequest, Drafter, Forecast, SeqId,
};
use super::features::{Features, MAX_NEW_STATES, MAX_UNREAD, joined};
use super::lessons::{Estimate, History, Lessons, Level, View};
use crate::error::{Error, Result};
use crate::kernels::parallel;
use crate::kv::{BlockAllocator, BlockTable, KvStore};
use crate::model::{Batch, Head, MaskedBlock, Output};
use crate::sampling::{Acceptance, Guess, Purpose, distribution, guess};
use candle_core::Tensor;
use product::{Candidate, Limits};
use std::collections::HashMap;
use std::ops::Range;
use std::time::Instant;

/// A parallel head with its own paged pool (DFlash, arXiv 2602.06036), whose guesses become a tree: the most
/// probable paths of the product of its distributions (DDTree, arXiv 2604.12989).
///
/// A round is one forward for all sequences, whatever the depth of their drafts. It reads the target's
/// hidden states of what was committed since the last round, whose K and V stay in the pool, and a block
/// of the last token and masks, whose K and V leave it. The pool has a prefix cache of its own; a sequence
/// starts no later than the head's prefix ends, because hidden states are not computed again.
pub struct ParallelDrafter {
    network: Network,
    lessons: Lessons,
    sequences: HashMap<SeqId, Sequence>,
    cost: DraftCost,
    /// Rows of the blocks and seconds of the last proposal's forward.
    forwards: Vec<(usize, f64)>,
}

/// The head and its pool.
struct Network {
    head: Box<dyn Head>,
    block: MaskedBlock,
    blocks: BlockAllocator,
    store: KvStore,
    /// Maximum number of states of one sequence that a forward reads.
    chunk: usize,
}

/// What is kept of one sequence.
#[derive(Default)]
struct Sequence {
    table: BlockTable,
    /// Number of states that were read: so many positions are in the pool.
    read: usize,
    features: Features,
    history: History,
}

/// A request that takes part in a round.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// Index of the request.
    place: usize,
    /// Number of masks.
    depth: usize,
}

/// What is guessed for one request.
#[derive(Default)]
struct Guessed {
    draft: Draft,
    levels: Vec<Level>,
}

impl ParallelDrafter {
    /// A drafter over a parallel `head`, with an empty pool of `num_blocks` blocks. A prompt is read
    /// while the target computes it, at most `chunk` of its positions at a time.
    ///
    /// # Errors
    /// If it is another kind of head, or the device has no memory for the pool.
    pub fn new(
        head: Box<dyn Head>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        let block = head.masked_block();
        let block = block.ok_or_else(|| Error::internal("only a parallel head predicts blocks"))?;
        Ok(Self {
            network: Network {
                store: head.new_kv(num_blocks, block_size)?,
                blocks: BlockAllocator::new(num_blocks, block_size).with_prefix_cache(true),
                block,
                head,
                chunk: chunk.max(1),
            },
            lessons: Lessons::default(),
            sequences: HashMap::new(),
            cost: DraftCost::default(),
            forwards: Vec::new(),
        })
    }

    /// The same, with or without a prefix cache.
    pub fn with_prefix_cache(mut self, enabled: bool) -> Self {
        self.network.blocks.set_prefix_cache(enabled);
        self
    }
}

impl Sequence {
    /// The states that came and were not read.
    fn unread(&self) -> Range<usize> {
        self.read..self.features.kept().end
    }

    /// Notes that all states up to `read` were read, and frees what a block took.
    fn has_read(&mut self, read: usize, blocks: &mut BlockAllocator) {
        self.read = read;
        self.features.drop_before(read);
        blocks.truncate_to(&mut self.table, read);
    }

    /// Frees what is in the pool. The head goes on with the states that come next.
    fn reset(&mut self, blocks: &mut BlockAllocator) {
        self.read = 0;
        self.features = Features::default();
        blocks.release(&mut self.table);
    }
}

impl Network {
    /// Makes room for a block of a request; returns the number of its masks. 0 if there is no room, or not
    /// all states of the tokens before the last are there.
    fn begin(&mut self, sequence: &mut Sequence, request: &DraftRequest<'_>) -> usize {
        let mut depth = request.model_depth.min(self.block.size - 1);
        if request.max_siblings() == 1 {
            depth = depth.min(request.nodes);
        }
        let known = sequence.features.kept().end;
        let start = sequence.features.start();
        let has_states = start.is_some_and(|start| start + known + 1 == request.tokens.len());
        let vocab_size = self.head.config().vocab_size;
        let is_known = (request.tokens.last()).is_some_and(|&last| (last as usize) < vocab_size);
        let rows = known + 1 + depth;
        match has_states && is_known && self.blocks.reserve(&mut sequence.table, rows).is_ok() {
            true => depth,
            false => 0,
        }
    }

    /// Adds states that the batch's forward reads.
    fn push_states(&self, batch: &mut Batch, sequence: &Sequence, rows: Range<usize>) {
        // Their tokens do not matter.
        let tokens = vec![0; rows.len()];
        let block_size = self.blocks.block_size();
        batch.push_span(&tokens, &[], rows.start, &sequence.table, block_size);
    }

    /// Reads states, so that few are left when a draft is requested. The full blocks of a prompt are read at
    /// once: others may share them.
    ///
    /// # Errors
    /// If there is no room, or the device failed.
    fn read_ahead(&mut self, sequence: &mut Sequence, is_prompt: bool) -> Result<()> {
        let (block, caches) = (self.blocks.block_size(), self.blocks.has_prefix_cache());
        let max_unread = self.chunk.min(if caches { MAX_UNREAD } else { self.chunk });
        loop {
            let unread = sequence.unread();
            let end = match unread.len() {
                count if count > max_unread => unread.end,
                _ if is_prompt && caches => unread.end / block * block,
                _ => unread.start,
            };
            if end <= unread.start {
                return Ok(());
            }
            let rows = unread.start..end.min(unread.start + self.chunk);
            (self.blocks.reserve(&mut sequence.table, rows.end))
                .map_err(|_| Error::internal("the head's pool is full"))?;
            let mut batch = Batch::default();
            self.push_states(&mut batch, sequence, rows.clone());
            let states = sequence.features.of_rows(rows.clone())?;
            batch.features = Some(self.head.fuse(&states)?);
            self.head.forward(&batch, &mut self.store)?;
            sequence.has_read(rows.end, &mut self.blocks);
        }
    }

    /// The logits of all masks, one round after the other. First come the rows of all states, since the head
    /// computes less for them.
    fn forward(
        &mut self,
        requests: &[DraftRequest<'_>],
        rounds: &[Round],
        sequences: &HashMap<SeqId, Sequence>,
    ) -> Result<Output> {
        let mut batch = Batch::default();
        let of = |round: &Round| {
            let request = &requests[round.place];
            sequences.get(&request.id).map(|of| (request, of))
        };
        let mut states: Vec<Tensor> = Vec::new();
        for (_, sequence) in rounds.iter().filter_map(of) {
            let rows = sequence.unread();
            if !rows.is_empty() {
                states.push(sequence.features.of_rows(rows.clone())?);
                self.push_states(&mut batch, sequence, rows);
            }
        }
        if !states.is_empty() {
            batch.features = Some(self.head.fuse(&joined(states)?)?);
        }
        for round in rounds {
            let Some((request, sequence)) = of(round) else {
                continue;
            };
            let mut tokens = vec![self.block.mask; 1 + round.depth];
            tokens[0] = request.tokens[request.tokens.len() - 1];
            let (context, table) = (sequence.features.kept().end, &sequence.table);
            let first = batch.tokens.len() as u32;
            batch.push_block(&tokens, context, table, self.blocks.block_size());
            let masks = first + 1..first + tokens.len() as u32;
            batch.logits.extend(masks);
        }
        self.head.forward(&batch, &mut self.store)
    }
}

/// The draft of a request whose masks have the logits `rows`.
///
/// A tree's guesses for a depth are the same after every path. Penalties, which do depend on the path, see
/// the most probable guesses before it; those of a chain are its path. It is only a draft.
fn guess_all<'a>(
    request: &mut DraftRequest<'_>,
    view: &View<'_>,
    rows: impl Iterator<Item = &'a [f32]>,
) -> Guessed {
    let (rng, width) = (request.rng(), request.max_siblings());
    let output_len = request.sampler.output_len();
    let (mut levels, mut dists) = (Vec::new(), Vec::<DraftDist>::new());
    for (depth, row) in rows.enumerate() {
        let sampler = &*request.sampler;
        let guesses = match request.acceptance {
            Acceptance::Coupled => guess(row, sampler, rng.key(depth), width).unwrap_or_default(),
            Acceptance::Rejection => match distribution(row, sampler) {
                Err(_) => Vec::new(),
                Ok(dist) => {
                    let token = dist.sample(rng.uniform(depth, Purpose::Draft, 0));
                    let prob = dist.prob(token) as f32;
                    dists.push(dist.into());
                    vec![Guess { token, prob }]
                }
            },
        };
        let Some(first) = guesses.first() else {
            break;
        };
        request.sampler.push(first.token);
        let ranked = guesses.iter().enumerate();
        let level = ranked.map(|(rank, guess)| (guess.token, view.estimate(rank, guess.prob)));
        levels.push(level.collect::<Level>());
    }
    request.sampler.truncate(output_len);
    let candidates = levels.iter().map(|level| {
        let candidate = |&(token, estimate): &(u32, Estimate)| Candidate {
            token,
            prob: estimate.adjusted,
        };
        let mut level: Vec<Candidate> = level.iter().map(candidate).collect();
        level.sort_by(|a, b| b.prob.total_cmp(&a.prob));
        level
    });
    let limits = Limits {
        nodes: request.nodes,
        width,
        min_score: request.min_score,
    };
    let mut draft = product::tree(&candidates.collect::<Vec<_>>(), &limits);
    dists.truncate(draft.len());
    draft.dists = dists;
    Guessed { draft, levels }
}

fn is_sampled(request: &DraftRequest<'_>) -> bool {
    !request.sampler.params().is_greedy()
}

impl ParallelDrafter {
    /// The draft of each round, from the logits of its masks.
    fn guess(
        &self,
        requests: &mut [DraftRequest<'_>],
        rounds: &[Round],
        mut logits: &[f32],
    ) -> Vec<Guessed> {
        let vocab_size = self.network.head.config().vocab_size;
        let (mut parts, mut rounds) = (Vec::with_capacity(rounds.len()), rounds.iter().peekable());
        for (place, request) in requests.iter_mut().enumerate() {
            if let Some(round) = rounds.next_if(|round| round.place == place)
                && let Some(sequence) = self.sequences.get(&request.id)
            {
                let (rows, rest) = logits.split_at(round.depth * vocab_size);
                logits = rest;
                let view = self.lessons.view(&sequence.history, is_sampled(request));
                parts.push((request, view, rows));
            }
        }
        parallel::map(&mut parts, |(request, view, rows)| {
            guess_all(request, view, rows.chunks(vocab_size))
        })
    }

    /// Learns what a forward cost, if it read few states.
    fn note_forward(&mut self, rounds: &[Round], most_states: usize, seconds: f64) {
        if most_states <= MAX_NEW_STATES {
            // The rows of states cost little: of each layer only K and V, and no logits.
            let rows = rounds.iter().map(|round| 1 + round.depth).sum();
            self.forwards.push((rows, seconds));
            self.cost.steps += 1;
            self.cost.step_seconds += seconds;
        }
    }
}

impl Drafter for ParallelDrafter {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        let started = Instant::now();
        let mut drafts = vec![Draft::default(); requests.len()];
        self.forwards.clear();
        let (mut rounds, mut most_states) = (Vec::new(), 0);
        for (place, request) in requests.iter().enumerate() {
            if request.model_depth > 0
                && let Some(sequence) = self.sequences.get_mut(&request.id)
            {
                let depth = self.network.begin(sequence, request);
                if depth > 0 {
                    rounds.push(Round { place, depth });
                    most_states = most_states.max(sequence.unread().len());
                }
            }
        }
        if rounds.is_empty() {
            return Ok(drafts);
        }
        let output = (self.network).forward(requests, &rounds, &self.sequences)?;
        let guessed = output.read(|logits| self.guess(requests, &rounds, logits))?;
        for (round, guessed) in rounds.iter().zip(guessed) {
            let request = &requests[round.place];
            if let Some(sequence) = self.sequences.get_mut(&request.id) {
                let read = sequence.features.kept().end;
                sequence.has_read(read, &mut self.network.blocks);
                let (history, sampled) = (&mut sequence.history, is_sampled(request));
                history.propose_levels(request.tokens, sampled, guessed.levels);
            }
            drafts[round.place] = guessed.draft;
        }
        self.note_forward(&rounds, most_states, started.elapsed().as_secs_f64());
        Ok(drafts)
    }

    fn taps(&self) -> &[usize] {
        self.network.head.reads()
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        let unknown = History::default();
        let sequence = self.sequences.get(&request.id);
        let history = sequence.map_or(&unknown, |sequence| &sequence.history);
        let length = request.length.min(self.network.block.size - 1);
        Some(Forecast {
            path: (self.lessons).forecast(history, is_sampled(request), length),
            pending: 1,
            at_once: true,
        })
    }

    fn calibrate(&mut self) -> Result<Measured> {
        let Network {
            head,
            blocks,
            store,
            ..
        } = &mut self.network;
        calibration::measure(&mut **head, store, blocks.num_blocks())
    }

    fn forwards(&self) -> &[(usize, f64)] {
        &self.forwards
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for committed in committed {
            let sequence = self.sequences.entry(committed.id).or_default();
            self.lessons.learn(&mut sequence.history, committed.tokens);
            let Some(hidden) = &committed.hidden else {
                continue;
            };
            let added = sequence.features.add(committed.new.start, hidden.clone());
            if !matches!(added, Ok(true)) {
                sequence.reset(&mut self.network.blocks);
            }
            let is_prompt = committed.new.end <= committed.prompt_len;
            if let Err(error) = self.network.read_ahead(sequence, is_prompt) {
                tracing::debug!("a head goes on without what came before: {error}");
                sequence.reset(&mut self.network.blocks);
            }
            if sequence.features.are_whole() {
                let (root, read) = (committed.context.scope.root(None), sequence.read);
                let blocks = &mut self.network.blocks;
                blocks.cache(&mut sequence.table, root, &committed.tokens[..read]);
            }
        }
    }

    fn resume(&mut self, id: SeqId, tokens: &[u32], scope: CacheScope, len: usize) -> usize {
        let sequence = self.sequences.entry(id).or_default();
        let blocks = &mut self.network.blocks;
        let prefix = blocks.find(scope.root(None), &tokens[..len]);
        sequence.read = blocks.adopt(&mut sequence.table, &prefix);
        sequence.features = Features::after(sequence.read);
        len.min(sequence.read)
    }

    fn reset_prefix_cache(&mut self) {
        self.network.blocks.reset_prefix_cache();
    }

    fn forget(&mut self, id: SeqId) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            self.network.blocks.release(&mut sequence.table);
        }
    }

    fn cost(&self) -> DraftCost {
        self.cost
    }

    fn kv_usage(&self) -> f64 {
        self.network.blocks.usage()
    }

    fn check_invariants(&self) -> Result<(), String> {
        let held = self.sequences.values().map(|sequence| &sequence.table);
        self.network.blocks.check_invariants(held)
    }
}
