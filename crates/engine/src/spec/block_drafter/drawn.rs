//! Guesses that a GPU draws from rows of logits, so that it copies only tokens to the host.

use crate::spec::device::{RowParams, guesses_of};
use crate::spec::draft::{DraftDist, DraftRequest};
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_core::sampling::{Guess, Sampler};
use foretoken_kernels::sample::{
    BestTokens, MAX_BEST, ProcessedLogits, TokenChoice, process_logits,
};

/// How tokens are drawn from rows of logits, one row after the other.
#[derive(Default)]
pub struct RowDraws {
    rows: RowParams,
    /// Maximum number of tokens of a row.
    width: usize,
}

/// The tokens that were drawn from the rows.
pub struct DrawnRows {
    best: BestTokens,
    processed: ProcessedLogits,
}

impl RowDraws {
    /// Whether a GPU has all that the request asks for.
    pub fn takes(request: &DraftRequest<'_>) -> bool {
        !request.sampler.needs_host() && request.max_siblings() <= MAX_BEST
    }

    /// Adds the draw of up to `width` tokens from the next row, for the position that `sampler` has reached.
    pub fn push(&mut self, sampler: &Sampler, choice: TokenChoice, width: usize) {
        let row = self.rows.params.len() as u32;
        self.rows.push(row, sampler, choice);
        self.width = self.width.max(width);
    }

    /// Draws from `logits`, `[rows, vocab_size]` f32 on a GPU, and waits for the tokens.
    ///
    /// # Errors
    /// If there are fewer rows than draws, or the device fails.
    pub fn run(self, logits: &Tensor) -> Result<DrawnRows> {
        let logits = logits.contiguous()?;
        let RowParams {
            params,
            adjustments,
        } = self.rows;
        let processed = process_logits(&logits, params, adjustments, self.width)?;
        Ok(DrawnRows {
            best: processed.read()?,
            processed,
        })
    }
}

impl DrawnRows {
    /// The guesses after a row, at most `width`, the likeliest first. Adds to `dists` the distribution from which a token
    /// was drawn, which the rejection rule needs. The tokens are those that the host chooses; the probability of a sampled
    /// one is its share of the weights, without the noise that the host knows.
    pub fn guesses(&self, row: usize, width: usize, dists: &mut Vec<DraftDist>) -> Vec<Guess> {
        let found = guesses_of(&self.best, row, width);
        if !found.is_empty() {
            dists.extend(self.processed.row(row).map(DraftDist::Device));
        }
        found
    }
}
