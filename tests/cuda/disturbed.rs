//! Models and heads with whose rounds of drafting a test meddles.

use candle_core::{Device, Tensor};
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::{Batch, Draw, ForwardOutput, Head, Model, ModelInfo};
use std::sync::{Arc, Mutex};

/// What happens in the middle of rounds.
pub(super) trait Mischief: Send {
    /// Before a forward that is no part of a chain.
    fn before_forward(&mut self) {}

    /// `draw`s from the `output` of a forward of a chain, or does something else.
    fn draw(
        &mut self,
        draw: &mut Draw<'_>,
        output: &ForwardOutput,
        place: Option<&Tensor>,
    ) -> Result<Tensor>;
}

/// A model or a head that computes while there is mischief.
pub(super) struct Disturbed<M: ?Sized, D> {
    pub(super) mischief: Arc<Mutex<D>>,
    pub(super) model: Box<M>,
}

impl<M: Model + ?Sized, D: Mischief> Model for Disturbed<M, D> {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.model.kv_shape()
    }

    fn device(&self) -> &Device {
        self.model.device()
    }

    fn padded_rows(&self, rows: usize) -> usize {
        self.model.padded_rows(rows)
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        self.mischief.lock().unwrap().before_forward();
        self.model.forward(batch, kv)
    }

    fn forward_chain(
        &mut self,
        batches: &mut [Batch],
        kv: &mut KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        let mischief = &self.mischief;
        self.model.forward_chain(batches, kv, &mut |output, place| {
            mischief.lock().unwrap().draw(draw, output, place)
        })
    }
}

impl<M: Head + ?Sized, D: Mischief> Head for Disturbed<M, D> {
    fn reads(&self) -> &[usize] {
        self.model.reads()
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        self.model.fuse(hidden)
    }

    fn layout(&self) -> String {
        self.model.layout()
    }
}
