//! Draft tokens that a GPU draws.

use super::drafting::Drafting;
use crate::error::Result;
use crate::kernels::sample::{self, NO_TOKEN, ProcessedLogits};
use crate::model::Output;
use crate::sampling::Guess;
use crate::spec::device::{logits_params, row_adjustments};
use crate::spec::draft::DraftDist;
use candle_core::Tensor;

/// The tokens that one step drew on a GPU and the host has not read.
pub struct Drawn {
    processed: ProcessedLogits,
    /// The sequences they belong to, ascending.
    of: Vec<usize>,
}

impl Drawn {
    /// Draws the next draft token of each sequence of `of` from its row of logits.
    pub fn new(output: &Output, drafting: &mut [Drafting<'_, '_>], of: Vec<usize>) -> Result<Self> {
        let (mut params, mut adjustments) = (Vec::with_capacity(of.len()), Vec::new());
        for (row, &i) in of.iter().enumerate() {
            let (row, one) = (row as u32, &mut drafting[i]);
            let uniform = one.uniform();
            let sampler = &mut *one.request.sampler;
            params.push(logits_params(row, sampler.params(), uniform));
            adjustments.extend(row_adjustments(row, sampler));
            sampler.push_unknown();
            one.unread += 1;
        }
        let processed = sample::process_logits(&output.logits, params, adjustments, true)?;
        Ok(Self { processed, of })
    }

    /// Whether the next step of `open` needs only these tokens, and of them only their number.
    pub fn suffices(&self, drafting: &[Drafting<'_, '_>], open: &[usize]) -> bool {
        let needs_this = |i: &usize| {
            let one = &drafting[*i];
            let is_drawn = self.of.binary_search(i).is_ok() && one.unread > 0;
            is_drawn && one.is_open() && !one.request.sampler.depends_on_tokens()
        };
        !open.is_empty() && open.iter().all(needs_this)
    }

    /// The tokens of `open` as input to the model, `[open]` u32 on the GPU.
    pub fn fed_to(&self, open: &[usize]) -> Result<Tensor> {
        let tokens = self.processed.ids()?;
        if self.of == open {
            return Ok(tokens);
        }
        let place = |i: &usize| self.of.partition_point(|of| of < i) as u32;
        let places: Vec<u32> = open.iter().map(place).collect();
        Ok(tokens.index_select(&Tensor::new(places, tokens.device())?, 0)?)
    }

    /// Waits for the tokens and appends them to the drafts; a draft ends where there is no token.
    pub fn read(self, drafting: &mut [Drafting<'_, '_>]) -> Result<()> {
        let tokens: Vec<u32> = self.processed.tokens()?.to_vec1()?;
        for (row, (&i, token)) in self.of.iter().zip(tokens).enumerate() {
            let one = &mut drafting[i];
            one.unread -= 1;
            one.ended |= token == NO_TOKEN;
            if !one.ended {
                let dist = self.processed.row(row).map(DraftDist::Device);
                one.push(Guess { token, prob: 1.0 }, dist);
            }
        }
        Ok(())
    }
}
