//! The steps of a target and its draft on a GPU, compared with what the memory bandwidth allows: plain
//! decoding, verification, draft steps and a whole speculative step, with and without CUDA graphs.
//!
//! `FORETOKEN_BENCH_TARGET` and `FORETOKEN_BENCH_DRAFT` are folders with a `config.json` (for random
//! weights of that shape, in the blocks that `FORETOKEN_BENCH_TARGET_QUANTIZE` and
//! `FORETOKEN_BENCH_DRAFT_QUANTIZE` name, such as `q4_k`) or GGUF files, `FORETOKEN_BENCH_CONTEXT` is the number of tokens before a step
//! (1024), `FORETOKEN_BENCH_SPEC_LENGTH` is K (5). Times are medians of alternating steps, in
//! milliseconds.

use candle_core::{DType, Device};
use foretoken::kernels;
use foretoken::kernels::quant::{BlockType, DeviceQuantMatrix};
use foretoken::kernels::sample::{self, NO_TOKEN, TokenChoice};
use foretoken::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken::model::{Batch, LoadFormat, LoadOptions, Model, ModelSource, inspect, load};
use foretoken::sampling::SamplingParams;
use foretoken::spec::logits_params;
use std::path::Path;
use std::time::Instant;

/// The same as in the program.
#[path = "../src/main/allocator.rs"]
mod allocator;

const ROWS: [usize; 9] = [1, 2, 4, 6, 8, 16, 24, 32, 64];
const BLOCK_SIZE: usize = 16;
/// Bytes that are copied to measure the bandwidth.
const COPIED: usize = 1 << 30;
/// Repetitions of each step.
const REPEAT: usize = 50;

fn main() {
    allocator::keep_freed_memory();
    let device = match kernels::device("cuda") {
        Ok(device) => device,
        Err(reason) => {
            println!("no CUDA device, nothing is measured: {reason}");
            return;
        }
    };
    let context = number("FORETOKEN_BENCH_CONTEXT", 1024);
    let k = number("FORETOKEN_BENCH_SPEC_LENGTH", 5);
    let bandwidth = bandwidth(&device);
    println!("copies read and write {:.0} GB/s together", bandwidth / 1e9);
    for eager in [false, true] {
        println!(
            "\n{}",
            if eager {
                "kernel by kernel"
            } else {
                "CUDA graphs"
            }
        );
        let mut target = Loaded::new("TARGET", "configs/llama-3.2-3b", &device, eager, context);
        let mut draft = Loaded::new("DRAFT", "configs/llama-3.2-1b", &device, eager, context);
        for one in [&target, &draft] {
            let floor = one.bytes as f64 / bandwidth * 1e3;
            println!(
                "{}: {:.2} GB a step, floor {floor:.3}",
                one.name,
                one.bytes as f64 / 1e9
            );
        }
        let verified = target.steps(&ROWS);
        let drafted = draft.steps(&[1, 2]);
        println!(
            "| rows of the target | ms | until all is launched | over one row | floor over it |"
        );
        println!("|---:|---:|---:|---:|---:|");
        for (rows, step) in ROWS.iter().zip(&verified) {
            println!(
                "| {rows} | {:.3} | {:.3} | {:.2} | {:.2} |",
                step.whole,
                step.launched,
                step.whole / verified[0].whole,
                target.bytes as f64 / bandwidth * 1e3 / step.whole
            );
        }
        println!(
            "draft step {:.3}, of two rows {:.3}; c = {:.2}, floor over it {:.2}",
            drafted[0].whole,
            drafted[1].whole,
            drafted[0].whole / verified[0].whole,
            draft.bytes as f64 / bandwidth * 1e3 / drafted[0].whole,
        );
        let round = round(&mut target, &mut draft, k);
        let parts = k as f64 * round.draft + round.verification;
        println!(
            "round of K = {k}: {:.3}; {k} x {:.3} + {:.3} = {parts:.3}, over it {:.2}",
            round.whole,
            round.draft,
            round.verification,
            round.whole / parts
        );
    }
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number"))
    })
}

/// Bytes per second that a copy within the device's memory reads and writes.
fn bandwidth(device: &Device) -> f64 {
    let (free, _) = kernels::device_memory(device).unwrap().unwrap_or((0, 0));
    let bytes = COPIED.min(free as usize / 4);
    let cuda = device.as_cuda_device().unwrap();
    let from = cuda.alloc_zeros::<u8>(bytes).unwrap();
    let mut to = cuda.alloc_zeros::<u8>(bytes).unwrap();
    let times = (0..20).map(|_| {
        device.synchronize().unwrap();
        let started = Instant::now();
        cuda.memcpy_dtod(&from, &mut to).unwrap();
        device.synchronize().unwrap();
        started.elapsed().as_secs_f64()
    });
    2. * bytes as f64 / median(times.collect())
}

