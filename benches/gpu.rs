//! The steps of a target and its draft on a GPU, compared with what the memory bandwidth allows: plain
//! decoding, verification, draft steps and a whole speculative step, with and without CUDA graphs.
//!
//! `FORETOKEN_BENCH_TARGET` and `FORETOKEN_BENCH_DRAFT` are folders with a `config.json` (for random
//! weights of that shape, in the blocks that `FORETOKEN_BENCH_TARGET_QUANTIZE` and
//! `FORETOKEN_BENCH_DRAFT_QUANTIZE` name, such as `q4_k`) or GGUF files, `FORETOKEN_BENCH_CONTEXT` is the number of tokens before a step
//! (1024), `FORETOKEN_BENCH_SPEC_LENGTH` is K (5), and `FORETOKEN_BENCH_ROWS` lists the numbers of rows of the target's
//! steps (1,2,4,6,8,16). With `FORETOKEN_BENCH_ONE_LAUNCH`, forwards are in one launch where they can be, and with
//! `FORETOKEN_BENCH_ONLY_GRAPHS` only graphs are measured. Times are medians of alternating steps, in milliseconds.
//!
//! With `FORETOKEN_BENCH_PROFILE`, a list of numbers of rows, it instead runs single steps for a profiler, and measures the
//! parts of steps; see [`profile`].

use candle_core::cuda_backend::cudarc::driver::Profiler;
use candle_core::{DType, Device, Tensor};
use foretoken::kernels;
use foretoken::kernels::quant::{BlockType, DeviceQuantMatrix};
use foretoken::kernels::sample::{
    self, Draws, LogitsParams, NO_TOKEN, ProcessedLogits, TokenChoice,
};
use foretoken::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken::model::{Batch, LoadFormat, LoadOptions, LoadedModel, ModelSource, inspect, load};
use foretoken::sampling::SamplingParams;
use foretoken::spec::logits_params;
use std::path::Path;
use std::time::Instant;

/// The same as in the program.
#[path = "../src/main/allocator.rs"]
mod allocator;

