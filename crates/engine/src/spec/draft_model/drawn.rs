//! Draft tokens that a GPU draws.

use super::drafting::Drafting;
use crate::spec::device::{RowParams, guesses_of};
use crate::spec::draft::DraftDist;
use foretoken_core::error::Result;
use foretoken_core::kv::KvStore;
use foretoken_core::model::{Batch, ForwardOutput, Model};
use foretoken_core::sampling::Sampler;
use foretoken_kernels::sample::{BestTokens, Draws, MAX_BEST, ProcessedLogits};

/// Forwards, one after the other, whose tokens a GPU draws. All that the host sends is known before the first one runs,
/// except the tokens, which a forward takes from the draws after the one before it.
#[derive(Default)]
pub struct DeviceSteps {
    batches: Vec<Batch>,
    /// How each row of logits of each step becomes tokens.
    rows: Vec<RowParams>,
    /// The sequences that each step draws for, and the first row of each.
    of: Vec<Vec<(usize, usize)>>,
    /// Maximum number of tokens after a row.
    width: usize,
}

/// The tokens of some steps, which the host has not read.
pub struct DrawnTokens {
    draws: Draws,
    processed: Vec<ProcessedLogits>,
    of: Vec<Vec<(usize, usize)>>,
}

impl DeviceSteps {
    /// Adds the forward of `batch`, and the draws of the next level of each sequence of `of` from its rows of logits,
    /// which follow one another.
    pub fn push(&mut self, batch: Batch, drafting: &mut [Drafting<'_, '_>], of: &[usize]) {
        let mut rows = RowParams::default();
        let mut firsts = Vec::with_capacity(of.len());
        for &i in of {
            let one = &mut drafting[i];
            firsts.push((i, rows.params.len()));
            self.width = self.width.max(one.width());
            let choice = one.choice();
            let mut draw = |sampler: &mut Sampler| {
                let row = rows.params.len() as u32;
                rows.push(row, sampler, choice);
            };
            if one.is_chain() {
                // The sampler has its tokens, as far as they are known.
                draw(one.request.sampler);
                one.request.sampler.push_unknown();
            } else {
                for parent in one.parents() {
                    let path = one.path(parent);
                    one.request.sampler.after(&path, &mut draw);
                }
            }
            one.unread += 1;
        }
        self.batches.push(batch);
        self.rows.push(rows);
        self.of.push(firsts);
    }

    /// The number of rows of each forward.
    pub fn rows(&self) -> impl Iterator<Item = usize> + '_ {
        self.batches.iter().map(|batch| batch.tokens.len())
    }

    /// Launches all forwards and draws. Returns the output of the last one.
    ///
    /// # Errors
    /// If the device fails.
    pub fn run(
        self,
        model: &mut dyn Model,
        store: &mut KvStore,
    ) -> Result<(ForwardOutput, DrawnTokens)> {
        let Self {
            mut batches,
            rows,
            of,
            width,
        } = self;
        let rows = rows.into_iter().map(|rows| (rows.params, rows.adjustments));
        let (params, adjustments): (Vec<_>, Vec<_>) = rows.unzip();
        let mut draws = Draws::new(params, width.min(MAX_BEST), model.device())?;
        let mut adjustments = adjustments.into_iter();
        let mut processed = Vec::with_capacity(of.len());
        let output = model.forward_chain(&mut batches, store, &mut |output, place| {
            let adjustments = adjustments.next().unwrap_or_default();
            let drawn = draws.draw(&output.logits, adjustments, place)?;
            let ids = drawn.ids().clone();
            processed.push(drawn);
            Ok(ids)
        })?;
        let drawn = DrawnTokens {
            draws,
            processed,
            of,
        };
        Ok((output, drawn))
    }
}

impl DrawnTokens {
    /// Waits for the tokens of all steps, and adds them to the drafts; a draft ends where there is no token.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let steps = self.draws.read()?.into_iter().zip(&self.processed);
        for ((best, processed), of) in steps.zip(self.of) {
            add_level(drafting, of, &best, processed);
        }
        Ok(())
    }
}

/// Adds to the drafts of the sequences of `of` what one step drew for them.
fn add_level(
    drafting: &mut [Drafting<'_, '_>],
    of: Vec<(usize, usize)>,
    best: &BestTokens,
    processed: &ProcessedLogits,
) {
    for (i, row) in of {
        let one = &mut drafting[i];
        one.unread -= 1;
        if !one.is_chain() {
            let rows = row..row + one.parents().len();
            let width = one.width();
            one.add_level(rows.map(|row| guesses_of(best, row, width)));
            continue;
        }
        match guesses_of(best, row, 1).first() {
            Some(&guess) if !one.ended => {
                let dist = processed.row(row).map(DraftDist::Device);
                one.push(guess, dist);
            }
            _ => one.ended = true,
        }
    }
}
