//! Scores of keys in blocks: integer products of queries that are rounded to bytes, with the order of additions of
//! products with quantized weights.

use super::queries::QueryGroup;
use super::scratch::Scratch;
use super::stored::Stored;
use super::vectors::{Places, STRIDE, Vectors};
use crate::quant::{ByteRows, Line, lines_of_16, pack_16};
use crate::simd::{LANES, Loop, Simd, run};
use std::ops::Range;

impl<E: Stored> QueryGroup<'_, E> {
    /// Rounds the queries of `scratch` to bytes.
    pub(super) fn round_queries(&self, scratch: &mut Scratch) {
        let head_dim = self.dims.head_dim;
        let queries = scratch.queries.room(self.count() * head_dim);
        scratch.byte_queries = Some(ByteRows::quantize(self.isa, queries, head_dim));
    }

    /// As [`score`](Self::score), of keys in blocks.
    pub(super) fn score_bytes(
        &self,
        places: Places<'_>,
        queries: &Range<usize>,
        start: usize,
        scratch: &mut Scratch,
    ) {
        let lines = lines_of_16(self.dims.head_dim);
        let strips = places.at.len().div_ceil(LANES) * lines;
        if scratch.strips.len() < strips {
            scratch.strips.resize(strips, Line::ZERO);
        }
        let to = &mut scratch.strips[..strips];
        let keys = Vectors::new(E::bytes(self.k), places, self.elements());
        run(self.isa, PackBytes { keys, to, lines });
        let scores = scratch.scores.room(self.count() * STRIDE);
        let Some(loaded) = &scratch.byte_queries else {
            unreachable!("queries are rounded before their scores are computed")
        };
        let strips = &scratch.strips[..strips];
        loaded.multiply(self.isa, queries, strips, |query, strip, products| {
            let at = query * STRIDE + start + strip * LANES;
            scores[at..at + LANES].copy_from_slice(products);
        });
    }
}

/// Makes strips of keys: see [`pack_16`].
pub(super) struct PackBytes<'a> {
    pub keys: Vectors<'a, u8>,
    /// Strips of 16 keys. Where there are fewer than 16 the rest is not specified.
    pub to: &'a mut [Line],
    /// Lines of a strip.
    pub lines: usize,
}

impl Loop for PackBytes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let strips = self.to.chunks_exact_mut(self.lines);
        let places = self.keys.places().chunks(LANES);
        assert!(places.len() <= strips.len());
        for (i, (places, strip)) in places.zip(strips).enumerate() {
            for j in 0..LANES {
                self.keys.prefetch(LANES * i + j, 0..self.keys.width());
            }
            pack_16(s, &self.keys.rows(places), strip);
        }
    }
}
