//! `foretoken distill`: trains a draft for a target.
//!
//! By default the draft learns the target's next-token distributions (Hinton et al. 2015; for drafts,
//! Zhou et al. 2024, "DistillSpec", with forward KL), which the target computes once for all rows. With
//! cross-entropy the draft learns from the text alone, and no target runs. Instead of a draft model it can
//! be a head that reads the target's hidden states: EAGLE-3 ([`head`]) or a parallel one ([`parallel`]).
//!
//! All random values depend only on the seed and their use: weights on their names, the order of rows on
//! their number. So a run that is resumed from a checkpoint equals an uninterrupted run, bit for bit on
//! the CPU.

mod attention;
mod block_attention;
pub mod corpus;
mod cost;
pub mod features;
pub mod head;
mod head_weights;
mod heads;
mod identity;
pub mod learn;
pub mod loss;
pub mod model;
mod on_device;
mod ops;
pub mod optimizer;
pub mod output;
pub mod parallel;
#[cfg(test)]
#[path = "../../tests/common/plain.rs"]
mod plain;
#[cfg(test)]
#[path = "../../tests/common/plain_parallel.rs"]
mod plain_parallel;
#[cfg(test)]
mod reference;
pub mod report;
mod shape;
mod student;
mod target;
pub mod targets;
pub mod tokenizer;
mod trainer;
pub mod vocabulary;
mod workers;

use crate::console::{self, Progress, say};
use crate::error::{Error, Result};
use crate::kernels;
use crate::model::{LoadOptions, MAX_TREE_NODES, ModelConfig, Weights, load};
use crate::parse::{at_least_one, number, threads, up_to};
use crate::text::Text;
use candle_core::Device;
use clap::{Args, ValueEnum};
use corpus::{Row, Split};
use features::{FeatureStore, Precision};
use head::TrainHead;
use identity::Identity;
use model::TrainModel;
use output::OutputFolder;
use parallel::TrainParallelHead;
use report::DistillReport;
use serde::Serialize;
use serde_json::{Value, json};
use shape::StudentSpec;
use std::path::PathBuf;
use student::Student;
use target::DistillTarget;
use targets::SoftTargets;
use trainer::{TrainData, Trainer};
use vocabulary::DraftVocabulary;

/// What is trained.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
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

/// The shape of a draft model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DraftSize {
    /// 2 layers of hidden size 256.
    Tiny,
    /// 4 layers of hidden size 512.
    Small,
}

/// What a draft learns.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Objective {
    /// The target's distributions: KL(p || q).
    #[default]
    Kl,
    /// The tokens of the corpus.
    #[value(name = "ce")]
    CrossEntropy,
}

