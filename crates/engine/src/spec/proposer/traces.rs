//! Texts, machines and a head, by what was measured of them, for simulations of whole runs.

use super::super::acceptance_model::Estimate;
use super::super::cost::tests::Noise;
use super::super::pool::DraftPool;
use super::*;
use crate::spec::draft::{Committed, Source};
use candle_core::{Device, Tensor};
use foretoken_core::error::Result;
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::toy::ToyModel;
use foretoken_core::model::{
    Batch, DepthRates, DraftNetwork, ForwardOutput, Head, Model, ModelInfo,
};
use foretoken_core::sampling::mix;
use std::sync::Arc;

/// A machine that computes SmolLM2-135M, or on the GPU Llama-3.2-3B. All times are in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub name: &'static str,
    /// A step of one row at the start of a text.
    pub one_row: f64,
    /// Steps by their rows at the start of a text, over one of one row.
    rows: &'static [(usize, f64)],
    /// Attention for each token of the context: once for a sequence, and for each of its rows.
    attention: [f64; 2],
    /// A forward of the head over a step of one row.
    head: f64,
    /// A row of a prompt, which the head reads, over a step of one row.
    head_prompt_row: f64,
    /// The host's work for a draft: on CPUs 0.3 to 1% of the steps of 16 sequences were measured, on the GPU it is assumed.
    pub ask: f64,
    /// The share by which steps take longer while the head reads.
    pub displaced: f64,
}

pub const ZEN5: Machine = Machine {
    name: "Zen 5, 2 threads",
    one_row: 1.59e-3,
    rows: &[(1, 1.0), (2, 1.01), (4, 1.03), (8, 1.24), (16, 2.07)],
    attention: [0.26e-6, 0.22e-6],
    head: 0.10,
    head_prompt_row: 0.006,
    ask: 1.5e-6,
    displaced: 0.0,
};

pub const VNNI: Machine = Machine {
    name: "AVX-512 VNNI, 2 threads of a shared machine",
    one_row: 3.2e-3,
    rows: &[(1, 1.0), (2, 1.15), (4, 1.49), (8, 2.66), (16, 4.3)],
    attention: [0.5e-6, 0.4e-6],
    head: 0.09,
    head_prompt_row: 0.006,
    ask: 2e-6,
    displaced: 0.0,
};

/// Attention of eight rows costs three times that of one, products 1.75 times.
pub const XEON: Machine = Machine {
    name: "Xeon, 2 cores",
    one_row: 4.0e-3,
    rows: &[(1, 1.0), (2, 1.12), (4, 1.30), (8, 1.75), (16, 3.1)],
    attention: [1.4e-6, 0.56e-6],
    head: 0.12,
    head_prompt_row: 0.006,
    ask: 2e-6,
    displaced: 0.0,
};

/// Other work needs the same cache, which nearly holds the model (measured: 1.10 to 1.21 times as long).
pub const XEON_SHARED: Machine = Machine {
    name: "Xeon, 2 cores, whose cache is shared",
    displaced: 0.13,
    ..XEON
};

pub const AVX2: Machine = Machine {
    name: "AVX2",
    one_row: 5.0e-3,
    rows: &[
        (1, 1.0),
        (2, 1.2),
        (3, 1.35),
        (4, 1.51),
        (6, 2.0),
        (8, 2.5),
        (16, 4.3),
    ],
    attention: [0.6e-6, 0.5e-6],
    head: 0.12,
    head_prompt_row: 0.006,
    ask: 2e-6,
    displaced: 0.0,
};

pub const H100: Machine = Machine {
    name: "H100",
    one_row: 2.78e-3,
    rows: &[(1, 1.0), (4, 1.018), (8, 1.065), (16, 1.155)],
    attention: [2e-9, 1e-9],
    head: 0.10,
    head_prompt_row: 0.0001,
    ask: 15e-6,
    displaced: 0.0,
};

impl Machine {
    /// A step of so many rows of so many sequences, which have so many tokens each.
    pub fn step(&self, sequences: usize, rows: usize, context: usize) -> f64 {
        let after = self.rows.partition_point(|&(known, _)| known < rows);
        let after = after.clamp(1, self.rows.len() - 1);
        let ((few, low), (many, high)) = (self.rows[after - 1], self.rows[after]);
        let share = (rows as f64 - few as f64) / (many - few) as f64;
        let [each, row] = self.attention;
        let attention = each * sequences as f64 + row * rows as f64;
        self.one_row * (low + (high - low) * share) + attention * context as f64
    }

