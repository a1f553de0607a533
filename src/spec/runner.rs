//! `propose -> forward -> verify` for one engine step.

use super::device;
use super::draft::{Ask, Draft, DraftCost, Drafter, Kept, SeqId};
use super::verify::{accept_by_chance, verify};
use crate::error::Result;
use crate::kernels::parallel;
use crate::kv::{BlockTable, KvPool};
use crate::model::{Batch, Model};
use crate::sampling::{History, Rng, SamplingParams, TokenLogprobs, distribution, logprobs};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What one sequence does in a step: some rows of what is pending, and perhaps a draft after them.
#[derive(Debug, Clone)]
pub struct Turn<'a> {
    pub id: SeqId,
    /// All tokens of the sequence; pending is `tokens[kv_len..]`.
    pub tokens: &'a [u32],
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the target's pool.
    pub kv_len: usize,
    /// Pending tokens to feed now. If it is all of them, the step samples, unless `sample` is off.
    pub rows: usize,
    /// Whether a token is wanted after the last pending one.
    pub sample: bool,
    /// Draft tokens wanted at most.
    pub draft: usize,
    /// Accepts the draft by chance instead of verifying it; see [`accept_by_chance`].
    pub synthetic_acceptance: Option<f64>,
    /// Room in the target's pool for `kv_len + rows + draft` tokens.
    pub table: &'a BlockTable,
    pub params: &'a SamplingParams,
    /// Alternatives wanted with the log-probability of each new token.
    pub logprobs: Option<usize>,
    /// Prompt positions whose log-probabilities are wanted from this step's rows; the first is at
    /// least `kv_len + 1`. Alternatives as in `prompt_logprobs`.
    pub prompt_scores: Range<usize>,
    pub prompt_logprobs: usize,
}

/// What became of a [`Turn`].
#[derive(Debug, Clone, Default)]
pub struct Round {
    /// New tokens: those accepted from the draft, then the target's own. Empty without sampling.
    pub tokens: Vec<u32>,
    /// One for each of `tokens`, if wanted.
    pub logprobs: Vec<TokenLogprobs>,
    /// One for each of the turn's `prompt_scores`.
    pub prompt_scores: Vec<TokenLogprobs>,
    pub drafted: usize,
    /// Draft tokens whose acceptance was decided.
    pub tested: usize,
}

/// The target with its pool, and the drafter. Plain decoding is speculation with empty drafts.
pub struct SpeculativeRunner {
    target: Box<dyn Model>,
    /// The target's pool.
    pub pool: KvPool,
    drafter: Option<Box<dyn Drafter>>,
}

impl SpeculativeRunner {
    /// A runner with an empty target pool.
    ///
    /// # Errors
    /// The device has no memory for the pool.
    pub fn new(
        target: Box<dyn Model>,
        drafter: Option<Box<dyn Drafter>>,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let store = target.new_kv(num_blocks, block_size)?;
        Ok(Self {
            target,
            pool: KvPool::new(store, num_blocks),
            drafter,
        })
    }

