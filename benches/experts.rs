//! What steps of a model with experts cost by their rows and by the experts that these read, and how well that is
//! known beforehand: by rows alone, and by rows and experts.
//!
//! Random weights in the shape of Qwen3-30B-A3B (`FORETOKEN_BENCH_LAYERS` of its 48 layers, 20), quantized to `Q4_0`.
//! The rows are those of one text (a token and its draft) or one of each of so many requests, of
//! `FORETOKEN_BENCH_CONTEXT` (64) tokens each; `FORETOKEN_BENCH_ROUNDS` (9) rounds, in each of which every step has its
//! turn. As in the server, both costs are calibrated before, and learn from each step after they said what it would
//! take. Prints a table of medians.

use foretoken::kernels::quant::BlockType;
use foretoken::kv::{BlockAllocator, BlockTable, KvStore};
use foretoken::model::{Batch, LoadFormat, LoadOptions, Model, ModelSource, load};
use foretoken::spec::{MeasuredForward, TargetCost, measure};
use serde_json::json;
use std::time::Instant;

/// The same as in the program.
#[path = "../src/main/allocator.rs"]
mod allocator;

const ROWS: [usize; 6] = [1, 2, 4, 8, 16, 32];
const BLOCK_SIZE: usize = 16;
const EXPERTS: usize = 128;
const PER_ROW: usize = 8;
const VOCAB: usize = 151_936;

fn main() {
    allocator::keep_freed_memory();
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    let number = |name: &str, default: usize| {
        let text = std::env::var(name).ok();
        text.map_or(default, |text| text.parse().expect("a number"))
    };
    let layers = number("FORETOKEN_BENCH_LAYERS", 20);
    let context = number("FORETOKEN_BENCH_CONTEXT", 64);
    let mut model = model(layers);
    let requests = ROWS[ROWS.len() - 1];
    let num_blocks = requests * (context + requests).div_ceil(BLOCK_SIZE);
    let mut store = model.new_kv(num_blocks, BLOCK_SIZE).expect("memory");
    let measured = measure(&mut *model, &mut store, num_blocks, true, 16).expect("it runs");
    let forwards = measured.forwards;
    println!("measured before the first step:");
    for one in &forwards {
        let MeasuredForward {
            rows,
            context,
            experts_read,
            seconds,
        } = one;
        println!(
            "{rows} rows after {context} tokens, {experts_read} experts: {:.1} ms",
            1e3 * seconds
        );
    }
    let mut costs = Costs::calibrated(layers, &forwards);
    let each = costs.of_experts.expert_seconds();
    println!("an expert takes {:.1} us\n", 1e6 * each);
    let mut steps = Steps::new(&mut *model, store, num_blocks, context);
    let kinds = ROWS
        .iter()
        .flat_map(|&rows| [Kind::Text(rows), Kind::Requests(rows)]);
    let kinds: Vec<Kind> = kinds.skip(1).collect();
    let mut samples = vec![Vec::new(); kinds.len()];
    for _ in 0..number("FORETOKEN_BENCH_ROUNDS", 9) {
        for (kind, samples) in kinds.iter().zip(&mut samples) {
            samples.push(costs.sample(*kind, steps.run(&mut *model, *kind)));
        }
    }
    print(&kinds, &samples, layers);
}

/// The rows of a step.
#[derive(Clone, Copy)]
enum Kind {
    /// A token of one text and the nodes of its draft.
    Text(usize),
    /// A token of each of so many texts.
    Requests(usize),
}

impl Kind {
    /// Rows that gain a token, and draft nodes.
    fn rows(self) -> (usize, usize) {
        match self {
            Self::Text(rows) => (1, rows - 1),
            Self::Requests(rows) => (rows, 0),
        }
    }
}

fn model(layers: usize) -> Box<dyn Model> {
    let folder = tempfile::tempdir().expect("a folder");
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu",
        "num_experts": EXPERTS, "num_experts_per_tok": PER_ROW, "moe_intermediate_size": 768,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": false,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let options = LoadOptions {
        format: LoadFormat::Dummy,
        quantize: Some(BlockType::Q4_0),
        ..LoadOptions::default()
    };
    load(&ModelSource::Folder(folder.path().into()), &options).expect("the model loads")
}

/// The sequences of the steps, which no step changes.
struct Steps {
    store: KvStore,
    tables: Vec<BlockTable>,
    context: usize,
}

