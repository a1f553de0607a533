//! What a model's forwards cost, measured before the first request.

use super::cost::CALIBRATED;
use super::target_cost::MeasuredForward;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken_core::model::{Batch, Model};
use std::time::{Duration, Instant};

/// Numbers of rows whose cost is measured.
const ROWS: [usize; 6] = [1, 2, 4, 6, 8, 16];
/// Most rows of the measured forwards of one sequence, on a GPU each number of them: it records a graph for each. More rows
/// are of as many sequences, as in the steps of many requests.
const MAX_SPAN: usize = 16;
/// Further numbers of rows whose cost is measured on a GPU: where kernels, tiles and graphs usually change, a row more costs
/// much, and what few rows cost says nothing of it.
const MANY_ROWS: [usize; 9] = [17, 24, 32, 48, 64, 65, 96, 128, 256];
/// Most rows that a forward may be rounded up to.
const MAX_ROUNDED: usize = 1024;
/// Tokens before the rows of the forwards that tell what attention costs, and the numbers of these rows.
const CONTEXT: usize = 512;
const ROWS_AFTER_CONTEXT: [usize; 2] = [1, 8];
/// Rounds, in each of which every number of rows has its turn; of the same number the fastest forward counts. In
/// turns, because a shared machine that becomes slower between two of them would make one look dear.
const RUNS: usize = 4;
/// How much longer than the fastest forward the median of the same number of rows may take, as a share, while all
/// observations count. Of four forwards on a machine that does nothing else it takes a twentieth longer; beside other
/// work that needs the same cores, half as long again.
const STEADY: f64 = 0.1;
/// After this time no other number of rows is begun, and after twice this time no further round.
const MAX_TIME: Duration = Duration::from_secs(1);
/// The same where many numbers of rows are measured.
const MAX_TIME_OF_MANY: Duration = Duration::from_secs(2);
/// Rows of a probe: at least so many, in whole blocks, and at most so many.
const MIN_PROBE: usize = 32;
const MAX_PROBE: usize = 256;

/// What a model's forwards cost.
#[derive(Debug, Clone)]
pub struct Calibration {
    /// The fastest forward of each number of rows.
    pub forwards: Vec<MeasuredForward>,
    /// The number of observations of steps that each of them is worth: fewer if other work disturbed them.
    pub observations: u32,
}

/// The numbers of rows that a model's forwards are rounded up to, ascending, up to the largest one that is not a
/// forward's own number; empty if no forward is rounded up. See [`Model::padded_rows`].
pub fn edges(model: &dyn Model) -> Vec<usize> {
    let is_rounded = |&rows: &usize| model.padded_rows(rows) > rows;
    let last = (1..=MAX_ROUNDED).rev().find(is_rounded).unwrap_or(0);
    let rounded = (1..=last).map(|rows| model.padded_rows(rows).max(rows));
    let mut edges: Vec<usize> = rounded.collect();
    edges.sort_unstable();
    edges.dedup();
    edges
}

