//! Domino's correction of a block's logits (arXiv 2605.29707): a GRU reads the tokens of the block, from its first
//! row's on, and what a small network makes of its state and of a row's hidden state is added to the row's logits.

use super::config::DominoConfig;
use crate::config::ModelConfig;
use crate::layers::linear::{Embedding, Linear};
use crate::weights::Weights;
use candle_core::{D, Tensor};
use candle_nn::ops::{sigmoid, silu};
use foretoken_core::error::Result;

/// A loaded correction. The GRU is that of PyTorch, without biases.
pub(crate) struct Domino {
    /// The embedding whose rows the block consists of.
    embedding: Embedding,
    /// Projects the embedding of a token to the reset gate, the update gate and the candidate for the next state.
    of_token: Linear,
    /// Projects the state before the token to the reset gate, the update gate and the candidate for the next state.
    of_state: Linear,
    /// Projects hidden state and state to the rank of the correction.
    down: Linear,
    /// Projects the rank of the correction to the outputs.
    up: Linear,
    of: DominoConfig,
}

impl Domino {
    /// Reads the weights of the correction of a head whose layers are like `config`, and whose blocks consist of rows
    /// of `embedding`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub fn load(
        of: DominoConfig,
        config: &ModelConfig,
        weights: &mut Weights,
        outputs: usize,
        embedding: &Embedding,
    ) -> Result<Self> {
        let (hidden, gates) = (config.hidden_size, 3 * of.width);
        Ok(Self {
            embedding: embedding.clone(),
            of_token: weights.linear("prefix_gru.ih", (gates, hidden), false)?,
            of_state: weights.linear("prefix_gru.hh", (gates, of.width), false)?,
            down: weights.linear("embed_proj.0", (of.rank, hidden + of.width), false)?,
            up: weights.linear("embed_proj.2", (outputs, of.rank), false)?,
            of,
        })
    }

    /// The states `[rows, width]` after `tokens` `[rows]`; `None` = they are the first ones of their blocks.
    ///
    /// # Errors
    /// If the device fails.
    pub fn next_states(&self, tokens: &Tensor, states: Option<&Tensor>) -> Result<Tensor> {
        let embedded = self.embedding.forward(tokens)?;
        let zeros = || {
            let shape = (embedded.dim(0)?, self.of.width);
            Tensor::zeros(shape, embedded.dtype(), embedded.device())
        };
        let states = states.map_or_else(zeros, |states| Ok(states.clone()))?;
        let token = self.of_token.forward(&embedded)?.chunk(3, D::Minus1)?;
        let state = self.of_state.forward(&states)?.chunk(3, D::Minus1)?;
        let reset = sigmoid(&(&token[0] + &state[0])?)?;
        let update = sigmoid(&(&token[1] + &state[1])?)?;
        let candidate = (&token[2] + (reset * &state[2])?)?.tanh()?;
        // (1 - update) * candidate + update * state
        Ok((&candidate + (update * (states - &candidate)?)?)?)
    }

    /// Whether the `level`-th row of a block is corrected.
    pub fn corrects(&self, level: usize) -> bool {
        level >= self.of.prefix
    }

    /// What is added to the logits, `[rows, outputs]`, of rows with these `hidden` states that follow these `states` of
    /// the GRU.
    ///
    /// # Errors
    /// If the device fails.
    pub fn bias(&self, hidden: &Tensor, states: &Tensor) -> Result<Tensor> {
        let down = self.down.forward(&Tensor::cat(&[hidden, states], 1)?)?;
        self.up.forward(&silu(&down)?)
    }
}