/// What to train, on what, and how: the flags of `foretoken distill`.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Training")]
pub struct DistillOptions {
    /// The target: a Hugging Face id, a folder with config.json and safetensors, or a .gguf file.
    /// With --objective ce only its tokenizer is read.
    #[arg(long, help_heading = "Models")]
    pub model: String,
    /// Branch, tag or commit of a Hugging Face model. A gated model needs HF_TOKEN.
    #[arg(long, help_heading = "Models")]
    pub revision: Option<String>,
    /// draft = a model of its own, eagle3 and parallel = a head that reads the target's hidden states
    /// and guesses token by token or a block at once.
    #[arg(long, value_enum, default_value_t, help_heading = "Models")]
    pub method: Method,
    /// The draft's shape: a config.json of a Llama with the target's vocab_size. A head has the shape
    /// of the target's layers without it.
    #[arg(long, value_name = "CONFIG", help_heading = "Models")]
    pub draft_config: Option<PathBuf>,
    /// Instead of --draft-config, a shape that suits most targets: tiny = 2 layers of hidden size 256,
    /// small = 4 of 512.
    #[arg(
        long,
        value_enum,
        value_name = "SIZE",
        conflicts_with = "draft_config",
        help_heading = "Models"
    )]
    pub draft_size: Option<DraftSize>,
    /// Of a head, or with --draft-size: number of ids that it predicts, the most frequent ones of the corpus.
    #[arg(long, value_name = "N", default_value_t = 8000, value_parser = up_to::<{ 1 << 24 }>,
          help_heading = "Models")]
    pub draft_vocab_size: usize,
    /// Of a head: the layers of the target whose inputs it reads, as in 2,15,27 [default: the third, the
    /// middle one, and the third from the end].
    #[arg(
        long,
        value_name = "LAYERS",
        value_delimiter = ',',
        help_heading = "Models"
    )]
    pub taps: Vec<usize>,
    /// With parallel: layers of the head [default: those of --draft-config, or 2].
    #[arg(long, value_name = "N", value_parser = up_to::<{ 1 << 12 }>, help_heading = "Models")]
    pub layers: Option<usize>,
    /// With parallel: rows of a block, the last token and a mask for each token to guess.
    #[arg(long, value_name = "N", default_value_t = 5, help_heading = "Models",
          value_parser = number("a whole number from 2 to 64", |n: &usize| (2..=MAX_TREE_NODES).contains(n)))]
    pub block_size: usize,
    /// With parallel: the token that stands for those to guess [default: that of --init-from, or the
    /// last special token that the corpus does not contain, or the last such id].
    #[arg(long, value_name = "ID", help_heading = "Models")]
    pub mask_token_id: Option<u32>,
    /// Folder with weights of that shape to begin with, instead of random ones. Of a model with half
    /// as many layers or more, the upper ones are taken twice. A head keeps the ids of that folder.
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
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = up_to::<{ 1 << 17 }>,
          help_heading = "Corpus")]
    pub seq_len: usize,
    /// Share of rows to measure on instead of training on them; at least one row is held out.
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, help_heading = "Corpus",
          value_parser = number("a number between 0 and 1", |&x: &f64| x > 0.0 && x < 1.0))]
    pub holdout: f64,

    /// kl = the target's distributions, ce = the tokens of the corpus.
    #[arg(long, value_enum, default_value_t)]
    pub objective: Objective,
    /// With kl: from 0 to 1, the share of the rejected mass, 1 - sum min(p, q), in the loss; the rest is KL.
    /// It serves a small draft that has learned the distributions roughly.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0,
          value_parser = number("a number from 0 to 1", |x: &f64| (0.0..=1.0).contains(x)))]
    pub overlap_share: f64,
    /// With kl: token ids a position whose probabilities are kept; all others count as one.
    #[arg(long, value_name = "K", default_value_t = 32, value_parser = up_to::<{ 1 << 16 }>)]
    pub top_k: usize,
    /// With eagle3: steps over which the head is unrolled on its own outputs.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = up_to::<64>)]
    pub ttt_steps: usize,
    /// Of a head: how the hidden states are stored in --out. f16 takes 2 bytes a value, int8 1.
    #[arg(long, value_enum, default_value_t)]
    pub features: Precision,
    /// Steps of the whole run.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = up_to::<{ 1 << 40 }>)]
    pub steps: usize,
    /// End after so many steps, with a checkpoint that --resume goes on from.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub stop_after: Option<usize>,
    /// Rows a step.
    #[arg(long, value_name = "ROWS", default_value_t = 16, value_parser = up_to::<{ 1 << 16 }>)]
    pub batch_size: usize,
    /// Rows of one forward: more are faster on a GPU and take more memory.
    #[arg(long, value_name = "ROWS", default_value_t = 1, value_parser = up_to::<{ 1 << 12 }>)]
    pub micro_batch: usize,
    /// Highest learning rate; it falls to a tenth.
    #[arg(long, value_name = "RATE", default_value_t = 1e-3, value_parser = above_zero)]
    pub learning_rate: f64,
    /// Steps until the highest learning rate [default: a twentieth of --steps].
    #[arg(long, value_name = "N")]
    pub warmup: Option<usize>,
    /// AdamW's weight decay, of matrices alone.
    #[arg(long, value_name = "RATE", default_value_t = 0.1,
          value_parser = number("a number from 0 to 1", |x: &f64| (0.0..=1.0).contains(x)))]
    pub weight_decay: f64,
    /// Largest norm of all gradients together.
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = above_zero)]
    pub clip: f64,
    /// Steps between two lines with held-out figures.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = up_to::<{ 1 << 40 }>)]
    pub eval_every: usize,
    /// Steps between two checkpoints.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = up_to::<{ 1 << 40 }>)]
    pub checkpoint_every: usize,
    /// Seed of the first weights, of the order of rows and of what is held out.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Where the target runs and the draft is trained: auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu", help_heading = "Machine")]
    pub device: String,
    /// CPU threads, each with a micro-batch of its own [default: the physical cores that this
    /// process may use].
    #[arg(long, value_name = "N", value_parser = threads, help_heading = "Machine")]
    pub threads: Option<usize>,
}

fn above_zero(text: &str) -> Result<f64, String> {
    number("a number above 0", |&x: &f64| x > 0.0 && x.is_finite())(text)
}