impl Steps {
    /// Fills the pool with texts that have nothing in common.
    fn new(model: &mut dyn Model, mut store: KvStore, num_blocks: usize, context: usize) -> Self {
        let mut blocks = BlockAllocator::new(num_blocks, BLOCK_SIZE);
        let most = ROWS[ROWS.len() - 1];
        let mut tables = Vec::new();
        for text in 0..most {
            let mut table = BlockTable::default();
            let tokens = context + most;
            blocks
                .reserve(&mut table, tokens)
                .expect("there are as many blocks");
            let tokens: Vec<u32> = (0..context).map(|at| token(text, at)).collect();
            let mut batch = Batch::default();
            batch.push_span(&tokens, &[], 0, &table, BLOCK_SIZE);
            batch.logits = vec![context as u32 - 1];
            model.forward(&batch, &mut store).expect("it runs");
            tables.push(table);
        }
        Self {
            store,
            tables,
            context,
        }
    }

    fn run(&mut self, model: &mut dyn Model, kind: Kind) -> MeasuredForward {
        let mut batch = Batch::default();
        let texts = match kind {
            Kind::Text(rows) => vec![rows],
            Kind::Requests(rows) => vec![1; rows],
        };
        for (text, &rows) in texts.iter().enumerate() {
            let tokens = (self.context..self.context + rows).map(|at| token(text, at));
            let tokens: Vec<u32> = tokens.collect();
            batch.push_span(&tokens, &[], self.context, &self.tables[text], BLOCK_SIZE);
        }
        let rows = batch.tokens.len();
        batch.logits = (0..rows as u32).collect();
        let started = Instant::now();
        let output = model.forward(&batch, &mut self.store).expect("it runs");
        MeasuredForward {
            rows,
            // All steps have the same: its attention counts for the rows.
            context: 0,
            experts_read: output.experts_read,
            seconds: started.elapsed().as_secs_f64(),
        }
    }
}

/// No two are the same.
fn token(text: usize, at: usize) -> u32 {
    ((text * 1_009 + at) * 7_919 % VOCAB) as u32
}

/// What is expected of steps.
struct Costs {
    of_rows: TargetCost,
    of_experts: TargetCost,
}

/// A step: what it took, and what rows alone, and rows and experts, said before.
#[derive(Clone, Copy)]
struct Sample {
    took: MeasuredForward,
    of_rows: f64,
    of_experts: f64,
}

impl Costs {
    fn calibrated(layers: usize, forwards: &[MeasuredForward]) -> Self {
        let mut of_rows = TargetCost::new([]);
        // The first of each number of rows has no token twice.
        let mut first = forwards.to_vec();
        first.dedup_by_key(|one| one.rows);
        first.iter_mut().for_each(|one| one.experts_read = 0);
        of_rows.calibrate(&first);
        let mut of_experts = TargetCost::new(vec![(EXPERTS, PER_ROW); layers]);
        of_experts.calibrate(forwards);
        Self {
            of_rows,
            of_experts,
        }
    }

    fn sample(&mut self, kind: Kind, took: MeasuredForward) -> Sample {
        let (rows, nodes) = kind.rows();
        let sample = Sample {
            took,
            of_rows: self.of_rows.seconds(rows, nodes),
            of_experts: self.of_experts.seconds(rows, nodes),
        };
        self.of_rows.note(rows, nodes, 0, 0, took.seconds);
        (self.of_experts).note(rows, nodes, 0, took.experts_read, took.seconds);
        sample
    }
}

fn print(kinds: &[Kind], samples: &[Vec<Sample>], layers: usize) {
    let one = median(&samples[0], |sample| sample.took.seconds);
    println!(
        "| rows | of | ms | over one row | experts a layer | by rows: first, then | by experts: first, then |"
    );
    println!("|---:|---|---:|---:|---:|---:|---:|");
    for (kind, samples) in kinds.iter().zip(samples) {
        let (rows, of) = match kind {
            Kind::Text(rows) => (rows, "one text"),
            Kind::Requests(rows) => (rows, "requests"),
        };
        let took = median(samples, |sample| sample.took.seconds);
        let experts = samples[0].took.experts_read as f64 / layers as f64;
        let learned = &samples[samples.len() / 3..];
        let over = |of: fn(&Sample) -> f64| {
            let first = of(&samples[0]) / took;
            format!(
                "{first:.2}, {:.2}",
                median(learned, |one| of(one) / one.took.seconds)
            )
        };
        println!(
            "| {rows} | {of} | {:.1} | {:.2} | {experts:.1} | {} | {} |",
            1e3 * took,
            took / one,
            over(|one| one.of_rows),
            over(|one| one.of_experts),
        );
    }
}

fn median(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