/// The numbers of rows whose forwards are measured where steps have at most `max_rows`, on a GPU or where forwards are
/// rounded up to one of `edges`: those on both sides of each edge.
pub fn rows_on_gpu(edges: &[usize], max_rows: usize) -> Vec<usize> {
    let sides = edges.iter().flat_map(|&edge| [edge, edge + 1]);
    let all = (1..=MAX_SPAN).chain(MANY_ROWS).chain(sides);
    let rounded = all.filter(|&rows| rows <= max_rows).map(|rows| {
        let edge = edges.iter().copied().find(|&edge| edge >= rows);
        edge.unwrap_or(rows)
    });
    let mut rows: Vec<usize> = rounded.collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Number of rows of a [`probe`] of this model.
pub fn probe_rows(model: &dyn Model, store: &KvStore, num_blocks: usize) -> usize {
    let rows = MIN_PROBE.next_multiple_of(store.block_size).min(MAX_PROBE);
    let pool = num_blocks * store.block_size;
    rows.min(pool).min(model.info().max_position_embeddings)
}

/// K and V of some tokens, as bytes: they differ where weights, kernels or CPUs do. `prepare` adds to the batch what the
/// model reads besides tokens. Writes to the pool, which has `num_blocks` blocks and in which no sequence may have any.
///
/// # Errors
/// If the device failed.
pub fn probe(
    model: &mut dyn Model,
    store: &mut KvStore,
    num_blocks: usize,
    prepare: impl FnOnce(&mut Batch),
) -> Result<Vec<u8>> {
    let rows = probe_rows(model, store, num_blocks);
    let mut blocks = BlockAllocator::new(num_blocks, store.block_size);
    let mut table = BlockTable::default();
    (blocks.reserve(&mut table, rows)).map_err(|_| Error::internal("a pool without blocks"))?;
    let vocab_size = model.info().vocab_size as u64;
    let token = |row: usize| (row as u64 * 7919 + 11) % vocab_size;
    let tokens: Vec<u32> = (0..rows).map(|row| token(row) as u32).collect();
    let mut batch = Batch::default();
    batch.push_span(&tokens, &[], 0, &table, store.block_size);
    prepare(&mut batch);
    model.forward(&batch, store)?;
    let mut bytes = Vec::new();
    for &block in table.blocks() {
        bytes.extend(store.read_block(block)?);
    }
    Ok(bytes)
}

/// Measures forwards of sequences that begin at position 0, all of whose tokens differ, up to those of steps of `max_rows`
/// rows. Writes to the pool, which has `num_blocks` blocks and in which no sequence may have any.
///
/// Of a target, which is `verified`, it also measures forwards of few rows after `CONTEXT` tokens, if there is room for
/// them. If the target has experts, a forward whose tokens are all the same follows each forward of several rows. Its
/// rows have the same values, so attention makes the same of them, and all of them choose the same experts (but for what
/// else a model makes of positions, such as states).
///
/// # Errors
/// If the device failed.
pub fn measure(
    model: &mut dyn Model,
    store: &mut KvStore,
    num_blocks: usize,
    verified: bool,
    max_rows: usize,
) -> Result<Calibration> {
    let mut blocks = BlockAllocator::new(num_blocks, store.block_size);
    let edges = edges(model);
    let rows = if edges.is_empty() && !model.device().is_cuda() {
        ROWS.to_vec()
    } else {
        rows_on_gpu(&edges, max_rows)
    };
    let max_time = if rows.len() > ROWS.len() {
        MAX_TIME_OF_MANY
    } else {
        MAX_TIME
    };
    let vocab_size = model.info().vocab_size as u32;
    let alike = verified && !model.info().experts.is_empty();
    // A forward in the middle of a text would need a state of the tokens before it.
    let can_begin_later = !model.kv_shape().is_recurrent()
        && CONTEXT + MAX_SPAN <= model.info().max_position_embeddings;
    let (started, mut tables) = (Instant::now(), vec![BlockTable::default()]);
    let mut forward = |rows: usize, step: u32, context: usize, tables: &[BlockTable]| {
        let mut batch = Batch::default();
        let token = |row: u32| row * step % vocab_size;
        let tokens: Vec<u32> = (0..rows as u32).map(token).collect();
        let span = if rows <= MAX_SPAN { rows } else { 1 };
        for (tokens, table) in tokens.chunks(span).zip(tables) {
            batch.push_span(tokens, &[], context, table, store.block_size);
        }
        batch.logits = (0..rows as u32).collect();
        let (experts_read, seconds) = timed(model, store, &batch)?;
        Ok::<_, Error>(MeasuredForward {
            rows,
            context,
            experts_read,
            seconds,
        })
    };
    // The step from token to token, the fastest forward, and the seconds of all.
    let mut measured: Vec<(u32, MeasuredForward, Vec<f64>)> = Vec::new();
    for rows in rows {
        let is_reserved = reserve(&mut blocks, &mut tables, rows);
        if started.elapsed() > max_time || !is_reserved {
            break;
        }
        let both = [1, 0].into_iter().take(1 + usize::from(alike && rows > 1));
        for step in both {
            // The first one allocates.
            let first = forward(rows, step, 0, &tables)?;
            let seconds = f64::INFINITY;
            measured.push((step, MeasuredForward { seconds, ..first }, Vec::new()));
        }
    }
    for rows in ROWS_AFTER_CONTEXT {
        // They tell nothing without the same rows at the start.
        let is_known = measured.iter().any(|(_, one, _)| one.rows == rows);
        let in_time = started.elapsed() <= max_time;
        if verified
            && can_begin_later
            && is_known
            && in_time
            && blocks.reserve(&mut tables[0], CONTEXT + rows).is_ok()
        {
            let first = forward(rows, 1, CONTEXT, &tables)?;
            let seconds = f64::INFINITY;
            measured.push((1, MeasuredForward { seconds, ..first }, Vec::new()));
        }
    }
    for _ in 0..RUNS {
        for (step, fastest, all) in &mut measured {
            let (rows, context) = (fastest.rows, fastest.context);
            let seconds = forward(rows, *step, context, &tables)?.seconds;
            fastest.seconds = fastest.seconds.min(seconds);
            all.push(seconds);
        }
        if started.elapsed() > 2 * max_time {
            break;
        }
    }
    tables.iter_mut().for_each(|table| blocks.release(table));
    let observations = observations(measured.iter_mut().map(|(.., all)| &mut **all));
    // Forwards whose tokens are all the same are a kind of their own.
    let (different, same): (Vec<_>, Vec<_>) =
        measured.into_iter().partition(|(step, ..)| *step > 0);
    let kinds = [different, same].map(|kind| {
        let forwards = kind.into_iter().map(|(_, fastest, _)| fastest);
        no_dearer_than_more_rows(forwards.collect())
    });
    let mut forwards = kinds.concat();
    forwards.sort_by_key(|one| (one.context, one.rows));
    Ok(Calibration {
        forwards,
        observations,
    })
}

/// Runs a forward and waits for its result. Returns the experts that it read, and its seconds.
fn timed(model: &mut dyn Model, store: &mut KvStore, batch: &Batch) -> Result<(usize, f64)> {
    let started = Instant::now();
    let output = model.forward(batch, store)?;
    let one = output.logits.narrow(0, 0, 1)?.narrow(1, 0, 1)?;
    one.flatten_all()?.to_vec1::<f32>()?;
    Ok((output.experts_read, started.elapsed().as_secs_f64()))
}

/// A forward of the first rows of a sequence, to be repeated.
pub struct RepeatedForward<'a> {
    model: &'a mut dyn Model,
    store: &'a mut KvStore,
    batch: Batch,
}

