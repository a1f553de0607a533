//! The divergence between the next-token distributions of draft and target, and its gradient in closed
//! form.
//!
//! The target's distribution p is known in part: the probabilities of the top ids separately, and those of all others
//! only as a sum, the tail. With t the mass of the tail, the loss of a position is `sum_top p (ln p - ln q) + t_p (ln
//! t_p - ln t_q)`: KL(p || q) after merging the tail's ids, which is a lower bound of the full divergence. By the
//! chain rule over a softmax, its gradient is `q - p~`, where `p~` is p on the top ids and, on the tail, q scaled to
//! the mass `t_p`. Cross-entropy on a token is the case of one id of mass 1 and an empty tail. Ids outside the
//! draft's vocabulary are left out of p: the masses then sum to s < 1, and the gradient scales q to s.

use super::ops::{with_slices, with_slope};
use candle_core::backprop::GradStore;
use candle_core::{D, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::float::exp;

/// The logit of the column for all ids outside the draft's vocabulary: q is 0 there, but its logarithm
/// is finite.
pub const NEVER: f64 = -1e4;

/// Keeps logarithms and divisions finite if a mass is 0; far below the precision of f32 sums.
const TINY: f32 = 1e-30;

/// The distributions that a draft should have at some positions.
#[derive(Debug, Clone)]
pub struct Soft {
    /// `[positions, k]`, u32: the most probable ids, best first.
    pub ids: Tensor,
    /// `[positions, k]`, f32: their probabilities.
    pub probs: Tensor,
    /// `[positions, 1]`, f32: the mass of all other ids.
    pub tail: Tensor,
}

impl Soft {
    /// All mass on one token per position: the targets of cross-entropy.
    pub fn one_hot(tokens: &[u32], device: &Device) -> Result<Self> {
        let dims = (tokens.len(), 1);
        let probs = Tensor::ones(dims, candle_core::DType::F32, device)?;
        Ok(Self {
            ids: Tensor::from_slice(tokens, dims, device)?,
            tail: probs.zeros_like()?,
            probs,
        })
    }
}

/// The quality of a draft's distribution at one position; see [`Comparison`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DraftMetrics {
    /// Nats.
    pub loss: f32,
    /// The lower and the upper bound.
    pub overlap: [f32; 2],
    /// 1 or 0.
    pub agrees: f32,
    /// Number of ids that the draft thinks likelier than the target's most probable one; `usize::MAX` if
    /// it does not have that.
    pub rank: usize,
}

impl DraftMetrics {
    /// Without any merit if the loss is not finite: `min(p, NaN)` is p, so that a draft whose logits are no numbers
    /// would seem perfect.
    fn checked(self) -> Self {
        if self.loss.is_finite() {
            return self;
        }
        Self {
            loss: self.loss,
            rank: usize::MAX,
            ..Self::default()
        }
    }
}

/// The weights of the loss at the positions of a batch.
#[derive(Debug, Clone, Copy)]
pub struct LossWeights<'a> {
    /// The weight of each position.
    pub positions: &'a [f32],
    /// From 0 to 1: the share of the rejected mass, `1 - sum min(p, q)`, in the loss; the rest is the
    /// divergence.
    pub overlap: f32,
}

/// The targets of a student for some rows. The positions are `[depths, rows, positions of a row]`.
pub struct TrainTargets {
    /// The distributions to learn.
    pub soft: Soft,
    /// Weight of the loss of each position.
    pub weights: Vec<f32>,
    /// Whether evaluation counts each position.
    pub counted: Vec<bool>,
}

