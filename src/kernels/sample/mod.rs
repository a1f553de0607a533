//! Computes distributions, tokens and verdicts where the logits are, so that logits never leave a GPU.
//!
//! The CPU implementation is `sampling` and `spec::verify`, which process row after row, and only
//! the rows that a verdict needs; the CUDA side processes all rows of a step at once and gives the
//! same tokens.

#[cfg(feature = "cuda")]
mod cuda;
mod race;

use candle_core::{Result, Tensor};

pub use race::{exponential, race};

/// Stands for a token if none can be chosen: the logits contain NaN or infinity, or all are minus
/// infinity.
pub const NO_TOKEN: u32 = u32::MAX;

/// A change of one logit `x` of one row: `x / repetition` if `x` is above 0, else `x * repetition`;
/// then minus `subtract`, plus `bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct RowAdjustment {
    pub row: u32,
    pub id: u32,
    pub repetition: f32,
    pub subtract: f32,
    pub bias: f32,
}

/// How a row of logits becomes a distribution; the fields are those of `SamplingParams`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct LogitsParams {
    /// Row of the logits.
    pub row: u32,
    /// 0 = all.
    pub top_k: u32,
    /// 0 = the largest logit is chosen.
    pub temperature: f32,
    pub min_p: f32,
    pub top_p: f32,
    /// The random number in [0, 1) with which a token is sampled.
    pub uniform: f64,
}

/// The distribution of one row, in device memory.
#[derive(Debug, Clone)]
pub struct DeviceRow {
    /// `[rows, vocab_size]` f32.
    probs: Tensor,
    row: usize,
}

/// Equal if they are the same memory.
impl PartialEq for DeviceRow {
    fn eq(&self, other: &Self) -> bool {
        self.probs.id() == other.probs.id() && self.row == other.row
    }
}

impl DeviceRow {
    /// Copies the probabilities, `[vocab_size]`, to the host.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self) -> Result<Vec<f32>> {
        self.probs.get(self.row)?.to_vec1()
    }
}

/// A drafted token, the random number that decides about it, and the distribution it was drawn from;
/// `None` = it was not drawn from a model.
#[derive(Debug, Clone, Copy)]
pub struct Node<'a> {
    pub token: u32,
    pub uniform: f64,
    pub q: Option<&'a DeviceRow>,
}

/// A draft without branches, over `nodes.len() + 1` rows from `row`.
#[derive(Debug, Clone)]
pub struct Chain<'a> {
    pub row: usize,
    pub nodes: Vec<Node<'a>>,
    /// Accept each node with this probability instead, for measurements.
    pub synthetic_acceptance: Option<f64>,
}

/// The verdict on a [`Chain`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Accepted {
    /// Number of accepted nodes.
    pub len: u32,
    /// The token after them, or [`NO_TOKEN`].
    pub next: u32,
}

/// The distributions of some rows.
#[derive(Debug)]
pub struct ProcessedLogits {
    params: Vec<LogitsParams>,
    /// The same parameters, on the device.
    #[cfg(feature = "cuda")]
    sent: cuda::Sent,
    /// `[rows, vocab_size]` f32; rows of temperature 0 are uninitialized; `[1, 1]` if all have
    /// temperature 0.
    probs: Tensor,
    /// `[2, rows]` u32: [`ProcessedLogits::ids`] and [`ProcessedLogits::tokens`].
    tokens: Tensor,
}

/// Runs the pipeline of `sampling` over rows of `logits`, `[_, vocab_size]` f32 on a GPU. Applies the
/// adjustments of a row and id in their order, and ignores ids that do not exist. With `draw` each
/// row gets a token.
///
/// # Errors
/// If the device fails or is not a GPU.
pub fn process_logits(
    logits: &Tensor,
    params: Vec<LogitsParams>,
    mut adjustments: Vec<RowAdjustment>,
    draw: bool,
) -> Result<ProcessedLogits> {
    let vocab_size = logits.dim(1)?;
    adjustments.retain(|adjustment| (adjustment.id as usize) < vocab_size);
    adjustments.sort_by_key(|adjustment| (adjustment.row, adjustment.id));
    #[cfg(feature = "cuda")]
    return cuda::process_logits(logits, params, &adjustments, draw);
    #[cfg(not(feature = "cuda"))]
    candle_core::bail!(
        "no GPU in this build: {:?}, {params:?}, {draw}",
        logits.device()
    )
}

