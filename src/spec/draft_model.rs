//! Drafting with a small model of the same vocabulary.

use super::device::{logits_params, row_adjustments};
use super::draft::{Committed, Draft, DraftCost, DraftDist, DraftRequest, Drafter, SeqId, Source};
use crate::error::Result;
use crate::kernels::parallel;
use crate::kernels::sample::{self, ProcessedLogits, TokenChoice};
use crate::kv::{BlockAllocator, BlockTable, KvStore};
use crate::model::{Batch, Model, Output};
use crate::sampling::{Acceptance, Purpose, Rng, distribution, guess};
use candle_core::Tensor;
use std::collections::HashMap;
use std::time::Instant;

/// A draft model with its own paged pool. It keeps no record of rounds: it compares the tokens it
/// was fed with the committed tokens and truncates its pool to their common prefix.
///
/// Its vocabulary may be smaller than the target's. A sequence with an id that it does not know
/// gets no draft.
pub struct DraftModel {
    network: Network,
    fed: HashMap<SeqId, Fed>,
}

/// The model and its pool.
struct Network {
    model: Box<dyn Model>,
    blocks: BlockAllocator,
    store: KvStore,
    /// Maximum number of rows of one sequence in one forward.
    chunk: usize,
    cost: DraftCost,
}

/// The tokens and block table of one sequence in the pool.
#[derive(Default)]
struct Fed {
    tokens: Vec<u32>,
    table: BlockTable,
}

/// One sequence that is being drafted for.
struct Drafting<'a, 'b> {
    /// Index of the request.
    place: usize,
    request: &'a mut DraftRequest<'b>,
    fed: &'a mut Fed,
    draft: Draft,
    /// Number of tokens that a GPU has drawn after `draft` and the host has not read.
    unread: usize,
    /// Whether the first forward can feed all tokens.
    may_draft: bool,
    /// Whether the draft has ended because the model's logits are not finite.
    ended: bool,
}

impl DraftModel {
    /// A drafter over `model` with an empty pool of `num_blocks` blocks.
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
        Ok(Self {
            network: Network {
                store: model.new_kv(num_blocks, block_size)?,
                blocks: BlockAllocator::new(num_blocks, block_size),
                model,
                chunk: chunk.max(2),
                cost: DraftCost::default(),
            },
            fed: HashMap::new(),
        })
    }
}

impl Fed {
    /// Truncates to the longest prefix shared with `tokens`. Their last token is always fed
    /// (again), for its logits.
    fn roll_back(&mut self, blocks: &mut BlockAllocator, tokens: &[u32]) {
        let known = &tokens[..tokens.len() - 1];
        let common = self
            .tokens
            .iter()
            .zip(known)
            .take_while(|(a, b)| a == b)
            .count();
        self.tokens.truncate(common);
        blocks.truncate_to(&mut self.table, common);
    }
}

impl Network {
    /// Makes room for the rows of a request. Returns false if there is no room, or if the model
    /// cannot continue these tokens.
    fn begin(&mut self, fed: &mut Fed, request: &DraftRequest<'_>) -> bool {
        fed.roll_back(&mut self.blocks, request.tokens);
        let config = self.model.config();
        let knows = |&id: &u32| (id as usize) < config.vocab_size;
        let rows = request.tokens.len() + request.length.min(request.nodes) - 1;
        let new = &request.tokens[fed.tokens.len()..];
        if rows > config.max_position_embeddings || !new.iter().all(knows) {
            fed.tokens.clear();
            self.blocks.release(&mut fed.table);
            return false;
        }
        self.blocks.reserve(&mut fed.table, rows).is_ok()
    }

