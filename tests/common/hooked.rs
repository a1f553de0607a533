//! A toy model whose forwards do what a test wants: wait, count, fail, answer something else.

use candle_core::{Device, Tensor};
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::toy::ToyModel;
use foretoken::model::{Batch, ForwardOutput, GiveUp, Model, ModelInfo};
use foretoken::sampling::mix;

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

/// A model of which every second forward that may be given up is given up somewhere, whoever waits.
struct Interrupted {
    model: Box<dyn Model>,
    dice: u64,
}

impl Model for Interrupted {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.model.kv_shape()
    }

    fn device(&self) -> &Device {
        self.model.device()
    }

    fn generates(&self) -> bool {
        self.model.generates()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        self.model.forward(batch, kv)
    }

    fn is_interruptible(&self) -> bool {
        true
    }

    fn forward_unless(
        &mut self,
        batch: &Batch,
        kv: &mut KvStore,
        _: &GiveUp<'_>,
    ) -> Result<Option<ForwardOutput>> {
        self.dice = mix(self.dice);
        if self.dice.is_multiple_of(2) {
            return self.model.forward(batch, kv).map(Some);
        }
        // Beyond all layers it has computed all.
        let share = (self.dice >> 8) as f64 / (u64::MAX >> 8) as f64;
        self.model.forward_unless(batch, kv, &|done| done > share)?;
        Ok(None)
    }
}

/// `model`, of which every second forward that may be given up is, where `seed` says.
pub fn interrupted(model: Box<dyn Model>, seed: u64) -> Box<dyn Model> {
    Box::new(Interrupted { model, dice: seed })
}