/// The figures of all positions and, with weights, the gradient of the weighted sum of losses by the
/// logits. Ids for which `logits`, `[positions, outputs]`, have no column must have no mass, and positions that
/// do not count must have none.
///
/// # Errors
/// If the device fails.
pub fn measure(
    logits: &Tensor,
    soft: &Soft,
    weights: Option<LossWeights<'_>>,
) -> Result<(Vec<DraftMetrics>, Option<Tensor>)> {
    if !logits.device().is_cpu() {
        return measure_on_device(logits, soft, weights);
    }
    // One pass over a row while it is in the cache; the ops of [`Comparison`] would make a dozen over all.
    let (positions, outputs) = logits.dims2()?;
    let k = soft.ids.dim(D::Minus1)?;
    let ids = soft.ids.flatten_all()?.to_vec1::<u32>()?;
    let probs = soft.probs.flatten_all()?.to_vec1::<f32>()?;
    let tails = soft.tail.flatten_all()?.to_vec1::<f32>()?;
    // Without weights, one row of scratch is enough.
    let rows = if weights.is_some() { positions } else { 1 };
    let mut slopes = vec![0f32; rows * outputs];
    let mut figures = Vec::with_capacity(positions);
    with_slices([&logits.detach()], |[logits]| {
        for (at, logits) in logits.chunks_exact(outputs).enumerate() {
            let slope = &mut slopes[at % rows * outputs..][..outputs];
            let wanted = Wanted {
                ids: &ids[at * k..(at + 1) * k],
                probs: &probs[at * k..(at + 1) * k],
                tail: tails[at],
            };
            let weight = weights.map(|w| (w.positions[at], w.overlap));
            figures.push(wanted.compare(logits, weight, slope).checked());
        }
    })?;
    let slopes = weights.map(|_| Tensor::from_vec(slopes, (positions, outputs), &Device::Cpu));
    Ok((figures, slopes.transpose()?))
}

/// The figures of all positions, and the gradients of the weighted sum of losses by all that `logits` come from. `overlap`
/// is that of [`LossWeights`].
///
/// # Errors
/// If the device fails.
pub fn backward(
    logits: &Tensor,
    targets: &TrainTargets,
    overlap: f32,
) -> Result<(Vec<DraftMetrics>, GradStore)> {
    let positions = &targets.weights;
    let weights = LossWeights { positions, overlap };
    let (figures, slope) = measure(logits, &targets.soft, Some(weights))?;
    let slope = slope.ok_or_else(|| Error::internal("a gradient was wanted"))?;
    // The slope is known in closed form, so that the graph of softmax and logarithms is not needed.
    let loss = if logits.device().is_cpu() {
        with_slope(logits, slope)?
    } else {
        (logits * slope)?.sum_all()?
    };
    Ok((figures, loss.backward()?))
}

/// [`measure`] on a GPU.
fn measure_on_device(
    logits: &Tensor,
    soft: &Soft,
    weights: Option<LossWeights<'_>>,
) -> Result<(Vec<DraftMetrics>, Option<Tensor>)> {
    let (count, outputs) = logits.dims2()?;
    // A column for the ids that `logits` have no column for.
    let never = Tensor::full(NEVER as f32, (count, 1), logits.device())?;
    let compared = Comparison::new(&Tensor::cat(&[&logits.detach(), &never], 1)?, soft)?;
    let list = |figure: Tensor| figure.to_vec1::<f32>();
    let [lower, upper] = compared.overlap()?;
    let (loss, agrees) = (list(compared.loss()?)?, list(compared.agrees()?)?);
    let overlaps = list(lower)?.into_iter().zip(list(upper)?);
    let figures = (loss.into_iter().zip(agrees).zip(overlaps))
        .zip(list(compared.rank()?)?)
        .map(|(((loss, agrees), (lower, upper)), rank)| DraftMetrics {
            loss,
            overlap: [lower, upper],
            agrees,
            rank: rank as usize,
        })
        .map(DraftMetrics::checked)
        .collect();
    let slope = match weights {
        None => None,
        Some(LossWeights { positions, overlap }) => {
            let weights = Tensor::from_slice(positions, (positions.len(), 1), logits.device())?;
            let (kl, tv) = (compared.gradient()?, compared.overlap_gradient()?);
            let share = f64::from(overlap);
            let both = ((kl * (1.0 - share))? + (tv * share)?)?;
            let slope = both.broadcast_mul(&weights)?;
            Some(slope.narrow(1, 0, outputs)?.contiguous()?)
        }
    };
    Ok((figures, slope))
}

/// One position of a [`Soft`].
struct Wanted<'a> {
    ids: &'a [u32],
    probs: &'a [f32],
    tail: f32,
}

