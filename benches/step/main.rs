//! The parts of one step's time: forwards of 1 to 16 rows of one sequence (plain decoding and verification),
//! and the choice of their tokens, on a real model.
//!
//! `FORETOKEN_BENCH_MODEL` is a GGUF file or a folder; `FORETOKEN_BENCH_CONTEXT` is the number of tokens in
//! the pool before the step (256); `FORETOKEN_BENCH_ROWS` are other numbers of rows, such as `8,64,512`: more
//! than 64 are a prompt, of which only the last row has logits; `FORETOKEN_BENCH_DTYPE` is that of `--dtype`, and
//! `FORETOKEN_BENCH_KV_CACHE_DTYPE` that of `--kv-cache-dtype`. Prints a table of medians, in milliseconds.
//!
//! With `FORETOKEN_BENCH_ROUND=4`, it instead measures what a round of speculative decoding with four rows takes over such
//! a forward: a round with tables, or with the head in the GGUF file `FORETOKEN_BENCH_DRAFT_MODEL`, without the head's
//! own forwards.

mod clock;
mod round;

use clap::ValueEnum;
use clock::PARTS;
use criterion::Criterion;
use foretoken::kv::{BlockAllocator, BlockTable, KvCacheDtype};
use foretoken::model::{
    Batch, HeadKind, LoadOptions, LoadedModel, MAX_TREE_NODES, Model, ModelSource, load, load_head,
};
use foretoken::sampling::{Sampler, SamplingParams, distribution};
use foretoken::spec::{DraftModel, Drafter, Tables};
use std::path::Path;
use std::time::{Duration, Instant};

/// The same as in the program.
#[path = "../../src/main/allocator.rs"]
mod allocator;

const ROWS: &str = "1,2,4,6,8,16";
const BLOCK_SIZE: usize = 16;
/// Of the forwards that fill the pool.
const PROMPT_ROWS: usize = 512;
/// Of tables, bytes.
const TABLES_MEMORY: usize = 16 << 20;
const DEFAULT_MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

fn main() {
    allocator::keep_freed_memory();
    let path = std::env::var("FORETOKEN_BENCH_MODEL").unwrap_or(DEFAULT_MODEL.into());
    let path = Path::new(&path);
    if !path.exists() {
        println!("no model at {}: nothing is measured", path.display());
        return;
    }
    let source = match path.is_dir() {
        true => ModelSource::Folder(path.into()),
        false => ModelSource::Gguf(path.into()),
    };
    let dtype = std::env::var("FORETOKEN_BENCH_DTYPE").ok();
    let of_cache = std::env::var("FORETOKEN_BENCH_KV_CACHE_DTYPE").unwrap_or("auto".into());
    let of_cache = KvCacheDtype::from_str(&of_cache, false);
    let options = LoadOptions {
        dtype: dtype.map(|name| name.parse().expect("f32, f16 or bf16")),
        kv_cache_dtype: of_cache.expect("a value of --kv-cache-dtype"),
        ..LoadOptions::default()
    };
    let mut model = load(&source, &options).expect("the model loads");
    let number = |text: &str| text.parse::<usize>().expect("a number of tokens or rows");
    let context = std::env::var("FORETOKEN_BENCH_CONTEXT").map_or(256, |text| number(&text));
    let all = std::env::var("FORETOKEN_BENCH_ROWS").unwrap_or(ROWS.into());
    if let Ok(rows) = std::env::var("FORETOKEN_BENCH_ROUND") {
        let target = load(&source, &options).expect("the model loads");
        let rows = number(&rows).clamp(2, MAX_TREE_NODES);
        let drafter = drafter(&*target, context + PROMPT_ROWS);
        let (forward, ratio) = round::measure(&mut *model, (target, drafter), context, rows);
        let forward = forward * 1e3;
        println!(
            "{rows} rows: {forward:.3} ms with the choice of tokens; a round: {ratio:.3} times as long"
        );
        return;
    }
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .sample_size(20)
        .configure_from_args();
    let mut table = Vec::new();
    for rows in all.split(',').map(number) {
        let mut step = Step::new(&mut *model, context, rows);
        let mut samples: Vec<Vec<f64>> = Vec::new();
        criterion.bench_function(&format!("step/rows={rows}"), |b| {
            b.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    let sample = step.run(&mut *model);
                    total += sample[0];
                    samples.push(sample.iter().map(Duration::as_secs_f64).collect());
                }
                total
            });
        });
        if !samples.is_empty() {
            table.push((rows, medians(&samples)));
        }
    }
    print(&table, context);
}

