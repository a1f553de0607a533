//! The learner's thread: trains, compares, switches.

use super::examples::{ExampleBuffer, Kept};
use super::folder::LearnFolder;
use super::gain::{Gain, MIN_EXAMPLES, Score};
use super::metrics::LearnMetrics;
use super::source::HeadFile;
use super::step::Candidate;
use crate::head::TrainHead;
use crate::optimizer::ByName;
use crate::student::Student;
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::model::Head;
use foretoken_engine::spec::TrainingExample;
use foretoken_model::{HeadKind, HeadTarget, LoadOptions, ModelSource, as_loaded, load_head_of};
use rayon::ThreadPool;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Examples of a step.
const BATCH: usize = 8;
/// Steps between two comparisons of the candidate with the head in use.
const COMPARE_EVERY: usize = 8;
/// Examples that a comparison measures on, at most.
const MAX_JUDGED: usize = 32;
/// Interval at which the learner looks whether a request runs.
const POLL: Duration = Duration::from_millis(20);
/// Time without a request after which the learner computes: a client that asks again at once would share the core.
const QUIET: Duration = Duration::from_millis(200);

/// A head that is or was in use.
pub struct Version {
    /// The head as it drafts, with the rounding of its blocks.
    head: TrainHead,
    /// The head's weights before rounding; `None` = the head is the one that was given, which has no others.
    trained: Option<ByName<Tensor>>,
    /// The head's scores in held-out examples, by the examples' numbers.
    scores: HashMap<u64, Score>,
}

impl Version {
    pub fn new(head: TrainHead, trained: Option<ByName<Tensor>>) -> Self {
        Self {
            head,
            trained,
            scores: HashMap::new(),
        }
    }

    /// The score in an example, which `candidate` measures once.
    fn score(&mut self, candidate: &Candidate, kept: &Kept) -> Result<Score> {
        if let Some(score) = self.scores.get(&kept.number) {
            return Ok(*score);
        }
        let score = candidate.score(&self.head, &kept.example)?;
        self.scores.insert(kept.number, score);
        Ok(score)
    }
}

/// The state of the training of a head.
pub struct HeadTraining {
    pub examples: ExampleBuffer,
    pub candidate: Candidate,
    pub used: Version,
    /// The head that comes back if the head in use proves worse.
    pub previous: Option<Version>,
    /// The number of the next example at the last switch, and at the last comparison with the previous head.
    pub switched_at: u64,
    pub watched_at: u64,
    /// Steps so far, and at the last comparison.
    pub steps: usize,
    pub compared_at: usize,
    pub heads: Sender<Box<dyn Head>>,
    pub folder: LearnFolder,
    /// The head that was given, and where it is.
    pub base: HeadFile,
    pub source: ModelSource,
    pub target: Arc<HeadTarget>,
    pub load: LoadOptions,
    pub metrics: LearnMetrics,
}

/// Lets the learner compute only while no request runs, and only for its share of that time.
pub struct Pace {
    /// A pool of one thread: whatever candle spreads over "the" pool stays on it.
    pub pool: ThreadPool,
    pub share: f64,
    pub inbox: Receiver<TrainingExample>,
    /// The time at which the learner last saw a request run.
    pub last_busy: Instant,
    /// Whether the drafter is gone.
    pub has_ended: bool,
}

impl Pace {
    /// Takes examples for the duration `patience`.
    ///
    /// # Errors
    /// If the drafter is gone.
    fn receive(&mut self, training: &mut HeadTraining, patience: Duration) -> Result<()> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.inbox.recv_timeout(left) {
                Ok(example) => {
                    training.metrics.examples.inc();
                    training.examples.add(example);
                }
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => {
                    self.has_ended = true;
                    return Err(Error::shutting_down());
                }
            }
        }
    }

    /// Computes `work` when no request runs, and then rests.
    ///
    /// # Errors
    /// The error of the work, or an error if the drafter is gone.
    fn turn<R: Send>(
        &mut self,
        training: &mut HeadTraining,
        is_busy: &dyn Fn() -> bool,
        work: impl FnOnce(&mut HeadTraining) -> Result<R> + Send,
    ) -> Result<R> {
        loop {
            if is_busy() {
                self.last_busy = Instant::now();
            } else if self.last_busy.elapsed() >= QUIET {
                break;
            }
            self.receive(training, POLL)?;
        }
        let started = Instant::now();
        let result = self.pool.install(|| work(training))?;
        let seconds = started.elapsed().as_secs_f64();
        training.metrics.seconds.inc_by(seconds);
        let rest = Duration::from_secs_f64(seconds * (1.0 / self.share - 1.0));
        self.receive(training, rest)?;
        Ok(result)
    }
}