    /// A forward of the head that drafts, of so many rows.
    pub fn head(&self, rows: usize) -> f64 {
        self.one_row * self.head * (1.0 + 0.03 * (rows as f64 - 1.0))
    }

    /// The head's reading of so many rows of a prompt.
    pub fn reading(&self, rows: usize) -> f64 {
        self.one_row * self.head_prompt_row * rows as f64
    }
}

/// Categories of Spec-Bench: the share of an answer that repeats what came before, greedy, and the acceptance rates of
/// the head's first token, greedy and sampled (the head's card; docs/figures.md).
const CATEGORIES: [[f64; 3]; 13] = [
    [0.20, 0.43, 0.10], // writing
    [0.24, 0.62, 0.22], // roleplay
    [0.20, 0.52, 0.40], // reasoning
    [0.23, 0.50, 0.44], // math
    [0.28, 0.55, 0.32], // coding
    [0.55, 0.75, 0.39], // extraction
    [0.18, 0.40, 0.31], // stem
    [0.25, 0.48, 0.29], // humanities
    [0.65, 0.80, 0.28], // translation
    [0.30, 0.47, 0.33], // summarization
    [0.30, 0.50, 0.28], // qa
    [0.38, 0.62, 0.34], // math_reasoning
    [0.22, 0.42, 0.33], // rag
];
/// The share of sampled texts that repeats what came before, over that of greedy ones.
const SAMPLED_REPEATS: f64 = 0.2;
/// The acceptance rate of a head's further token over that of the one before it.
const DEEPER: f64 = 0.93;
/// The head's rate where the text repeats itself.
const RATE_OF_REPEATS: f64 = 0.8;
/// Mean length of a repeat.
const REPEAT: f64 = 6.0;
/// Number of token ids of the texts; low ones are frequent.
const IDS: f64 = 800.0;

/// What the training of the head measured, over rows of which a third are greedy.
pub fn rates() -> DepthRates {
    DepthRates {
        greedy: vec![0.53, 0.48, 0.459],
        sampled: vec![0.495, 0.452, 0.425],
    }
}

/// A prompt and its answer.
#[derive(Debug)]
pub struct Text {
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub is_sampled: bool,
    seed: u64,
    /// For each position, the probability that the head's first guess is right.
    rates: Vec<f64>,
}

impl Text {
    /// The text number `number`, with an answer of `len` tokens.
    pub fn new(number: usize, len: usize, is_sampled: bool) -> Self {
        let noise = &mut Noise(0x7e57 + number as u64);
        let [repeats, greedy, sampled] = CATEGORIES[number % CATEGORIES.len()];
        let (repeats, rate) = if is_sampled {
            (SAMPLED_REPEATS * repeats, sampled)
        } else {
            (repeats, greedy)
        };
        let rate_of_new = ((rate - repeats * RATE_OF_REPEATS) / (1.0 - repeats)).max(0.1 * rate);
        let prompt_len = 60 + noise.below(200);
        let (mut tokens, mut rates) = (Vec::<u32>::new(), Vec::new());
        // The repeat that is going on: where it reads, and how far it still goes.
        let (mut source, mut left) = (0, 0);
        for position in 0..prompt_len + len {
            let new = IDS.powf(noise.unit()) as u32;
            if left == 0 && position > 8 && noise.unit() < repeats / (REPEAT * (1.0 - repeats)) {
                let last = tokens[position - 1];
                let earlier = (0..position - 1).filter(|&at| tokens[at] == last);
                let earlier: Vec<usize> = earlier.collect();
                if !earlier.is_empty() {
                    source = earlier[noise.below(earlier.len())] + 1;
                    left = 1 + noise.below(2 * REPEAT as usize);
                }
            }
            let mean = if left > 0 {
                RATE_OF_REPEATS
            } else {
                rate_of_new
            };
            let spread = mean.min(1.0 - mean);
            rates.push(mean + spread * (2.0 * noise.unit() - 1.0));
            tokens.push(if left > 0 { tokens[source] } else { new });
            (source, left) = (source + 1, left.saturating_sub(1));
        }
        Self {
            tokens,
            prompt_len,
            is_sampled,
            seed: mix(number as u64),
            rates,
        }
    }

