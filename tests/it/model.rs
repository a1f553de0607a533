//! Compares the decoder with candle's own, and with itself: batched, chunked, shuffled, as a tree.

use crate::common::rig::*;
use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;

/// "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
const QUESTION: [u32; 16] = [
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
];

fn rig() -> Rig {
    Rig::new(smollm2(), 64, 8)
}

/// The Kullback-Leibler divergence of the distributions of two rows of logits, in nats.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |logits: &[f32]| logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let (p_sum, q_sum) = (log_sum(p), log_sum(q));
    let terms = p.iter().zip(q).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - p_sum, f64::from(q) - q_sum);
        p.exp() * (p - q)
    });
    terms.sum()
}

/// Feeds `tokens` to a new sequence in pieces that end at `cuts`; returns the logits of all rows.
fn in_pieces(rig: &mut Rig, tokens: &[u32], cuts: &[usize]) -> (Seq, Vec<Vec<f32>>) {
    let mut seq = Seq::default();
    let mut logits = Vec::new();
    for &cut in cuts.iter().chain([&tokens.len()]) {
        let new = &tokens[seq.len..cut];
        logits.extend(rig.feed(&mut seq, new));
    }
    (seq, logits)
}

/// Both quantize activations to 8 bits, but differently, so the logits differ a little (as much as each
/// differs from unquantized arithmetic); the text is the same.
#[test]
fn smollm2_agrees_with_candles_llama() {
    let path = smollm2_path();
    let mut file = std::fs::File::open(&path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut theirs = ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
    let mut rig = rig();
    let mut seq = Seq::default();
    let mut tokens = QUESTION.to_vec();
    for step in 0..8 {
        let new = tokens[seq.len..].to_vec();
        let input = Tensor::new(new.as_slice(), &Device::Cpu).unwrap();
        let reference = theirs
            .forward(&input.unsqueeze(0).unwrap(), seq.len)
            .unwrap();
        let reference = reference.squeeze(0).unwrap().to_vec1::<f32>().unwrap();
        let ours = rig.feed(&mut seq, &new).pop().unwrap();
        let apart = divergence(&reference, &ours);
        assert!(apart < 0.03, "step {step}: {apart} nats apart");
        assert_eq!(argmax(&ours), argmax(&reference), "step {step}");
        tokens.push(argmax(&ours));
    }
    // " The capital of France is Paris.<|im_end|>" without its first space.
    assert_eq!(tokens[16..], [504, 3575, 282, 4649, 314, 7042, 30, 2]);
    assert!(
        rig.model.info().eos_token_ids.contains(&2),
        "<|im_end|> ends a turn"
    );
}

#[test]
fn chunks_equal_the_whole_bit_for_bit() {
    let tokens = prompt(37, 1);
    let mut rig = rig();
    let (_, whole) = in_pieces(&mut rig, &tokens, &[]);
    let every = |n: usize| {
        (1..)
            .map(|i| i * n)
            .take_while(|&c| c < 37)
            .collect::<Vec<_>>()
    };
    for cuts in [every(1), every(7), every(16), vec![33, 34]] {
        let (mut seq, pieces) = in_pieces(&mut rig, &tokens, &cuts);
        for (row, (piece, whole)) in pieces.iter().zip(&whole).enumerate() {
            assert!(piece == whole, "cuts {cuts:?}: row {row} differs");
        }
        rig.blocks.release(&mut seq.table);
    }
}

#[test]
fn a_mixed_batch_equals_each_sequence_alone() {
    let mut rig = rig();
    let prompts: Vec<Vec<u32>> = [9, 1, 30].iter().map(|&n| prompt(n, n as u32)).collect();
    let alone: Vec<Vec<Vec<f32>>> = prompts
        .iter()
        .map(|tokens| in_pieces(&mut rig, tokens, &[]).1)
        .collect();

    // Sequences that grow in turn have interleaved blocks, which contain K and V of earlier sequences.
    let mut rig = Rig::new(smollm2(), 16, 4);
    let (_, _) = in_pieces(&mut rig, &prompt(20, 99), &[]);
    rig.blocks = foretoken::kv::BlockAllocator::new(16, 4);
    let mut seqs: Vec<Seq> = prompts.iter().map(|_| Seq::default()).collect();
    let mut together: Vec<Vec<Vec<f32>>> = prompts.iter().map(|_| vec![]).collect();
    while seqs.iter().zip(&prompts).any(|(seq, p)| seq.len < p.len()) {
        let mut parts = Vec::new();
        let mut who = Vec::new();
        for (i, (seq, p)) in seqs.iter_mut().zip(&prompts).enumerate().rev() {
            let end = p.len().min(seq.len + 3 + 2 * i);
            if seq.len < end {
                who.extend(std::iter::repeat_n(i, end - seq.len));
                let tokens = &p[seq.len..end];
                let parents = &[];
                parts.push(Rows {
                    seq,
                    tokens,
                    parents,
                });
            }
        }
        for (i, logits) in who.into_iter().zip(rig.forward(&mut parts)) {
            together[i].push(logits);
        }
    }
    for (i, (together, alone)) in together.iter().zip(&alone).enumerate() {
        assert!(together == alone, "sequence {i} differs");
    }
}

#[test]
fn a_tree_equals_its_chains_bit_for_bit() {
    let mut rig = rig();
    let context = prompt(13, 4);
    // 0 -> 1 -> 3, 0 -> 2 -> 4 -> 5, and a second root 6.
    let tree = [501u32, 502, 503, 504, 505, 506, 507];
    let parents = [None, Some(0), Some(0), Some(1), Some(2), Some(4), None];
    let (mut seq, _) = in_pieces(&mut rig, &context, &[]);
    let got = rig.forward(&mut [Rows {
        seq: &mut seq,
        tokens: &tree,
        parents: &parents,
    }]);
    for chain in [vec![0, 1, 3], vec![0, 2, 4, 5], vec![6]] {
        let tokens: Vec<u32> = chain.iter().map(|&i| tree[i]).collect();
        let (mut alone, _) = in_pieces(&mut rig, &context, &[]);
        for (&node, want) in chain.iter().zip(rig.feed(&mut alone, &tokens)) {
            assert!(got[node] == want, "node {node} of chain {chain:?} differs");
        }
        rig.blocks.release(&mut alone.table);
    }
}

#[test]
fn only_the_requested_rows_get_logits() {
    let mut rig = rig();
    let tokens = prompt(6, 8);
    let mut seq = Seq::default();
    let all = rig.feed(&mut seq, &tokens);
    let table = &seq.table;
    let mut batch = foretoken::model::Batch {
        tokens: tokens.clone(),
        positions: (0..6).collect(),
        slots: (0..6).map(|p| table.slot(p, 8)).collect(),
        spans: vec![foretoken::model::Span::causal(0..6, 0, table.blocks())],
        logits: vec![1, 5],
        ..Default::default()
    };
    let some = rig.model.forward(&batch, &mut rig.kv).unwrap().logits;
    let expected = [all[1].clone(), all[5].clone()];
    assert_eq!(some.to_vec2::<f32>().unwrap(), expected);
    batch.logits.clear();
    let none = rig.model.forward(&batch, &mut rig.kv).unwrap().logits;
    assert_eq!(none.dims(), [0, rig.model.info().vocab_size]);
}
