//! The training loop: rows, forward, loss, backward, step, with evaluations and checkpoints in between.

use super::corpus::{Order, Row};
use super::loss::{Comparison, Soft};
use super::model::TrainModel;
use super::optimizer::{AdamW, Named, accumulate, clip, global_norm, learning_rate};
use super::output::{self, OutputFolder, State};
use super::report::{Evaluation, Report, Sums};
use super::targets::SoftTargets;
use super::vocabulary::Vocabulary;
use super::workers::Workers;
use super::{Objective, Options, bar, say};
use crate::error::{Error, Result};
use crate::kernels;
use crate::model::ModelConfig;
use candle_core::{Device, Tensor};
use indicatif::ProgressBar;
use serde_json::Value;
use std::time::Instant;

/// The data for training and evaluation.
pub struct Data {
    pub rows: Vec<Row>,
    /// Indices of rows.
    pub train: Vec<usize>,
    pub held_out: Vec<usize>,
    /// The draft's vocabulary; `None` = all ids.
    pub vocabulary: Option<Vocabulary>,
    /// `None` with cross-entropy.
    pub soft: Option<SoftTargets>,
}

/// The state of a run between two steps.
pub struct Trainer<'a> {
    options: &'a Options,
    data: Data,
    folder: &'a OutputFolder,
    device: Device,
    workers: Workers,
    model: TrainModel,
    optimizer: AdamW,
    state: State,
    /// The last evaluation, and the number of steps before it.
    last: (usize, Evaluation),
}

