//! The flags of `foretoken distill`, which shares none with serving but the names.

use super::at_least_one;
use crate::error::{Error, Result};
use crate::train;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Trains a draft model for a target.
#[derive(Debug, Clone, Args)]
pub struct DistillFlags {
    /// The target: a Hugging Face id, a folder with config.json and safetensors, or a .gguf file.
    /// With --objective ce only its tokenizer is read.
    #[arg(long, help_heading = "Models")]
    pub model: String,
    /// Branch, tag or commit of a Hugging Face model. A gated model needs HF_TOKEN.
    #[arg(long, help_heading = "Models")]
    pub revision: Option<String>,
    /// The draft's shape: a config.json of a Llama with the target's vocab_size.
    #[arg(long, value_name = "CONFIG", help_heading = "Models")]
    pub draft_config: PathBuf,
    /// Folder with weights of that shape to begin with, instead of random ones. Of a model with half
    /// as many layers or more, the upper ones are taken twice.
    #[arg(long, value_name = "DIR", help_heading = "Models")]
    pub init_from: Option<PathBuf>,
    /// Folder for checkpoints and the draft, which then is a model like any other.
    #[arg(long, value_name = "DIR", help_heading = "Models")]
    pub out: PathBuf,
    /// Go on from the checkpoint in --out; the other flags must be those of that run.
    #[arg(long, help_heading = "Models")]
    pub resume: bool,

    /// What to train on; may be given several times. JSON lines (.jsonl) as `foretoken generate`
    /// writes them, else plain text with blank lines between documents.
    #[arg(long, value_name = "FILE", required = true, help_heading = "Corpus")]
    pub corpus: Vec<PathBuf>,
    /// Encode the texts of JSON lines anew, for a target with another tokenizer.
    #[arg(long, help_heading = "Corpus")]
    pub retokenize: bool,
    /// Tokens a row; documents are packed into rows.
    #[arg(long, value_name = "N", default_value_t = 256, help_heading = "Corpus")]
    pub seq_len: usize,
    /// Share of rows to measure on instead of training on them; at least one row is held out.
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 0.05,
        help_heading = "Corpus"
    )]
    pub holdout: f64,

    /// kl = the target's distributions, ce = the tokens of the corpus.
    #[arg(long, value_enum, default_value_t, help_heading = "Training")]
    pub objective: ObjectiveName,
    /// With kl: token ids a position whose probabilities are kept; all others count as one.
    #[arg(
        long,
        value_name = "K",
        default_value_t = 32,
        help_heading = "Training"
    )]
    pub top_k: usize,
    /// Steps of the whole run.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1000,
        help_heading = "Training"
    )]
    pub steps: usize,
    /// End after so many steps, with a checkpoint that --resume goes on from.
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub stop_after: Option<usize>,
    /// Rows a step.
    #[arg(
        long,
        value_name = "ROWS",
        default_value_t = 16,
        help_heading = "Training"
    )]
    pub batch_size: usize,
    /// Rows of one forward: more are faster on a GPU and take more memory.
    #[arg(
        long,
        value_name = "ROWS",
        default_value_t = 1,
        help_heading = "Training"
    )]
    pub micro_batch: usize,
    /// Highest learning rate; it falls to a tenth.
    #[arg(
        long,
        value_name = "RATE",
        default_value_t = 1e-3,
        help_heading = "Training"
    )]
    pub learning_rate: f64,
    /// Steps until the highest learning rate [default: a twentieth of --steps].
    #[arg(long, value_name = "N", help_heading = "Training")]
    pub warmup: Option<usize>,
    /// AdamW's weight decay, of matrices alone.
    #[arg(
        long,
        value_name = "RATE",
        default_value_t = 0.1,
        help_heading = "Training"
    )]
    pub weight_decay: f64,
    /// Largest norm of all gradients together.
    #[arg(
        long,
        value_name = "NORM",
        default_value_t = 1.0,
        help_heading = "Training"
    )]
    pub clip: f64,
    /// Steps between two lines with held-out figures.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        help_heading = "Training"
    )]
    pub eval_every: usize,
    /// Steps between two checkpoints.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100,
        help_heading = "Training"
    )]
    pub checkpoint_every: usize,
    /// Seed of the first weights, of the order of rows and of what is held out.
    #[arg(long, default_value_t = 0, help_heading = "Training")]
    pub seed: u64,

    /// Where the draft is trained: auto, cpu, cuda or cuda:N. The target runs on the CPU.
    #[arg(long, default_value = "auto", help_heading = "Machine")]
    pub device: String,
    /// CPU threads, each with a micro-batch of its own [default: the physical cores that this
    /// process may use].
    #[arg(long, value_name = "N", help_heading = "Machine")]
    pub threads: Option<usize>,
}

/// What the draft learns.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveName {
    /// The target's distributions.
    #[default]
    Kl,
    /// The tokens of the corpus.
    Ce,
}

impl DistillFlags {
    /// Checks what needs no file.
    ///
    /// # Errors
    /// `Setup`, naming the flag.
    pub fn validate(self) -> Result<train::Options> {
        if !(self.holdout > 0.0 && self.holdout < 1.0) {
            return Err(refused("--holdout", "between 0 and 1", self.holdout));
        }
        for (flag, value) in [
            ("--learning-rate", self.learning_rate),
            ("--clip", self.clip),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(refused(flag, "above 0", value));
            }
        }
        if !(0.0..=1.0).contains(&self.weight_decay) {
            return Err(refused("--weight-decay", "from 0 to 1", self.weight_decay));
        }
        let optional =
            |flag, value: Option<usize>| value.map(|n| at_least_one(flag, n)).transpose();
        Ok(train::Options {
            model: self.model,
            revision: self.revision,
            draft_config: self.draft_config,
            init_from: self.init_from,
            corpus: self.corpus,
            retokenize: self.retokenize,
            out: self.out,
            resume: self.resume,
            objective: match self.objective {
                ObjectiveName::Kl => train::Objective::Kl,
                ObjectiveName::Ce => train::Objective::CrossEntropy,
            },
            top_k: at_least_one("--top-k", self.top_k)?,
            seq_len: at_least_one("--seq-len", self.seq_len)?,
            holdout: self.holdout,
            batch_size: at_least_one("--batch-size", self.batch_size)?,
            micro_batch: at_least_one("--micro-batch", self.micro_batch)?,
            steps: at_least_one("--steps", self.steps)?,
            stop_after: optional("--stop-after", self.stop_after)?,
            learning_rate: self.learning_rate,
            warmup: self.warmup,
            weight_decay: self.weight_decay,
            clip: self.clip,
            eval_every: at_least_one("--eval-every", self.eval_every)?,
            checkpoint_every: at_least_one("--checkpoint-every", self.checkpoint_every)?,
            seed: self.seed,
            device: self.device,
            threads: optional("--threads", self.threads)?,
        })
    }
}

fn refused(flag: &str, range: &str, value: f64) -> Error {
    Error::setup(format!("{flag} must be {range}, not {value}"))
}