    /// One forward that feeds each sequence of `open` what it has not seen, and drafts a token for
    /// those that have seen all. Returns the largest number of rows of a sequence. Tokens that a
    /// GPU draws are added to `drawn`.
    fn step(
        &mut self,
        drafting: &mut [Drafting<'_, '_>],
        open: &[usize],
        drawn: &mut Vec<Drawn>,
    ) -> Result<usize> {
        let mut batch = Batch::default();
        let mut complete = Vec::new();
        let mut longest = 0;
        for &i in open {
            let one = &mut drafting[i];
            let seen = one.fed.tokens.len();
            let all = one.request.tokens.len() + one.len();
            let rows = (all - seen).min(self.chunk);
            longest = longest.max(rows);
            let new: Vec<u32> = (seen..seen + rows).map(|at| one.token(at)).collect();
            batch.push_span(&new, &[], seen, &one.fed.table, self.blocks.block_size());
            one.fed.tokens.extend(new);
            if one.may_draft && seen + rows == all {
                batch.logits.push(batch.tokens.len() as u32 - 1);
                complete.push(i);
            }
        }
        if let Some(last) = drawn.last() {
            batch.drawn = Some(last.fed_to(open)?);
        }
        let output = self.model.forward(&batch, &mut self.store)?;
        if output.is_on_gpu() {
            drawn.push(Drawn::new(&output, drafting, complete)?);
        } else {
            let all = drafting.iter_mut().enumerate();
            let ready = all.filter(|(i, _)| complete.binary_search(i).is_ok());
            let vocab = self.model.config().vocab_size;
            output.read(|logits| {
                let mut ready: Vec<_> = ready.zip(logits.chunks(vocab)).collect();
                parallel::map(&mut ready, |((_, one), row)| one.draw(row));
            })?;
        }
        Ok(longest)
    }

    fn draft_all(&mut self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let started = Instant::now();
        let (mut steps, mut longest) = (0, 0);
        let mut drawn: Vec<Drawn> = Vec::new();
        loop {
            let wants = |one: &Drafting<'_, '_>| {
                !one.ended && one.len() < one.limit() && (steps == 0 || one.may_draft)
            };
            let all = 0..drafting.len();
            let open: Vec<usize> = all.filter(|&i| wants(&drafting[i])).collect();
            // Tokens that a GPU drew go into the next step without a copy to the host, if the step
            // needs nothing else and no penalties depend on them.
            if !drawn
                .last()
                .is_some_and(|last| last.suffices(drafting, &open))
            {
                drawn.drain(..).try_for_each(|one| one.read(drafting))?;
                if open.iter().any(|&i| drafting[i].ended) {
                    continue;
                }
            }
            if open.is_empty() {
                break;
            }
            longest = longest.max(self.step(drafting, &open, &mut drawn)?);
            steps += 1;
        }
        // A prompt's rows would distort the cost of a draft step; two rows are the catch-up after a
        // round in which every draft token was accepted.
        if longest <= 2 {
            self.cost.steps += steps;
            self.cost.step_seconds += started.elapsed().as_secs_f64();
        }
        Ok(())
    }
}

/// The tokens that one step drew on a GPU and the host has not read.
struct Drawn {
    processed: ProcessedLogits,
    /// The sequences they belong to, ascending.
    of: Vec<usize>,
}

impl Drawn {
    /// Draws the next draft token of each sequence of `of` from its row of logits.
    fn new(output: &Output, drafting: &mut [Drafting<'_, '_>], of: Vec<usize>) -> Result<Self> {
        let (mut params, mut adjustments) = (Vec::with_capacity(of.len()), Vec::new());
        for (row, &i) in of.iter().enumerate() {
            let (row, one) = (row as u32, &mut drafting[i]);
            let choice = match one.request.acceptance {
                Acceptance::Coupled => TokenChoice::Race(one.rng().key(one.len())),
                Acceptance::Rejection => TokenChoice::Quantile(one.uniform()),
            };
            let sampler = &mut *one.request.sampler;
            params.push(logits_params(row, sampler.params(), choice));
            adjustments.extend(row_adjustments(row, sampler));
            sampler.push_unknown();
            one.unread += 1;
        }
        let processed = sample::process_logits(&output.logits, params, adjustments, 1)?;
        Ok(Self { processed, of })
    }

    /// Whether the next step of `open` needs only these tokens, and of them only their number.
    fn suffices(&self, drafting: &[Drafting<'_, '_>], open: &[usize]) -> bool {
        let needs_this = |i: &usize| {
            let one = &drafting[*i];
            let missing = one.request.tokens.len() + one.len() - one.fed.tokens.len();
            let is_drawn = self.of.binary_search(i).is_ok() && missing == 1;
            is_drawn && !one.request.sampler.depends_on_tokens()
        };
        !open.is_empty() && open.iter().all(needs_this)
    }

    /// The tokens of `open` as input to the model, `[open]` u32 on the GPU.
    fn fed_to(&self, open: &[usize]) -> Result<Tensor> {
        let tokens = self.processed.ids()?;
        if self.of == open {
            return Ok(tokens);
        }
        let place = |i: &usize| self.of.partition_point(|of| of < i) as u32;
        let places: Vec<u32> = open.iter().map(place).collect();
        Ok(tokens.index_select(&Tensor::new(places, tokens.device())?, 0)?)
    }

