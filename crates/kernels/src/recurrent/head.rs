//! One head over the tokens of one sequence.

use super::tokens::Tokens;
use super::{Recurrence, TokenInputs};
use crate::parallel::Shared;
use crate::simd::{Loop, Simd};

/// The matrices of one sequence, of all heads.
#[derive(Default)]
pub(super) struct Matrices<'a> {
    /// `None` = they are not kept.
    pub own: Option<Shared<'a, f32>>,
    /// Whether the matrices begin with zeros.
    pub is_empty: bool,
    /// Matrices that become like `own` after so many tokens.
    pub copies: Vec<(usize, Shared<'a, f32>)>,
}

/// Computes a head over `tokens`, and writes its outputs to the rows of `out` from the index `first` on.
pub(super) struct Head<'a, R> {
    pub layer: &'a R,
    pub head: usize,
    pub tokens: &'a Tokens<'a>,
    /// `[tokens, channels]`
    pub mixed: &'a [f32],
    pub matrices: &'a Matrices<'a>,
    pub out: &'a Shared<'a, f32>,
    pub first: usize,
}

impl<R: Recurrence> Loop for Head<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self {
            layer,
            head,
            tokens,
            mixed,
            matrices,
            out,
            first,
        } = self;
        let sizes = layer.sizes();
        let (mut none, size) = (Vec::new(), sizes.matrix);
        let at = head * size;
        let state = match &matrices.own {
            // SAFETY: each head of a sequence is computed once.
            Some(all) => unsafe { all.slice(at, size) },
            None => {
                none.resize(size, 0.);
                &mut none[..]
            }
        };
        if matrices.is_empty {
            state.fill(0.);
        }
        let mut scratch = layer.scratch();
        let mut step = |token: usize, state: &mut [f32]| {
            let place = tokens.gate(token).map(|(row, gate)| {
                let at = first + row * sizes.values() + head * sizes.outputs;
                // SAFETY: each head of a row is computed once.
                let place = unsafe { out.slice(at, sizes.outputs) };
                (place, &gate[head * sizes.outputs..][..sizes.outputs])
            });
            let inputs = TokenInputs {
                mixed: &mixed[token * sizes.channels..][..sizes.channels],
                scalars: tokens.scalars(token),
            };
            layer.step(head, state, &inputs, &mut scratch, place);
        };
        for taken in 0..tokens.taken {
            step(taken, state);
            for (_, copy) in matrices.copies.iter().filter(|(at, _)| *at == taken + 1) {
                // SAFETY: as of `own`; no slot is written twice.
                unsafe { copy.slice(at, size) }.copy_from_slice(state);
            }
        }
        // Of each node that others come after.
        let mut states: Vec<Option<Vec<f32>>> = vec![None; tokens.parents.len()];
        for (node, parent) in tokens.parents.iter().enumerate() {
            let later = &tokens.parents[node + 1..];
            let mut state = match parent.map(usize::from) {
                None => state.to_vec(),
                Some(of) if later.contains(parent) => states[of].clone().unwrap_or_default(),
                Some(of) => states[of].take().unwrap_or_default(),
            };
            step(tokens.taken + node, &mut state);
            states[node] = later.contains(&Some(node as u16)).then_some(state);
        }
    }
}
