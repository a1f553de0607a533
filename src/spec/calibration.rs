//! What a model's forwards cost, measured before the first request.

use crate::error::Result;
use crate::kv::{BlockAllocator, BlockTable, KvStore};
use crate::model::{Batch, Model};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Rows of a forward, and its seconds.
pub type Measured = Vec<(usize, f64)>;

/// Numbers of rows whose cost is measured.
const ROWS: [usize; 6] = [1, 2, 4, 6, 8, 16];
/// The same on a GPU, which records a graph for each.
const RECORDED_ROWS: RangeInclusive<usize> = 1..=16;
/// Rounds, in each of which every number of rows has its turn; of the same number the fastest forward counts. In
/// turns, because a shared machine that becomes slower between two of them would make one look dear.
const RUNS: usize = 4;
/// After this time no other number of rows is begun, and after twice this time no further round.
const MAX_TIME: Duration = Duration::from_secs(1);

/// Measures forwards of one sequence that begins at position 0. Writes to the pool, which has `num_blocks`
/// blocks and in which no sequence may have any.
///
/// # Errors
/// If the device failed.
pub fn measure(model: &mut dyn Model, store: &mut KvStore, num_blocks: usize) -> Result<Measured> {
    let mut blocks = BlockAllocator::new(num_blocks, store.block_size);
    let first_pool = store.layers.first();
    let rows: Vec<usize> = if first_pool.is_some_and(|(k, _)| k.device().is_cuda()) {
        RECORDED_ROWS.collect()
    } else {
        ROWS.to_vec()
    };
    let (started, mut table) = (Instant::now(), BlockTable::default());
    let mut forward = |rows: usize, table: &BlockTable| -> Result<f64> {
        let mut batch = Batch::default();
        let tokens: Vec<u32> = (0..rows as u32).collect();
        batch.push_span(&tokens, &[], 0, table, store.block_size);
        batch.logits = (0..rows as u32).collect();
        let started = Instant::now();
        // Waits for the result.
        let logits = model.forward(&batch, store)?.logits;
        let one = logits.narrow(0, 0, 1)?.narrow(1, 0, 1)?;
        one.flatten_all()?.to_vec1::<f32>()?;
        Ok(started.elapsed().as_secs_f64())
    };
    let mut measured = Measured::new();
    for rows in rows {
        if started.elapsed() > MAX_TIME || blocks.reserve(&mut table, rows).is_err() {
            break;
        }
        // The first one allocates.
        forward(rows, &table)?;
        measured.push((rows, f64::INFINITY));
    }
    for _ in 0..RUNS {
        for (rows, fastest) in &mut measured {
            *fastest = fastest.min(forward(*rows, &table)?);
        }
        if started.elapsed() > 2 * MAX_TIME {
            break;
        }
    }
    blocks.release(&mut table);
    Ok(measured)
}
