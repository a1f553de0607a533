//! Drafting with a small model of the same vocabulary.

use super::draft::{Ask, Draft, DraftCost, Drafter, Kept, SeqId};
use crate::error::Result;
use crate::kernels::parallel;
use crate::kernels::sample::{self, Shaped};
use crate::kv::{BlockTable, KvPool};
use crate::model::{Batch, Model, Output};
use crate::sampling::{self, Dist, History, Purpose, Rng, distribution, shaping};
use candle_core::Tensor;
use std::collections::HashMap;
use std::time::Instant;

/// A draft model with its own paged pool. It keeps no books of rounds: it compares the tokens that
/// it was fed with the tokens that are certain, and truncates its pool to their common prefix.
pub struct DraftModel {
    model: Box<dyn Model>,
    pool: KvPool,
    fed: HashMap<SeqId, Fed>,
    /// Rows of one sequence in one forward at most.
    chunk: usize,
    cost: DraftCost,
}

/// What one sequence has in the pool.
#[derive(Default)]
struct Fed {
    tokens: Vec<u32>,
    table: BlockTable,
}

/// One sequence that is being drafted for.
struct Drafting<'a> {
    ask: &'a Ask<'a>,
    fed: Fed,
    history: History,
    draft: Draft,
    /// Tokens that a GPU has drawn after those of `draft`, and the host has not read.
    unread: usize,
    /// Whether it has been asked about often enough for its prompt to have been fed by chunks.
    due: bool,
}

impl DraftModel {
    /// A drafter over `model` with an empty pool of `num_blocks` blocks.
    ///
    /// A prompt is prefilled when its first draft is asked for, `chunk` (at least 2) rows a round so
    /// that no round grows longer than a chunk takes; until it is in the pool the drafts are empty.
    /// Which rounds those are depends on the sequence alone, not on what else is running: after a
    /// preemption all of it is fed again at once.
    ///
    /// # Errors
    /// The device has no memory for the pool.
    pub fn new(
        model: Box<dyn Model>,
        num_blocks: usize,
        block_size: usize,
        chunk: usize,
    ) -> Result<Self> {
        let store = model.new_kv(num_blocks, block_size)?;
        Ok(Self {
            model,
            pool: KvPool::new(store, num_blocks),
            fed: HashMap::new(),
            chunk: chunk.max(2),
            cost: DraftCost::default(),
        })
    }

    /// Rolls `fed` back to the longest prefix that it shares with `tokens`, the last of which
    /// always has to be fed (again), for its logits.
    fn roll_back(pool: &mut KvPool, fed: &mut Fed, tokens: &[u32]) {
        let known = &tokens[..tokens.len() - 1];
        let common = fed
            .tokens
            .iter()
            .zip(known)
            .take_while(|(a, b)| a == b)
            .count();
        fed.tokens.truncate(common);
        pool.blocks.truncate_to(&mut fed.table, common);
    }

    /// Takes the state of an asked sequence and makes room for its rows. `None` = no room.
    fn begin<'a>(&mut self, ask: &'a Ask<'a>) -> Option<Drafting<'a>> {
        let mut fed = self.fed.remove(&ask.id).unwrap_or_default();
        Self::roll_back(&mut self.pool, &mut fed, ask.tokens);
        let rows = ask.tokens.len() + ask.length - 1;
        if self.pool.blocks.reserve(&mut fed.table, rows).is_err() {
            self.fed.insert(ask.id, fed);
            return None;
        }
        let rounds = ask.tokens.len() - ask.prompt_len;
        Some(Drafting {
            due: rounds * self.chunk >= ask.tokens.len(),
            ask,
            fed,
            history: History::new(ask.params, ask.tokens, ask.prompt_len),
            draft: Draft::default(),
            unread: 0,
        })
    }

