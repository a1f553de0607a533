//! The flags of `foretoken distill`.

use super::ops::Products;
#[cfg(feature = "clap")]
use foretoken_core::{
    model::MAX_TREE_NODES,
    parse::{at_least_one, number, seed, threads, up_to},
};
use foretoken_model::HeadKind;
#[cfg(feature = "clap")]
use foretoken_model::MAX_MARKOV_RANK;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// What is trained.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// A draft model beside the target.
    #[default]
    Draft,
    /// An EAGLE-3 head on the target's hidden states.
    Eagle3,
    /// A parallel head (DFlash) on the target's hidden states.
    Parallel,
}

impl Method {
    /// The kind of head that it trains; `None` = a draft model.
    pub fn head(self) -> Option<HeadKind> {
        match self {
            Self::Draft => None,
            Self::Eagle3 => Some(HeadKind::Eagle3),
            Self::Parallel => Some(HeadKind::Parallel),
        }
    }
}

/// The shape of a draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum DraftSize {
    /// 2 layers of hidden size 256.
    Tiny,
    /// 4 layers of hidden size 512.
    Small,
}

/// What a draft learns.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// The target's distributions: KL(p || q).
    #[default]
    Kl,
    /// The tokens of the corpus.
    #[cfg_attr(feature = "clap", value(name = "ce"))]
    CrossEntropy,
}

/// How hidden states are stored.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// Two bytes a value.
    #[default]
    F16,
    /// One byte a value, and a scale a position and layer.
    Int8,
}