/// The head that is to draft for `target`, with room for so many `tokens`; tables if none is named.
fn drafter(target: &dyn LoadedModel, tokens: usize) -> Box<dyn Drafter> {
    let Ok(path) = std::env::var("FORETOKEN_BENCH_DRAFT_MODEL") else {
        return Box::new(Tables::new(TABLES_MEMORY));
    };
    let source = ModelSource::Gguf(path.into());
    let kind = HeadKind::of(&source).expect("the file can be read");
    let kind = kind.expect("the file has a head");
    let head = load_head(&source, kind, &LoadOptions::default(), target).expect("the head loads");
    let num_blocks = 4 * tokens.div_ceil(BLOCK_SIZE);
    let drafter = DraftModel::of_head(head, num_blocks, BLOCK_SIZE, PROMPT_ROWS);
    Box::new(drafter.expect("there is memory"))
}

/// A step that can be repeated: it does not change the sequence.
struct Step {
    batch: Batch,
    kv: foretoken::kv::KvStore,
}

impl Step {
    /// Fills the pool with `context` tokens.
    fn new(model: &mut dyn Model, context: usize, rows: usize) -> Self {
        let blocks = (context + rows).div_ceil(BLOCK_SIZE);
        let mut allocator = BlockAllocator::new(blocks, BLOCK_SIZE);
        let mut table = BlockTable::default();
        allocator
            .reserve(&mut table, context + rows)
            .expect("there are as many blocks");
        let tokens: Vec<u32> = (0..rows as u32).map(|i| 100 + 37 * i % 40_000).collect();
        let mut batch = Batch::default();
        batch.push_span(&tokens, &[], context, &table, BLOCK_SIZE);
        // Pages that nothing wrote are one page of zeros, which the caches hold.
        let mut kv = model.new_kv(blocks, BLOCK_SIZE).expect("there is memory");
        for start in (0..context).step_by(PROMPT_ROWS) {
            let rows = PROMPT_ROWS.min(context - start) as u32;
            let prompt: Vec<u32> = (0..rows)
                .map(|i| 100 + 31 * (start as u32 + i) % 40_000)
                .collect();
            let mut batch = Batch::default();
            batch.push_span(&prompt, &[], start, &table, BLOCK_SIZE);
            batch.logits = vec![rows - 1];
            model.forward(&batch, &mut kv).expect("the forward works");
        }
        let first_with_logits = if rows > MAX_TREE_NODES { rows - 1 } else { 0 };
        batch.logits = (first_with_logits as u32..rows as u32).collect();
        Self { batch, kv }
    }

    /// Runs the step. Returns the wall time of the step, of its greedy sampling, and of each part of the
    /// forward.
    fn run(&mut self, model: &mut dyn Model) -> Vec<Duration> {
        let started = Instant::now();
        let (output, parts) = clock::measure(|| model.forward(&self.batch, &mut self.kv));
        let forward = started.elapsed();
        let sampler = Sampler::new(greedy(), &[1]);
        let vocab = model.info().vocab_size;
        let output = output.expect("the forward works");
        let sampled = output.read(|logits| {
            for row in logits.chunks(vocab) {
                let _ = std::hint::black_box(distribution(row, &sampler));
            }
        });
        sampled.expect("logits are f32");
        let total = started.elapsed();
        let mut times = vec![total, total - forward];
        times.extend(parts);
        times
    }
}

fn greedy() -> SamplingParams {
    SamplingParams::at(0.)
}

fn medians(samples: &[Vec<f64>]) -> Vec<f64> {
    let median = |i: usize| {
        let mut column: Vec<f64> = samples.iter().map(|s| s[i]).collect();
        column.sort_by(f64::total_cmp);
        column[column.len() / 2]
    };
    (0..samples[0].len()).map(median).collect()
}

fn print(table: &[(usize, Vec<f64>)], context: usize) {
    println!("\n{context} tokens of context; medians in ms");
    println!(
        "| rows | step | {} | sampling | rest | over 1 row |",
        PARTS.join(" | ")
    );
    println!("|{}", "---:|".repeat(PARTS.len() + 5));
    for (rows, times) in table {
        let parts = &times[2..];
        let rest = times[0] - times[1] - parts[..parts.len() - 1].iter().sum::<f64>();
        let parts: Vec<String> = parts.iter().map(|t| format!("{:.3}", t * 1e3)).collect();
        println!(
            "| {rows} | {:.3} | {} | {:.3} | {:.3} | {:.2} |",
            times[0] * 1e3,
            parts.join(" | "),
            times[1] * 1e3,
            rest * 1e3,
            times[0] / table[0].1[0],
        );
    }
}
