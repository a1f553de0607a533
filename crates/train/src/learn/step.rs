//! One step of a head that learns: the trainer's, over examples of different lengths.

use super::gain::Score;
use crate::head::{DECAY, TrainHead};
use crate::loss::{DraftMetrics, Soft, TrainTargets, backward, measure};
use crate::optimizer::{AdamW, ByName, accumulate, clip, global_norm};
use crate::student::{Student, TrainBatch};
use crate::vocabulary::DraftVocabulary;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::Result;
use foretoken_engine::spec::TrainingExample;

const WEIGHT_DECAY: f64 = 0.01;
/// Largest norm of all gradients together.
const CLIP: f64 = 1.0;
/// Steps in which the rate rises: AdamW's first steps know little of the gradients' size.
const WARMUP: usize = 10;

/// A copy of the head in training.
pub struct Candidate {
    pub head: TrainHead,
    vocabulary: DraftVocabulary,
    optimizer: AdamW,
    rate: f64,
    /// Sums of the gradients of the examples since the last step.
    gradients: ByName<Tensor>,
}

impl Candidate {
    /// Begins with `head`, whose ids `vocabulary` has; `rate` is the learning rate.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(head: TrainHead, vocabulary: DraftVocabulary, rate: f64) -> Result<Self> {
        Ok(Self {
            optimizer: AdamW::new(head.vars(), WEIGHT_DECAY)?,
            head,
            vocabulary,
            rate,
            gradients: ByName::new(),
        })
    }

    /// Begins again with other `weights`.
    ///
    /// # Errors
    /// The errors of [`Candidate::new`].
    pub fn restart(&mut self, weights: &ByName<Tensor>) -> Result<()> {
        self.head = self.head.with(weights)?;
        self.optimizer = AdamW::new(self.head.vars(), WEIGHT_DECAY)?;
        self.gradients.clear();
        Ok(())
    }

    /// Adds what `example` gives to the gradients of the next step.
    ///
    /// # Errors
    /// If the device fails.
    pub fn learn(&mut self, example: &TrainingExample) -> Result<()> {
        let targets = self.targets(example)?;
        let logits = self.head.logits(&batch(example)?)?;
        let (_, slopes) = backward(&logits, &targets, 0.0)?;
        accumulate(&mut self.gradients, self.head.vars(), slopes)
    }

    /// Makes the step. Returns `false`, and makes no step, if gradients are not finite: then the candidate should begin
    /// again.
    ///
    /// # Errors
    /// If the device fails.
    pub fn step(&mut self) -> Result<bool> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let norm = global_norm(&gradients)?;
        if !norm.is_finite() {
            return Ok(false);
        }
        clip(&mut gradients, norm, CLIP)?;
        let warmth = (self.optimizer.steps + 1) as f64 / WARMUP as f64;
        let rate = self.rate * warmth.min(1.0);
        self.optimizer.step(self.head.vars(), &gradients, rate)?;
        Ok(true)
    }

    /// Returns the worth that drafts of `head` would have at the positions of `example`. A draft token counts if the
    /// tokens before it in its draft stand. In a greedy text a draft token stands or not; in a sampled one it stands
    /// with the probability that the head gives it.
    ///
    /// # Errors
    /// If the device fails.
    pub fn score(&self, head: &TrainHead, example: &TrainingExample) -> Result<Score> {
        let targets = self.targets(example)?;
        let logits = head.logits(&batch(example)?)?.detach();
        let (figures, _) = measure(&logits, &targets.soft, None)?;
        let positions = example.tokens.len() - 2;
        let stands = |figures: &DraftMetrics| {
            if example.is_sampled {
                figures.overlap[0]
            } else {
                figures.agrees
            }
        };
        let mut score = Score {
            accepted: 0.0,
            positions: 0.0,
        };
        for position in (0..positions).filter(|&position| targets.counted[position]) {
            score.positions += 1.0;
            let mut path = 1.0;
            let passes = figures
                .chunks(positions)
                .zip(targets.counted.chunks(positions));
            for (figures, counted) in passes {
                path *=
                    f64::from(stands(&figures[position])) * f64::from(u8::from(counted[position]));
                score.accepted += path;
            }
        }
        Ok(score)
    }

    /// The targets of the head's passes in an example.
    fn targets(&self, example: &TrainingExample) -> Result<TrainTargets> {
        let (passes, _) = self.head.depths();
        let (len, positions) = (example.tokens.len(), example.tokens.len() - 2);
        let (mut tokens, mut weights, mut counted) = (Vec::new(), Vec::new(), Vec::new());
        for pass in 0..passes {
            let weight = DECAY.powi(pass as i32) / positions as f64;
            for position in 0..positions {
                // At a position the head knows the next token and predicts the tokens after it. The target did not
                // draw what the user wrote, so those tokens do not count.
                let at = position + 2 + pass;
                counted.push(at < len && at >= example.drawn);
                tokens.push(example.tokens[at.min(len - 1)]);
                weights.push(weight as f32);
            }
        }
        let mut soft = Soft::one_hot(&tokens, &Device::Cpu)?;
        let mass: Vec<f32> = counted.iter().map(|&c| f32::from(u8::from(c))).collect();
        soft.probs = Tensor::from_vec(mass, soft.probs.dims(), &Device::Cpu)?;
        Ok(TrainTargets {
            soft: self.vocabulary.restrict(soft)?,
            weights,
            counted,
        })
    }
}

fn batch(example: &TrainingExample) -> Result<TrainBatch<'_>> {
    let positions = example.tokens.len() - 2;
    let dims = (positions, example.states.len() / positions);
    let states = Tensor::from_slice(&example.states, dims, &Device::Cpu)?;
    Ok(TrainBatch {
        tokens: vec![&example.tokens],
        features: Some(states.to_dtype(DType::F32)?),
        positions: Vec::new(),
        later: None,
    })
}
