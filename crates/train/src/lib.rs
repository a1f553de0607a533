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
pub mod corpus;
mod cost;
pub mod features;
pub mod head;
mod head_weights;
mod heads;
mod identity;
mod initial;
pub mod learn;
pub mod loss;
mod micro_batch;
pub mod model;
mod on_device;
mod ops;
pub mod optimizer;
mod options;
pub mod output;
pub mod parallel;
mod pass;
#[cfg(test)]
#[path = "../../../tests/common/plain.rs"]
mod plain;
#[cfg(test)]
#[path = "../../../tests/common/plain_parallel.rs"]
mod plain_parallel;
mod positioned;
#[cfg(test)]
mod reference;
pub mod report;
mod shape;
mod spec;
mod student;
mod target;
pub mod targets;
pub mod tokenizer;
mod trainer;
pub mod vocabulary;
mod workers;

use candle_core::Device;
use corpus::{Row, Split};
use features::FeatureStore;
use foretoken_core::console::{self, Progress, say};
use foretoken_core::error::{Error, Result};
use foretoken_kernels as kernels;
use foretoken_model::{LoadOptions, Weights, load};
use foretoken_text::Text;
use head::TrainHead;
use head_weights::HeadWeights;
use identity::Identity;
use model::TrainModel;
pub use ops::Products;
pub use options::{DistillOptions, DraftSize, Method, Objective};
use output::{OutputFolder, belongs_to};
use parallel::TrainParallelHead;
use report::DistillReport;
use spec::TrainSpec;
use student::Student;
use target::DistillTarget;
use targets::SoftTargets;
use trainer::{TrainData, Trainer};
use vocabulary::DraftVocabulary;

/// Trains the draft, prints figures on the way, and writes the draft to `options.out`.
///
/// # Errors
/// `Setup`, for a wrong file or flag, a draft that does not match the target, a full disk, or a loss
/// that is not finite. The last checkpoint is kept.
pub fn run(options: &DistillOptions) -> Result<DistillReport> {
    let device = kernels::device(&options.device).map_err(Error::setup)?;
    kernels::keep_freed_memory(&device).map_err(Error::setup)?;
    if let Some(threads) = options.threads {
        kernels::set_threads(threads).map_err(Error::setup)?;
    }
    if !device.is_cpu() && options.products != Products::F32 {
        return Err(Error::setup(
            "--products bf16 is for --device cpu: leave it out on a GPU",
        ));
    }
    let target = DistillTarget::open(options)?;
    let mut spec = shape::of(options, &target)?;
    let rows = rows(options, &target.text, spec.config.vocab_size)?;
    spec.choose_mask(options, &rows, &target.text)?;
    let Split { train, held_out } = corpus::split(&rows, options.holdout, options.seed)?;
    let folder = OutputFolder::open(&options.out, options.resume)?;
    let fingerprint = corpus::fingerprint(&rows);
    let settings = options.settings(&spec.json, fingerprint);
    folder.check(&settings)?;
    say(format_args!(
        "corpus: {} rows of {} tokens, {} of them held out",
        rows.len(),
        options.seq_len,
        held_out.len()
    ));
    let (soft, features) = match options.objective {
        Objective::CrossEntropy => (None, None),
        Objective::Kl => {
            let taps = &spec.taps;
            let (soft, features) =
                of_the_target(options, &target, &rows, taps, &folder, fingerprint, &device)?;
            (Some(soft), features)
        }
    };
    let seen = train.iter().map(|&row| &rows[row]);
    let vocabulary = vocabulary(options, &spec, seen, &target, &device)?;
    let student = student(options, &spec, &target, vocabulary.as_ref(), &device)?;
    folder.write_model_files(spec.json, &target.source, &target.text)?;
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
    spec: &TrainSpec,
    rows: impl Iterator<Item = &'a Row>,
    target: &DistillTarget,
    device: &Device,
) -> Result<Option<DraftVocabulary>> {
    let Some(size) = spec.config.draft_vocab_size else {
        return Ok(None);
    };
    let all = spec.config.vocab_size;
    Ok(Some(match (spec.method.head(), &options.init_from) {
        (Some(kind), Some(path)) => {
            let ids = initial::head_ids(path, kind, &spec.config)?;
            DraftVocabulary::of(ids, all, device)?
        }
        _ => {
            let always = &target.text.special_ids().eos;
            DraftVocabulary::most_frequent(rows, always, size, all, device)?
        }
    }))
}

/// Returns the student to train, with its first weights.
fn student(
    options: &DistillOptions,
    spec: &TrainSpec,
    target: &DistillTarget,
    vocabulary: Option<&DraftVocabulary>,
    device: &Device,
) -> Result<Box<dyn Student>> {
    let ids = vocabulary.map(DraftVocabulary::ids);
    let student: Box<dyn Student> = match (spec.method, &target.config) {
        (Method::Draft, _) | (_, None) => {
            let (config, seed) = (spec.config.clone(), spec.seed);
            Box::new(TrainModel::new(config, ids, seed, spec.seq_len, device)?)
        }
        (Method::Eagle3 | Method::Parallel, Some(of_target)) => {
            let mut weights = Weights::open(&target.source)?;
            if weights.rope_factors()?.is_some() {
                return Err(Error::setup(
                    "--model has rope_freqs.weight, which a head's config.json cannot express: give the folder with safetensors instead",
                ));
            }
            let ids = ids.unwrap_or_default().to_vec();
            let weights = HeadWeights::new(spec, (of_target, &mut weights), ids, device)?;
            if spec.method == Method::Parallel {
                Box::new(TrainParallelHead::new(weights, spec.block))
            } else {
                Box::new(TrainHead::new(weights, spec.unrolling))
            }
        }
    };
    if let Some(path) = &options.init_from {
        initial::load_weights(path, spec, student.vars(), device)?;
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
            let what = format!(
                "token id {id} is not in the vocabulary of {vocab_size} ids: add --retokenize, or give the --model that wrote the file"
            );
            return Err(Error::in_file(file, what));
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
    if options.resume {
        // Before hidden states are begun anew where there are none.
        belongs_to(&folder.path().join(targets::NOTE), &identity)?;
    }
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
