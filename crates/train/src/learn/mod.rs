//! Online learning of a head: `--learn`.
//!
//! The engine's drafter hands over parts of served texts with the target's hidden states
//! ([`TrainingExample`](foretoken_engine::spec::TrainingExample)). A thread of its own trains a copy of the head on them, while no request
//! runs. The copy comes into use when it is better on requests that it has not learned from, is saved before
//! that, and makes way again if it proves worse on later ones.

mod examples;
mod folder;
mod gain;
mod learner;
mod metrics;
mod source;
mod step;

use super::head::TrainHead;
use super::head_weights::{HeadWeights, TargetEmbedding, variables};
use super::spec::Unrolling;
use super::vocabulary::DraftVocabulary;
use super::workers::one_thread;
use candle_core::Device;
use examples::ExampleBuffer;
use folder::LearnFolder;
use foretoken_core::error::{Error, Result};
use foretoken_core::model::Head;
use foretoken_engine::spec::{EXAMPLE_ROWS, LearnerLink};
use foretoken_model::{HeadKind, HeadTarget, LoadOptions, LoadedModel, ModelSource, load_head_of};
use learner::{HeadTraining, Learner, Pace, Version, served};
use metrics::LearnMetrics;
use prometheus::Registry;
use source::HeadFile;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{channel, sync_channel};
use std::time::Instant;
use step::Candidate;

/// Examples that wait for the learner; further ones are dropped.
const MAX_WAITING: usize = 64;
/// How the head is unrolled on its own outputs; the default of `distill`.
const UNROLLING: Unrolling = Unrolling {
    passes: 3,
    stride: 1,
};

/// Options of a head's learning.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnOptions {
    /// The folder in which the head is kept.
    pub folder: PathBuf,
    /// Share of the time of one core while no request runs, above 0 and at most 1.
    pub share: f64,
    /// AdamW's learning rate.
    pub rate: f64,
    /// Maximum bytes of the hidden states that are kept.
    pub max_bytes: usize,
}

impl LearnOptions {
    /// The share that the learner may take if nothing else is said.
    pub const SHARE: f64 = 0.25;

    /// The usual options, with the head kept in `folder`.
    pub fn new(folder: PathBuf) -> Self {
        Self {
            folder,
            share: Self::SHARE,
            rate: 5e-4,
            max_bytes: 256 << 20,
        }
    }
}

/// A learner that does not run yet, and what its drafter needs.
pub struct Learning {
    /// The head that the folder has from before, to draft in place of the one that was given.
    pub head: Option<Box<dyn Head>>,
    link: LearnerLink,
    learner: IdleLearner,
}

/// The head that `--learn` would train, for a server with this API key.
pub struct LearnSetup<'a> {
    /// The options of `--learn`.
    pub options: &'a LearnOptions,
    /// The head of `--draft-model`, and how it is loaded.
    pub source: &'a ModelSource,
    /// How the head is loaded.
    pub load: LoadOptions,
    /// The target that the head drafts for.
    pub target: &'a dyn LoadedModel,
    /// The server's API key; `None` = it has none.
    pub api_key: Option<&'a str>,
}