    /// One forward that feeds each of `open` what it has not seen, and drafts a token for those that
    /// have seen all; gives the most rows that one of them had. What a GPU draws is added to `drawn`.
    fn step(
        &mut self,
        drafting: &mut [Drafting<'_>],
        open: &[usize],
        drawn: &mut Vec<Drawn>,
    ) -> Result<usize> {
        let mut batch = Batch::default();
        let mut complete = Vec::new();
        let mut longest = 0;
        for &i in open {
            let one = &mut drafting[i];
            let seen = one.fed.tokens.len();
            let all = one.ask.tokens.len() + one.len();
            let rows = (all - seen).min(self.chunk);
            longest = longest.max(rows);
            let new: Vec<u32> = (seen..seen + rows).map(|at| one.token(at)).collect();
            batch.push_span(&new, seen, &one.fed.table, self.pool.blocks.block_size());
            one.fed.tokens.extend(new);
            if one.due && seen + rows == all {
                batch.logits.push(batch.tokens.len() as u32 - 1);
                complete.push(i);
            }
        }
        if let Some(last) = drawn.last() {
            batch.drawn = Some(last.tokens_of(open)?);
        }
        let output = self.model.forward(&batch, &mut self.pool.store)?;
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

    fn draft_all(&mut self, drafting: &mut [Drafting<'_>]) -> Result<()> {
        let started = Instant::now();
        let (mut steps, mut longest) = (0, 0);
        let mut drawn: Vec<Drawn> = Vec::new();
        loop {
            let wants = |one: &Drafting<'_>| one.len() < one.ask.length && (steps == 0 || one.due);
            let all = 0..drafting.len();
            let open: Vec<usize> = all.filter(|&i| wants(&drafting[i])).collect();
            // What a GPU drew goes into the next step without a detour over the host, where that is
            // all that the step needs and nobody's penalties ask for it.
            if !drawn
                .last()
                .is_some_and(|last| last.suffices(drafting, &open))
            {
                drawn.drain(..).try_for_each(|one| one.read(drafting))?;
            }
            if open.is_empty() {
                break;
            }
            longest = longest.max(self.step(drafting, &open, &mut drawn)?);
            steps += 1;
        }
        // A prompt's rows would not tell what a draft step costs; two are the catch-up after a
        // round in which all was accepted.
        if longest <= 2 {
            self.cost.steps += steps;
            self.cost.step_seconds += started.elapsed().as_secs_f64();
        }
        Ok(())
    }
}

/// The tokens that one step drew on a GPU, which the host has not read.
struct Drawn {
    shaped: Shaped,
    /// Whose they are, in ascending order.
    of: Vec<usize>,
}

impl Drawn {
    /// Draws the next draft token of each of `of` from its row of logits.
    fn new(output: &Output, drafting: &mut [Drafting<'_>], of: Vec<usize>) -> Result<Self> {
        let (mut shapings, mut edits) = (Vec::with_capacity(of.len()), Vec::new());
        for (row, &i) in of.iter().enumerate() {
            let (row, one) = (row as u32, &mut drafting[i]);
            shapings.push(shaping(row, one.ask.params, one.uniform()));
            edits.extend(sampling::edits(row, one.ask.params, &one.history));
            one.unread += 1;
            one.history.push_unread();
        }
        let shaped = sample::shape(&output.logits, shapings, edits, true)?;
        Ok(Self { shaped, of })
    }

    /// Whether the next step of `open` needs to know nothing but these tokens, and only their number.
    fn suffices(&self, drafting: &[Drafting<'_>], open: &[usize]) -> bool {
        let needs_this = |i: &usize| {
            let one = &drafting[*i];
            let missing = one.ask.tokens.len() + one.len() - one.fed.tokens.len();
            self.of.binary_search(i).is_ok() && missing == 1 && !one.history.asks_which()
        };
        !open.is_empty() && open.iter().all(needs_this)
    }

    /// Those of `open`, `[open]` u32 on the GPU.
    fn tokens_of(&self, open: &[usize]) -> Result<Tensor> {
        let tokens = self.shaped.tokens();
        if self.of == open {
            return Ok(tokens.clone());
        }
        let place = |i: &usize| self.of.partition_point(|of| of < i) as u32;
        let places: Vec<u32> = open.iter().map(place).collect();
        Ok(tokens.index_select(&Tensor::new(places, tokens.device())?, 0)?)
    }

    /// Waits for the tokens and appends them to the drafts.
    fn read(self, drafting: &mut [Drafting<'_>]) -> Result<()> {
        let tokens: Vec<u32> = self.shaped.tokens().to_vec1()?;
        for (row, (&i, token)) in self.of.iter().zip(tokens).enumerate() {
            let one = &mut drafting[i];
            let at = one.ask.tokens.len() + one.draft.len();
            if let Some(fed) = one.fed.tokens.get_mut(at) {
                *fed = token;
            }
            one.unread -= 1;
            one.history.read(token);
            let dist = self.shaped.row(row);
            one.draft
                .push(token, dist.map_or(Dist::Point(token), Dist::Device));
        }
        Ok(())
    }
}

impl Drafting<'_> {
    /// Tokens drafted.
    fn len(&self) -> usize {
        self.draft.len() + self.unread
    }

    /// Token at position `at` of the sequence with its draft; any where it is not read yet.
    fn token(&self, at: usize) -> u32 {
        match at.checked_sub(self.ask.tokens.len()) {
            None => self.ask.tokens[at],
            Some(drafted) => self.draft.tokens.get(drafted).copied().unwrap_or(0),
        }
    }

    /// The random number that the next draft token is drawn by.
    fn uniform(&self) -> f64 {
        let rng = Rng {
            seed: self.ask.params.seed,
            position: self.ask.tokens.len(),
        };
        rng.uniform(self.len(), Purpose::Draft, 0)
    }

    /// Draws the next draft token from one row of logits.
    fn draw(&mut self, logits: &[f32]) {
        let dist: Dist = distribution(logits, self.ask.params, &self.history);
        let token = dist.sample(self.uniform());
        self.history.push(token);
        self.draft.push(token, dist);
    }
}

impl Drafter for DraftModel {
    fn propose(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Draft>> {
        let mut drafting = Vec::with_capacity(asks.len());
        let mut places = Vec::with_capacity(asks.len());
        for (place, ask) in asks.iter().enumerate() {
            if let Some(one) = self.begin(ask) {
                drafting.push(one);
                places.push(place);
            }
        }
        let result = self.draft_all(&mut drafting);
        let mut drafts = vec![Draft::default(); asks.len()];
        for (place, one) in places.into_iter().zip(drafting) {
            self.fed.insert(one.ask.id, one.fed);
            drafts[place] = one.draft;
        }
        result.map(|()| drafts)
    }

    fn observe(&mut self, kept: &[Kept<'_>]) {
        for kept in kept {
            if let Some(fed) = self.fed.get_mut(&kept.id) {
                Self::roll_back(&mut self.pool, fed, kept.tokens);
            }
        }
    }

    fn forget(&mut self, id: SeqId) {
        if let Some(mut fed) = self.fed.remove(&id) {
            self.pool.blocks.release(&mut fed.table);
        }
    }

    fn cost(&self) -> DraftCost {
        self.cost
    }

    fn kv_usage(&self) -> f64 {
        self.pool.blocks.usage()
    }

    fn check_idle(&self) -> Result<(), String> {
        self.pool
            .blocks
            .check([])
            .map_err(|e| format!("draft pool: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::toy::ToyModel;
    use crate::sampling::SamplingParams;

    fn drafter(chunk: usize) -> DraftModel {
        DraftModel::new(Box::new(ToyModel::new(32, 256, 5, 0.0)), 64, 4, chunk).unwrap()
    }

    fn propose(drafter: &mut DraftModel, tokens: &[u32], prompt_len: usize) -> Vec<u32> {
        let params = SamplingParams::default();
        let ask = Ask {
            id: 1,
            tokens,
            prompt_len,
            length: 4,
            params: &params,
        };
        drafter.propose(&[ask]).unwrap().remove(0).tokens
    }

    /// After any outcome of a round the next draft is what a drafter says that sees the sequence
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
                    let kept = Kept {
                        id: 1,
                        tokens: &tokens,
                    };
                    used.observe(&[kept]);
                    assert!(used.pool.blocks.num_free() >= 64 - tokens.len().div_ceil(4));
                }
                let fresh = propose(&mut drafter(64), &tokens, 4);
                assert_eq!(propose(&mut used, &tokens, 4), fresh, "{kept} kept");
                used.forget(1);
                assert_eq!(used.check_idle(), Ok(()));
            }
        }
    }

    /// A long prompt is fed by chunks, one a round; which rounds have no draft depends on the
    /// sequence alone, and a drafter that lost its state gives the same from there on.
    #[test]
    fn a_long_prompt_is_prefilled_by_chunks() {
        let mut tokens: Vec<u32> = (0..50).map(|i| i % 32).collect();
        let mut used = drafter(20);
        for round in 1..8 {
            tokens.push(round);
            let draft = propose(&mut used, &tokens, 50);
            assert_eq!(draft.is_empty(), round < 3, "round {round}");
            assert_eq!(
                draft,
                propose(&mut drafter(20), &tokens, 50),
                "round {round}"
            );
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
