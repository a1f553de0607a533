//! Measures the cost of a draft step, in target steps.

use crate::error::{Error, Result};
use crate::kv::{BlockAllocator, BlockTable, KvStore};
use crate::model::{Batch, LoadOptions, Model, ModelSource, load};
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens in the pool before a step.
const CONTEXT: usize = 128;
const BLOCK_SIZE: usize = 16;
/// Steps of each model. They alternate, so that both models see the same load of the machine.
const STEPS: usize = 21;

/// The time of a step of the draft in folder `draft` divided by that of `target`: c of Leviathan et al.
/// 2023, Definition 3.7. Both run as they are served on this machine, with one sequence and without
/// sampling; the times are medians of a few steps.
///
/// # Errors
/// If a model cannot be loaded.
pub fn measure(target: &ModelSource, draft: &Path) -> Result<f64> {
    let options = LoadOptions::default();
    let mut target = Step::new(load(target, &options)?)?;
    let mut draft = Step::new(load(&ModelSource::Folder(draft.to_owned()), &options)?)?;
    // The first step of each is slower.
    draft.run()?;
    target.run()?;
    let mut times = Vec::new();
    for _ in 0..STEPS {
        times.push((draft.run()?, target.run()?));
    }
    let (draft, target): (Vec<_>, Vec<_>) = times.into_iter().unzip();
    Ok(median(draft).as_secs_f64() / median(target).as_secs_f64())
}

/// A decode step of one sequence that can be repeated.
struct Step {
    model: Box<dyn Model>,
    batch: Batch,
    kv: KvStore,
}

impl Step {
    fn new(model: Box<dyn Model>) -> Result<Self> {
        let context = CONTEXT.min(model.config().max_position_embeddings - 1);
        let blocks = (context + 1).div_ceil(BLOCK_SIZE);
        let mut table = BlockTable::default();
        BlockAllocator::new(blocks, BLOCK_SIZE)
            .reserve(&mut table, context + 1)
            .map_err(|_| Error::internal("the pool is as large as the context"))?;
        let mut batch = Batch::default();
        batch.push_span(&[0], &[], context, &table, BLOCK_SIZE);
        batch.logits = vec![0];
        Ok(Self {
            kv: model.new_kv(blocks, BLOCK_SIZE)?,
            model,
            batch,
        })
    }

    fn run(&mut self) -> Result<Duration> {
        let started = Instant::now();
        self.model.forward(&self.batch, &mut self.kv)?;
        Ok(started.elapsed())
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
