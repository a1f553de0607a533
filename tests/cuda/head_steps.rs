//! A head's chain on a GPU: the inputs of its steps come in one copy, the host waits once a round, and the drafts are those
//! of single forwards.

use super::draft_steps::{CHUNK, Counts, Text, assert_empty, propose, texts};
use super::texts::eagle3;
use super::{BLOCK_SIZE, BLOCKS, gpu, model, shape};
use candle_core::{DType, Device, Tensor};
use foretoken::error::Result;
use foretoken::kv::{KvShape, KvStore};
use foretoken::model::{Batch, ForwardOutput, Head, Model, ModelInfo};
use foretoken::sampling::{SamplingParams, mix};
use foretoken::spec::{Committed, DraftContext, DraftModel, Drafter};

/// Values of the hidden states that the head reads of a position.
const WIDTH: usize = 3 * 256;

/// A head whose chains are forwards one by one.
struct OneByOne(Box<dyn Head>);

impl Model for OneByOne {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.0.kv_shape()
    }

    fn device(&self) -> &Device {
        self.0.device()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        self.0.forward(batch, kv)
    }
}

impl Head for OneByOne {
    fn reads(&self) -> &[usize] {
        self.0.reads()
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        self.0.fuse(hidden)
    }

    fn layout(&self) -> String {
        self.0.layout()
    }
}

fn drafter(head: Box<dyn Head>) -> DraftModel {
    DraftModel::of_head(head, BLOCKS, BLOCK_SIZE, CHUNK).unwrap()
}

/// Lets the drafters observe the target's hidden states of all tokens of the texts but the last, from those at `from` on.
fn observe(drafters: &mut [&mut DraftModel], texts: &[Text], from: &[usize], gpu: &Device) {
    for (text, &from) in texts.iter().zip(from) {
        let new = from..text.tokens.len() - 1;
        let of = |i: usize| mix((new.start * WIDTH + i) as u64 ^ text.id << 32) % 2001;
        let states = (0..new.len() * WIDTH).map(|i| of(i) as f32 / 1000. - 1.);
        let states = Tensor::from_vec(states.collect(), (new.len(), WIDTH), gpu).unwrap();
        let context = DraftContext::default();
        let committed = Committed {
            id: text.id,
            tokens: &text.tokens,
            prompt_len: text.tokens.len() - text.sampler.output_len(),
            hidden: Some(states.to_dtype(DType::BF16).unwrap()),
            candidates: &[],
            parents: &[],
            context: &context,
            new,
        };
        for drafter in drafters.iter_mut() {
            drafter.observe(std::slice::from_ref(&committed));
        }
    }
}

/// Whatever its length: one copy of all inputs, one of all parameters, and one of the tokens, for which the host waits. One
/// launch puts the inputs of all steps into their places, and each step has as many as the others.
#[test]
fn a_round_sends_once_and_waits_once() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = model(&source, &gpu, Some(DType::BF16), 5);
    for temperature in [0.0, 1.0] {
        let mut kernels = Vec::new();
        for length in [2, 3, 5] {
            let mut drafter = drafter(eagle3(&source, &gpu, &*target, [0, 1, 2]));
            let params = SamplingParams {
                temperature,
                ..SamplingParams::default()
            };
            let mut texts = [Text::new(0, params, 9, length)];
            observe(&mut [&mut drafter], &texts, &[0], &gpu);
            for round in 0..3 {
                let (drafts, counts) = Counts::of(|| propose(&mut drafter, &mut texts).unwrap());
                assert_eq!(drafts[0].tokens.len(), length);
                // The first round loads kernels.
                if let Some(counts) = counts.filter(|_| round > 0) {
                    let all = (counts.waits, counts.copies, counts.graphs);
                    assert_eq!(all, (1, 3, 0), "{length} tokens, round {round}: {counts:?}");
                    if round == 2 {
                        kernels.push(counts.kernels);
                    }
                }
                let from = texts[0].tokens.len() - 1;
                texts[0].push(round);
                observe(&mut [&mut drafter], &texts, &[from], &gpu);
            }
            assert_empty(&mut drafter, &texts);
        }
        if let [two, three, five] = kernels[..] {
            assert_eq!(five - three, 2 * (three - two), "{kernels:?}");
            println!("launches of 2, 3 and 5 steps: {kernels:?}");
        }
    }
}

/// Of texts with drafts of different lengths, also after rounds of which parts were rejected.
#[test]
fn drafts_are_those_of_single_forwards() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let target = model(&source, &gpu, Some(DType::BF16), 5);
    let head = || eagle3(&source, &gpu, &*target, [0, 1, 2]);
    let (mut all, mut single) = (drafter(head()), drafter(Box::new(OneByOne(head()))));
    let mut texts = texts();
    let longest = texts.iter().map(|text| text.length).max().unwrap() as i64;
    let mut from = vec![0; texts.len()];
    for round in 0..10 {
        observe(&mut [&mut all, &mut single], &texts, &from, &gpu);
        let (drafts, counts) = Counts::of(|| propose(&mut all, &mut texts).unwrap());
        let (want, of_single) = Counts::of(|| propose(&mut single, &mut texts).unwrap());
        for (draft, want) in drafts.iter().zip(&want) {
            assert!(!draft.tokens.is_empty());
            assert_eq!((&draft.tokens, &draft.scores), (&want.tokens, &want.scores));
        }
        if let Some((counts, single)) = counts.zip(of_single).filter(|_| round > 0) {
            assert_eq!(counts.waits, 1, "round {round}: {counts:?}");
            // Those of the inputs of all steps but the first.
            let saved = single.copies - counts.copies;
            assert!(
                saved >= longest - 1,
                "round {round}: {counts:?}, {single:?}"
            );
        }
        for (i, (text, draft)) in texts.iter_mut().zip(drafts).enumerate() {
            from[i] = text.tokens.len() - 1;
            let kept = (round + i) % (draft.tokens.len() + 1);
            draft.tokens[..kept]
                .iter()
                .for_each(|&token| text.push(token));
            text.push((round * 7 + i) as u32);
        }
    }
    assert_empty(&mut all, &texts);
    assert_empty(&mut single, &texts);
}