impl HeadTraining {
    /// Whether enough examples came that are held out, of those with a number from `first` on.
    fn can_judge(&self, first: u64) -> bool {
        self.examples.recent(MIN_EXAMPLES, first).len() == MIN_EXAMPLES
    }

    fn must_watch(&self) -> bool {
        self.previous.is_some() && self.can_judge(self.watched_at.max(self.switched_at))
    }

    fn must_compare(&self) -> bool {
        let steps = self.steps - self.compared_at;
        let is_due = steps >= COMPARE_EVERY || steps > 0 && !self.can_learn();
        is_due && self.can_judge(0)
    }

    fn can_learn(&self) -> bool {
        self.examples.left() >= BATCH
    }

    /// A copy of the candidate as it is now.
    fn trained(&self) -> Result<ByName<Tensor>> {
        let vars = self.candidate.head.vars().iter();
        vars.map(|(name, var)| Ok((name.clone(), var.as_detached_tensor().copy()?)))
            .collect()
    }

    /// The head that drafts with `weights` once they were saved and loaded.
    fn as_served(&self, weights: &ByName<Tensor>) -> Result<TrainHead> {
        let served = served(weights, self.base.dtype, &self.load)?;
        self.candidate.head.with(&served)
    }

    /// Saves `version` and lets it draft. Returns the one before it.
    fn switch(&mut self, version: Version) -> Result<Version> {
        let source = match &version.trained {
            Some(weights) => {
                let head = self.candidate.head.with(weights)?;
                self.folder.write(&self.base, &head)?;
                self.folder.source()
            }
            None => {
                self.folder.clear()?;
                self.source.clone()
            }
        };
        let head = load_head_of(&source, HeadKind::Eagle3, &self.load, &self.target)?;
        // A drafter that is gone needs none.
        let _ = self.heads.send(head);
        self.switched_at = self.examples.next();
        Ok(std::mem::replace(&mut self.used, version))
    }

    /// Begins to train the head in use again.
    fn restart(&mut self) -> Result<()> {
        match &self.used.trained {
            Some(weights) => self.candidate.restart(weights),
            None => self.candidate.restart(&values(&self.used.head)),
        }
    }
}

/// `weights` after they were saved in `dtype` and loaded by `load`.
///
/// # Errors
/// `Setup`, if they do not fit.
pub fn served(
    weights: &ByName<Tensor>,
    dtype: DType,
    load: &LoadOptions,
) -> Result<ByName<Tensor>> {
    let round = |(name, weight): (&String, &Tensor)| -> Result<_> {
        let loaded = as_loaded(&weight.to_dtype(dtype)?, load)?;
        Ok((name.clone(), loaded.to_dtype(DType::F32)?))
    };
    weights.iter().map(round).collect()
}

fn values(head: &TrainHead) -> ByName<Tensor> {
    let vars = head.vars().iter();
    vars.map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect()
}

/// A learner: what it does, and when.
pub struct Learner {
    pub training: HeadTraining,
    pub pace: Pace,
}

