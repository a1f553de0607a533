//! Distributions, tokens and verdicts where the logits are, so that logits never leave a GPU.
//!
//! The CPU's side is `sampling` and `spec::verify`, which take one row after the other and no more
//! of them than a verdict needs; the CUDA side takes all rows of a step at once and gives the same
//! tokens.

#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{Result, Tensor};

/// In place of a token where none can be chosen: NaN or infinity among the logits, or minus infinity
/// alone.
pub const NO_TOKEN: u32 = u32::MAX;

/// A change of one logit of one row: `x / repetition` where `x` is above 0 and `x * repetition`
/// elsewhere, less `subtract`, plus `bias`.
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
    /// 0 = the largest logit is taken.
    pub temperature: f32,
    pub min_p: f32,
    pub top_p: f32,
    /// The random number in [0, 1) that a token is sampled by.
    pub uniform: f64,
}

/// A distribution of one row, in the memory of the device.
#[derive(Debug, Clone)]
pub struct DeviceRow {
    /// `[rows, vocab_size]` f32.
    probs: Tensor,
    row: usize,
}

/// The same memory.
impl PartialEq for DeviceRow {
    fn eq(&self, other: &Self) -> bool {
        self.probs.id() == other.probs.id() && self.row == other.row
    }
}

impl DeviceRow {
    /// Copies the probabilities, `[vocab_size]`, to the host.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn read(&self) -> Result<Vec<f32>> {
        self.probs.get(self.row)?.to_vec1()
    }
}

/// A drafted token, the random number that decides about it, and what it was drawn from; `None` = it
/// is the guess of no model.
#[derive(Debug, Clone, Copy)]
pub struct Node<'a> {
    pub token: u32,
    pub uniform: f64,
    pub q: Option<&'a DeviceRow>,
}

/// A draft without branches, over `nodes.len() + 1` rows from `row` on.
#[derive(Debug, Clone)]
pub struct Chain<'a> {
    pub row: usize,
    pub nodes: Vec<Node<'a>>,
    /// Accept each node with this probability instead: for measurements.
    pub synthetic_acceptance: Option<f64>,
}

/// What became of a [`Chain`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Accepted {
    /// Nodes.
    pub len: u32,
    /// The token after them, or [`NO_TOKEN`].
    pub next: u32,
}

/// The distributions of some rows.
#[derive(Debug)]
pub struct ProcessedLogits {
    params: Vec<LogitsParams>,
    /// The same, on the device.
    #[cfg(feature = "cuda")]
    sent: cuda::Sent,
    /// `[rows, vocab_size]` f32; nothing in rows of temperature 0, and `[1, 1]` where all are.
    probs: Tensor,
    /// `[2, rows]` u32: [`ProcessedLogits::ids`] and [`ProcessedLogits::tokens`].
    tokens: Tensor,
}

/// Runs the pipeline of `sampling` over rows of `logits`, `[_, vocab_size]` f32 on a GPU. The
/// adjustments of a row and id are done in their order, those of ids that do not exist not at all.
/// With `draw` each row gets a token.
///
/// # Errors
/// Where the device fails or is not a GPU.
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
    /// The token of each row, `[rows]` u32: the largest logit at temperature 0, else what was drawn, if
    /// it was; [`NO_TOKEN`] where there is none.
    ///
    /// # Errors
    /// None that a caller could cause.
    pub fn tokens(&self) -> Result<Tensor> {
        self.tokens.get(1)
    }

    /// The same with an id of the vocabulary where there is none, for a model to be fed with.
    ///
    /// # Errors
    /// None that a caller could cause.
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
    /// Where a row or a token does not exist, or the device fails or is not a GPU.
    pub fn verify(&self, chains: &[Chain<'_>]) -> Result<Vec<Accepted>> {
        check(chains, &self.params, self.probs.dim(1)?)?;
        #[cfg(feature = "cuda")]
        return cuda::verify(self, chains);
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("no GPU in this build: {chains:?}")
    }
}

/// Whether `chains` are inside of the rows of `params`, and their tokens inside of the distributions
/// that a kernel looks them up in: those of the target, unless its rows are greedy and have none, and
/// those of the draft.
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

    /// What leads a kernel out of a distribution, which a GPU would not notice.
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
