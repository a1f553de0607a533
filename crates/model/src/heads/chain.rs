//! Forwards of a head that reads hidden states beside tokens: one, or a chain of them, each of which takes the token that was
//! drawn from the logits of the one before it.

use super::draft::DraftHead;
use crate::layers::Step;
use crate::layers::inputs::{Inputs, drawn_for, rows_of};
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvStore;
use foretoken_core::model::{Batch, Draw, ForwardOutput, Model};
use foretoken_kernels::{AttentionBatch, Writes};

/// What a forward reads of its batch, but for the features.
struct TokenStep<'b> {
    inputs: Inputs,
    attention: AttentionBatch<'b>,
}

impl DraftHead {
    /// What the forward of `batch` reads: a GPU has it once `writes` are written.
    ///
    /// # Errors
    /// See [`Inputs::new`].
    ///
    /// # Safety
    /// No kernel reads it before.
    unsafe fn token_step<'b>(
        &self,
        batch: &'b Batch,
        kv: &KvStore,
        writes: &mut Writes,
    ) -> Result<TokenStep<'b>> {
        let (config, device, slots) = (&self.head.shape, self.device(), kv.num_slots());
        let sizes = (config.vocab_size, slots);
        let ropes = (self.ropes.tables(), self.dtypes.activations);
        // SAFETY: the caller promises it.
        let inputs = unsafe { Inputs::new_with(batch, ropes, sizes, device, writes)? };
        let attention = AttentionBatch::new(&batch.spans, kv.block_size, slots)?;
        let attention = attention.with_max_group(config.max_query_heads_a_key());
        if !device.is_cpu() {
            // SAFETY: as above.
            unsafe { attention.send_with(device, self.dtypes.activations, writes)? };
        }
        Ok(TokenStep { inputs, attention })
    }

    /// The forward of rows with these `features`.
    fn forward_step(
        &self,
        step: &TokenStep<'_>,
        features: Option<&Tensor>,
        kv: &KvStore,
    ) -> Result<ForwardOutput> {
        let TokenStep { inputs, attention } = step;
        let config = &self.head.shape;
        let step = Step::new(config, inputs, attention)?;
        let rows = self.rows(features, &inputs.tokens)?;
        let ran = self.run(rows, None, inputs.wanted.is_some(), (&step, None), kv)?;
        let (Some((x, delta)), Some(wanted)) = (ran, &inputs.wanted) else {
            return ForwardOutput::none(config.vocab_size);
        };
        self.tail(&rows_of(&x, wanted)?, &rows_of(&delta, wanted)?)
    }

    /// One forward.
    pub(super) fn forward_tokens(&self, batch: &Batch, kv: &KvStore) -> Result<ForwardOutput> {
        let mut writes = Writes::default();
        // SAFETY: they are written here.
        let step = unsafe { self.token_step(batch, kv, &mut writes)? };
        writes.write()?;
        self.forward_step(&step, batch.features.as_ref(), kv)
    }

    /// See [`Model::forward_chain`]. The inputs of all forwards come in one copy, and tokens are drawn to their place among
    /// them.
    pub(super) fn run_chain(
        &self,
        batches: &[Batch],
        kv: &KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        let (mut writes, mut steps) = (Writes::default(), Vec::with_capacity(batches.len()));
        for batch in batches {
            // SAFETY: they are written before the first forward.
            steps.push(unsafe { self.token_step(batch, kv, &mut writes)? });
        }
        writes.write()?;
        let mut last: Option<ForwardOutput> = None;
        for (at, step) in steps.iter().enumerate() {
            let batch = &batches[at];
            let features = match &last {
                None => batch.features.clone(),
                Some(ForwardOutput { features, .. }) => {
                    let own = |rows: &Tensor| rows.narrow(0, 0, batch.tokens.len());
                    features.as_ref().map(own).transpose()?
                }
            };
            let output = self.forward_step(step, features.as_ref(), kv)?;
            match batches.get(at + 1) {
                Some(next) => {
                    let place = &steps[at + 1].inputs.tokens;
                    drawn_for(next, &output, Some(place), draw)?;
                }
                None => {
                    draw(&output, None)?;
                }
            }
            last = Some(output);
        }
        last.ok_or_else(|| Error::internal("a chain of no forwards"))
    }
}
