//! The training loop: rows, forward, loss, backward, step, with evaluations and checkpoints in between.

use super::corpus::{Order, Row};
use super::cost::Costs;
use super::features::FeatureStore;
use super::loss::{Soft, TrainTargets, backward, measure};
use super::micro_batch::MicroBatch;
use super::optimizer::{AdamW, ByName, accumulate, clip, global_norm, learning_rate};
use super::output::{self, OutputFolder, TrainState};
use super::report::{self, DistillReport, Evaluation, LossSums};
use super::student::{Student, TrainBatch};
use super::targets::SoftTargets;
use super::vocabulary::DraftVocabulary;
use super::workers::Workers;
use super::{DistillOptions, Method, Objective};
use candle_core::{Device, Tensor};
use foretoken_core::console::{Progress, say};
use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::mix;
use foretoken_kernels as kernels;
use indicatif::ProgressBar;
use serde_json::Value;
use std::time::Instant;

/// The data for training and evaluation.
pub struct TrainData {
    pub rows: Vec<Row>,
    /// Indices of rows.
    pub train: Vec<usize>,
    pub held_out: Vec<usize>,
    /// The draft's vocabulary; `None` = all ids.
    pub vocabulary: Option<DraftVocabulary>,
    /// `None` with cross-entropy.
    pub soft: Option<SoftTargets>,
    /// The target's hidden states, for a head.
    pub features: Option<FeatureStore>,
}

/// The purpose of random numbers.
const POSITIONS: u64 = u64::from_le_bytes(*b"position");

/// The state of a run between two steps.
pub struct Trainer<'a> {
    options: &'a DistillOptions,
    data: TrainData,
    folder: &'a OutputFolder,
    device: Device,
    workers: Workers,
    micro_batch: MicroBatch,
    model: Box<dyn Student>,
    optimizer: AdamW,
    state: TrainState,
    /// The last evaluation, by depth, and the number of steps before it.
    last: (usize, Vec<Evaluation>),
}

impl<'a> Trainer<'a> {
    /// A new run of `model`, or the run of the folder's checkpoint if `options.resume` is set, which
    /// [had](OutputFolder::check) these `settings`.
    ///
    /// # Errors
    /// `Setup`, if the checkpoint is broken.
    pub fn new(
        options: &'a DistillOptions,
        model: Box<dyn Student>,
        settings: Value,
        data: TrainData,
        folder: &'a OutputFolder,
        device: Device,
    ) -> Result<Self> {
        let optimizer = AdamW::new(model.vars(), options.weight_decay)?;
        // A GPU is one queue, and one micro-batch keeps it busy.
        let workers = if device.is_cpu() {
            Workers::new(kernels::threads())?
        } else {
            Workers::none()
        };
        let mut trainer = Self {
            micro_batch: MicroBatch::new(options, &device),
            options,
            data,
            folder,
            device,
            workers,
            model,
            optimizer,
            state: TrainState {
                steps: 0,
                settings,
                untrained: Vec::new(),
            },
            last: (0, Vec::new()),
        };
        if options.resume && folder.has_checkpoint() {
            trainer.state =
                folder.load_checkpoint(&*trainer.model, &mut trainer.optimizer, &trainer.device)?;
            say(format_args!("resuming after step {}", trainer.state.steps));
            trainer.evaluate(None)?;
        } else {
            trainer.evaluate(None)?;
            trainer.state.untrained = trainer.last.1.clone();
        }
        Ok(trainer)
    }

    /// Trains to the last step of this session and saves the draft.
    ///
    /// # Errors
    /// `Setup`, if a loss is not finite or a file cannot be written. The last checkpoint is kept.
    pub fn run(&mut self) -> Result<()> {
        let first = self.state.steps;
        let session = self.options.stop_after.unwrap_or(usize::MAX);
        let end = self.options.steps.min(first.saturating_add(session));
        let mut progress = Progress::new("training", "steps", end.saturating_sub(first) as u64);
        let started = Instant::now();
        let train = self.data.train.clone();
        let mut order = Order::new(&train, self.options.seed);
        while self.state.steps < end {
            let batch = self.options.batch_size;
            let from = self.state.steps * batch;
            let rows: Vec<usize> = (from..from + batch).map(|n| order.row(n)).collect();
            let loss = self.step(&rows)?;
            let steps = self.state.steps;
            let made = steps - first;
            let tokens = (made * batch * self.options.seq_len) as f64;
            let rate = tokens / started.elapsed().as_secs_f64();
            progress.step(format!("loss {loss:.4}, {rate:.0} tokens/s"));
            if steps.is_multiple_of(self.options.eval_every) {
                self.evaluate(Some((progress.bar(), loss, rate)))?;
            }
            if steps.is_multiple_of(self.options.checkpoint_every) {
                self.save_checkpoint()?;
            }
        }
        progress.end();
        if self.last.0 != self.state.steps {
            self.evaluate(None)?;
        }
        self.save_checkpoint()?;
        self.folder.save_weights(&*self.model)
    }

