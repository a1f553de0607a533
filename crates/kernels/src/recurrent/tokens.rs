//! The tokens of one sequence, and the convolution over them.

use super::{Convolution, Sizes, sigmoid};
use crate::simd::{Loop, Simd};
use crate::states::StateRows;
use candle_core::Result;

/// The tokens of one sequence: those before its state, only for the convolution, those that the state takes in, and the
/// nodes of a draft.
pub(super) struct Tokens<'a> {
    /// Of each, the channels before the convolution; then the scalars, except of those before the state.
    inputs: Vec<&'a [f32]>,
    /// The gates of those that are rows of the forward: the last ones.
    gates: Vec<&'a [f32]>,
    /// The token before each.
    before: Vec<usize>,
    /// Number of those before the state.
    window: usize,
    /// Number of those that the state takes in.
    pub taken: usize,
    pub parents: &'a [Option<u16>],
    channels: usize,
}

impl<'a> Tokens<'a> {
    /// The tokens of `part`, among the forward's rows `x`, after the tokens of `window`; `nodes` are the inputs of the
    /// last draft.
    ///
    /// # Errors
    /// If an accepted node is not among the nodes.
    pub fn new(
        sizes: &Sizes,
        part: &'a StateRows,
        x: &'a [f32],
        window: &'a [f32],
        nodes: &'a [f32],
    ) -> Result<Self> {
        let mut inputs: Vec<&[f32]> = window.chunks_exact(sizes.channels).collect();
        let window = inputs.len();
        for &node in part.kept.iter().flat_map(|kept| &kept.accepted) {
            let at = usize::from(node) * sizes.inputs();
            let Some(node) = nodes.get(at..at + sizes.inputs()) else {
                candle_core::bail!("states: node {node} was not in the forward before");
            };
            inputs.push(node);
        }
        let rows = &x[part.rows.start * sizes.width()..part.rows.end * sizes.width()];
        let rows = rows.chunks_exact(sizes.width());
        let rows = rows.map(|row| row.split_at(sizes.values()));
        inputs.extend(rows.clone().map(|(_, inputs)| inputs));
        let first_node = inputs.len() - part.parents.len();
        let chain = (0..first_node).map(|token| token.saturating_sub(1));
        let nodes = part.parents.iter().map(|parent| match parent {
            Some(node) => first_node + usize::from(*node),
            None => first_node.saturating_sub(1),
        });
        Ok(Self {
            before: chain.chain(nodes).collect(),
            gates: rows.map(|(gate, _)| gate).collect(),
            window,
            taken: first_node - window,
            parents: &part.parents,
            channels: sizes.channels,
            inputs,
        })
    }

    /// Number of tokens that are taken in or are nodes. They are counted from the first one on.
    pub fn count(&self) -> usize {
        self.inputs.len() - self.window
    }

    /// What of `token` is not mixed.
    #[inline(always)]
    pub fn scalars(&self, token: usize) -> &'a [f32] {
        &self.inputs[self.window + token][self.channels..]
    }

    /// The row of `token` among those of the sequence in this forward, and its gate; `None` if it is none.
    #[inline(always)]
    pub fn gate(&self, token: usize) -> Option<(usize, &'a [f32])> {
        let row = token.checked_sub(self.count() - self.gates.len())?;
        Some((row, self.gates[row]))
    }

    /// What the convolution reads after so many of the tokens were taken in.
    fn window_after(&self, taken: usize, channels: usize) -> Vec<f32> {
        let last = self.inputs[taken..taken + self.window].iter();
        last.flat_map(|inputs| &inputs[..channels])
            .copied()
            .collect()
    }

    /// The inputs of the nodes.
    fn nodes(&self) -> &[&'a [f32]] {
        &self.inputs[self.window + self.taken..]
    }
}

/// Mixes the channels of a token with those before.
pub(super) struct Mixing<'a> {
    pub convolution: Convolution<'a>,
    pub tokens: &'a Tokens<'a>,
    pub token: usize,
    /// `[channels]`
    pub out: &'a mut [f32],
}

impl Loop for Mixing<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (out, tokens) = (self.out, self.tokens);
        match self.convolution.bias {
            Some(bias) => out.copy_from_slice(bias),
            None => out.fill(0.),
        }
        let mut from = tokens.window + self.token;
        for weights in self.convolution.weights.chunks_exact(out.len()) {
            let inputs = &tokens.inputs[from][..out.len()];
            for ((sum, x), weight) in out.iter_mut().zip(inputs).zip(weights) {
                *sum += x * weight;
            }
            from = tokens.before[from];
        }
        out.iter_mut().for_each(|x| *x *= sigmoid(*x));
    }
}

/// What a forward leaves in a slot besides matrices.
pub(super) struct Left {
    pub window: Vec<f32>,
    pub nodes: Vec<f32>,
}

impl Left {
    /// What the slots of `part` keep after these tokens, in the order of the slots.
    pub fn of(part: &StateRows, tokens: &Tokens<'_>, channels: usize) -> Vec<Self> {
        let Some(kept) = &part.kept else {
            return Vec::new();
        };
        let own = Self {
            window: tokens.window_after(tokens.taken, channels),
            nodes: tokens.nodes().concat(),
        };
        let copies = kept.copies.iter().map(|(at, _)| Self {
            window: tokens.window_after(*at, channels),
            nodes: Vec::new(),
        });
        std::iter::once(own).chain(copies).collect()
    }
}
