//! Greedy texts of llama.cpp on the same file, and how far a model agrees with them.

use super::rig::argmax;
use foretoken::kv::{BlockAllocator, BlockTable};
use foretoken::model::{Batch, Model};
use serde::Deserialize;

const BLOCK_SIZE: usize = 16;

/// A greedy text of llama.cpp, written by `scripts/llama-greedy.py`.
#[derive(Deserialize)]
pub struct Theirs {
    pub prompt: Vec<u32>,
    pub text: Vec<u32>,
    /// By how much the logarithm of each token's probability exceeds that of the second.
    margins: Vec<f32>,
}

/// The texts of a file that the script has written.
pub fn theirs(lines: &str) -> Vec<Theirs> {
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// How far greedy texts agree.
pub struct Agreement {
    /// The share of a text before the first token that differs, on average over the texts.
    pub mean: f64,
    /// How many of `tokens` are the same after llama.cpp's own text.
    pub same: usize,
    pub tokens: usize,
    /// The widest margin of a token that differs.
    pub widest: f32,
}

impl Agreement {
    /// Compares the greedy choices of `model` after the tokens of each text with the text's next tokens.
    pub fn of(model: &mut dyn Model, texts: &[Theirs]) -> Self {
        let (mut tokens, mut same, mut shares, mut widest) = (0, 0, Vec::new(), 0f32);
        for Theirs {
            prompt,
            text,
            margins,
        } in texts
        {
            let ours = choices(model, prompt, text);
            let differ: Vec<usize> = (0..text.len()).filter(|&i| ours[i] != text[i]).collect();
            let begin = differ.first().copied().unwrap_or(text.len());
            println!(
                "{} tokens after {}: the same for {begin}; {} differ, of margins {:?}",
                text.len(),
                prompt.len(),
                differ.len(),
                differ.iter().map(|&i| margins[i]).collect::<Vec<_>>(),
            );
            shares.push(begin as f64 / text.len() as f64);
            widest = differ.iter().map(|&i| margins[i]).fold(widest, f32::max);
            tokens += text.len();
            same += text.len() - differ.len();
        }
        let mean = shares.iter().sum::<f64>() / shares.len() as f64;
        println!(
            "{} texts: the same for {:.1}% of their length (mean), {same} of {tokens} tokens after the same text; the widest margin of another is {widest}",
            shares.len(),
            mean * 100.
        );
        Self {
            mean,
            same,
            tokens,
            widest,
        }
    }
}

/// The greedy token after each token of `text`, but after its last one, and that after `prompt`.
fn choices(model: &mut dyn Model, prompt: &[u32], text: &[u32]) -> Vec<u32> {
    let tokens = [prompt, &text[..text.len() - 1]].concat();
    let count = tokens.len().div_ceil(BLOCK_SIZE);
    let mut kv = model.new_kv(count, BLOCK_SIZE).unwrap();
    let mut blocks = BlockAllocator::new(count, BLOCK_SIZE);
    let mut table = BlockTable::default();
    blocks.reserve(&mut table, tokens.len()).unwrap();
    let mut batch = Batch::default();
    batch.push_span(&tokens, &[], 0, &table, BLOCK_SIZE);
    batch.logits = (prompt.len() as u32 - 1..tokens.len() as u32).collect();
    let output = model.forward(&batch, &mut kv).unwrap();
    let vocab = model.info().vocab_size;
    output
        .read(|logits| logits.chunks(vocab).map(argmax).collect())
        .unwrap()
}