impl Learner {
    /// Learns until the drafter is gone.
    ///
    /// # Errors
    /// If the head cannot be saved, or a device fails.
    pub fn run(&mut self, is_busy: &dyn Fn() -> bool) -> Result<()> {
        loop {
            let done = if self.training.must_watch() {
                self.watch(is_busy)
            } else if self.training.must_compare() {
                self.compare(is_busy)
            } else if self.training.can_learn() {
                self.step(is_busy)
            } else {
                self.pace.receive(&mut self.training, POLL)
            };
            match done {
                Ok(()) => {}
                Err(_) if self.pace.has_ended => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    fn step(&mut self, is_busy: &dyn Fn() -> bool) -> Result<()> {
        let (pace, training) = (&mut self.pace, &mut self.training);
        for example in training.examples.take(BATCH, training.steps as u64) {
            pace.turn(training, is_busy, |training| {
                training.candidate.learn(&example)
            })?;
        }
        pace.turn(training, is_busy, |training| {
            training.steps += 1;
            training.metrics.steps.inc();
            if training.candidate.step()? {
                return Ok(());
            }
            tracing::warn!("a step of the head in training was not finite: it begins again");
            training.restart()
        })
    }

    /// Lets the candidate draft if it is better than the head in use.
    fn compare(&mut self, is_busy: &dyn Fn() -> bool) -> Result<()> {
        let (pace, training) = (&mut self.pace, &mut self.training);
        training.compared_at = training.steps;
        let mut candidate = pace.turn(training, is_busy, |training| {
            let trained = training.trained()?;
            let head = training.as_served(&trained)?;
            Ok(Version::new(head, Some(trained)))
        })?;
        let pairs = self.scores(is_busy, &mut candidate, 0)?;
        let (pace, training) = (&mut self.pace, &mut self.training);
        let Some(gain) = Gain::of(&pairs) else {
            return Ok(());
        };
        training.metrics.used.set(gain.before);
        training.metrics.candidate.set(gain.after);
        tracing::debug!(steps = training.steps, "the head in training: {gain}");
        if gain.is_better() {
            let previous = pace.turn(training, is_busy, |training| training.switch(candidate))?;
            training.previous = Some(previous);
            training.metrics.switches.inc();
            tracing::info!("a better head drafts from now on: {gain}");
        } else if gain.is_worse() {
            pace.turn(training, is_busy, HeadTraining::restart)?;
        }
        Ok(())
    }

    /// The scores of `version` and of the head in use, in the last held-out examples with a number from `first` on.
    fn scores(
        &mut self,
        is_busy: &dyn Fn() -> bool,
        version: &mut Version,
        first: u64,
    ) -> Result<Vec<(Score, Score)>> {
        let (pace, training) = (&mut self.pace, &mut self.training);
        let examples = training.examples.recent(MAX_JUDGED, first).into_iter();
        let scores = examples.map(|kept| {
            let own = pace.turn(training, is_busy, |t| version.score(&t.candidate, &kept))?;
            let used = pace.turn(training, is_busy, |t| t.used.score(&t.candidate, &kept))?;
            Ok((own, used))
        });
        let scores = scores.collect::<Result<_>>()?;
        let HeadTraining { examples, used, .. } = &mut self.training;
        examples.retain_known(&mut used.scores);
        examples.retain_known(&mut version.scores);
        Ok(scores)
    }

    /// Lets the head before the one in use come back if it is better on examples that have come since.
    fn watch(&mut self, is_busy: &dyn Fn() -> bool) -> Result<()> {
        self.training.watched_at = self.training.examples.next();
        let Some(mut previous) = self.training.previous.take() else {
            return Ok(());
        };
        let first = self.training.switched_at;
        let mut pairs = self.scores(is_busy, &mut previous, first)?;
        pairs.iter_mut().for_each(|pair| *pair = (pair.1, pair.0));
        let (pace, training) = (&mut self.pace, &mut self.training);
        let Some(gain) = Gain::of(&pairs).filter(Gain::is_worse) else {
            training.previous = Some(previous);
            return Ok(());
        };
        pace.turn(training, is_busy, |training| {
            training.switch(previous)?;
            training.restart()
        })?;
        training.metrics.switches_back.inc();
        tracing::info!("the head before the one in use drafts again: {gain}");
        Ok(())
    }
}
