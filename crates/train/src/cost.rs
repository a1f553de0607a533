//! Measures the cost of a draft step, and of the target's rows, in target steps.

use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken_core::model::{Batch, DraftNetwork, KeptState};
use foretoken_model::{HeadKind, LoadOptions, ModelSource, load, load_head};
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens in the pool before a step.
const CONTEXT: usize = 128;
const BLOCK_SIZE: usize = 16;
/// Maximum rows of a step.
const MAX_ROWS: usize = 16;
/// Steps of each model. They alternate, so that both models see the same load of the machine.
const STEPS: usize = 21;

/// Costs of steps on this machine, in target steps of one row.
#[derive(Debug, Clone, Serialize)]
pub struct Costs {
    /// Cost of a draft step: c of Leviathan et al. 2023, Definition 3.7. For a parallel head, the cost of a whole
    /// block.
    pub draft: f64,
    /// Costs of the target's steps, by their number of rows, ascending.
    pub rows: Vec<(usize, f64)>,
}

/// Numbers of rows of the target's steps.
const ROWS: [usize; 6] = [1, 2, 4, 6, 8, 16];

/// The costs of the draft in folder `draft`, a model or a head of `target`. All run as they are served on
/// this machine, with one sequence and without sampling; the times are medians of a few steps.
///
/// # Errors
/// If a model cannot be loaded.
pub fn measure(target: &ModelSource, draft: &Path) -> Result<Costs> {
    let options = LoadOptions::default();
    let target = load(target, &options)?;
    let source = ModelSource::Folder(draft.to_owned());
    let draft = match HeadKind::of(&source)? {
        Some(kind) => DraftNetwork::Head(load_head(&source, kind, &options, &*target)?),
        None => DraftNetwork::Model(load(&source, &options)?),
    };
    let target = DraftNetwork::Model(target);
    let (mut target, mut draft) = (Stepper::new(target)?, Stepper::new(draft)?);
    // The first step of each is slower.
    let rows = draft.network.masked_block().map_or(1, |block| block.size);
    draft.run(rows)?;
    target.run(MAX_ROWS)?;
    let (mut of_draft, mut by_rows) = (Vec::new(), vec![Vec::new(); ROWS.len()]);
    for _ in 0..STEPS {
        for (times, rows) in by_rows.iter_mut().zip(ROWS) {
            times.push(target.run(rows)?);
        }
        of_draft.push(draft.run(rows)?);
    }
    let seconds: Vec<f64> = by_rows.into_iter().map(median).collect();
    let of_one = seconds[0];
    Ok(Costs {
        draft: median(of_draft) / of_one,
        rows: ROWS
            .into_iter()
            .zip(seconds.iter().map(|s| s / of_one))
            .collect(),
    })
}

impl Costs {
    /// The cost of a target's step of `rows` rows, between those that were measured; beyond them each row
    /// costs as much as the last ones.
    pub fn of_rows(&self, rows: usize) -> f64 {
        let after = self.rows.partition_point(|&(known, _)| known < rows);
        let after = after.clamp(1, self.rows.len() - 1);
        let ((low, from), (high, to)) = (self.rows[after - 1], self.rows[after]);
        let share = (rows as f64 - low as f64) / (high - low) as f64;
        from + share * (to - from)
    }
}

/// Steps of one sequence that can be repeated.
struct Stepper {
    network: DraftNetwork,
    context: usize,
    table: BlockTable,
    kv: KvStore,
}

impl Stepper {
    fn new(network: DraftNetwork) -> Result<Self> {
        // A block and the state before it.
        let block = network.masked_block();
        let (model, rows) = (network.model(), block.map_or(0, |block| 1 + block.size));
        let (rows, longest) = (rows.max(MAX_ROWS), model.info().max_position_embeddings);
        let context = CONTEXT.min(longest.saturating_sub(rows));
        let blocks = (context + rows).div_ceil(BLOCK_SIZE);
        let mut table = BlockTable::default();
        BlockAllocator::new(blocks, BLOCK_SIZE)
            .reserve(&mut table, context + rows)
            .map_err(|_| Error::internal("the pool is as large as the context"))?;
        Ok(Self {
            kv: model.new_kv(blocks, BLOCK_SIZE)?,
            network,
            context,
            table,
        })
    }

    /// The time of a step of `rows` rows, each with logits; of a parallel head, a block of so many rows,
    /// whose masks have logits, after one new state of the target.
    fn run(&mut self, rows: usize) -> Result<Duration> {
        let (mut batch, tokens) = (Batch::default(), vec![0; rows]);
        let (context, table) = (self.context, &self.table);
        let started = Instant::now();
        match self.network.head() {
            Some(head) if head.masked_block().is_some() => {
                let width = head.reads().len() * head.info().hidden_size;
                let state = Tensor::zeros((1, width), DType::F32, &Device::Cpu)?;
                batch.context_features = Some(head.fuse(&state)?);
                batch.push_span(&[0], &[], context, table, BLOCK_SIZE);
                batch.push_block(&tokens, context + 1, table, BLOCK_SIZE);
                batch.logits = (2..=rows as u32).collect();
            }
            _ => {
                batch.push_span(&tokens, &[], context, table, BLOCK_SIZE);
                // A recurrent state takes the same time whatever it has taken in.
                batch.keep_state(rows, &[], KeptState::of_chunk(0, true));
                batch.logits = (0..rows as u32).collect();
            }
        }
        self.network.model_mut().forward(&batch, &mut self.kv)?;
        Ok(started.elapsed())
    }
}

/// Returns the median of `times`, in seconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_between_the_measured_ones_are_interpolated() {
        let costs = Costs {
            draft: 0.1,
            rows: vec![(1, 1.0), (2, 1.2), (4, 1.6), (8, 3.2)],
        };
        for (rows, wanted) in [(1, 1.0), (2, 1.2), (3, 1.4), (6, 2.4), (10, 4.0)] {
            let found = costs.of_rows(rows);
            assert!((found - wanted).abs() < 1e-9, "{rows}: {found}");
        }
    }
}
