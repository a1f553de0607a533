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
/// Forwards of each, of which the fastest counts.
const RUNS: usize = 4;
/// No further forward is measured after this time.
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
    let (started, mut measured) = (Instant::now(), Vec::new());
    for rows in rows {
        let mut table = BlockTable::default();
        if blocks.reserve(&mut table, rows).is_err() {
            break;
        }
        let mut batch = Batch::default();
        let tokens: Vec<u32> = (0..rows as u32).collect();
        batch.push_span(&tokens, &[], 0, &table, store.block_size);
        batch.logits = (0..rows as u32).collect();
        let mut fastest = f64::INFINITY;
        for run in 0..=RUNS {
            if run > 1 && started.elapsed() > MAX_TIME {
                break;
            }
            let started = Instant::now();
            // Waits for the result.
            let logits = model.forward(&batch, store)?.logits;
            let one = logits.narrow(0, 0, 1)?.narrow(1, 0, 1)?;
            one.flatten_all()?.to_vec1::<f32>()?;
            // The first one allocates.
            if run > 0 {
                fastest = fastest.min(started.elapsed().as_secs_f64());
            }
        }
        measured.push((rows, fastest));
        blocks.release(&mut table);
        if started.elapsed() > MAX_TIME {
            break;
        }
    }
    Ok(measured)
}