impl Wanted<'_> {
    /// The figures of `logits`; with the position's weight and the share of the rejected mass, `slope`
    /// becomes the weighted gradient, otherwise scratch.
    fn compare(
        &self,
        logits: &[f32],
        weight: Option<(f32, f32)>,
        slope: &mut [f32],
    ) -> DraftMetrics {
        let mass = self.probs.iter().sum::<f32>() + self.tail;
        if mass == 0.0 {
            slope.fill(0.0);
            return DraftMetrics {
                rank: usize::MAX,
                ..DraftMetrics::default()
            };
        }
        let highest = largest(logits);
        for (weight, logit) in slope.iter_mut().zip(logits) {
            *weight = exp(logit - highest);
        }
        let known = |&(&id, _): &(&u32, &f32)| (id as usize) < logits.len();
        let top = || self.ids.iter().zip(self.probs).filter(known);
        let sum = total(slope);
        // A sum, not 1 minus the top ids: that would lose a small tail to rounding.
        top().for_each(|(&id, _)| slope[id as usize] = 0.0);
        let q_tail = total(slope) / sum;
        let ln_sum = sum.ln();
        let mut figures = DraftMetrics::default();
        let scale = mass - self.tail / q_tail.max(TINY);
        let ln_q = |id: u32| logits[id as usize] - highest - ln_sum;
        let misses_tail = f32::from(q_tail < self.tail);
        let mut missing = q_tail * misses_tail;
        if let Some((weight, overlap)) = weight {
            // The mass of q where it is below p.
            let below = top().map(|(&id, &p)| (ln_q(id).exp(), p));
            missing += below.filter(|(q, p)| q < p).map(|(q, _)| q).sum::<f32>();
            let of_tail = (1.0 - overlap) * scale + overlap * (missing - misses_tail);
            let factor = of_tail * weight / sum;
            slope.iter_mut().for_each(|q| *q *= factor);
        }
        for (&id, &p) in top() {
            let ln_q = ln_q(id);
            let q = ln_q.exp();
            figures.loss += p * (p.max(TINY).ln() - ln_q);
            figures.overlap[0] += p.min(q);
            if let Some((weight, overlap)) = weight {
                let of_overlap = q * (missing - f32::from(q < p));
                slope[id as usize] =
                    ((1.0 - overlap) * (q * mass - p) + overlap * of_overlap) * weight;
            }
        }
        let tail = self.tail.max(TINY).ln() - q_tail.max(TINY).ln();
        figures.loss += self.tail * tail;
        figures.overlap[1] = figures.overlap[0] + self.tail.min(q_tail);
        // If logits are equal, the first counts, as in sampling.
        let best = logits.iter().position(|&logit| logit == highest);
        let wanted = self.ids.first().map(|&id| id as usize);
        figures.agrees = f32::from(best == wanted);
        figures.rank = match wanted.and_then(|id| logits.get(id)) {
            Some(wanted) => logits.iter().filter(|&logit| logit > wanted).count(),
            None => usize::MAX,
        };
        figures
    }
}

/// Number of partial results of a pass over a row, so that the compiler can use vector registers.
const LANES: usize = 16;

