//! The models in training: a draft model, or a head that reads the target's hidden states.

use super::optimizer::ByName;
use candle_core::{Device, Tensor, Var};
use foretoken_core::error::{Error, Result};
use foretoken_model::names;
use std::collections::HashMap;

/// Some rows of the corpus, as a student reads them.
pub struct TrainBatch<'a> {
    /// The `seq_len + 1` ids of each row.
    pub tokens: Vec<&'a [u32]>,
    /// The target's hidden states, `[rows * positions, taps * hidden_size]`, f32; `None` for students
    /// that do not read them.
    pub features: Option<Tensor>,
    /// The [positions](Student::positions) of each row.
    pub positions: Vec<Vec<usize>>,
    /// The positions of each row at the depths after the first, if they are [others](Student::later_positions) than
    /// at the first; each row has as many.
    pub later: Option<Vec<Vec<usize>>>,
}

impl TrainBatch<'_> {
    /// The target's hidden states, and the number of positions of a row that have some.
    ///
    /// # Errors
    /// If there are none.
    pub fn known(&self) -> Result<(&Tensor, usize)> {
        let features = self.features.as_ref();
        let features =
            features.ok_or_else(|| Error::internal("a head reads the target's hidden states"))?;
        Ok((features, features.dim(0)? / self.tokens.len().max(1)))
    }
}

/// A model in training. At some positions of a row it predicts [`Student::depths`] tokens, one after the
/// other.
pub trait Student: Send + Sync {
    /// The variables, by the names of the checkpoint.
    fn vars(&self) -> &ByName<Var>;

    /// The weights in the format for serving.
    ///
    /// # Errors
    /// If the device fails.
    fn weights(&self) -> Result<HashMap<String, Tensor>>;

    /// Number of tokens that a position predicts, and how much less the loss of each counts than that of
    /// the one before it.
    fn depths(&self) -> (usize, f64) {
        (1, 1.0)
    }

    /// Whether it predicts each token with those before it, as they are in the row.
    fn follows_paths(&self) -> bool {
        true
    }

    /// The position of a row, from 0, whose next-token distribution the first position predicts. The rows
    /// have that many positions less, and the prediction at depth `s` of position `i` is about the
    /// distribution at `i + target_offset + s`.
    fn target_offset(&self) -> usize {
        0
    }

    /// The positions, ascending, at which it predicts something in a row of `len` tokens. Their number
    /// depends on `len` alone; if there is a choice, the random number makes it.
    fn positions(&self, len: usize, _random: u64) -> Vec<usize> {
        (0..len.saturating_sub(self.target_offset())).collect()
    }

    /// The subset of `positions` at which a step of training predicts the tokens of the depths after the first;
    /// `None` = all. Its length depends on that of `positions` alone.
    fn later_positions(&self, _positions: &[usize], _random: u64) -> Option<Vec<usize>> {
        None
    }

    /// The logits, `[depths * rows * positions, outputs]`: depth after depth. A column that `outputs` does
    /// not have is an id that the student never predicts.
    ///
    /// # Errors
    /// If the device fails.
    fn logits(&self, batch: &TrainBatch<'_>) -> Result<Tensor>;
}

/// The weights in the format for serving: the variables and, of a student that predicts `ids` alone, `d2t`, which is
/// the id of each output row minus the row's number, as in EAGLE-3.
///
/// # Errors
/// If the device fails.
pub fn published(vars: &ByName<Var>, ids: Option<&[u32]>) -> Result<HashMap<String, Tensor>> {
    let vars = vars.iter();
    let mut weights: HashMap<String, Tensor> = vars
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect();
    if let Some(ids) = ids {
        let rows = (0..).zip(ids);
        let offsets: Vec<i64> = rows.map(|(row, &id)| i64::from(id) - row).collect();
        let offsets = Tensor::new(offsets, &Device::Cpu)?;
        weights.insert(names::OUTPUT_IDS.into(), offsets);
    }
    Ok(weights)
}

/// Replaces all weights by those that `weight` returns.
///
/// # Errors
/// `Setup`, if a weight is missing or has another shape.
pub fn set(vars: &ByName<Var>, mut weight: impl FnMut(&str) -> Option<Tensor>) -> Result<()> {
    for (name, var) in vars {
        match weight(name) {
            Some(saved) if saved.dims() == var.dims() => var.set(&saved)?,
            _ => {
                return Err(Error::setup(format!(
                    "tensor {name} is missing or does not have the shape that the draft's config asks for"
                )));
            }
        }
    }
    Ok(())
}
