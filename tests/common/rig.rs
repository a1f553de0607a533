//! What the model tests share: the checkpoint, and sequences over a pool.
#![allow(dead_code, reason = "each test file uses its part")]

use foretoken::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken::model::{Batch, LoadOptions, Model, ModelSource, Span, load};
use std::path::PathBuf;

/// The real checkpoint. Its absence is a failure, not a reason to skip.
pub fn smollm2_path() -> PathBuf {
    let path =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(
        path.exists(),
        "{} is missing: run scripts/fetch-smollm2.sh first",
        path.display()
    );
    path
}

pub fn smollm2() -> Box<dyn Model> {
    load(
        &ModelSource::Gguf(smollm2_path().into()),
        &LoadOptions::default(),
    )
    .unwrap()
}

/// Token ids that look like text to nobody, but exercise every path.
pub fn prompt(len: usize, salt: u32) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (i * 7919 + salt * 104_729 + 11) % 49_000)
        .collect()
}

/// A model and its pool.
pub struct Rig {
    pub model: Box<dyn Model>,
    pub kv: KvStore,
    pub blocks: BlockAllocator,
}

/// One sequence: where it lives, and how much of it is in the pool.
#[derive(Default)]
pub struct Seq {
    pub table: BlockTable,
    pub len: usize,
}

/// New rows of one sequence.
pub struct Rows<'a> {
    pub seq: &'a mut Seq,
    pub tokens: &'a [u32],
    /// Parent of each row inside these rows, for a tree; `None` = causal.
    pub parents: Option<&'a [Option<usize>]>,
}

impl Rig {
    pub fn new(model: Box<dyn Model>, num_blocks: usize, block_size: usize) -> Self {
        let kv = model.new_kv(num_blocks, block_size).unwrap();
        let blocks = BlockAllocator::new(num_blocks, block_size);
        Self { model, kv, blocks }
    }

    /// One forward; the logits of every row.
    pub fn forward(&mut self, parts: &mut [Rows<'_>]) -> Vec<Vec<f32>> {
        let mut batch = Batch::default();
        for part in parts {
            let (start, context) = (batch.tokens.len(), part.seq.len);
            let rows = part.tokens.len();
            let table = &mut part.seq.table;
            self.blocks.reserve(table, context + rows).unwrap();
            let (masks, depths) = shape(part.parents, rows);
            for (i, &token) in part.tokens.iter().enumerate() {
                batch.tokens.push(token);
                batch.positions.push((context + depths[i]) as u32);
                batch
                    .slots
                    .push(table.slot(context + i, self.kv.block_size));
                batch.logits.push((start + i) as u32);
            }
            batch.spans.push(Span {
                rows: start..start + rows,
                context,
                blocks: table.blocks().to_vec(),
                tree: part.parents.map(|_| masks),
            });
            part.seq.len += rows;
        }
        let out = self.model.forward(&batch, &mut self.kv).unwrap();
        out.logits.to_vec2::<f32>().unwrap()
    }

    /// Feeds one sequence alone.
    pub fn feed(&mut self, seq: &mut Seq, tokens: &[u32]) -> Vec<Vec<f32>> {
        let parents = None;
        self.forward(&mut [Rows {
            seq,
            tokens,
            parents,
        }])
    }
}

/// Ancestor masks and depths of a tree given by parents (of a chain, without).
fn shape(parents: Option<&[Option<usize>]>, rows: usize) -> (Vec<u64>, Vec<usize>) {
    let (mut masks, mut depths) = (vec![0u64; rows], vec![0; rows]);
    for i in 0..rows {
        let parent = match parents {
            Some(parents) => parents[i],
            None => i.checked_sub(1),
        };
        if let Some(p) = parent {
            masks[i] = masks[p];
            depths[i] = depths[p] + 1;
        }
        if i < 64 {
            masks[i] |= 1 << i;
        }
    }
    (masks, depths)
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

/// The largest difference, and the largest value it stands beside.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0., f32::max)
}
