//! What the types of a KV cache change: the log-probabilities of the tokens of a text, against those with a cache in f32.
//!
//! `FORETOKEN_BENCH_MODEL` is a GGUF file, `FORETOKEN_BENCH_TEXT` a text file (docs/flags.md), and
//! `FORETOKEN_BENCH_CONTEXT` the number of its tokens that are read (2,000).

use clap::ValueEnum;
use foretoken::kv::{BlockAllocator, BlockTable, KvCacheDtype};
use foretoken::model::{Batch, LoadOptions, Model, ModelSource, load};
use foretoken::text::Text;
use std::path::Path;

const BLOCK_SIZE: usize = 16;
/// Rows of a forward.
const ROWS: usize = 128;

fn main() {
    let variable = |name: &str, default: &str| std::env::var(name).unwrap_or(default.into());
    let default = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = variable("FORETOKEN_BENCH_MODEL", default);
    if !Path::new(&path).exists() {
        println!("no model at {path}: nothing is measured");
        return;
    }
    let source = ModelSource::Gguf(Path::new(&path).into());
    let text = std::fs::read_to_string(variable("FORETOKEN_BENCH_TEXT", "docs/flags.md"));
    let count = variable("FORETOKEN_BENCH_CONTEXT", "2000");
    let ids = Text::from_gguf(Path::new(&path)).expect("the file has a tokenizer");
    let mut ids = (ids.encode(&text.expect("a text"), true)).expect("the text has tokens");
    ids.truncate(count.parse().expect("a number of tokens"));
    println!("{path}, {} tokens", ids.len());
    println!(
        "| cache | bytes of a token | mean log-probability | difference, mean | largest | same best token |"
    );
    println!("|---|---:|---:|---:|---:|---:|");
    let mut exact: Option<Vec<(f64, u32)>> = None;
    for name in ["f32", "f16", "bf16", "q8_0"] {
        let options = LoadOptions {
            kv_cache_dtype: KvCacheDtype::from_str(name, false).expect("a type"),
            ..LoadOptions::default()
        };
        let mut model = load(&source, &options).expect("the model loads");
        let rows = log_probabilities(&mut *model, &ids);
        let exact = exact.get_or_insert_with(|| rows.clone());
        let both = || rows.iter().zip(exact.iter());
        let off: Vec<f64> = both().map(|(a, b)| (a.0 - b.0).abs()).collect();
        let same = both().filter(|(a, b)| a.1 == b.1).count();
        let count = rows.len() as f64;
        println!(
            "| {name} | {} | {:.4} | {:.6} | {:.4} | {:.2} % |",
            model.kv_shape().bytes_per_token(),
            rows.iter().map(|row| row.0).sum::<f64>() / count,
            off.iter().sum::<f64>() / count,
            off.iter().copied().fold(0., f64::max),
            100. * same as f64 / count,
        );
    }
}

/// Of each token but the first, the log-probability of it and the most probable token in its place.
fn log_probabilities(model: &mut dyn Model, ids: &[u32]) -> Vec<(f64, u32)> {
    let blocks = ids.len().div_ceil(BLOCK_SIZE);
    let (mut allocator, mut table) = (
        BlockAllocator::new(blocks, BLOCK_SIZE),
        BlockTable::default(),
    );
    (allocator.reserve(&mut table, ids.len())).expect("there are as many blocks");
    let mut kv = model.new_kv(blocks, BLOCK_SIZE).expect("there is memory");
    let vocab = model.info().vocab_size;
    let mut all = Vec::new();
    for start in (0..ids.len()).step_by(ROWS) {
        let tokens = &ids[start..ids.len().min(start + ROWS)];
        let mut batch = Batch::default();
        batch.push_span(tokens, &[], start, &table, BLOCK_SIZE);
        batch.logits = (0..tokens.len() as u32).collect();
        let output = model.forward(&batch, &mut kv).expect("the forward works");
        let next = &ids[start + 1..];
        let read = output.read(|logits| {
            for (row, &id) in logits.chunks(vocab).zip(next) {
                let best = (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]));
                let best = best.expect("there are tokens");
                let sum = row.iter().map(|&x| f64::from(x - row[best]).exp());
                let of_id = f64::from(row[id as usize] - row[best]) - sum.sum::<f64>().ln();
                all.push((of_id, best as u32));
            }
        });
        read.expect("logits are f32");
    }
    all
}