impl DistillOptions {
    /// Steps in which the learning rate rises.
    fn warmup(&self) -> usize {
        self.warmup.unwrap_or(self.steps / 20)
    }

    /// Everything that determines the weights after a step, by the name of its flag if it has one.
    /// Fractions are stored as text, because JSON readers may lose their last bit.
    fn settings(&self, draft: &Value, corpus: u64) -> Value {
        let kl = self.objective == Objective::Kl;
        let eagle3 = self.method == Method::Eagle3;
        let parallel = self.method == Method::Parallel;
        json!({
            "method": self.method,
            "ttt-steps": eagle3.then_some(self.ttt_steps),
            "block-size": parallel.then_some(self.block_size),
            "features": (eagle3 || parallel).then_some(self.features),
            "objective": self.objective,
            "model": kl.then_some(&self.model),
            "top-k": kl.then_some(self.top_k),
            "overlap-share": (self.overlap_share > 0.0).then(|| self.overlap_share.to_string()),
            "seq-len": self.seq_len,
            "batch-size": self.batch_size,
            "micro-batch": self.micro_batch,
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

/// Trains the draft, prints figures on the way, and writes the draft to `options.out`.
///
/// # Errors
/// `Setup`, for a wrong file or flag, a draft that does not match the target, a full disk, or a loss
/// that is not finite. The last checkpoint is kept.
pub fn run(options: &DistillOptions) -> Result<DistillReport> {
    let device = kernels::device(&options.device)?;
    if let Some(threads) = options.threads {
        kernels::set_threads(threads);
    }
    let target = DistillTarget::open(options)?;
    let mut shape = shape::of(options, &target)?;
    let rows = rows(options, &target.text, shape.config.vocab_size)?;
    shape.choose_mask(options, &rows, &target.text)?;
    let Split { train, held_out } = corpus::split(&rows, options.holdout, options.seed)?;
    let folder = OutputFolder::open(&options.out, options.resume)?;
    say(format_args!(
        "corpus: {} rows of {} tokens, {} of them held out",
        rows.len(),
        options.seq_len,
        held_out.len()
    ));
    let fingerprint = corpus::fingerprint(&rows);
    let (soft, features) = match options.objective {
        Objective::CrossEntropy => (None, None),
        Objective::Kl => {
            let taps = &shape.taps;
            let (soft, features) =
                of_the_target(options, &target, &rows, taps, &folder, fingerprint, &device)?;
            (Some(soft), features)
        }
    };
    let settings = options.settings(&shape.json, fingerprint);
    let seen = train.iter().map(|&row| &rows[row]);
    let vocabulary = vocabulary(options, &shape.config, seen, &target, &device)?;
    let student = student(options, &shape, &target, vocabulary.as_ref(), &device)?;
    folder.write_model_files(shape.json, &target.source, &target.text)?;
    let data = TrainData {
        vocabulary,
        rows,
        train,
        held_out,
        soft,
        features,
    };
    let mut trainer = Trainer::new(options, student, settings, data, &folder, device)?;
    trainer.run()?;
    let costs = match options.objective {
        Objective::Kl => Some(cost::measure(&target.source, folder.path())?),
        Objective::CrossEntropy => None,
    };
    let report = trainer.report(costs)?;
    console::print(&report)?;
    Ok(report)
}

/// The ids that the draft predicts; `None` = all.
fn vocabulary<'a>(
    options: &DistillOptions,
    draft: &ModelConfig,
    rows: impl Iterator<Item = &'a Row>,
    target: &DistillTarget,
    device: &Device,
) -> Result<Option<DraftVocabulary>> {
    let Some(size) = draft.draft_vocab_size else {
        return Ok(None);
    };
    let all = draft.vocab_size;
    Ok(Some(match (options.method, &options.init_from) {
        (Method::Eagle3 | Method::Parallel, Some(folder)) => {
            let ids = output::head_ids(folder)?;
            let fit = ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|&id| (id as usize) < all);
            if !fit || ids.len() != size {
                return Err(Error::in_file(
                    folder,
                    format!(
                        "its head predicts {} ids: give --draft-vocab-size {}, and a head for the same target",
                        ids.len(),
                        ids.len()
                    ),
                ));
            }
            DraftVocabulary::of(ids, all, device)?
        }
        _ => {
            let always = &target.text.special_ids().eos;
            DraftVocabulary::most_frequent(rows, always, size, all, device)?
        }
    }))
}

/// What is trained, with its first weights.
fn student(
    options: &DistillOptions,
    shape: &StudentSpec,
    target: &DistillTarget,
    vocabulary: Option<&DraftVocabulary>,
    device: &Device,
) -> Result<Box<dyn Student>> {
    let (config, seed, seq_len) = (shape.config.clone(), options.seed, options.seq_len);
    let ids = vocabulary.map(DraftVocabulary::ids);
    let student: Box<dyn Student> = match (options.method, &target.config) {
        (Method::Draft, _) | (_, None) => {
            Box::new(TrainModel::new(config, ids, seed, seq_len, device)?)
        }
        (Method::Eagle3 | Method::Parallel, Some(of_target)) => {
            let mut weights = Weights::open(&target.source)?;
            if weights.rope_factors()?.is_some() {
                return Err(Error::setup(
                    "--model has rope_freqs.weight, which a head's config.json cannot express: give the folder with safetensors instead",
                ));
            }
            let of_target = (of_target, &mut weights);
            let (taps, ids) = (shape.taps.len(), ids.unwrap_or_default().to_vec());
            let (passes, rows) = (options.ttt_steps, (seed, seq_len));
            match shape.block {
                Some(block) => Box::new(TrainParallelHead::new(
                    config, of_target, taps, ids, block, rows, device,
                )?),
                None => Box::new(TrainHead::new(
                    config, of_target, taps, ids, passes, rows, device,
                )?),
            }
        }
    };
    if let Some(folder) = &options.init_from {
        output::load_weights(folder, student.vars(), device)?;
    }
    Ok(student)
}

/// All rows of the corpus.
fn rows(options: &DistillOptions, text: &Text, vocab_size: usize) -> Result<Vec<Row>> {
    let mut documents = Vec::new();
    for file in &options.corpus {
        let read = corpus::read(file, text, options.retokenize)?;
        let foreign = (read.iter().flat_map(|d| &d.tokens)).find(|&&id| id as usize >= vocab_size);
        if let Some(id) = foreign {
            return Err(Error::in_file(
                file,
                format!(
                    "token id {id} is not in the vocabulary of {vocab_size} ids: add --retokenize, or give the --model that wrote the file"
                ),
            ));
        }
        documents.extend(read);
    }
    let eos = &text.special_ids().eos;
    Ok(corpus::pack(&documents, eos, text.eos(), options.seq_len))
}

/// The target's distributions, and its hidden states at `taps` if there are any; computes those that do
/// not exist yet.
fn of_the_target(
    options: &DistillOptions,
    target: &DistillTarget,
    rows: &[Row],
    taps: &[usize],
    folder: &OutputFolder,
    fingerprint: u64,
    device: &Device,
) -> Result<(SoftTargets, Option<FeatureStore>)> {
    let config = target.config.as_ref();
    let (vocab_size, context) =
        config.map_or((0, 0), |c| (c.vocab_size, c.max_position_embeddings));
    if options.seq_len > context {
        return Err(Error::setup(format!(
            "--seq-len must be at most {context}, the context length of the target, not {}",
            options.seq_len
        )));
    }
    let identity = Identity {
        model: options.model.clone(),
        revision: options.revision.clone(),
        vocab_size,
        corpus: fingerprint,
        rows: rows.len(),
        seq_len: options.seq_len,
        top_k: options.top_k,
    };
    let mut features = match (taps, config) {
        ([], _) | (_, None) => None,
        (taps, Some(config)) => {
            let shape = features::FeatureShape {
                rows: identity.clone(),
                taps: taps.to_vec(),
                hidden_size: config.hidden_size,
                precision: options.features,
            };
            let bytes = (shape.position_bytes() * shape.rows.seq_len * shape.rows.rows) as f64;
            say(format_args!(
                "hidden states of layers {taps:?}: {} bytes a token, {:.2} GB in all",
                shape.position_bytes(),
                bytes / 1e9
            ));
            Some(FeatureStore::open(folder.path(), shape, options.resume)?)
        }
    };
    let mut soft = SoftTargets::open(folder.path(), identity, options.resume)?;
    if soft.missing(features.as_ref()) > 0 {
        let loading = LoadOptions {
            device: device.clone(),
            ..LoadOptions::default()
        };
        let mut model = load(&target.source, &loading)?;
        let missing = soft.missing(features.as_ref()) as u64;
        let mut progress = Progress::new("target", "rows", missing);
        soft.compute(&mut *model, rows, features.as_mut(), || progress.step(""))?;
        progress.end();
    }
    Ok((soft, features))
}
