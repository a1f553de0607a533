//! What the tests of all recurrent layers check.

use super::StateBatch;
use crate::states::{KeptState, StatePool, StateRows, StateShape, StateStart};
use candle_core::{DType, Device, Result, Tensor};
use std::ops::Range;

/// The outputs of rows, which go on with states.
type Run<'a> = dyn Fn(&Tensor, &StateBatch, &mut StatePool) -> Result<Tensor> + 'a;

/// What the definition makes of the rows of a text, in f64.
type Defined<'a> = dyn Fn(&[Vec<f32>]) -> Vec<Vec<f64>> + 'a;

/// A layer under test.
pub struct Case<'a> {
    /// Values of a row.
    pub width: usize,
    pub states: StateShape,
    pub run: &'a Run<'a>,
    pub defined: &'a Defined<'a>,
}

/// The tests of a layer, in a module with its `SHAPE`, some `weights`, and what the definition makes of rows (`defined`).
macro_rules! tests_of {
    ($layer:ident) => {
        fn check(check: impl Fn(&Case<'_>)) {
            let weights = weights();
            let run = |x: &Tensor, rows: &StateBatch, pool: &mut StatePool| {
                $layer(x, &weights, rows, pool)
            };
            check(&Case {
                width: SHAPE.width(),
                states: SHAPE.states(),
                run: &run,
                defined: &|rows: &[Vec<f32>]| defined(&weights, rows),
            });
        }

        #[test]
        fn it_computes_what_the_definition_says() {
            check(|case| case.check_defined());
        }

        #[test]
        fn how_a_text_is_divided_changes_no_bit() {
            check(|case| case.check_divisions());
        }

        #[test]
        fn what_would_write_twice_or_read_nothing_is_refused() {
            check(|case| case.check_refusals());
        }
    };
}
pub(crate) use tests_of;

pub fn random(count: usize, scale: f32) -> Vec<f32> {
    let values = Tensor::randn(0f32, scale, count, &Device::Cpu).unwrap();
    values.to_vec1().unwrap()
}

fn part(rows: Range<usize>, parents: &[Option<u16>], kept: Option<KeptState>) -> StateRows {
    StateRows {
        rows,
        parents: parents.to_vec(),
        kept,
    }
}

fn kept(
    slot: u32,
    start: StateStart,
    accepted: &[u16],
    copies: &[(usize, u32)],
) -> Option<KeptState> {
    Some(KeptState {
        slot,
        start,
        accepted: accepted.to_vec(),
        copies: copies.to_vec(),
    })
}

impl Case<'_> {
    /// Rows of so many tokens.
    fn text(&self, len: usize) -> Vec<Vec<f32>> {
        (0..len).map(|_| random(self.width, 1.)).collect()
    }

    /// The outputs of a text from scratch.
    fn outputs(&self, text: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let rows: Vec<&Vec<f32>> = text.iter().collect();
        let mut pool = StatePool::new(self.states);
        self.of_rows(&rows, &[part(0..text.len(), &[], None)], &mut pool)
    }

    fn of_rows(
        &self,
        rows: &[&Vec<f32>],
        parts: &[StateRows],
        pool: &mut StatePool,
    ) -> Vec<Vec<f32>> {
        let flat: Vec<f32> = rows.iter().flat_map(|row| row.iter().copied()).collect();
        let x = Tensor::from_vec(flat, (rows.len(), self.width), &Device::Cpu).unwrap();
        (self.run)(&x, &StateBatch::new(parts.to_vec()), pool)
            .unwrap()
            .to_vec2()
            .unwrap()
    }

    /// Checks outputs against what the definition says.
    pub fn check_defined(&self) {
        let text = self.text(23);
        let (found, defined) = (self.outputs(&text), (self.defined)(&text));
        assert_eq!(found.len(), defined.len());
        for (found, want) in found.iter().flatten().zip(defined.iter().flatten()) {
            assert!(
                (f64::from(*found) - want).abs() < 1e-4 * want.abs().max(1.),
                "{found} {want}"
            );
        }
    }

    /// Chunks, drafts with branches of which some nodes are accepted, states from copies, and other sequences beside: all
    /// give the bits of one forward.
    pub fn check_divisions(&self) {
        let (text, other) = (self.text(14), self.text(3));
        let t = |i: usize| &text[i];
        let wrong = &other[0];
        let (want, alone) = (self.outputs(&text), self.outputs(&other));
        let mut pool = StatePool::new(self.states);

        // A chunk, of which slot 5 remembers the first two tokens, beside another sequence.
        let parts = [
            part(0..3, &[], kept(7, StateStart::Empty, &[], &[])),
            part(3..7, &[], kept(2, StateStart::Empty, &[], &[(2, 5)])),
        ];
        let rows = [&other[0], &other[1], &other[2], t(0), t(1), t(2), t(3)];
        let found = self.of_rows(&rows, &parts, &mut pool);
        assert_eq!((&found[..3], &found[3..]), (&alone[..], &want[..4]));

        // Token 4, and a tree: wrong, 5 -> (wrong, 6 -> 7), of which 5 and 6 are accepted.
        let parents = [None, None, Some(1), Some(1), Some(3)];
        let tree = [part(0..6, &parents, kept(2, StateStart::Kept, &[], &[]))];
        let rows = [t(4), wrong, t(5), wrong, t(6), t(7)];
        let found = self.of_rows(&rows, &tree, &mut pool);
        assert_eq!(
            [&found[0], &found[2], &found[4], &found[5]],
            [&want[4], &want[5], &want[6], &want[7]]
        );
        assert_ne!(found[1], want[5]);

        // They are taken in, with a copy after 5, before token 7 and a chain 8, wrong; 8 is accepted.
        let chain = [part(
            0..3,
            &[None, Some(0)],
            kept(2, StateStart::Kept, &[1, 3], &[(1, 4)]),
        )];
        let found = self.of_rows(&[t(7), t(8), wrong], &chain, &mut pool);
        assert_eq!(found[..2], want[7..9]);
        let rest = [part(0..5, &[], kept(2, StateStart::Kept, &[0], &[]))];
        let rows: Vec<&Vec<f32>> = text[9..].iter().collect();
        assert_eq!(self.of_rows(&rows, &rest, &mut pool), want[9..]);

        // From the copies, which stay as they are.
        for (slot, from, start) in [(0, 5, 2), (1, 4, 6), (3, 4, 6)] {
            let parts = [part(
                0..4,
                &[],
                kept(slot, StateStart::CopyOf(from), &[], &[]),
            )];
            let rows: Vec<&Vec<f32>> = text[start..start + 4].iter().collect();
            let found = self.of_rows(&rows, &parts, &mut pool);
            assert_eq!(found, want[start..start + 4]);
        }
    }

    /// Rows that would write twice or read nothing, and rows of another width.
    pub fn check_refusals(&self) {
        let x = Tensor::zeros((4, self.width), DType::F32, &Device::Cpu).unwrap();
        let own = |accepted: &[u16]| kept(1, StateStart::Kept, accepted, &[]);
        for parts in [
            vec![part(0..3, &[], None)],
            vec![part(0..2, &[], None), part(3..4, &[], None)],
            vec![part(0..2, &[], own(&[])), part(2..4, &[], own(&[]))],
            vec![part(0..4, &[], own(&[3]))],
            vec![part(0..4, &[Some(0)], own(&[]))],
            vec![part(0..4, &[], kept(1, StateStart::Empty, &[], &[(5, 2)]))],
        ] {
            let parts = StateBatch::new(parts);
            (self.run)(&x, &parts, &mut StatePool::new(self.states)).unwrap_err();
        }
        let x = Tensor::zeros((4, self.width + 1), DType::F32, &Device::Cpu).unwrap();
        let all = StateBatch::new(vec![part(0..4, &[], None)]);
        (self.run)(&x, &all, &mut StatePool::new(self.states)).unwrap_err();
    }
}