impl<'a> RepeatedForward<'a> {
    /// A forward of `rows` rows. Writes to the pool, which has `num_blocks` blocks and in which no sequence may have any.
    ///
    /// # Errors
    /// If the pool has no room for so many tokens.
    pub fn new(
        model: &'a mut dyn Model,
        store: &'a mut KvStore,
        num_blocks: usize,
        rows: usize,
    ) -> Result<Self> {
        let mut blocks = BlockAllocator::new(num_blocks, store.block_size);
        let mut table = BlockTable::default();
        (blocks.reserve(&mut table, rows)).map_err(|_| Error::internal("a pool without blocks"))?;
        let vocab_size = model.info().vocab_size as u32;
        let tokens: Vec<u32> = (0..rows as u32).map(|row| row % vocab_size).collect();
        let mut batch = Batch::default();
        batch.push_span(&tokens, &[], 0, &table, store.block_size);
        batch.logits = (0..rows as u32).collect();
        Ok(Self {
            model,
            store,
            batch,
        })
    }

    /// Runs it; returns its seconds.
    ///
    /// # Errors
    /// If the device failed.
    pub fn run(&mut self) -> Result<f64> {
        Ok(timed(self.model, self.store, &self.batch)?.1)
    }
}

/// The forwards, none with more seconds than one with more rows or tokens before them: that one does the same work and more,
/// and other work only adds to either.
pub fn no_dearer_than_more_rows(mut forwards: Vec<MeasuredForward>) -> Vec<MeasuredForward> {
    let all = forwards.clone();
    for one in &mut forwards {
        let bounds =
            (all.iter()).filter(|other| other.rows >= one.rows && other.context >= one.context);
        one.seconds = bounds.fold(one.seconds, |least, other| least.min(other.seconds));
    }
    forwards
}