/// What to train, on what, and how: the flags of `foretoken distill`.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "Training")
)]
pub struct DistillOptions {
    /// The target: a Hugging Face id, a folder with config.json and safetensors, or a .gguf file.
    /// With --objective ce only its tokenizer is read.
    #[cfg_attr(feature = "clap", arg(long, help_heading = "Models"))]
    pub model: String,
    /// Branch, tag or commit of a Hugging Face model. A gated model needs HF_TOKEN.
    #[cfg_attr(feature = "clap", arg(long, help_heading = "Models"))]
    pub revision: Option<String>,
    /// draft = a model of its own, eagle3 and parallel = a head that reads the target's hidden states
    /// and guesses token by token or a block at once.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_enum, default_value_t, help_heading = "Models")
    )]
    pub method: Method,
    /// The draft's shape: a config.json of a Llama with the target's vocab_size. A head has the shape
    /// of the target's layers without it.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "CONFIG", help_heading = "Models")
    )]
    pub draft_config: Option<PathBuf>,
    /// Instead of --draft-config, a shape that suits most targets: tiny = 2 layers of hidden size 256,
    /// small = 4 of 512.
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_enum,
            value_name = "SIZE",
            conflicts_with = "draft_config",
            help_heading = "Models"
        )
    )]
    pub draft_size: Option<DraftSize>,
    /// Of a head, or with --draft-size: number of ids that it predicts, the most frequent ones of the corpus.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 8000, value_parser = up_to::<{ 1 << 24 }>,
          help_heading = "Models"))]
    pub draft_vocab_size: usize,
    /// Of a head: the layers of the target whose inputs it reads, as in 2,15,27 [default: the third, the
    /// middle one, and the third from the end].
    #[cfg_attr(
        feature = "clap",
        arg(
            long,
            value_name = "LAYERS",
            value_delimiter = ',',
            help_heading = "Models"
        )
    )]
    pub taps: Vec<usize>,
    /// With parallel: layers of the head [default: those of --draft-config, or 2].
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = up_to::<{ 1 << 12 }>, help_heading = "Models"))]
    pub layers: Option<usize>,
    /// With parallel: rows of a block, the last token and a mask for each token to guess.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 5, help_heading = "Models",
          value_parser = number("a whole number from 2 to 64", |n: &usize| (2..=MAX_TREE_NODES).contains(n))))]
    pub block_size: usize,
    /// With parallel: the token that stands for those to guess [default: that of --init-from, or the
    /// last special token that the corpus does not contain, or the last such id].
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "ID", help_heading = "Models")
    )]
    pub mask_token_id: Option<u32>,
    /// With parallel: rank of the Markov head, which lets a guess depend on the one before it; 0 = none
    /// [default: that of --init-from, or 64].
    #[cfg_attr(feature = "clap", arg(long, value_name = "RANK", help_heading = "Models",
          value_parser = number("a whole number from 0 to 16384", |&n: &usize| n <= MAX_MARKOV_RANK)))]
    pub markov_rank: Option<usize>,
    /// Weights of that shape to begin with, instead of random ones: a folder, or a head's .gguf file. Of a draft
    /// model with half as many layers or more, the upper ones are taken twice. A head keeps the ids of the other.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "PATH", help_heading = "Models")
    )]
    pub init_from: Option<PathBuf>,
    /// Folder for checkpoints and the draft, which then is a model like any other.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "DIR", help_heading = "Models")
    )]
    pub out: PathBuf,
    /// Go on from the checkpoint in --out; the other flags must be those of that run.
    #[cfg_attr(feature = "clap", arg(long, help_heading = "Models"))]
    pub resume: bool,

    /// What to train on; may be given several times. JSON lines (.jsonl) as `foretoken generate`
    /// writes them, else plain text with blank lines between documents.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "FILE", required = true, help_heading = "Corpus")
    )]
    pub corpus: Vec<PathBuf>,
    /// Encode the texts of JSON lines anew, for a target with another tokenizer.
    #[cfg_attr(feature = "clap", arg(long, help_heading = "Corpus"))]
    pub retokenize: bool,
    /// Tokens a row; documents are packed into rows.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 256, value_parser = up_to::<{ 1 << 17 }>,
          help_heading = "Corpus"))]
    pub seq_len: usize,
    /// Share of rows to measure on instead of training on them; at least one row is held out.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SHARE", default_value_t = 0.05, help_heading = "Corpus",
          value_parser = number("a number between 0 and 1", |&x: &f64| x > 0.0 && x < 1.0)))]
    pub holdout: f64,

    /// kl = the target's distributions, ce = the tokens of the corpus.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t))]
    pub objective: Objective,
    /// With kl: from 0 to 1, the share of the rejected mass, 1 - sum min(p, q), in the loss; the rest is KL.
    /// It serves a small draft that has learned the distributions roughly.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SHARE", default_value_t = 0.0,
          value_parser = number("a number from 0 to 1", |x: &f64| (0.0..=1.0).contains(x))))]
    pub overlap_share: f64,
    /// With kl: token ids a position whose probabilities are kept; all others count as one.
    #[cfg_attr(feature = "clap", arg(long, value_name = "K", default_value_t = 32, value_parser = up_to::<{ 1 << 16 }>))]
    pub top_k: usize,
    /// With eagle3: steps over which the head is unrolled on its own outputs.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 3, value_parser = up_to::<64>))]
    pub ttt_steps: usize,
    /// With eagle3: a step of training begins the steps after the first at one position of so many, others each
    /// time. They cost as much as the first where it is 1.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1, value_parser = up_to::<64>))]
    pub ttt_stride: usize,
    /// Of a head, on the CPU: what the products with weights multiply. bf16 is faster with AVX512-BF16, and only
    /// there; weights, gradients and sums stay f32.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t))]
    pub products: Products,
    /// Of a head: how the hidden states are stored in --out. f16 takes 2 bytes a value, int8 1.
    #[cfg_attr(feature = "clap", arg(long, value_enum, default_value_t))]
    pub features: Precision,
    /// Steps of the whole run.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 1000, value_parser = up_to::<{ 1 << 40 }>))]
    pub steps: usize,
    /// End after so many steps, with a checkpoint that --resume goes on from.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = at_least_one))]
    pub stop_after: Option<usize>,
    /// Rows a step.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ROWS", default_value_t = 16, value_parser = up_to::<{ 1 << 16 }>))]
    pub batch_size: usize,
    /// Rows that a forward takes at once [default: 1 on the CPU, --batch-size on a GPU]. A GPU whose memory is too
    /// small takes fewer.
    #[cfg_attr(feature = "clap", arg(long, value_name = "ROWS", value_parser = up_to::<{ 1 << 12 }>))]
    pub micro_batch: Option<usize>,
    /// Highest learning rate; it falls to a tenth.
    #[cfg_attr(feature = "clap", arg(long, value_name = "RATE", default_value_t = 1e-3, value_parser = above_zero))]
    pub learning_rate: f64,
    /// Steps until the highest learning rate [default: a twentieth of --steps].
    #[cfg_attr(feature = "clap", arg(long, value_name = "N"))]
    pub warmup: Option<usize>,
    /// AdamW's weight decay, of matrices alone.
    #[cfg_attr(feature = "clap", arg(long, value_name = "RATE", default_value_t = 0.1,
          value_parser = number("a number from 0 to 1", |x: &f64| (0.0..=1.0).contains(x))))]
    pub weight_decay: f64,
    /// Largest norm of all gradients together.
    #[cfg_attr(feature = "clap", arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = above_zero))]
    pub clip: f64,
    /// Steps between two lines with held-out figures.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 100, value_parser = up_to::<{ 1 << 40 }>))]
    pub eval_every: usize,
    /// Steps between two checkpoints.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = 100, value_parser = up_to::<{ 1 << 40 }>))]
    pub checkpoint_every: usize,
    /// Seed of the first weights, of the order of rows and of what is held out; -1 = a random one, which cannot
    /// be resumed.
    #[cfg_attr(feature = "clap", arg(long, default_value_t = 0, value_parser = seed, allow_negative_numbers = true))]
    pub seed: u64,

    /// Where the target runs and the draft is trained: auto, cpu, cuda or cuda:N.
    #[cfg_attr(
        feature = "clap",
        arg(long, default_value = "cpu", help_heading = "Machine")
    )]
    pub device: String,
    /// CPU threads, each with a micro-batch of its own [default: the physical cores that this
    /// process may use].
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = threads, help_heading = "Machine"))]
    pub threads: Option<usize>,
}