    /// The head's guess for `position` at this depth, from 0, and its own estimate of it.
    fn guess(&self, position: usize, depth: usize) -> (u32, f32) {
        let (Some(&token), Some(rate)) = (self.tokens.get(position), self.rates.get(position))
        else {
            return (0, 0.1);
        };
        let rate = rate * DEEPER.powi(depth as i32);
        let drawn = mix(self.seed ^ mix((position * 64 + depth) as u64));
        let is_right = ((drawn >> 11) as f64) < rate * (1u64 << 53) as f64;
        // Heads are a little too sure of themselves.
        let own = rate + 0.1 * (1.0 - rate);
        (if is_right { token } else { token + 1 }, own as f32)
    }
}

/// A network that is not run.
struct NoNetwork(ToyModel, Option<DepthRates>);

impl Model for NoNetwork {
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

impl Head for NoNetwork {
    fn reads(&self) -> &[usize] {
        &[0]
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(hidden.clone())
    }

    fn rates(&self) -> Option<&DepthRates> {
        self.1.as_ref()
    }
}

/// A head whose guesses are those of the texts and whose forwards take what they take on the machine.
pub struct TracedHead {
    pool: DraftPool,
    /// The text of the sequence `id` is number `id`.
    texts: Vec<Arc<Text>>,
    machine: Machine,
    noise: Noise,
    /// Tokens of each sequence when the head drafted last.
    fed: HashMap<SeqId, usize>,
}

impl TracedHead {
    pub fn new(
        texts: Vec<Arc<Text>>,
        machine: Machine,
        noise: Noise,
        rates: Option<DepthRates>,
    ) -> Self {
        let network = NoNetwork(ToyModel::new(32, 4096, 5, 0.0), rates);
        let pool = DraftPool::new(DraftNetwork::Head(Box::new(network)), 4, 4, 64);
        Self {
            pool: pool.expect("memory for a toy"),
            texts,
            machine,
            noise,
            fed: HashMap::new(),
        }
    }

    fn pending(&self, request: &DraftRequest<'_>) -> usize {
        let fed = self.fed.get(&request.id);
        let fed = fed.copied().unwrap_or(request.tokens.len() - 1);
        request.tokens.len().saturating_sub(fed).clamp(1, 64)
    }
}

impl Drafter for TracedHead {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        self.pool.network.forwards.clear();
        let (mut drafts, mut rows) = (Vec::new(), Vec::<usize>::new());
        for request in requests {
            let mut draft = Draft::default();
            rows.resize(request.model_length.max(rows.len()), 0);
            for (level, rows) in rows[..request.model_length].iter_mut().enumerate() {
                *rows += if level == 0 { self.pending(request) } else { 1 };
            }
            let pool = &mut self.pool;
            let sequence = pool.sequences.entry(request.id).or_default();
            let view = pool
                .acceptance
                .view(&sequence.history, request.is_sampled());
            let (mut estimates, mut score) = (Vec::<Estimate>::new(), 1.0);
            for depth in 0..request.model_length {
                let text = &self.texts[request.id as usize];
                let (token, own) = text.guess(request.tokens.len() + depth, depth);
                let estimate = view.estimate(0, own);
                score *= estimate.adjusted;
                draft.push(token, score, Source::Model);
                estimates.push(estimate);
            }
            if request.model_length > 0 {
                self.fed.insert(request.id, request.tokens.len());
                let (tokens, is_sampled) = (request.tokens, request.is_sampled());
                (sequence.history).propose(tokens, is_sampled, draft.clone(), estimates);
            }
            drafts.push(draft);
        }
        for rows in rows {
            let seconds = self.machine.head(rows) * self.noise.factor(0.1);
            self.pool.network.forwards.push((rows, seconds));
        }
        Ok(drafts)
    }

    fn forecast(&self, request: &DraftRequest<'_>) -> Option<Forecast> {
        let pending = self.pending(request);
        Some(self.pool.forecast(request, request.length, pending))
    }

    fn pool(&mut self) -> Option<&mut DraftPool> {
        Some(&mut self.pool)
    }

    fn resume(&mut self, _: SeqId, _: &[u32], _: super::super::CacheScope, len: usize) -> usize {
        len
    }

    fn observe(&mut self, committed: &[Committed<'_>]) {
        let pool = &mut self.pool;
        for one in committed {
            if let Some(sequence) = pool.sequences.get_mut(&one.id) {
                pool.acceptance.learn(&mut sequence.history, one.tokens);
            }
        }
    }
}
