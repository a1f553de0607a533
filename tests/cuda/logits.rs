//! The logits of a model, computed in different cuts.

use super::{BLOCK_SIZE, BLOCKS};
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::{Batch, KeptState, Model};

/// The logits of all tokens, computed in forwards of `cuts` rows.
pub fn logits(model: &mut dyn Model, tokens: &[u32], cuts: &[usize]) -> Vec<Vec<f32>> {
    let mut kv = model.new_kv(BLOCKS, BLOCK_SIZE).unwrap();
    let mut blocks = BlockAllocator::new(BLOCKS, BLOCK_SIZE);
    let mut table = BlockTable::default();
    let (mut out, mut at) = (Vec::new(), 0);
    for &rows in cuts {
        blocks.reserve(&mut table, at + rows).unwrap();
        let mut batch = Batch::default();
        batch.push_span(&tokens[at..at + rows], &[], at, &table, BLOCK_SIZE);
        batch.logits = (0..rows as u32).collect();
        if model.kv_shape().is_recurrent() {
            batch.keep_state(rows, &[], KeptState::of_chunk(3, at == 0));
        }
        let output = model.forward(&batch, &mut kv).unwrap();
        let vocab = model.info().vocab_size;
        let rows_of = |logits: &[f32]| logits.chunks(vocab).map(<[f32]>::to_vec).collect();
        let read: Vec<Vec<f32>> = output.read(rows_of).unwrap();
        out.extend(read);
        at += rows;
    }
    out
}

/// Checks that verification, in steps of each of these numbers of rows after the `first`, has the bits of plain decoding, whose
/// logits it returns. All of `rows` divide the rest of `tokens`.
pub fn verified_as_plain(
    model: &mut dyn Model,
    tokens: &[u32],
    first: usize,
    rows: &[usize],
    name: &str,
) -> Vec<Vec<f32>> {
    let rest = tokens.len() - first;
    let cuts = |rows: usize| [vec![first], vec![rows; rest / rows]].concat();
    let plain = logits(model, tokens, &cuts(1));
    for &rows in rows {
        let verified = logits(model, tokens, &cuts(rows));
        assert!(verified == plain, "{name}: {rows} rows at a time");
    }
    plain
}

pub fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i * 37 % 509).collect()
}

/// The largest difference, relative to the largest finite logit.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = || a.iter().flatten().zip(b.iter().flatten());
    let finite = pairs().map(|(a, _)| a.abs()).filter(|a| a.is_finite());
    let largest = finite.fold(0., f32::max);
    let differ = pairs().filter(|(a, b)| a != b);
    differ.map(|(a, b)| (a - b).abs()).fold(0., f32::max) / largest
}

/// The logits of `rows` more tokens of each of some sequences, round by round: `together`, or each sequence alone.
pub fn rounds(model: &mut dyn Model, rows: &[Vec<usize>], together: bool) -> Vec<Vec<f32>> {
    let sequences = rows[0].len();
    let blocks = sequences * 4;
    let mut kv = model.new_kv(blocks, BLOCK_SIZE).unwrap();
    let mut free = BlockAllocator::new(blocks, BLOCK_SIZE);
    let mut tables: Vec<BlockTable> = (0..sequences).map(|_| BlockTable::default()).collect();
    let mut lengths = vec![0; sequences];
    let (vocab, is_recurrent) = (model.info().vocab_size, model.kv_shape().is_recurrent());
    let mut out = Vec::new();
    let mut forward = |batch: &mut Batch| {
        batch.logits = (0..batch.tokens.len() as u32).collect();
        let output = model.forward(batch, &mut kv).unwrap();
        let rows_of = |logits: &[f32]| logits.chunks(vocab).map(<[f32]>::to_vec).collect();
        let read: Vec<Vec<f32>> = output.read(rows_of).unwrap();
        out.extend(read);
    };
    let tokens = tokens(1000).into_iter();
    let tokens: Vec<u32> = tokens.map(|id| id % vocab as u32).collect();
    for round in rows {
        let mut batch = Batch::default();
        for (i, &rows) in round.iter().enumerate() {
            let (table, context) = (&mut tables[i], lengths[i]);
            free.reserve(table, context + rows).unwrap();
            let own = &tokens[i * 7 + context..][..rows];
            batch.push_span(own, &[], context, table, BLOCK_SIZE);
            if is_recurrent {
                batch.keep_state(rows, &[], KeptState::of_chunk(i as u32, context == 0));
            }
            lengths[i] += rows;
            if !together {
                forward(&mut std::mem::take(&mut batch));
            }
        }
        if together {
            forward(&mut batch);
        }
    }
    out
}
