//! Forwards of a decoder whose layers are on several GPUs: what the layers of each read is there, and hidden states of
//! the rows go from one to the next, and those that are asked for to the first one.

use super::Decoder;
use crate::layers::Step;
use crate::layers::inputs::{Inputs, rows_of};
use candle_core::Tensor;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvStore;
use foretoken_core::model::Batch;
use foretoken_kernels::{AttentionBatch, copy_to, wait_for};

/// What the layers of one of the GPUs after the first read, besides hidden states.
pub(super) struct Stage<'a> {
    pub inputs: Inputs,
    spans: AttentionBatch<'a>,
}

/// The stage of the GPU with this index, which is not the first.
pub(super) fn stage<'a, 'b>(stages: &'a [Stage<'b>], gpu: usize) -> Result<&'a Stage<'b>> {
    let found = gpu.checked_sub(1).and_then(|place| stages.get(place));
    found.ok_or_else(|| Error::internal("a layer is on another GPU than its inputs"))
}

impl Decoder {
    /// The stages of all GPUs but the first.
    ///
    /// # Errors
    /// See [`Inputs::new`].
    pub(super) fn stages<'a>(&self, batch: &'a Batch, kv: &KvStore) -> Result<Vec<Stage<'a>>> {
        let of_device = |device| -> Result<Stage<'a>> {
            Ok(Stage {
                inputs: self.inputs_on(device, batch, kv)?,
                spans: self.spans(batch, kv)?,
            })
        };
        self.split.devices()[1..].iter().map(of_device).collect()
    }

    /// The step of the layers of `stage`, where `step` is that of the layers before.
    pub(super) fn next_step<'a>(
        &'a self,
        stage: &'a Stage<'_>,
        step: &Step<'_>,
    ) -> Result<Step<'a>> {
        let next = Step::new(&self.config, &stage.inputs, &stage.spans)?;
        let own = step.layer_inputs.as_ref();
        let own = own.map(|own| copy_to(own, stage.inputs.slots.device()));
        Ok(next.with_layer_inputs(own.transpose()?))
    }

    /// `rows`, u32, of the residual stream after the last layer and of what is to be added to it, where the output layer
    /// is.
    pub(super) fn picked(
        &self,
        rows: &Tensor,
        x: &Tensor,
        delta: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let of =
            |all: &Tensor| -> Result<Tensor> { Ok(copy_to(&rows_of(all, rows)?, &self.device)?) };
        Ok((of(x)?, of(delta)?))
    }

    /// The hidden states of `tapped`, side by side, where the output layer is; `None` = there are none.
    pub(super) fn together(&self, tapped: &[Tensor]) -> Result<Option<Tensor>> {
        let here = tapped.iter().map(|one| copy_to(one, &self.device));
        let here = here.collect::<candle_core::Result<Vec<_>>>()?;
        let all = (!here.is_empty()).then(|| Tensor::cat(&here, 1));
        Ok(all.transpose()?)
    }

    /// Lets the first GPU wait for the others: whoever waits for it then waits for the forward.
    pub(super) fn wait_for_layers(&self) -> Result<()> {
        for device in &self.split.devices()[1..] {
            wait_for(&self.device, device)?;
        }
        Ok(())
    }
}
