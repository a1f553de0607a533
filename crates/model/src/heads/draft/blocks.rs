//! The forward of a parallel head: the context, and blocks of a token and masks.

use super::super::config::Causality;
use super::super::path::PathHead;
use super::super::states;
use super::DraftHead;
use crate::layers::Step;
use crate::layers::block_conv::BlockPlaces;
use crate::layers::inputs::{Inputs, rows_of};
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvStore, LayerPool};
use foretoken_core::model::{Batch, ForwardOutput, Span};
use foretoken_kernels::AttentionBatch;

impl DraftHead {
    /// The forward of a parallel head.
    pub(super) fn forward_blocks(&self, batch: &Batch, kv: &KvStore) -> Result<ForwardOutput> {
        let (config, dtype, slots) = (&self.head.shape, self.dtypes.activations, kv.num_slots());
        let (vocab_size, ropes) = (config.vocab_size, (self.ropes.tables(), dtype));
        let inputs = Inputs::new(batch, ropes, vocab_size, slots, &self.device)?;
        let context = batch.context_features.as_ref();
        let context = context.map(Tensor::contiguous).transpose()?;
        let others = context.as_ref().map_or(Ok(0), |context| context.dim(0))?;
        let wrong = || Error::internal(format!("a batch of {others} context rows"));
        let rows = inputs.slots.len().checked_sub(others).ok_or_else(wrong)?;
        if let (Some(pool), Some(context)) = (self.feature_pool(kv), &context) {
            states::write(context, &batch.slots[..others], pool)?;
        }
        let after = (others > 0).then(|| spans_after(others, &batch.spans));
        let spans = after.as_deref().unwrap_or(&batch.spans);
        let causality = self.head.causality;
        let blocks = (causality == Causality::All).then(|| causal(spans));
        let spans = blocks.as_deref().unwrap_or(spans);
        let attention = AttentionBatch::new(spans, kv.block_size, slots)?;
        let step = Step::new(config, &inputs, &attention)?;
        if let (0, Some(context)) = (rows, &context) {
            for (layer, pool) in self.layers.iter().zip(&kv.layers) {
                layer.write(context, &step, LayerPool::Tokens(pool))?;
            }
            return ForwardOutput::none(vocab_size);
        }
        let places = (self.head.convs)
            .map(|convs| BlockPlaces::new(spans, convs.taps, dtype, &self.device))
            .transpose()?;
        let step = step.with_places(places.as_ref());
        let causal = (causality == Causality::Windows).then(|| causal(spans));
        let causal = (causal.as_deref())
            .map(|spans| AttentionBatch::new(spans, kv.block_size, slots))
            .transpose()?;
        let windowed = (causal.as_ref())
            .map(|spans| {
                Ok::<_, Error>(Step::new(config, &inputs, spans)?.with_places(places.as_ref()))
            })
            .transpose()?;
        let own = self.rows(None, &inputs.tokens.narrow(0, others, rows)?)?;
        let (is_wanted, steps) = (inputs.wanted.is_some(), (&step, windowed.as_ref()));
        let ran = self.run(own, context.as_ref(), is_wanted, steps, kv)?;
        let (Some((x, delta)), Some(wanted)) = (ran, inputs.wanted) else {
            return ForwardOutput::none(vocab_size);
        };
        let wanted = if others == 0 {
            wanted
        } else {
            let moved = (batch.logits.iter()).map(|&row| row.checked_sub(others as u32));
            let moved: Vec<u32> = moved.collect::<Option<_>>().ok_or_else(wrong)?;
            Tensor::new(moved, &self.device)?
        };
        let mut output = self.tail(&rows_of(&x, &wanted)?, &rows_of(&delta, &wanted)?)?;
        let in_span = |span: &Span| {
            let is_own = |row: &&u32| span.rows.contains(&(**row as usize - others));
            batch.logits.iter().filter(is_own).count()
        };
        let counts: Vec<usize> = spans.iter().map(in_span).collect();
        if let Some(kept) = self.kept_of_blocks(&output, spans, &counts, kv)? {
            output.path_hidden = Some(kept);
        }
        Ok(output)
    }

    /// The pool of the features of committed positions, if the head reads them again.
    fn feature_pool<'k>(&self, kv: &'k KvStore) -> Option<&'k (Tensor, Tensor)> {
        self.path.as_ref()?.lilicorr()?;
        kv.layers.last()
    }

    /// What the head keeps of the rows with logits of blocks with these `spans`, if it reads all rows of a block at once.
    /// Of each span, so many rows have logits; `output` has their logits and hidden states.
    fn kept_of_blocks(
        &self,
        output: &ForwardOutput,
        spans: &[Span],
        counts: &[usize],
        kv: &KvStore,
    ) -> Result<Option<Tensor>> {
        let lilicorr = self.path.as_ref().and_then(PathHead::lilicorr);
        let (Some(lilicorr), Some(pool), Some(hidden)) =
            (lilicorr, self.feature_pool(kv), &output.path_hidden)
        else {
            return Ok(None);
        };
        let (mut kept, mut end) = (Vec::new(), 0);
        for (span, &count) in spans.iter().zip(counts) {
            // Without a context, as in calibration, any features will do.
            let slot = span.slot_before(0, 1, kv.block_size);
            let slot = slot.or_else(|| span.slot_before(0, 0, kv.block_size));
            let anchor = states::read(&[slot.unwrap_or(0)], pool, self.dtypes.activations)?;
            let rows = end..end + count;
            for first in rows.clone().step_by(lilicorr.slots()) {
                let len = (rows.end - first).min(lilicorr.slots());
                let logits = output.logits.narrow(0, first, len)?;
                let hidden = hidden.narrow(0, first, len)?.contiguous()?;
                kept.push(lilicorr.correct((&logits, &hidden), &anchor, &self.embedding)?);
            }
            end = rows.end;
        }
        Ok(Some(Tensor::cat(&kept, 0)?))
    }
}

/// The spans after the first `others` rows, as if those rows did not exist.
fn spans_after(others: usize, spans: &[Span]) -> Vec<Span> {
    let after = spans.iter().filter(|span| span.rows.start >= others);
    let moved = after.map(|span| Span {
        rows: span.rows.start - others..span.rows.end - others,
        ..span.clone()
    });
    moved.collect()
}

/// `spans` with rows that see only the rows before them.
fn causal(spans: &[Span]) -> Vec<Span> {
    let causal = spans.iter().map(|span| Span {
        tree: None,
        ..span.clone()
    });
    causal.collect()
}