impl ProcessedLogits {
    /// The token of each row, `[rows]` u32: that of the largest logit at temperature 0, else the drawn
    /// one (0 without `draw`); [`NO_TOKEN`] if no token can be chosen.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn tokens(&self) -> Result<Tensor> {
        self.tokens.get(1)
    }

    /// The same with id 0 instead of [`NO_TOKEN`], as input for a model.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn ids(&self) -> Result<Tensor> {
        self.tokens.get(0)
    }

    /// The distribution of row `row`, unless its temperature is 0.
    pub fn row(&self, row: usize) -> Option<DeviceRow> {
        (self.params[row].temperature > 0.).then(|| DeviceRow {
            probs: self.probs.clone(),
            row,
        })
    }

    /// Accepts or corrects drafts (Leviathan et al. 2023, Algorithm 1); see `spec::verify`.
    ///
    /// # Errors
    /// If a row or a token does not exist, or the device fails or is not a GPU.
    pub fn verify(&self, chains: &[Chain<'_>]) -> Result<Vec<Accepted>> {
        check(chains, &self.params, self.probs.dim(1)?)?;
        #[cfg(feature = "cuda")]
        return cuda::verify(self, chains);
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("no GPU in this build: {chains:?}")
    }
}

/// Checks that `chains` stay within the rows of `params`, and their tokens within the distributions
/// in which a kernel looks them up: those of the target, unless its rows are greedy and have none,
/// and those of the draft.
fn check(chains: &[Chain<'_>], params: &[LogitsParams], vocab_size: usize) -> Result<()> {
    for chain in chains {
        let (row, len) = (chain.row, chain.nodes.len());
        if row.checked_add(len).is_none_or(|last| last >= params.len()) {
            candle_core::bail!("sample: {len} nodes from row {row} of {}", params.len());
        }
        let sampled = params[row].temperature != 0.;
        for node in &chain.nodes {
            let token = node.token as usize;
            let beyond_q = match node.q {
                None => false,
                Some(q) => token >= q.probs.dim(1)?,
            };
            if beyond_q || sampled && token >= vocab_size {
                candle_core::bail!("sample: token {token} is outside the vocabulary");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// These would make a kernel read outside a distribution, which a GPU would not notice.
    #[test]
    fn chains_of_rows_and_tokens_that_do_not_exist_are_refused() {
        let q = DeviceRow {
            probs: Tensor::zeros((1, 6), DType::F32, &Device::Cpu).unwrap(),
            row: 0,
        };
        let run = |temperature, row, token, q| {
            let params = LogitsParams {
                row: 0,
                top_k: 0,
                temperature,
                min_p: 0.,
                top_p: 1.,
                uniform: 0.5,
            };
            let uniform = 0.5;
            let chain = Chain {
                row,
                nodes: vec![Node { token, uniform, q }],
                synthetic_acceptance: None,
            };
            check(&[chain], &[params; 3], 8)
        };
        run(1., 1, 7, None).unwrap();
        run(1., 1, 5, Some(&q)).unwrap();
        run(0., 1, u32::MAX, None).unwrap();
        run(1., 1, 8, None).unwrap_err();
        run(1., 1, u32::MAX, None).unwrap_err();
        for temperature in [0., 1.] {
            run(temperature, 1, 6, Some(&q)).unwrap_err();
            run(temperature, 2, 5, Some(&q)).unwrap_err();
            run(temperature, usize::MAX, 5, Some(&q)).unwrap_err();
        }
    }
}
