//! Shared by the model tests: the checkpoint, and sequences over a pool.
#![allow(dead_code, reason = "each test file uses its part")]

use candle_core::{DType, Tensor};
use foretoken::kv::{AcceptedPath, BlockAllocator, BlockTable, KvStore};
use foretoken::model::LoadedModel;
use foretoken::model::{Adapter, Batch, KeptState, LoadOptions, Model, ModelSource, load};
use std::path::PathBuf;
use std::sync::Arc;

/// The real checkpoint. If it is absent, the test fails and is not skipped.
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

pub fn smollm2() -> Box<dyn LoadedModel> {
    load(
        &ModelSource::Gguf(smollm2_path().into()),
        &LoadOptions::default(),
    )
    .unwrap()
}

/// Token ids that do not form a text, but exercise every path.
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
    /// Slots of recurrent states that were given away.
    states: u32,
}

/// One sequence: its block table, and how many of its tokens are in the pool.
#[derive(Default)]
pub struct Seq {
    pub table: BlockTable,
    pub len: usize,
    pub adapter: Option<Arc<dyn Adapter>>,
    /// The slot of its recurrent state, if the model has such.
    state: Option<u32>,
    /// The nodes of the last tree that were kept.
    kept: Vec<u16>,
}

/// New rows of one sequence.
pub struct Rows<'a> {
    pub seq: &'a mut Seq,
    pub tokens: &'a [u32],
    /// Parents of the nodes of a tree, which are the last of the tokens; see [`Batch::push_span`].
    pub parents: &'a [Option<u16>],
}

impl Seq {
    /// One that has not begun.
    pub fn of_adapter(adapter: Option<Arc<dyn Adapter>>) -> Self {
        Self {
            adapter,
            ..Self::default()
        }
    }
}

impl Rig {
    pub fn new(model: Box<dyn Model>, num_blocks: usize, block_size: usize) -> Self {
        let kv = model.new_kv(num_blocks, block_size).unwrap();
        let blocks = BlockAllocator::new(num_blocks, block_size);
        Self {
            model,
            kv,
            blocks,
            states: 0,
        }
    }

    /// Keeps only the nodes on `path` of the tree that was fed last; `seq.len` still counts all its
    /// `rows`.
    pub fn commit(&mut self, seq: &mut Seq, rows: usize, path: &[usize]) {
        let first = seq.len - rows;
        let accepted = AcceptedPath {
            table: &seq.table,
            first,
            nodes: path,
        };
        self.kv.commit([accepted]).unwrap();
        seq.len = first + path.len();
        seq.kept = path.iter().map(|&node| node as u16).collect();
        self.blocks.truncate_to(&mut seq.table, seq.len);
    }

    /// K and V of all layers at the positions of `seq`.
    pub fn kv_of(&self, seq: &Seq) -> Vec<Vec<Vec<f32>>> {
        let slots: Vec<u32> = (0..seq.len)
            .map(|position| seq.table.slot(position, self.kv.block_size))
            .collect();
        let slots = Tensor::new(slots, self.kv.layers[0].0.device()).unwrap();
        let read = |pool: &Tensor| -> Vec<Vec<f32>> {
            let own = pool.index_select(&slots, 0).unwrap().flatten_from(1);
            let own = own.unwrap().to_dtype(DType::F32).unwrap();
            own.to_vec2().unwrap()
        };
        let layers = self.kv.layers.iter();
        layers.flat_map(|(k, v)| [read(k), read(v)]).collect()
    }

    /// Feeds a text with each of `adapters`, which share forwards of `chunks` rows of each; the last of these is a tree of
    /// four nodes. Returns the logits of each text.
    pub fn in_company(
        &mut self,
        adapters: impl Iterator<Item = Option<Arc<dyn Adapter>>>,
        tokens: &[u32],
        chunks: &[usize],
    ) -> Vec<Vec<Vec<f32>>> {
        const TREE: [Option<u16>; 4] = [None, Some(0), Some(0), Some(1)];
        let mut seqs: Vec<Seq> = adapters.map(Seq::of_adapter).collect();
        let mut logits = vec![Vec::new(); seqs.len()];
        let mut rest = tokens;
        for (i, &chunk) in chunks.iter().enumerate() {
            let (tokens, others) = rest.split_at(chunk);
            rest = others;
            let is_last = i + 1 == chunks.len();
            let parents = if is_last { &TREE[..] } else { &[] };
            let of_seq = |seq| Rows {
                seq,
                tokens,
                parents,
            };
            let mut parts: Vec<Rows<'_>> = seqs.iter_mut().map(of_seq).collect();
            let rows = self.forward(&mut parts);
            for (all, rows) in logits.iter_mut().zip(rows.chunks_exact(chunk)) {
                all.extend(rows.to_vec());
            }
        }
        logits
    }

    /// One forward; the logits of every row.
    pub fn forward(&mut self, parts: &mut [Rows<'_>]) -> Vec<Vec<f32>> {
        let mut batch = Batch::default();
        for part in parts {
            let (start, context) = (batch.tokens.len(), part.seq.len);
            let end = context + part.tokens.len();
            let table = &mut part.seq.table;
            self.blocks.reserve(table, end).unwrap();
            let block_size = self.kv.block_size;
            batch.push_span(part.tokens, part.parents, context, table, block_size);
            if self.model.kv_shape().is_recurrent() {
                let is_first = part.seq.state.is_none();
                let slot = *part.seq.state.get_or_insert(self.states);
                self.states += u32::from(is_first);
                let mut kept = KeptState::of_chunk(slot, is_first);
                kept.accepted = std::mem::take(&mut part.seq.kept);
                batch.keep_state(part.tokens.len(), part.parents, kept);
            }
            if let Some(adapter) = &part.seq.adapter {
                batch.adapt(part.tokens.len(), adapter);
            }
            batch.logits.extend(start as u32..batch.tokens.len() as u32);
            part.seq.len = end;
        }
        let out = self.model.forward(&batch, &mut self.kv).unwrap();
        out.logits.to_vec2::<f32>().unwrap()
    }

    /// Feeds one sequence alone.
    pub fn feed(&mut self, seq: &mut Seq, tokens: &[u32]) -> Vec<Vec<f32>> {
        let parents = &[];
        self.forward(&mut [Rows {
            seq,
            tokens,
            parents,
        }])
    }
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
    best.unwrap() as u32
}

/// The largest absolute difference.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0., f32::max)
}