    /// Waits for the tokens and appends them to the drafts; a draft ends where there is no token.
    fn read(self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let best = self.processed.read()?;
        for (row, &i) in self.of.iter().enumerate() {
            let one = &mut drafting[i];
            one.unread -= 1;
            let first = best.of_row(row).next().filter(|_| !one.ended);
            let Some((token, prob)) = first else {
                one.ended = true;
                continue;
            };
            let at = one.request.tokens.len() + one.draft.len();
            if let Some(fed) = one.fed.tokens.get_mut(at) {
                *fed = token;
            }
            one.request.sampler.resolve(token);
            one.add(token, prob);
            if one.request.acceptance == Acceptance::Rejection {
                let dist = self.processed.row(row).map(DraftDist::Device);
                one.draft.dists.extend(dist);
            }
        }
        Ok(())
    }
}

impl Drafting<'_, '_> {
    /// Maximum number of tokens to draft.
    fn limit(&self) -> usize {
        self.request.length.min(self.request.nodes)
    }

    /// Number of tokens drafted.
    fn len(&self) -> usize {
        self.draft.len() + self.unread
    }

    /// Token at position `at` of the sequence with its draft; an arbitrary one if it is not read
    /// yet.
    fn token(&self, at: usize) -> u32 {
        match at.checked_sub(self.request.tokens.len()) {
            None => self.request.tokens[at],
            Some(drafted) => self.draft.tokens.get(drafted).copied().unwrap_or(0),
        }
    }

    /// The random numbers for the tokens after the sequence.
    fn rng(&self) -> Rng {
        Rng {
            seed: self.request.sampler.params().seed,
            position: self.request.position,
        }
    }

    /// The random number for drawing the next draft token under the rejection rule.
    fn uniform(&self) -> f64 {
        self.rng().uniform(self.len(), Purpose::Draft, 0)
    }

    /// Draws the next draft token from one row of logits.
    fn draw(&mut self, logits: &[f32]) {
        if self.request.acceptance == Acceptance::Rejection {
            let Ok(dist) = distribution(logits, self.request.sampler) else {
                self.ended = true;
                return;
            };
            let token = dist.sample(self.uniform());
            self.push(token, dist.prob(token) as f32);
            self.draft.dists.push(dist.into());
            return;
        }
        let key = self.rng().key(self.len());
        let guesses = guess(logits, self.request.sampler, key, 1).unwrap_or_default();
        match guesses.first() {
            Some(guess) => self.push(guess.token, guess.prob),
            None => self.ended = true,
        }
    }

    fn push(&mut self, token: u32, prob: f32) {
        self.request.sampler.push(token);
        self.add(token, prob);
    }

    /// Adds a token of probability `prob` to the draft.
    fn add(&mut self, token: u32, prob: f32) {
        let before = self.draft.scores.last().copied().unwrap_or(1.0);
        self.draft.push(token, before * prob, Source::Model);
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
        let mut drafting = Vec::with_capacity(requests.len());
        for (place, request) in requests.iter_mut().enumerate() {
            if let Some(fed) = states.remove(&request.id)
                && self.network.begin(fed, request)
            {
                drafting.push(Drafting {
                    place,
                    may_draft: request.tokens.len() - fed.tokens.len() <= self.network.chunk,
                    request,
                    fed,
                    draft: Draft::default(),
                    unread: 0,
                    ended: false,
                });
            }
        }
        self.network.draft_all(&mut drafting)?;
        for one in drafting {
            // Tokens drawn after the end of a draft are not known.
            let known = one.request.tokens.len() + one.draft.len();
            one.fed.tokens.truncate(known);
            drafts[one.place] = one.draft;
        }
        Ok(drafts)
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        for committed in committed {
            if let Some(fed) = self.fed.get_mut(&committed.id) {
                fed.roll_back(&mut self.network.blocks, committed.tokens);
            }
        }
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
    use super::super::draft::DraftContext;
    use super::*;
    use crate::model::toy::ToyModel;
    use crate::sampling::{Sampler, SamplingParams};

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
            nodes: 4,
            width: 1,
            position: tokens.len(),
            sampler: &mut sampler,
            acceptance: Acceptance::Coupled,
            context: &DraftContext::default(),
        };
        drafter.propose(&mut [request]).unwrap().remove(0).tokens
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
