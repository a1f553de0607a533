//! A toy model whose forwards do what a test wants: wait, count, fail, answer something else.

use candle_core::{Device, Tensor};
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::toy::ToyModel;
use foretoken::model::{Batch, ForwardOutput, Model, ModelInfo};

struct Hooked<F> {
    toy: ToyModel,
    forward: F,
}

impl<F> Model for Hooked<F>
where
    F: FnMut(&mut ToyModel, &Batch, &mut KvStore) -> Result<ForwardOutput> + Send,
{
    fn info(&self) -> &ModelInfo {
        self.toy.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.toy.kv_shape()
    }

    fn device(&self) -> &Device {
        self.toy.device()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        (self.forward)(&mut self.toy, batch, kv)
    }
}

/// `toy` with `forward` in the place of its own.
pub fn hooked(
    toy: ToyModel,
    forward: impl FnMut(&mut ToyModel, &Batch, &mut KvStore) -> Result<ForwardOutput> + Send + 'static,
) -> Box<dyn Model> {
    Box::new(Hooked { toy, forward })
}

/// `toy`, which calls `before` with each batch before it computes it.
pub fn watched(
    toy: ToyModel,
    mut before: impl FnMut(&Batch) -> Result<()> + Send + 'static,
) -> Box<dyn Model> {
    hooked(toy, move |toy, batch, kv| {
        before(batch)?;
        toy.forward(batch, kv)
    })
}

/// `toy`, whose logits are changed by `edit`: it gets the batch, the index of the batch's row, and its
/// logits.
pub fn edited(
    toy: ToyModel,
    mut edit: impl FnMut(&Batch, usize, &mut [f32]) + Send + 'static,
) -> Box<dyn Model> {
    hooked(toy, move |toy, batch, kv| {
        let output = toy.forward(batch, kv)?;
        if batch.logits.is_empty() {
            return Ok(output);
        }
        let mut rows = output.logits.to_vec2::<f32>()?;
        for (row, &at) in rows.iter_mut().zip(&batch.logits) {
            edit(batch, at as usize, row);
        }
        let logits = Tensor::new(rows, toy.device())?;
        Ok(ForwardOutput { logits, ..output })
    })
}