    /// Returns the figures of the run so far, and writes them to `report.json`; to a head's `config.json` how often its
    /// guesses were right.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be written.
    pub fn report(&self, costs: Option<Costs>) -> Result<DistillReport> {
        let report = DistillReport {
            method: self.options.method,
            objective: self.options.objective,
            steps: self.state.steps,
            of_steps: self.options.steps,
            held_out_rows: self.data.held_out.len(),
            untrained: first(&self.state.untrained),
            trained: first(&self.last.1),
            follows_paths: self.model.follows_paths(),
            depths: match self.options.method {
                Method::Draft => Vec::new(),
                Method::Eagle3 | Method::Parallel => self.last.1.clone(),
            },
            costs,
        };
        output::write_json(&self.folder.path().join("report.json"), &report)?;
        if let Some(rates) = report.rates() {
            self.folder.write_rates(&rates)?;
        }
        Ok(report)
    }

    /// Makes one step over `rows`. Returns the mean loss before it, in nats per position.
    fn step(&mut self, rows: &[usize]) -> Result<f64> {
        let (mut gradients, mut loss) = (ByName::new(), 0.0);
        let overlap = self.options.overlap_share as f32;
        let work = |logits: Tensor, targets: TrainTargets| {
            let (figures, slopes) = backward(&logits, &targets, overlap)?;
            let losses = figures.iter().zip(&targets.weights);
            let loss: f64 = losses.map(|(f, w)| f64::from(f.loss) * f64::from(*w)).sum();
            Ok((loss, slopes))
        };
        self.passes(rows, Some(self.state.steps), work, |(part, slopes)| {
            loss += part;
            accumulate(&mut gradients, self.model.vars(), slopes)
        })?;
        let norm = global_norm(&gradients)?;
        let step = self.state.steps;
        if !loss.is_finite() || !norm.is_finite() {
            return Err(self.not_finite(step + 1));
        }
        clip(&mut gradients, norm, self.options.clip)?;
        let options = self.options;
        let rate = learning_rate(options.learning_rate, step, options.warmup(), options.steps);
        self.optimizer.step(self.model.vars(), &gradients, rate)?;
        self.state.steps += 1;
        Ok(loss)
    }

    fn not_finite(&self, step: usize) -> Error {
        let kept = if self.folder.has_checkpoint() {
            "the last checkpoint is kept"
        } else {
            "there is no checkpoint yet"
        };
        Error::setup(format!(
            "the loss is not finite at step {step}: lower --learning-rate or --clip, or raise --warmup; {kept}"
        ))
    }

    /// Evaluates the held-out rows and prints the figures.
    fn evaluate(&mut self, training: Option<(&ProgressBar, f64, f64)>) -> Result<()> {
        let (depths, _) = self.model.depths();
        let mut sums: Vec<LossSums> = (0..depths).map(|_| LossSums::default()).collect();
        let work = |logits: Tensor, targets: TrainTargets| {
            Ok((measure(&logits, &targets.soft, None)?.0, targets.counted))
        };
        self.passes(&self.data.held_out, None, work, |(figures, counted)| {
            let positions = figures.len() / depths;
            let parts = figures.chunks(positions).zip(counted.chunks(positions));
            for (sums, (figures, counted)) in sums.iter_mut().zip(parts) {
                sums.add(figures, counted);
            }
            Ok(())
        })?;
        let step = self.state.steps;
        self.last = (step, sums.iter().map(LossSums::mean).collect());
        let line = report::line(&self.last.1, step, self.options.objective);
        match training {
            None => say(line),
            Some((bar, loss, rate)) => {
                bar.suspend(|| {
                    say(format_args!(
                        "{line}; training {loss:.4}, {rate:.0} tokens/s"
                    ))
                });
            }
        }
        if self.last.1.iter().any(|depth| !depth.loss.is_finite()) {
            return Err(self.not_finite(step));
        }
        Ok(())
    }

    fn save_checkpoint(&self) -> Result<()> {
        self.folder
            .save_checkpoint(&*self.model, &self.optimizer, &self.state)
    }