#[cfg(feature = "clap")]
fn above_zero(text: &str) -> Result<f64, String> {
    number("a number above 0", |&x: &f64| x > 0.0 && x.is_finite())(text)
}

impl DistillOptions {
    /// Steps in which the learning rate rises.
    pub fn warmup(&self) -> usize {
        self.warmup.unwrap_or(self.steps / 20)
    }

    /// Everything that determines the weights after a step, by the name of its flag if it has one.
    /// Fractions are stored as text, because JSON readers may lose their last bit.
    pub fn settings(&self, draft: &Value, corpus: u64) -> Value {
        let kl = self.objective == Objective::Kl;
        let eagle3 = self.method == Method::Eagle3;
        let parallel = self.method == Method::Parallel;
        json!({
            "method": self.method,
            "ttt-steps": eagle3.then_some(self.ttt_steps),
            "ttt-stride": (eagle3 && self.ttt_stride > 1).then_some(self.ttt_stride),
            "products": (self.products != Products::F32).then_some(self.products),
            "block-size": parallel.then_some(self.block_size),
            "features": (eagle3 || parallel).then_some(self.features),
            "objective": self.objective,
            "model": kl.then_some(&self.model),
            "revision": self.revision.as_ref().filter(|_| kl),
            "top-k": kl.then_some(self.top_k),
            "overlap-share": (self.overlap_share > 0.0).then(|| self.overlap_share.to_string()),
            "seq-len": self.seq_len,
            "batch-size": self.batch_size,
            // On a GPU its memory decides, too.
            "micro-batch": self.micro_batch.unwrap_or(1),
            "steps": self.steps,
            "warmup": self.warmup(),
            "holdout": self.holdout.to_string(),
            "learning-rate": self.learning_rate.to_string(),
            "weight-decay": self.weight_decay.to_string(),
            "clip": self.clip.to_string(),
            "seed": self.seed,
            "draft-config": draft.to_string(),
            "init-from": self.init_from,
            "the corpus": format!("{corpus:016x}"),
        })
    }
}
