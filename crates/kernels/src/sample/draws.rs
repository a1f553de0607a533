//! Draws from the logits of several steps, between which the host does not wait.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{BestTokens, LogitsParams, ProcessedLogits, RowAdjustment, check_best};
use candle_core::{Device, Result, Tensor};

/// Draws from the logits of several steps. What they need of each row is sent at once, before the first step, and what
/// they draw is read at once, after the last one.
#[derive(Debug)]
pub struct Draws {
    /// The rows of the steps that are still to come, the last step first.
    steps: Vec<Vec<LogitsParams>>,
    /// Number of tokens of a row.
    best: usize,
    /// The rows of each step so far.
    drawn: Vec<usize>,
    /// The parameters of all rows, in device memory. What follows has a place for each of them, too.
    #[cfg(feature = "cuda")]
    sent: cuda::Sent,
    /// `[rows]` u32: [`ProcessedLogits::ids`].
    ids: Tensor,
    /// `[rows * 2 * places]` u32: of each step the tokens and their probabilities.
    tokens: Tensor,
}

impl Draws {
    /// Draws by the parameters of the rows of each step, at least one, with `best` tokens a row as for
    /// [`process_logits`](super::process_logits).
    ///
    /// # Errors
    /// If `best` is too large, or the device fails or is not a GPU.
    pub fn new(mut steps: Vec<Vec<LogitsParams>>, best: usize, device: &Device) -> Result<Self> {
        check_best(best)?;
        steps.reverse();
        #[cfg(feature = "cuda")]
        {
            let (sent, ids, tokens) = cuda::shared(steps.iter().rev().flatten(), best, device)?;
            Ok(Self {
                steps,
                best,
                drawn: Vec::new(),
                sent,
                ids,
                tokens,
            })
        }
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("no GPU in this build: {device:?}, {steps:?}")
    }

    /// Draws the tokens of the next step from its `logits`, `[_, vocab_size]` f32; see
    /// [`process_logits`](super::process_logits). With `ids`, contiguous u32 of at least as many elements as the step has
    /// rows, the tokens that a model is fed with are written there.
    ///
    /// # Errors
    /// If there is no further step, a row does not exist, or the device fails.
    pub fn draw(
        &mut self,
        logits: &Tensor,
        mut adjustments: Vec<RowAdjustment>,
        ids: Option<&Tensor>,
    ) -> Result<ProcessedLogits> {
        let vocab_size = logits.dim(1)?;
        adjustments.retain(|adjustment| (adjustment.id as usize) < vocab_size);
        adjustments.sort_by_key(|adjustment| (adjustment.row, adjustment.id));
        let Some(params) = self.steps.pop() else {
            candle_core::bail!("sample: only {} steps were planned", self.drawn.len());
        };
        let (first, rows) = (self.drawn.iter().sum::<usize>(), params.len());
        self.drawn.push(rows);
        let values = 2 * self.best.max(1);
        let ids = match ids {
            Some(ids) => ids.narrow(0, 0, rows)?,
            None => self.ids.narrow(0, first, rows)?,
        };
        let tokens = self
            .tokens
            .narrow(0, first * values, values * rows)?
            .reshape((values, rows))?;
        #[cfg(feature = "cuda")]
        return cuda::draw(
            (logits, &adjustments),
            (params, &self.sent, first),
            (ids, tokens),
            self.best,
        );
        #[cfg(not(feature = "cuda"))]
        candle_core::bail!("no GPU in this build: {ids:?}, {tokens:?}, {params:?}")
    }

    /// Waits for all steps so far and copies their tokens and probabilities to the host.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&self) -> Result<Vec<BestTokens>> {
        let values = 2 * self.best.max(1);
        let rows: usize = self.drawn.iter().sum();
        let all: Vec<u32> = self.tokens.narrow(0, 0, rows * values)?.to_vec1()?;
        let mut rest = &all[..];
        let of_step = |&rows: &usize| {
            let (own, after) = rest.split_at(rows * values);
            rest = after;
            BestTokens {
                rows,
                places: values / 2,
                values: own.to_vec(),
            }
        };
        Ok(self.drawn.iter().map(of_step).collect())
    }
}
