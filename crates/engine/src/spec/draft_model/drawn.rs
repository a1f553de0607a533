//! Draft tokens that a GPU draws.

use super::drafting::Drafting;
use crate::spec::device::{logits_params, row_adjustments};
use crate::spec::draft::DraftDist;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_core::model::ForwardOutput;
use foretoken_core::sampling::Guess;
use foretoken_kernels::sample::{self, BestTokens, MAX_BEST, ProcessedLogits};

/// The tokens that one step drew on a GPU and the host has not read.
pub struct DrawnTokens {
    processed: ProcessedLogits,
    /// The sequences they belong to, ascending, and the first row of each.
    of: Vec<(usize, usize)>,
}

impl DrawnTokens {
    /// Draws the next level of each sequence of `of` from its rows of logits, which follow one another.
    pub fn new(
        output: &ForwardOutput,
        drafting: &mut [Drafting<'_, '_>],
        of: Vec<usize>,
    ) -> Result<Self> {
        let (mut params, mut adjustments) = (Vec::with_capacity(of.len()), Vec::new());
        let (mut firsts, mut width) = (Vec::with_capacity(of.len()), 1);
        for i in of {
            let one = &mut drafting[i];
            firsts.push((i, params.len()));
            width = width.max(one.width());
            let mut draw = |one: &mut Drafting<'_, '_>| {
                let (row, sampler) = (params.len() as u32, &*one.request.sampler);
                params.push(logits_params(row, sampler.params(), one.choice()));
                adjustments.extend(row_adjustments(row, sampler));
            };
            if one.is_chain() {
                // The sampler has its tokens, as far as they are known.
                draw(one);
                one.request.sampler.push_unknown();
            } else {
                let parents = one.parents().into_iter();
                parents.for_each(|parent| one.after(parent, &mut draw));
            }
            one.unread += 1;
        }
        let best = width.min(MAX_BEST);
        let processed = sample::process_logits(&output.logits, params, adjustments, best)?;
        Ok(Self {
            processed,
            of: firsts,
        })
    }

    /// Whether the next step of `open` needs only these tokens, and of them only their number.
    pub fn suffices(&self, drafting: &[Drafting<'_, '_>], open: &[usize]) -> bool {
        let needs_this = |i: &usize| {
            let one = &drafting[*i];
            let is_drawn = self.of.binary_search_by_key(i, |of| of.0).is_ok() && one.unread > 0;
            is_drawn && one.is_chain() && !one.request.sampler.depends_on_tokens()
        };
        !open.is_empty() && open.iter().all(needs_this)
    }

    /// The tokens of `open` as input to the model, `[open]` u32 on the GPU.
    pub fn fed_to(&self, open: &[usize]) -> Result<Tensor> {
        let tokens = self.processed.ids()?;
        let row = |i: &usize| self.of[self.of.partition_point(|of| of.0 < *i)].1 as u32;
        let rows: Vec<u32> = open.iter().map(row).collect();
        if rows.iter().copied().eq(0..tokens.elem_count() as u32) {
            return Ok(tokens);
        }
        Ok(tokens.index_select(&Tensor::new(rows, tokens.device())?, 0)?)
    }

    /// Waits for the tokens and adds them to the drafts; a draft ends where there is no token.
    pub fn read(self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let best = self.processed.read()?;
        for (i, row) in self.of {
            let one = &mut drafting[i];
            one.unread -= 1;
            if !one.is_chain() {
                let rows = row..row + one.parents().len();
                let width = one.width();
                one.add_level(rows.map(|row| guesses(&best, row, width)));
                continue;
            }
            match guesses(&best, row, 1).first() {
                Some(&guess) if !one.ended => {
                    let dist = self.processed.row(row).map(DraftDist::Device);
                    one.push(guess, dist);
                }
                _ => one.ended = true,
            }
        }
        Ok(())
    }
}

/// At most `count` tokens of a row, the likeliest first.
fn guesses(best: &BestTokens, row: usize, count: usize) -> Vec<Guess> {
    let guess = |(token, prob)| Guess { token, prob };
    best.of_row(row).take(count).map(guess).collect()
}
