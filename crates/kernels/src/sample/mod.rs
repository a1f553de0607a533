//! Computes distributions, tokens and verdicts where the logits are, so that logits never leave a GPU.
//!
//! The CPU implementation is `sampling` and `spec::verify`, which process row after row, and only
//! the rows that a verdict needs; the CUDA side processes all rows of a step at once and gives the
//! same tokens.

#[cfg(feature = "cuda")]
mod cuda;
mod draws;
mod gumbel_max;
mod top_logits;

use candle_core::{Result, Tensor};

pub use draws::Draws;
pub use gumbel_max::{exponential, gumbel_max, weights};
pub use top_logits::{TopLogits, TopRow, top_logits};

/// Stands for a token if none can be chosen: the logits contain NaN or infinity, or all are minus
/// infinity.
pub const NO_TOKEN: u32 = u32::MAX;

/// A change of one logit `x` of one row: `x / repetition` if `x` is above 0, else `x * repetition`;
/// then minus `subtract`, plus `bias`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct RowAdjustment {
    /// Row of the logits.
    pub row: u32,
    /// The token id whose logit changes.
    pub id: u32,
    /// The repetition penalty; 1 = none.
    pub repetition: f32,
    /// What is subtracted from the logit: the presence and frequency penalties.
    pub subtract: f32,
    /// What is added to the logit.
    pub bias: f32,
}

/// Maximum number of tokens of a row.
pub const MAX_BEST: usize = 8;

/// How a row's token is chosen from its weights w, at temperatures above 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenChoice {
    /// By a race: the token x with the largest w(x) / E(x), where E(x) are the exponential numbers of
    /// this key (see `sampling::choose`). Such a row has no distribution.
    GumbelMax(u64),
    /// The quantile of the distribution at this number in [0, 1).
    Quantile(f64),
}

/// How a row of logits becomes weights, and how a token is chosen from them; the other fields are those
/// of `SamplingParams`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitsParams {
    /// Row of the logits.
    pub row: u32,
    /// 0 = all.
    pub top_k: u32,
    /// 0 = the largest logit is chosen.
    pub temperature: f32,
    /// Tokens below `min_p * max probability` are dropped, in [0, 1]; 0 = off.
    pub min_p: f32,
    /// The smallest set of most probable tokens whose mass reaches this is kept, in (0, 1]; 1 = off.
    pub top_p: f32,
    /// How the token is chosen from the weights.
    pub choice: TokenChoice,
}

impl LogitsParams {
    /// Whether the row has a distribution.
    fn has_distribution(&self) -> bool {
        self.temperature != 0. && matches!(self.choice, TokenChoice::Quantile(_))
    }
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
    /// The id of the drafted token.
    pub token: u32,
    /// The random number in [0, 1) that decides about acceptance.
    pub uniform: f64,
    /// The distribution that the token was drawn from.
    pub q: Option<&'a DeviceRow>,
}

/// A draft without branches, over `nodes.len() + 1` rows from `row`.
#[derive(Debug, Clone)]
pub struct Chain<'a> {
    /// Row of the logits that decides about the first node.
    pub row: usize,
    /// The drafted tokens, in the order of the text.
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

/// The tokens and distributions of some rows.
#[derive(Debug)]
pub struct ProcessedLogits {
    params: Vec<LogitsParams>,
    /// `params` on the device, from row `first` on.
    #[cfg(feature = "cuda")]
    sent: cuda::Sent,
    #[cfg(feature = "cuda")]
    first: usize,
    /// `[rows, vocab_size]` f32, of which only rows with a distribution are specified; `[1, 1]` if the
    /// kernel needs none.
    probs: Tensor,
    /// See [`ProcessedLogits::ids`].
    ids: Tensor,
    /// `[2 * places, rows]` u32: the tokens by place, and the bits of their probabilities by place.
    tokens: Tensor,
}

/// The best tokens of each row, with their probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct BestTokens {
    rows: usize,
    places: usize,
    /// The tokens, `[places, rows]`, then the bits of their probabilities.
    values: Vec<u32>,
}

impl BestTokens {
    /// The token of row `row`; [`NO_TOKEN`] if none can be chosen.
    pub fn token(&self, row: usize) -> u32 {
        self.values[row]
    }

    /// The tokens of row `row` and their probabilities, best first: none if no token can be chosen, and
    /// fewer than requested if there are no others.
    pub fn of_row(&self, row: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        let at = move |place: usize| self.values[place * self.rows + row];
        (0..self.places)
            .map(move |place| (at(place), f32::from_bits(at(self.places + place))))
            .take_while(|&(token, _)| token != NO_TOKEN)
    }
}

