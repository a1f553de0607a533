//! What a model's forwards cost, measured before the first request.

use super::target_cost::MeasuredForward;
use foretoken_core::error::Result;
use foretoken_core::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken_core::model::{Batch, Model};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Numbers of rows whose cost is measured.
const ROWS: [usize; 6] = [1, 2, 4, 6, 8, 16];
/// Numbers of rows whose cost is measured on a GPU, which records a graph for each number.
const RECORDED_ROWS: RangeInclusive<usize> = 1..=16;
/// Rounds, in each of which every number of rows has its turn; of the same number the fastest forward counts. In
/// turns, because a shared machine that becomes slower between two of them would make one look dear.
const RUNS: usize = 4;
/// After this time no other number of rows is begun, and after twice this time no further round.
const MAX_TIME: Duration = Duration::from_secs(1);

/// Measures forwards of one sequence that begins at position 0, all of whose tokens differ. Writes to the pool,
/// which has `num_blocks` blocks and in which no sequence may have any.
///
/// If `alike`, and if the model has experts, a forward whose tokens are all the same follows each forward of
/// several rows. Its rows have the same values, so attention makes the same of them, and all of them choose the
/// same experts (but for what else a model makes of positions, such as states).
///
/// # Errors
/// If the device failed.
pub fn measure(
    model: &mut dyn Model,
    store: &mut KvStore,
    num_blocks: usize,
    alike: bool,
) -> Result<Vec<MeasuredForward>> {
    let mut blocks = BlockAllocator::new(num_blocks, store.block_size);
    let first_pool = store.layers.first();
    let rows: Vec<usize> = if first_pool.is_some_and(|(k, _)| k.device().is_cuda()) {
        RECORDED_ROWS.collect()
    } else {
        ROWS.to_vec()
    };
    let alike = alike && !model.info().experts.is_empty();
    let (started, mut table) = (Instant::now(), BlockTable::default());
    let mut forward = |rows: usize, step: u32, table: &BlockTable| -> Result<MeasuredForward> {
        let mut batch = Batch::default();
        let tokens: Vec<u32> = (0..rows as u32).map(|row| row * step).collect();
        batch.push_span(&tokens, &[], 0, table, store.block_size);
        batch.logits = (0..rows as u32).collect();
        let started = Instant::now();
        let output = model.forward(&batch, store)?;
        // Waits for the result.
        let one = output.logits.narrow(0, 0, 1)?.narrow(1, 0, 1)?;
        one.flatten_all()?.to_vec1::<f32>()?;
        Ok(MeasuredForward {
            rows,
            experts_read: output.experts_read,
            seconds: started.elapsed().as_secs_f64(),
        })
    };
    // The step from token to token, and the fastest forward.
    let mut measured: Vec<(u32, MeasuredForward)> = Vec::new();
    for rows in rows {
        if started.elapsed() > MAX_TIME || blocks.reserve(&mut table, rows).is_err() {
            break;
        }
        let both = [1, 0].into_iter().take(1 + usize::from(alike && rows > 1));
        for step in both {
            // The first one allocates.
            let first = forward(rows, step, &table)?;
            let seconds = f64::INFINITY;
            measured.push((step, MeasuredForward { seconds, ..first }));
        }
    }
    for _ in 0..RUNS {
        for (step, fastest) in &mut measured {
            let seconds = forward(fastest.rows, *step, &table)?.seconds;
            fastest.seconds = fastest.seconds.min(seconds);
        }
        if started.elapsed() > 2 * MAX_TIME {
            break;
        }
    }
    blocks.release(&mut table);
    Ok(measured.into_iter().map(|(_, fastest)| fastest).collect())
}