fn largest(values: &[f32]) -> f32 {
    let mut lanes = [f32::MIN; LANES];
    let parts = values.chunks_exact(LANES);
    let rest = parts.remainder().iter().copied().fold(f32::MIN, f32::max);
    for part in parts {
        for (lane, &value) in lanes.iter_mut().zip(part) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.into_iter().fold(rest, f32::max)
}

fn total(values: &[f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let parts = values.chunks_exact(LANES);
    let rest: f32 = parts.remainder().iter().sum();
    for part in parts {
        for (lane, value) in lanes.iter_mut().zip(part) {
            *lane += value;
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Compares a draft's distributions with the target's at `positions` positions.
pub struct Comparison<'a> {
    soft: &'a Soft,
    /// `[positions, vocab]`: the draft's probabilities.
    q: Tensor,
    /// `[positions, k]`: the draft's probabilities of the top ids, and their logarithms.
    q_top: Tensor,
    ln_q_top: Tensor,
    /// `[positions, 1]`: the draft's mass outside the top ids.
    q_tail: Tensor,
    /// `[positions, 1]`: the target's mass on the ids of the draft's vocabulary.
    in_draft_vocab: Tensor,
}

impl<'a> Comparison<'a> {
    /// `logits` are the draft's, `[positions, vocab]`, f32. They are detached from their graph.
    pub fn new(logits: &Tensor, soft: &'a Soft) -> Result<Self> {
        let logits = logits.detach();
        let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)?;
        let weights = shifted.exp()?;
        let sum = weights.sum_keepdim(D::Minus1)?;
        let q = weights.broadcast_div(&sum)?;
        let ln_q_top = shifted
            .gather(&soft.ids, D::Minus1)?
            .broadcast_sub(&sum.log()?)?;
        // A sum, not 1 minus the top ids: that would lose a small tail to rounding.
        let rest = q.scatter(&soft.ids, &soft.probs.zeros_like()?, D::Minus1)?;
        Ok(Self {
            soft,
            in_draft_vocab: (soft.probs.sum_keepdim(D::Minus1)? + &soft.tail)?,
            q_top: ln_q_top.exp()?,
            ln_q_top,
            q_tail: rest.sum_keepdim(D::Minus1)?,
            q,
        })
    }

    /// The loss of each position, `[positions]`, in nats.
    pub fn loss(&self) -> Result<Tensor> {
        let (p, tail) = (&self.soft.probs, &self.soft.tail);
        let top = (p * (ln(p)? - &self.ln_q_top)?)?.sum(D::Minus1)?;
        let rest = (tail * (ln(tail)? - ln(&self.q_tail)?)?)?;
        Ok((top + rest.squeeze(D::Minus1)?)?)
    }

    /// The gradient of the loss by the logits, `[positions, vocab]`.
    pub fn gradient(&self) -> Result<Tensor> {
        let scale = (&self.soft.tail / self.q_tail.clamp(TINY, f32::MAX)?)?;
        let rest = self.q.broadcast_mul(&(&self.in_draft_vocab - scale)?)?;
        let top = (self.q_top.broadcast_mul(&self.in_draft_vocab)? - &self.soft.probs)?;
        Ok(rest.scatter(&self.soft.ids, &top, D::Minus1)?)
    }

    /// The gradient of `1 - sum_x min(p(x), q(x))` by the logits, `[positions, vocab]`, with the tail as one
    /// id: with m the mass of q where it is below p, that of an id is `q (m - 1)` if its q is below its p,
    /// otherwise `q m`.
    pub fn overlap_gradient(&self) -> Result<Tensor> {
        let float = self.q.dtype();
        let below = self.q_top.lt(&self.soft.probs)?.to_dtype(float)?;
        let tail_below = self.q_tail.lt(&self.soft.tail)?.to_dtype(float)?;
        let missing = (&self.q_top * &below)?.sum_keepdim(D::Minus1)?;
        let missing = (missing + (&self.q_tail * &tail_below)?)?;
        let top = (&self.q_top * below.neg()?.broadcast_add(&missing)?)?;
        let rest = self.q.broadcast_mul(&(&missing - tail_below)?)?;
        Ok(rest.scatter(&self.soft.ids, &top, D::Minus1)?)
    }

    /// The lower and the upper bound of `sum_x min(p(x), q(x))`, the probability that a draft token
    /// sampled from q is accepted (Leviathan et al. 2023, Corollary 3.6), `[positions]` each: without the
    /// tail, and with the tail as one id, although p and q may differ within it.
    pub fn overlap(&self) -> Result<[Tensor; 2]> {
        let top = self.soft.probs.minimum(&self.q_top)?.sum(D::Minus1)?;
        let rest = self.soft.tail.minimum(&self.q_tail)?;
        let all = (&top + rest.squeeze(D::Minus1)?)?;
        Ok([top, all])
    }

    /// Number of ids that the draft thinks likelier than the target's most probable one, f32,
    /// `[positions]`.
    pub fn rank(&self) -> Result<Tensor> {
        let wanted = self.soft.ids.narrow(D::Minus1, 0, 1)?;
        let wanted = self.q.gather(&wanted.contiguous()?, D::Minus1)?;
        let likelier = self.q.broadcast_gt(&wanted)?;
        Ok(likelier.to_dtype(candle_core::DType::F32)?.sum(D::Minus1)?)
    }

    /// Whether draft and target have the same most probable id: 1 or 0, f32, `[positions]`.
    pub fn agrees(&self) -> Result<Tensor> {
        let best = self.q.argmax(D::Minus1)?;
        let wanted = self.soft.ids.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1)?;
        Ok(best.eq(&wanted)?.to_dtype(candle_core::DType::F32)?)
    }
}

fn ln(mass: &Tensor) -> candle_core::Result<Tensor> {
    mass.clamp(TINY, f32::MAX)?.log()
}

#[cfg(test)]
mod tests;