/// Runs the pipeline of `sampling` over rows of `logits`, `[_, vocab_size]` f32 on a GPU. Applies the
/// adjustments of a row and id in their order, and ignores ids that do not exist.
///
/// `best` is the number of tokens of each row, at most [`MAX_BEST`]: the chosen one, then those that
/// would be chosen without the ones before them; at temperature 0 those of the largest logits. Rows
/// with [`TokenChoice::Quantile`] have only one. Their probabilities are those after the pipeline; at
/// temperature 0 those of the adjusted logits at temperature 1.
///
/// With `best` 0, to verify drafts, probabilities are 0 and rows with a distribution have no token:
/// [`ProcessedLogits::verify`] chooses it.
///
/// # Errors
/// If `best` is too large, or the device fails or is not a GPU.
pub fn process_logits(
    logits: &Tensor,
    params: Vec<LogitsParams>,
    adjustments: Vec<RowAdjustment>,
    best: usize,
) -> Result<ProcessedLogits> {
    Draws::new(vec![params], best, logits.device())?.draw(logits, adjustments, None)
}

/// The ids of the `best` (at most [`MAX_BEST`]) largest values of each row of `logits`,
/// `[rows, vocab_size]` f32 on a GPU: `[rows, best]` u32, best first, and [`NO_TOKEN`] in rows that
/// contain NaN or infinity and where all other logits are minus infinity. Of equal logits the lowest id
/// is first.
///
/// # Errors
/// If `best` is too large, or the device fails or is not a GPU.
pub fn best_logits(logits: &Tensor, best: usize) -> Result<Tensor> {
    check_best(best)?;
    #[cfg(feature = "cuda")]
    return cuda::best_logits(logits, best);
    #[cfg(not(feature = "cuda"))]
    candle_core::bail!("no GPU in this build: {:?}", logits.device())
}

fn check_best(best: usize) -> Result<()> {
    if best > MAX_BEST {
        candle_core::bail!("sample: {best} tokens of a row, at most {MAX_BEST}");
    }
    Ok(())
}

impl ProcessedLogits {
    /// The token of each row as input for a model, `[rows]` u32 on the device; 0 if no token can be chosen.
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// The token of each row, `[rows]` u32 on the device; [`NO_TOKEN`] if none can be chosen.
    #[cfg(feature = "cuda")]
    fn chosen(&self) -> Result<Tensor> {
        self.tokens.get(0)
    }

    /// Copies the tokens and their probabilities to the host.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self) -> Result<BestTokens> {
        let (all, rows) = self.tokens.dims2()?;
        Ok(BestTokens {
            rows,
            places: all / 2,
            values: self.tokens.flatten_all()?.to_vec1()?,
        })
    }

    /// The distribution of row `row`, if it has one: see [`TokenChoice`].
    pub fn row(&self, row: usize) -> Option<DeviceRow> {
        self.params[row].has_distribution().then(|| DeviceRow {
            probs: self.probs.clone(),
            row,
        })
    }

    /// Accepts or corrects drafts (Sun et al. 2024, arXiv 2403.10444, Algorithm 2); see `spec::verify`.
    ///
    /// # Errors
    /// If a row or a token does not exist or a row is raced, or the device fails or is not a GPU.
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
        let rows = &params[row..=row + len];
        let sampled = rows[0].temperature != 0.;
        if rows.iter().any(|row| row.has_distribution() != sampled) {
            candle_core::bail!("sample: {len} nodes from row {row} need distributions");
        }
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
        let run_by = |choice, temperature, row, token, q| {
            let params = LogitsParams {
                row: 0,
                top_k: 0,
                temperature,
                min_p: 0.,
                top_p: 1.,
                choice,
            };
            let uniform = 0.5;
            let chain = Chain {
                row,
                nodes: vec![Node { token, uniform, q }],
                synthetic_acceptance: None,
            };
            check(&[chain], &[params; 3], 8)
        };
        let run = |temperature, row, token, q| {
            run_by(TokenChoice::Quantile(0.5), temperature, row, token, q)
        };
        run(1., 1, 7, None).unwrap();
        run(1., 1, 5, Some(&q)).unwrap();
        run(0., 1, u32::MAX, None).unwrap();
        run(1., 1, 8, None).unwrap_err();
        run(1., 1, u32::MAX, None).unwrap_err();
        run_by(TokenChoice::GumbelMax(5), 1., 1, 7, None).unwrap_err();
        run_by(TokenChoice::GumbelMax(5), 0., 1, 7, None).unwrap();
        for temperature in [0., 1.] {
            run(temperature, 1, 6, Some(&q)).unwrap_err();
            run(temperature, 2, 5, Some(&q)).unwrap_err();
            run(temperature, usize::MAX, 5, Some(&q)).unwrap_err();
        }
    }
}