    /// Calls `each` with the results of `work` for the student's logits and targets of each micro-batch of `rows` in
    /// step `step`, in order; `None` = in an evaluation. Rows for which a GPU has no memory are computed again, fewer at
    /// once.
    fn passes<R: Send>(
        &self,
        rows: &[usize],
        step: Option<usize>,
        work: impl Fn(Tensor, TrainTargets) -> Result<R> + Sync,
        mut each: impl FnMut(R) -> Result<()>,
    ) -> Result<()> {
        let mut rest = rows;
        while !rest.is_empty() {
            let size = self.micro_batch.rows();
            let batches = rest.chunks(size).take(self.workers.len());
            let batches: Vec<&[usize]> = batches.collect();
            let results = self.workers.map(&batches, |rows| {
                let batch = self.batch(rows, step)?;
                let targets = self.targets_of(rows, &batch)?;
                work(self.model.logits(&batch)?, targets)
            });
            for (rows, result) in batches.iter().zip(results) {
                match result {
                    Ok(result) => each(result)?,
                    Err(error) => {
                        self.micro_batch.halve(rows.len(), error, &self.device)?;
                        break;
                    }
                }
                rest = &rest[rows.len()..];
            }
        }
        Ok(())
    }

    /// Returns the student's input for `rows` in step `step`; `None` = in an evaluation.
    fn batch(&self, rows: &[usize], step: Option<usize>) -> Result<TrainBatch<'_>> {
        let len = self.options.seq_len;
        let features = match &self.data.features {
            Some(features) => {
                let positions = len.saturating_sub(self.model.target_offset());
                Some(features.read(rows, positions)?.to_device(&self.device)?)
            }
            None => None,
        };
        let tokens = rows.iter().map(|&row| &self.data.rows[row].tokens[..]);
        let draw = step.map_or(0, |step| mix(self.options.seed ^ POSITIONS) ^ step as u64);
        let random = |row: usize| mix(mix(draw) ^ row as u64);
        let positions = |&row: &usize| self.model.positions(len, random(row));
        let positions: Vec<Vec<usize>> = rows.iter().map(positions).collect();
        // An evaluation measures all depths at all positions.
        let later = step.and_then(|_| {
            let later = rows.iter().zip(&positions);
            later
                .map(|(&row, positions)| self.model.later_positions(positions, random(row)))
                .collect()
        });
        Ok(TrainBatch {
            tokens: tokens.collect(),
            features,
            positions,
            later,
        })
    }

    /// Returns the student's targets at the positions of `batch`, which has `rows`. Where the distribution would be
    /// after the end of the row there is no mass, and so no loss.
    fn targets_of(&self, rows: &[usize], batch: &TrainBatch<'_>) -> Result<TrainTargets> {
        let len = self.options.seq_len;
        let ((depths, decay), target_offset) = (self.model.depths(), self.model.target_offset());
        let all: f64 = (0..depths).map(|depth| decay.powi(depth as i32)).sum();
        let (mut places, mut weights, mut counted) = (Vec::new(), Vec::new(), Vec::new());
        for depth in 0..depths {
            let positions = match &batch.later {
                Some(later) if depth > 0 => later,
                _ => &batch.positions,
            };
            let in_row = positions.first().map_or(0, Vec::len);
            let scale = 1.0 / (all * (self.options.batch_size * in_row) as f64);
            for (number, (&row, positions)) in rows.iter().zip(positions).enumerate() {
                for position in positions {
                    let at = position + target_offset + depth;
                    let place = if at < len {
                        number * len + at
                    } else {
                        rows.len() * len
                    };
                    places.push(place as u32);
                    counted.push(at < len && self.data.rows[row].counted[at]);
                }
            }
            weights.resize(places.len(), (scale * decay.powi(depth as i32)) as f32);
        }
        let places = Tensor::new(places, &self.device)?;
        let soft = self.soft(rows)?;
        let taken = |values: &Tensor| values.pad_with_zeros(0, 0, 1)?.index_select(&places, 0);
        Ok(TrainTargets {
            soft: Soft {
                ids: taken(&soft.ids)?,
                probs: taken(&soft.probs)?,
                tail: taken(&soft.tail)?,
            },
            weights,
            counted,
        })
    }

    /// The distributions to learn at all positions of `rows`.
    fn soft(&self, rows: &[usize]) -> Result<Soft> {
        let soft = match (&self.data.soft, self.options.objective) {
            (Some(soft), Objective::Kl) => soft.read(rows, &self.device)?,
            _ => {
                let next = |&row: &usize| self.data.rows[row].tokens[1..].to_vec();
                let tokens: Vec<u32> = rows.iter().flat_map(next).collect();
                Soft::one_hot(&tokens, &self.device)?
            }
        };
        match &self.data.vocabulary {
            Some(vocabulary) => vocabulary.restrict(soft),
            None => Ok(soft),
        }
    }
}

/// The figures of the first drafted token.
fn first(depths: &[Evaluation]) -> Evaluation {
    depths.first().copied().unwrap_or_default()
}