impl LearnSetup<'_> {
    /// Opens the folder, and reads the head that was given and the one that is there.
    ///
    /// # Errors
    /// `Setup`, in one line: the head cannot learn, or the folder is broken, in use or another's.
    pub fn open(self) -> Result<Learning> {
        if !self.load.device.is_cpu() {
            return Err(Error::setup(
                "--learn trains on the CPU only: set --device cpu, or leave out --learn",
            ));
        }
        let target = Arc::new(HeadTarget::of(self.target)?);
        let base = HeadFile::read(self.source, &target)?;
        let load = LoadOptions {
            // The learned head is as fast as the given one.
            quantize: base.blocks.or(self.load.quantize),
            ..self.load
        };
        served(&base.weights, base.dtype, &load)
            .map_err(|e| Error::setup(format!("--learn: {e}")))?;
        let folder = LearnFolder::open(&self.options.folder, self.api_key)?;
        let kept = folder.read(&base, &target)?;
        // Loading checks more of the file.
        let load_kept = |_| load_head_of(&folder.source(), HeadKind::Eagle3, &load, &target);
        let head = kept.as_ref().map(load_kept).transpose();
        let head = head.map_err(|e| Error::in_file(&self.options.folder, e))?;
        let embedding = TargetEmbedding::Shared(target.clone());
        let vars = variables(&base.weights)?;
        let (config, ids) = (base.config.clone(), base.ids.clone());
        let positions = EXAMPLE_ROWS + 2 + UNROLLING.passes;
        let weights = HeadWeights::of(config, vars, embedding, ids.clone(), positions)?;
        let given = TrainHead::new(weights, UNROLLING);
        let (train, used, previous) = versions(given, kept.as_ref(), &base, &load)?;
        let vocabulary = DraftVocabulary::of(ids, base.config.vocab_size, &Device::Cpu)?;
        let (sender, examples) = sync_channel(MAX_WAITING);
        let (heads, receiver) = channel();
        let metrics = LearnMetrics::new()?;
        let link = LearnerLink {
            examples: sender,
            heads: receiver,
            dropped: metrics.dropped.clone(),
        };
        let candidate = Candidate::new(train, vocabulary, self.options.rate)?;
        Ok(Learning {
            head,
            link,
            learner: IdleLearner(Learner {
                pace: Pace {
                    pool: one_thread("learn".into())?,
                    share: self.options.share,
                    inbox: examples,
                    last_busy: Instant::now(),
                    has_ended: false,
                },
                training: HeadTraining {
                    examples: ExampleBuffer::new(self.options.max_bytes),
                    candidate,
                    used,
                    previous,
                    switched_at: 0,
                    watched_at: 0,
                    steps: 0,
                    compared_at: 0,
                    heads,
                    folder,
                    base,
                    source: self.source.clone(),
                    target,
                    load,
                    metrics,
                },
            }),
        })
    }
}

/// The head to train, the one in use, and the one that may come back, of the head that was `given` and the one that the
/// folder has `kept`.
fn versions(
    given: TrainHead,
    kept: Option<&HeadFile>,
    base: &HeadFile,
    load: &LoadOptions,
) -> Result<(TrainHead, Version, Option<Version>)> {
    let Some(kept) = kept else {
        return Ok((given.with(&base.weights)?, Version::new(given, None), None));
    };
    let head = given.with(&served(&kept.weights, base.dtype, load)?)?;
    let used = Version::new(head, Some(kept.weights.clone()));
    let train = given.with(&kept.weights)?;
    Ok((train, used, Some(Version::new(given, None))))
}

/// A learner that does not run yet.
pub struct IdleLearner(Learner);

impl Learning {
    /// Splits this into the drafter's link and the learner.
    pub fn split(self) -> (LearnerLink, IdleLearner) {
        (self.link, self.learner)
    }
}

impl IdleLearner {
    /// Starts the thread, which ends with the drafter. It computes nothing while `is_busy` holds.
    ///
    /// # Errors
    /// `Setup`, if it cannot be started.
    pub fn start(
        self,
        registry: &Registry,
        is_busy: impl Fn() -> bool + Send + 'static,
    ) -> Result<()> {
        let mut learner = self.0;
        let metrics = &learner.training.metrics;
        metrics.register(registry)?;
        let ended = metrics.ended.clone();
        std::thread::Builder::new()
            .name("learner".into())
            .spawn(move || {
                let run = catch_unwind(AssertUnwindSafe(|| learner.run(&is_busy)));
                let run = run.unwrap_or_else(|_| Err(Error::internal("the learner panicked")));
                if let Err(error) = run {
                    ended.set(1);
                    tracing::error!("learning has ended, and the head in use stays: {error}");
                }
            })
            .map_err(|e| Error::setup(format!("cannot start a thread: {e}")))?;
        Ok(())
    }
}
