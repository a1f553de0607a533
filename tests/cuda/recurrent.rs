//! Layers that read a text one token after another: short convolutions, gated delta nets and Mamba 2.

use super::architectures::fixture;
use super::heads::{OFTEN_RIGHT, VOCAB, test_texts};
use super::{BLOCK_SIZE, BLOCKS, Log, gpu, model, rounds};
use candle_core::DType;
use foretoken::kv::{AcceptedPath, BlockAllocator, BlockTable, KvCacheDtype};
use foretoken::model::{Batch, KeptState, Model, ModelSource, StateStart};
use std::path::Path;

/// Models of each kind: with convolutions; with delta nets, also with experts; with Mamba in layers of both halves, in
/// layers of one, and beside attention.
const MODELS: [&str; 6] = [
    "lfm2",
    "qwen3_5",
    "qwen3_next",
    "granite4_hybrid",
    "nemotron_h_moe",
    "falcon_h1",
];
const HEAD_DIM: usize = 64;

fn source(folder: &Path, name: &str) -> Option<ModelSource> {
    fixture(folder, &format!("architectures/{name}"), HEAD_DIM)
}

/// With trees of drafts that are often right.
#[test]
fn texts_depend_on_nothing_but_the_request() {
    let models = MODELS.map(|name| (name, HEAD_DIM));
    test_texts(&models, KvCacheDtype::Auto, OFTEN_RIGHT);
}

/// Steps are recorded as graphs, which take in each token once.
#[test]
fn many_sequences_have_the_bits_of_each_alone() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    for name in MODELS {
        let Some(source) = source(folder.path(), name) else {
            return;
        };
        let mut model = model(&source, &gpu, Some(DType::BF16), 2);
        // Rows of padding, of steps with the same number of rows.
        let round = |round: usize| -> Vec<usize> {
            (0..9).map(|i| if i == round { 1 } else { 2 }).collect()
        };
        let rows: Vec<Vec<usize>> = (0..5).map(round).collect();
        let before = Log::of_this_thread().len();
        let together = rounds(&mut *model, &rows, true);
        let log = Log::of_this_thread().split_off(before).join("\n");
        assert!(log.matches("is recorded").count() == 1, "{name}: {log}");
        assert!(rounds(&mut *model, &rows, false) == together, "{name}");
    }
}

/// The model's logits of a forward's rows, of one sequence in slot `slot`.
struct Sequence<'a> {
    model: &'a mut dyn Model,
    kv: foretoken::kv::KvStore,
    blocks: BlockAllocator,
    table: BlockTable,
    len: usize,
}

impl Sequence<'_> {
    fn new(model: &mut dyn Model) -> Sequence<'_> {
        Sequence {
            kv: model.new_kv(BLOCKS, BLOCK_SIZE).unwrap(),
            model,
            blocks: BlockAllocator::new(BLOCKS, BLOCK_SIZE),
            table: BlockTable::default(),
            len: 0,
        }
    }

    fn forward(
        &mut self,
        tokens: &[u32],
        parents: &[Option<u16>],
        kept: &KeptState,
    ) -> Vec<Vec<f32>> {
        let end = self.len + tokens.len();
        self.blocks.reserve(&mut self.table, end).unwrap();
        let mut batch = Batch::default();
        batch.push_span(tokens, parents, self.len, &self.table, BLOCK_SIZE);
        if self.model.kv_shape().is_recurrent() {
            batch.keep_state(tokens.len(), parents, kept.clone());
        }
        batch.logits = (0..tokens.len() as u32).collect();
        let output = self.model.forward(&batch, &mut self.kv).unwrap();
        self.len = end;
        let rows = |logits: &[f32]| {
            let rows = logits.chunks(VOCAB as usize);
            rows.map(<[f32]>::to_vec).collect()
        };
        output.read(rows).unwrap()
    }

    /// Keeps these of the last `count` rows.
    fn accept(&mut self, count: usize, nodes: &[usize]) {
        let first = self.len - count;
        let path = AcceptedPath {
            table: &self.table,
            first,
            nodes,
        };
        self.kv.commit([path]).unwrap();
        self.len = first + nodes.len();
    }
}

/// Token by token; and with a tree, of which a branch is accepted, and a copy of the state before its end, from which the
/// text goes on once more.
#[test]
fn accepted_branches_have_the_bits_of_plain_decoding() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let text: Vec<u32> = (0..12).map(|i| i * 37 % 251).collect();
    let kept = |slot, start, accepted: &[u16], copies: &[(usize, u32)]| KeptState {
        slot,
        start,
        accepted: accepted.to_vec(),
        copies: copies.to_vec(),
    };
    for name in MODELS {
        let Some(source) = source(folder.path(), name) else {
            return;
        };
        let mut model = model(&source, &gpu, Some(DType::BF16), 5);
        let mut plain = Sequence::new(&mut *model);
        let mut want = Vec::new();
        for (i, token) in text.iter().enumerate() {
            let state = KeptState::of_chunk(0, i == 0);
            want.extend(plain.forward(&[*token], &[], &state));
        }
        let mut drafted = Sequence::new(&mut *model);
        let t = |i: usize| text[i];
        let first = drafted.forward(&text[..4], &[], &kept(7, StateStart::Empty, &[], &[(2, 5)]));
        assert!(first == want[..4], "{name}");
        // Token 4, and a tree: wrong, 5 -> (wrong, 6 -> 7), of which 5 and 6 are accepted.
        let parents = [None, None, Some(1), Some(1), Some(3)];
        let rows = [t(4), 9, t(5), 9, t(6), t(7)];
        let tree = drafted.forward(&rows, &parents, &kept(7, StateStart::Kept, &[], &[]));
        let right = [&tree[0], &tree[2], &tree[4], &tree[5]];
        assert!(right == [&want[4], &want[5], &want[6], &want[7]], "{name}");
        assert!(tree[1] != want[5], "{name}");
        drafted.accept(5, &[1, 3]);
        // They are taken in, with a copy after 5, before token 7 and a chain: 8, wrong; 8 is accepted.
        let state = kept(7, StateStart::Kept, &[1, 3], &[(1, 4)]);
        let chain = drafted.forward(&[t(7), t(8), 9], &[None, Some(0)], &state);
        assert!(chain[..2] == want[7..9], "{name}");
        drafted.accept(2, &[0]);
        let rest = drafted.forward(&text[9..], &[], &kept(7, StateStart::Kept, &[0], &[]));
        assert!(rest == want[9..], "{name}");
        // From the copies, which stay as they are.
        for (slot, from, start) in [(0, 5, 2), (1, 4, 6), (3, 4, 6)] {
            drafted.len = start;
            let state = kept(slot, StateStart::CopyOf(from), &[], &[]);
            let again = drafted.forward(&text[start..start + 4], &[], &state);
            assert!(again == want[start..start + 4], "{name} after {start}");
        }
        // A node that there was not.
        if drafted.model.kv_shape().is_recurrent() {
            let mut batch = Batch::default();
            batch.push_span(&[1], &[], 10, &drafted.table, BLOCK_SIZE);
            batch.keep_state(1, &[], kept(7, StateStart::Kept, &[0], &[]));
            drafted.model.forward(&batch, &mut drafted.kv).unwrap_err();
        }
    }
}