/// The roles, and the folders of their shapes by default.
const TARGET: (&str, &str) = ("TARGET", "configs/llama-3.2-3b");
const DRAFT: (&str, &str) = ("DRAFT", "configs/llama-3.2-1b");
const BLOCK_SIZE: usize = 16;
/// Most rows of a sequence in a step.
const MAX_SPAN: usize = 16;
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
    let context = numbers("FORETOKEN_BENCH_CONTEXT", "1024")[0];
    let k = numbers("FORETOKEN_BENCH_SPEC_LENGTH", "5")[0];
    let rows = numbers("FORETOKEN_BENCH_ROWS", "1,2,4,6,8,16");
    let max_rows = rows.iter().copied().fold(k + 1, usize::max);
    if std::env::var_os(PROFILE).is_some() {
        return profile(&device, context, &numbers(PROFILE, "1"));
    }
    let bandwidth = bandwidth(&device);
    println!("copies read and write {:.0} GB/s together", bandwidth / 1e9);
    let only_graphs = std::env::var_os("FORETOKEN_BENCH_ONLY_GRAPHS").is_some();
    for eager in [false, true] {
        if eager && only_graphs {
            continue;
        }
        println!(
            "\n{}",
            if eager {
                "kernel by kernel"
            } else {
                "CUDA graphs"
            }
        );
        let mut target = Loaded::new(TARGET, &device, eager, context, max_rows);
        let mut draft = Loaded::new(DRAFT, &device, eager, context, max_rows);
        for one in [&target, &draft] {
            let floor = one.bytes as f64 / bandwidth * 1e3;
            println!(
                "{}: {:.2} GB a step, floor {floor:.3}",
                one.name,
                one.bytes as f64 / 1e9
            );
        }
        let verified = target.steps(&rows);
        let drafted = draft.steps(&[1, 2]);
        println!(
            "| rows of the target | ms | until all is launched | over one row | floor over it |"
        );
        println!("|---:|---:|---:|---:|---:|");
        for (rows, step) in rows.iter().zip(&verified) {
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
        let [alone, together] = draft.chains(k);
        println!(
            "{k} draft steps: {:.3} with a wait each; without waits {:.3}, launched after {:.3}; \
             with inputs sent and tokens read together {:.3}, launched after {:.3}",
            k as f64 * drafted[0].whole,
            alone.whole,
            alone.launched,
            together.whole,
            together.launched
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

/// The numbers, separated by commas, of a variable.
fn numbers(name: &str, default: &str) -> Vec<usize> {
    let text = std::env::var(name).unwrap_or(default.into());
    let one = |text: &str| text.parse().ok().filter(|&number| number > 0);
    let all: Option<Vec<usize>> = text.split(',').map(one).collect();
    all.unwrap_or_else(|| panic!("{name} is {text}, not numbers above 0"))
}

/// Numbers of rows of steps to profile.
const PROFILE: &str = "FORETOKEN_BENCH_PROFILE";

/// For each model and number of rows, a step kernel by kernel, for a profiler that waits for the program to start it
/// (`ncu --profile-from-start off`; scripts/step-by-kernel.py makes a table of it). A sine, which no model computes, marks
/// its begin. Then the parts of steps by the clock, which need no profiler.
fn profile(device: &Device, context: usize, rows: &[usize]) {
    let max_rows = rows.iter().copied().fold(1, usize::max);
    let mut number = 0;
    for role in [TARGET, DRAFT] {
        let mut model = Loaded::new(role, device, true, context, max_rows);
        for &rows in rows {
            // Loads the kernels.
            model.step(rows);
            number += 1;
            println!("step {number}: {}, {rows} rows", model.name);
            // Without a profiler there is nothing to start.
            let _profiler = Profiler::new();
            let mark = Tensor::zeros(1, DType::F32, device).and_then(|zero| zero.sin());
            mark.expect("the GPU computes a sine");
            model.step(rows);
        }
    }
    for role in [TARGET, DRAFT] {
        let mut all = Loaded::new(role, device, false, context, max_rows);
        let mut first = all.first_layer();
        let layers = all.model.config().spec.layers.len();
        let name = &all.name;
        println!(
            "\n| rows of {name} | ms | each of {layers} layers | inputs and ends | sampling |"
        );
        println!("|---:|---:|---:|---:|---:|");
        for &rows in rows {
            let (whole, one) = (all.steps(&[rows])[0].whole, first.steps(&[rows])[0].whole);
            let sampling = all.sampling(rows);
            let layer = (whole - one) / (layers.max(2) - 1) as f64;
            let ends = one - layer - sampling;
            println!("| {rows} | {whole:.3} | {layer:.4} | {ends:.3} | {sampling:.3} |");
        }
    }
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
    model: Box<dyn LoadedModel>,
    kv: KvStore,
    table: BlockTable,
    context: usize,
    max_rows: usize,
    /// Bytes that a step of one row reads: the weights, and K and V of the context.
    bytes: u64,
}

impl Loaded {
    /// The model of a role, for steps of up to `max_rows` rows.
    fn new(
        (role, default): (&str, &str),
        device: &Device,
        eager: bool,
        context: usize,
        max_rows: usize,
    ) -> Self {
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
        let is_tied = model.config().tie_word_embeddings;
        let read = read.filter(|entry| !inventory.is_looked_up(entry, is_tied));
        let weights: u64 = read.map(|entry| entry.loaded_bytes).sum();
        Self {
            bytes: weights + (model.kv_shape().bytes_per_token() * context) as u64,
            ..Self::with_pool(name, model, context, max_rows)
        }
    }

    fn with_pool(
        name: String,
        model: Box<dyn LoadedModel>,
        context: usize,
        max_rows: usize,
    ) -> Self {
        let blocks = (context + max_rows).div_ceil(BLOCK_SIZE);
        let mut allocator = BlockAllocator::new(blocks, BLOCK_SIZE);
        let mut table = BlockTable::default();
        allocator
            .reserve(&mut table, context + max_rows)
            .expect("there are as many blocks");
        Self {
            bytes: 0,
            kv: model.new_kv(blocks, BLOCK_SIZE).expect("there is memory"),
            name,
            model,
            table,
            context,
            max_rows,
        }
    }

    /// The model of the first layer of this one, with its embedding and output layer.
    fn first_layer(&self) -> Self {
        let first = self.model.subset(&[0]).expect("there is a layer");
        Self::with_pool(self.name.clone(), first, self.context, self.max_rows)
    }

    /// Computes the logits of `rows` rows.
    fn logits(&mut self, rows: usize) -> Tensor {
        let mut batch = Batch::default();
        let vocab = self.model.info().vocab_size as u32;
        let tokens: Vec<u32> = (0..rows as u32).map(|i| (100 + 37 * i) % vocab).collect();
        // Many rows are those of several sequences, here with the same context: a long span would be a prompt.
        for tokens in tokens.chunks(MAX_SPAN) {
            batch.push_span(tokens, &[], self.context, &self.table, BLOCK_SIZE);
        }
        batch.logits = (0..rows as u32).collect();
        let output = self.model.forward(&batch, &mut self.kv);
        output.expect("the forward works").logits
    }

    /// Runs a step of `rows` rows, and copies its greedy tokens to the host.
    fn step(&mut self, rows: usize) -> Step {
        let started = Instant::now();
        let logits = self.logits(rows);
        choose(&logits, started)
    }

    /// Median of the times in which the tokens of `rows` rows are chosen and copied to the host.
    fn sampling(&mut self, rows: usize) -> f64 {
        let logits = self.logits(rows);
        let times = (0..REPEAT).map(|_| {
            logits.device().synchronize().expect("the GPU works");
            choose(&logits, Instant::now()).whole
        });
        median(times.collect())
    }

    /// Medians of the times of `k` steps of one row, of which each takes the token of the one before it. No step waits for the
    /// host. Inputs are sent and tokens are read step by step in the first result, and together in the second.
    fn chains(&mut self, k: usize) -> [Step; 2] {
        let mut times = [Vec::new(), Vec::new()];
        for turn in 0..REPEAT + 3 {
            let both = [self.chain_step_by_step(k), self.chain(k)];
            if turn >= 3 {
                let all = times.iter_mut().zip(both);
                all.for_each(|(times, step)| times.push(step));
            }
        }
        times.map(|times| medians(&times))
    }

    /// The batch of step `at` of a chain, and how its token is drawn.
    fn chain_step(&self, at: usize) -> (Batch, Vec<LogitsParams>) {
        let mut batch = Batch::default();
        batch.push_span(&[100], &[], self.context + at, &self.table, BLOCK_SIZE);
        batch.logits = vec![0];
        (batch, greedy(1))
    }

    fn chain_step_by_step(&mut self, k: usize) -> Step {
        let (started, mut drawn) = (Instant::now(), Vec::<ProcessedLogits>::new());
        for at in 0..k {
            let (mut batch, params) = self.chain_step(at);
            batch.drawn = drawn.last().map(|last| last.ids().clone());
            let output = self.model.forward(&batch, &mut self.kv);
            let logits = output.expect("the forward works").logits;
            let one = sample::process_logits(&logits, params, Vec::new(), 1);
            drawn.push(one.expect("sampling works"));
        }
        let launched = milliseconds(started);
        for one in drawn {
            let tokens = one.read().expect("sampling works");
            assert!(tokens.token(0) != NO_TOKEN);
        }
        let whole = milliseconds(started);
        Step { launched, whole }
    }

    fn chain(&mut self, k: usize) -> Step {
        let started = Instant::now();
        let (mut batches, params): (Vec<_>, Vec<_>) = (0..k).map(|at| self.chain_step(at)).unzip();
        let device = self.model.device().clone();
        let mut draws = Draws::new(params, 1, &device).expect("sampling works");
        let ran = (self.model).forward_chain(&mut batches, &mut self.kv, &mut |output, place| {
            let drawn = draws.draw(&output.logits, Vec::new(), place)?;
            Ok(drawn.ids().clone())
        });
        ran.expect("the forwards work");
        let launched = milliseconds(started);
        let tokens = draws.read().expect("sampling works");
        assert!(tokens.iter().all(|one| one.token(0) != NO_TOKEN));
        let whole = milliseconds(started);
        Step { launched, whole }
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
        times.iter().map(|times| medians(times)).collect()
    }
}

/// The time until all work of a step is launched, and until its result is there.
#[derive(Clone)]
struct Step {
    launched: f64,
    whole: f64,
}

fn medians(times: &[Step]) -> Step {
    Step {
        launched: median(times.iter().map(|step| step.launched).collect()),
        whole: median(times.iter().map(|step| step.whole).collect()),
    }
}

/// How the greedy tokens of `rows` rows of logits are drawn.
fn greedy(rows: usize) -> Vec<LogitsParams> {
    let greedy = SamplingParams::at(0.);
    let of_row = |row| logits_params(row, &greedy, TokenChoice::GumbelMax(0));
    (0..rows as u32).map(of_row).collect()
}

/// Chooses the greedy tokens of `logits` and copies them to the host, as the end of a step that began at `started`.
fn choose(logits: &Tensor, started: Instant) -> Step {
    let rows = logits.dim(0).expect("logits have rows");
    let processed = sample::process_logits(logits, greedy(rows), Vec::new(), 0);
    let processed = processed.expect("sampling works");
    let launched = milliseconds(started);
    let tokens = processed.read().expect("sampling works");
    assert!((0..rows).all(|row| tokens.token(row) != NO_TOKEN));
    Step {
        launched,
        whole: milliseconds(started),
    }
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