/// The type of quantized weights that `name` names.
fn kind_of(name: &str) -> BlockType {
    let mut known = BlockType::all().filter(|kind| DeviceQuantMatrix::keeps(*kind, DType::F16));
    let found = known.find(|kind| kind.name().eq_ignore_ascii_case(name));
    found.unwrap_or_else(|| panic!("{name} is no type of quantized weights"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A model, with a sequence of `context` tokens in its pool.
struct Loaded {
    name: String,
    model: Box<dyn Model>,
    kv: KvStore,
    table: BlockTable,
    context: usize,
    /// Bytes that a step of one row reads: the weights, and K and V of the context.
    bytes: u64,
}

impl Loaded {
    fn new(role: &str, default: &str, device: &Device, eager: bool, context: usize) -> Self {
        let name = std::env::var(format!("FORETOKEN_BENCH_{role}")).unwrap_or(default.into());
        let path = Path::new(&name);
        let (source, format) = match path.is_dir() {
            true => (ModelSource::Folder(path.into()), LoadFormat::Dummy),
            false => (ModelSource::Gguf(path.into()), LoadFormat::Auto),
        };
        let options = LoadOptions {
            dtype: (format == LoadFormat::Auto).then_some(DType::BF16),
            device: device.clone(),
            format,
            enforce_eager: eager,
            one_launch: std::env::var_os("FORETOKEN_BENCH_ONE_LAUNCH").is_some(),
            quantize: std::env::var(format!("FORETOKEN_BENCH_{role}_QUANTIZE"))
                .ok()
                .map(|name| kind_of(&name)),
            ..LoadOptions::default()
        };
        let model = load(&source, &options).expect("the model loads");
        let (_, inventory) = inspect(&source, &options).expect("the model can be inspected");
        let read = inventory.entries.iter();
        // An embedding that is not the output layer, too, is only looked up.
        let is_tied = model.config().tie_word_embeddings;
        let read = read.filter(|entry| is_tied || !entry.name.contains("embed_tokens."));
        let weights: u64 = read.map(|entry| entry.loaded_bytes).sum();
        let max_rows = ROWS[ROWS.len() - 1];
        let blocks = (context + max_rows).div_ceil(BLOCK_SIZE);
        let mut allocator = BlockAllocator::new(blocks, BLOCK_SIZE);
        let mut table = BlockTable::default();
        allocator
            .reserve(&mut table, context + max_rows)
            .expect("there are as many blocks");
        Self {
            bytes: weights + (model.kv_shape().bytes_per_token() * context) as u64,
            kv: model.new_kv(blocks, BLOCK_SIZE).expect("there is memory"),
            name,
            model,
            table,
            context,
        }
    }

    /// Runs a step of `rows` rows, and copies its greedy tokens to the host.
    fn step(&mut self, rows: usize) -> Step {
        let mut batch = Batch::default();
        let vocab = self.model.info().vocab_size as u32;
        let tokens: Vec<u32> = (0..rows as u32).map(|i| (100 + 37 * i) % vocab).collect();
        batch.push_span(&tokens, &[], self.context, &self.table, BLOCK_SIZE);
        batch.logits = (0..rows as u32).collect();
        let greedy = SamplingParams {
            temperature: 0.,
            ..SamplingParams::default()
        };
        let started = Instant::now();
        let output = self
            .model
            .forward(&batch, &mut self.kv)
            .expect("the forward works");
        let params = (0..rows as u32)
            .map(|row| logits_params(row, &greedy, TokenChoice::GumbelMax(0)))
            .collect();
        let processed = sample::process_logits(&output.logits, params, Vec::new(), 0);
        let processed = processed.expect("sampling works");
        let launched = milliseconds(started);
        let tokens = processed.read().expect("sampling works");
        assert!((0..rows).all(|row| tokens.token(row) != NO_TOKEN));
        Step {
            launched,
            whole: milliseconds(started),
        }
    }

    /// Medians of the times of steps, one per number of rows.
    fn steps(&mut self, rows: &[usize]) -> Vec<Step> {
        let mut times = vec![Vec::new(); rows.len()];
        for turn in 0..REPEAT + 3 {
            for (rows, times) in rows.iter().zip(&mut times) {
                let step = self.step(*rows);
                // The first steps load kernels and record graphs.
                if turn >= 3 {
                    times.push(step);
                }
            }
        }
        let medians = times.into_iter().map(|times: Vec<Step>| Step {
            launched: median(times.iter().map(|step| step.launched).collect()),
            whole: median(times.iter().map(|step| step.whole).collect()),
        });
        medians.collect()
    }
}

/// The time until all work of a step is launched, and until its result is there.
#[derive(Clone)]
struct Step {
    launched: f64,
    whole: f64,
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Medians of the times of a speculative step and of its parts.
struct Round {
    whole: f64,
    draft: f64,
    verification: f64,
}

/// Measures K draft steps and the verification of K + 1 rows, with the same number of repetitions.
fn round(target: &mut Loaded, draft: &mut Loaded, k: usize) -> Round {
    let (mut whole, mut drafts, mut verifications) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..REPEAT + 3 {
        let started = Instant::now();
        for _ in 0..k {
            drafts.push(draft.step(1).whole);
        }
        verifications.push(target.step(k + 1).whole);
        if turn >= 3 {
            whole.push(milliseconds(started));
        }
    }
    Round {
        whole: median(whole),
        draft: median(drafts),
        verification: median(verifications),
    }
}