    /// Runs one step: asks for drafts, computes all rows in one target forward, and decides.
    /// The caller keeps the books: new tokens are neither appended to the sequences nor is the
    /// target's pool rolled back here. Call [`SpeculativeRunner::observe`] after that.
    ///
    /// The second value is the wall time of the target's forward.
    ///
    /// # Errors
    /// The device failed; nothing was decided for any turn.
    pub fn step(&mut self, turns: &[Turn<'_>]) -> Result<(Vec<Round>, Duration)> {
        let drafts = self.propose(turns)?;
        let started = Instant::now();
        let (batch, rows) = self.batch(turns, &drafts);
        let output = self.target.forward(&batch, &mut self.pool.store)?;
        let target_time = started.elapsed();
        let vocab = self.target.config().vocab_size;
        if output.is_on_gpu() {
            let rounds = device::decide_all(&output, turns, &drafts, rows, vocab)?;
            return Ok((rounds, target_time));
        }
        let rounds = output.read(|logits| {
            let mut parts: Vec<_> = turns.iter().zip(&drafts).zip(rows).collect();
            parallel::map(&mut parts, |((turn, draft), rows)| {
                let logits = &logits[rows.start * vocab..rows.end * vocab];
                decide(turn, draft, logits, vocab)
            })
        })?;
        Ok((rounds, target_time))
    }

    /// Tells the drafter what is certain now.
    pub fn observe(&mut self, kept: &[Kept<'_>]) {
        if let Some(drafter) = &mut self.drafter {
            drafter.observe(kept);
        }
    }

    /// The sequence has ended or was preempted.
    pub fn forget(&mut self, id: SeqId) {
        if let Some(drafter) = &mut self.drafter {
            drafter.forget(id);
        }
    }

    /// Cost of drafting since the start.
    pub fn draft_cost(&self) -> DraftCost {
        self.drafter
            .as_ref()
            .map_or_else(DraftCost::default, |d| d.cost())
    }

    /// Used fraction of the drafter's pool, 0 to 1.
    pub fn draft_kv_usage(&self) -> f64 {
        self.drafter.as_ref().map_or(0.0, |d| d.kv_usage())
    }

    /// Integrity when no sequence is alive: both pools must be wholly free.
    ///
    /// # Errors
    /// What is not.
    pub fn check_idle(&self) -> Result<(), String> {
        self.pool
            .blocks
            .check([])
            .map_err(|e| format!("target pool: {e}"))?;
        self.drafter.as_ref().map_or(Ok(()), |d| d.check_idle())
    }

    fn propose(&mut self, turns: &[Turn<'_>]) -> Result<Vec<Draft>> {
        let mut drafts = vec![Draft::default(); turns.len()];
        let Some(drafter) = &mut self.drafter else {
            return Ok(drafts);
        };
        let (places, asks): (Vec<usize>, Vec<Ask<'_>>) = turns
            .iter()
            .enumerate()
            .filter(|(_, turn)| turn.draft > 0)
            .map(|(place, turn)| {
                let ask = Ask {
                    id: turn.id,
                    tokens: turn.tokens,
                    prompt_len: turn.prompt_len,
                    length: turn.draft,
                    params: turn.params,
                };
                (place, ask)
            })
            .unzip();
        if !asks.is_empty() {
            for (place, draft) in places.into_iter().zip(drafter.propose(&asks)?) {
                debug_assert!(draft.is_chain() && draft.len() <= turns[place].draft);
                drafts[place] = draft;
            }
        }
        Ok(drafts)
    }

    /// All rows of the step, and for each turn its range of logits rows.
    fn batch(&self, turns: &[Turn<'_>], drafts: &[Draft]) -> (Batch, Vec<Range<usize>>) {
        let mut batch = Batch::default();
        let mut ranges = Vec::with_capacity(turns.len());
        for (turn, draft) in turns.iter().zip(drafts) {
            let base = batch.tokens.len();
            let pending = &turn.tokens[turn.kv_len..turn.kv_len + turn.rows];
            let rows = [pending, &draft.tokens].concat();
            let block_size = self.pool.blocks.block_size();
            batch.push_span(&rows, turn.kv_len, turn.table, block_size);
            let first = batch.logits.len();
            // Row i of the span is position kv_len + i and predicts the position after it.
            let row_of = |position: usize| (base + position - 1 - turn.kv_len) as u32;
            batch.logits.extend(turn.prompt_scores.clone().map(row_of));
            if turn.sample {
                let decided = turn.tokens.len()..=turn.tokens.len() + draft.len();
                batch.logits.extend(decided.map(row_of));
            }
            ranges.push(first..batch.logits.len());
        }
        (batch, ranges)
    }
}

/// Scores, distributions, verdict: all that follows from a turn's logits, `[rows, vocab]`.
pub(super) fn decide(turn: &Turn<'_>, draft: &Draft, logits: &[f32], vocab: usize) -> Round {
    let mut rows = logits.chunks(vocab);
    let prompt_scores = turn
        .prompt_scores
        .clone()
        .zip(&mut rows)
        .map(|(position, row)| logprobs(row, turn.tokens[position], turn.prompt_logprobs))
        .collect();
    if !turn.sample {
        return Round {
            prompt_scores,
            ..Round::default()
        };
    }
    let rows: Vec<&[f32]> = rows.collect();
    let mut history = History::new(turn.params, turn.tokens, turn.prompt_len);
    let rng = Rng {
        seed: turn.params.seed,
        position: turn.tokens.len(),
    };
    let target = |path: &[usize]| {
        if let Some(&last) = path.last() {
            history.push(draft.tokens[last]);
        }
        let row = path.last().map_or(0, |node| node + 1);
        distribution(rows[row], turn.params, &history)
    };
    let verdict = match turn.synthetic_acceptance {
        None => verify(draft, target, &rng),
        Some(rate) => accept_by_chance(draft, rate, target, &rng),
    };
    let mut tokens: Vec<u32> = verdict
        .path
        .iter()
        .map(|&node| draft.tokens[node])
        .collect();
    tokens.push(verdict.next);
    let scored = turn.logprobs.into_iter().flat_map(|top| {
        let scored = tokens.iter().zip(&rows);
        scored.map(move |(&token, row)| logprobs(row, token, top))
    });
    Round {
        logprobs: scored.collect(),
        prompt_scores,
        drafted: draft.len(),
        tested: verdict.tested,
        tokens,
    }
}