impl<'a> Trainer<'a> {
    /// A new run of a draft with configuration `draft`, or the run of the folder's checkpoint if
    /// `options.resume` is set.
    ///
    /// # Errors
    /// `Setup`, if the checkpoint is broken or its run had other `settings`.
    pub fn new(
        options: &'a Options,
        draft: ModelConfig,
        settings: Value,
        data: Data,
        folder: &'a OutputFolder,
        device: Device,
    ) -> Result<Self> {
        let outputs = data.vocabulary.as_ref().map(Vocabulary::ids);
        let model = TrainModel::new(draft, outputs, options.seed, options.seq_len, &device)?;
        if let Some(folder) = &options.init_from {
            output::load_weights(folder, &model, &device)?;
        }
        let optimizer = AdamW::new(model.vars(), options.weight_decay)?;
        // A GPU is one queue, and one micro-batch keeps it busy.
        let workers = match device.is_cpu() {
            true => kernels::threads(),
            false => 1,
        };
        let mut trainer = Self {
            options,
            data,
            folder,
            device,
            workers: Workers::new(workers)?,
            model,
            optimizer,
            state: State {
                steps: 0,
                settings,
                untrained: Evaluation::default(),
            },
            last: (0, Evaluation::default()),
        };
        if options.resume && folder.has_checkpoint() {
            let settings = trainer.state.settings.clone();
            trainer.state = folder.load_checkpoint(
                &trainer.model,
                &mut trainer.optimizer,
                &trainer.device,
                |state| state.check(&settings),
            )?;
            say(&format!("resuming after step {}", trainer.state.steps));
            trainer.evaluate(None)?;
        } else {
            trainer.evaluate(None)?;
            trainer.state.untrained = trainer.last.1;
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
        let bar = bar(
            "{wide_bar} step {pos}/{len}, {msg}, {eta} left",
            end.saturating_sub(first) as u64,
        );
        let started = Instant::now();
        let train = self.data.train.clone();
        let mut order = Order::new(&train, self.options.seed);
        while self.state.steps < end {
            let batch = self.options.batch_size;
            let from = self.state.steps * batch;
            let rows: Vec<usize> = (from..from + batch).map(|n| order.row(n)).collect();
            let loss = self.step(&rows)?;
            let made = self.state.steps - first;
            let tokens = (made * batch * self.options.seq_len) as f64;
            let rate = tokens / started.elapsed().as_secs_f64();
            bar.set_message(format!("loss {loss:.4}, {rate:.0} tokens/s"));
            bar.inc(1);
            if self.state.steps.is_multiple_of(self.options.eval_every) {
                self.evaluate(Some((&bar, loss, rate)))?;
            }
            if self
                .state
                .steps
                .is_multiple_of(self.options.checkpoint_every)
            {
                self.save_checkpoint()?;
            }
        }
        bar.finish_and_clear();
        if self.last.0 != self.state.steps {
            self.evaluate(None)?;
        }
        self.save_checkpoint()?;
        self.folder.save_weights(&self.model)
    }

    /// Returns the figures of the run so far, and writes them to `report.json`.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be written.
    pub fn report(&self, cost_ratio: Option<f64>) -> Result<Report> {
        let report = Report {
            objective: self.options.objective,
            steps: self.state.steps,
            of_steps: self.options.steps,
            held_out_rows: self.data.held_out.len(),
            untrained: self.state.untrained,
            trained: self.last.1,
            cost_ratio,
        };
        output::write_json(&self.folder.path().join("report.json"), &report)?;
        Ok(report)
    }

    /// Makes one step over `rows`. Returns the mean loss before it, in nats per position.
    fn step(&mut self, rows: &[usize]) -> Result<f64> {
        let positions = (rows.len() * self.options.seq_len) as f64;
        let (mut gradients, mut loss) = (Named::new(), 0.0);
        for rows in rows.chunks(self.options.micro_batch * self.workers.len()) {
            let batches = self.batches(rows)?;
            let model = &self.model;
            let passes = self.workers.map(&batches, |(tokens, soft)| {
                let logits = model.forward(tokens)?;
                let compared = Comparison::new(&logits, soft)?;
                let loss = f64::from(compared.loss()?.sum_all()?.to_scalar::<f32>()?);
                // The derivative of this sum by the logits is the gradient in closed form, so the graph
                // of softmax and logarithms is not needed.
                let slope = (compared.gradient()? / positions)?;
                Ok((loss, (logits * slope)?.sum_all()?.backward()?))
            });
            for pass in passes {
                let (part, slopes) = pass?;
                loss += part;
                accumulate(&mut gradients, self.model.vars(), slopes)?;
            }
        }
        let (loss, norm) = (loss / positions, global_norm(&gradients)?);
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
        let kept = match self.folder.has_checkpoint() {
            true => "the last checkpoint is kept",
            false => "there is no checkpoint yet",
        };
        Error::setup(format!(
            "the loss is not finite at step {step}: lower --learning-rate or --clip, or raise --warmup; {kept}"
        ))
    }

    /// Evaluates the held-out rows and prints the figures.
    fn evaluate(&mut self, training: Option<(&ProgressBar, f64, f64)>) -> Result<()> {
        let mut sums = Sums::default();
        let at_once = self.options.micro_batch * self.workers.len();
        for rows in self.data.held_out.clone().chunks(at_once) {
            let batches = self.batches(rows)?;
            let model = &self.model;
            let passes = self.workers.map(&batches, |(tokens, soft)| {
                let compared = Comparison::new(&model.forward(tokens)?, soft)?;
                let [lower, upper] = compared.overlap()?;
                Ok([compared.loss()?, lower, upper, compared.agrees()?])
            });
            for (rows, figures) in rows.chunks(self.options.micro_batch).zip(passes) {
                let counted: Vec<bool> = rows
                    .iter()
                    .flat_map(|&row| self.data.rows[row].counted.iter().copied())
                    .collect();
                sums.add(figures?.each_ref(), &counted)?;
            }
        }
        let step = self.state.steps;
        self.last = (step, sums.mean());
        let line = self.last.1.line(step, self.options.objective);
        match training {
            None => say(&line),
            Some((bar, loss, rate)) => {
                bar.suspend(|| say(&format!("{line}; training {loss:.4}, {rate:.0} tokens/s")));
            }
        }
        if !self.last.1.loss.is_finite() {
            return Err(self.not_finite(step));
        }
        Ok(())
    }

    fn save_checkpoint(&self) -> Result<()> {
        self.folder
            .save_checkpoint(&self.model, &self.optimizer, &self.state)
    }

    /// Divides `rows` into micro-batches: the model's input tokens, and the distributions to learn.
    fn batches(&mut self, rows: &[usize]) -> Result<Vec<(Tensor, Soft)>> {
        rows.chunks(self.options.micro_batch)
            .map(|rows| Ok((self.tokens(rows)?, self.soft(rows)?)))
            .collect()
    }

    /// The input tokens of `rows`, `[rows, seq_len]`.
    fn tokens(&self, rows: &[usize]) -> Result<Tensor> {
        let len = self.options.seq_len;
        let seen = |&row: &usize| self.data.rows[row].tokens[..len].to_vec();
        let tokens: Vec<u32> = rows.iter().flat_map(seen).collect();
        Ok(Tensor::from_vec(tokens, (rows.len(), len), &self.device)?)
    }

    /// The distributions to learn at the positions of `rows`.
    fn soft(&mut self, rows: &[usize]) -> Result<Soft> {
        let soft = match (&mut self.data.soft, self.options.objective) {
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