/// The observations that the fastest of such forwards are worth, by how much longer the median of each takes.
fn observations<'a>(seconds: impl Iterator<Item = &'a mut [f64]>) -> u32 {
    let median = |all: &mut [f64]| {
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied()
    };
    let longer = seconds.filter_map(|all| Some(median(all)? / all[0] - 1.0));
    let mut longer: Vec<f64> = longer.collect();
    let share = STEADY / median(&mut longer).unwrap_or(0.0);
    (f64::from(CALIBRATED) * share.min(1.0)).max(1.0) as u32
}

/// Makes room for a forward of `rows` rows; returns whether there is any.
fn reserve(blocks: &mut BlockAllocator, tables: &mut Vec<BlockTable>, rows: usize) -> bool {
    if rows <= MAX_SPAN {
        return blocks.reserve(&mut tables[0], rows).is_ok();
    }
    tables.resize_with(rows.max(tables.len()), BlockTable::default);
    (tables.iter_mut()).all(|table| blocks.reserve(table, 1).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use foretoken_core::kv::KvShape;
    use foretoken_core::model::toy::ToyModel;
    use foretoken_core::model::{ForwardOutput, ModelInfo};

    /// A toy that rounds more than 4 rows up to multiples of 8, up to 32 rows.
    struct Rounding(ToyModel);

    impl Model for Rounding {
        fn info(&self) -> &ModelInfo {
            self.0.info()
        }

        fn kv_shape(&self) -> KvShape {
            self.0.kv_shape()
        }

        fn device(&self) -> &Device {
            self.0.device()
        }

        fn padded_rows(&self, rows: usize) -> usize {
            match rows {
                5..=32 => rows.next_multiple_of(8),
                _ => rows,
            }
        }

        fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
            assert!(batch.tokens.len() <= 16 || batch.spans.len() == batch.tokens.len());
            self.0.forward(batch, kv)
        }
    }

    #[test]
    fn forwards_beside_other_work_are_worth_less() {
        let of = |all: &[&[f64]]| {
            let mut all: Vec<Vec<f64>> = all.iter().map(|all| all.to_vec()).collect();
            observations(all.iter_mut().map(|all| &mut **all))
        };
        let steady: [&[f64]; 3] = [&[1.0, 1.02, 1.05], &[2.1, 2.0, 2.1], &[3.0, 9.0, 3.1]];
        assert_eq!(of(&steady), CALIBRATED);
        assert_eq!(of(&[&[1.0, 1.2, 1.2], &[1.5, 1.0, 1.2]]), CALIBRATED / 2);
        assert_eq!(of(&[&[1.0, 2.0, 2.2], &[3.0, 2.0, 4.0]]), 1);
        assert_eq!(of(&[]), CALIBRATED);
    }

    #[test]
    fn more_rows_bound_what_fewer_take() {
        let forward = |&(rows, context, seconds)| MeasuredForward {
            rows,
            context,
            experts_read: 0,
            seconds,
        };
        let measured = [
            (1, 0, 1.0),
            (2, 0, 2.1),
            (4, 0, 1.2),
            (8, 0, 3.0),
            (1, 512, 1.5),
            (8, 512, 2.0),
        ];
        let bounded = no_dearer_than_more_rows(measured.iter().map(forward).collect());
        let seconds: Vec<f64> = bounded.iter().map(|one| one.seconds).collect();
        assert_eq!(seconds, [1.0, 1.2, 1.2, 2.0, 1.5, 2.0]);
    }

    #[test]
    fn both_sides_of_each_edge_are_measured() {
        let mut model = Rounding(ToyModel::new(512, 64, 1, 0.0));
        assert_eq!(edges(&model), [1, 2, 3, 4, 8, 16, 24, 32]);
        assert_eq!(edges(&model.0), [0; 0]);
        let mut rows = |num_blocks, max_rows| -> Vec<usize> {
            let mut store = model.new_kv(num_blocks, 4).unwrap();
            let measured = measure(&mut model, &mut store, num_blocks, true, max_rows).unwrap();
            measured.forwards.iter().map(|one| one.rows).collect()
        };
        let few = [1, 2, 3, 4, 8, 16, 24, 32, 33, 48, 64];
        assert_eq!(rows(80, 64), few);
        // As many as steps may have, and as there is room for.
        assert_eq!(rows(80, 18), few[..7]);
        assert_eq!(rows(35, 300), few[..8]);
    }
}
