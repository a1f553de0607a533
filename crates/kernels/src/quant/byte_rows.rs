//! Products of rows with rows of `Q8_0` blocks that become tiles just before: queries and keys of attention.

use super::activations::{Activations, Turn, turns};
use super::formats::{BLOCK, Format, Q8_0, TileFormat, VECTOR, WIDTH};
use super::tiles::{Line, Strip, bytes_mut, strip_lines};
use super::{PANEL, max_rows, product};
use crate::cpu::Isa;
use crate::q8_blocks::BYTES;
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Rows of floats, quantized to 8 bits as the inputs of every product with quantized weights are.
pub(crate) struct ByteRows {
    x: Activations,
    turns: Vec<Turn>,
}

impl ByteRows {
    /// Quantizes `x` `[rows, inputs]`; `inputs` is a multiple of 32.
    pub fn quantize(isa: Isa, x: &[f32], inputs: usize) -> Self {
        let x = Activations::quantize(isa, x, inputs);
        let turns = turns(x.passes(), max_rows(isa, &x, TileFormat::Q8_0));
        Self { x, turns }
    }

    /// Multiplies some rows with strips of 16 others, from [`pack_16`]. `store` gets the row, the number of the strip
    /// and 16 products.
    pub fn multiply(
        &self,
        isa: Isa,
        rows: &Range<usize>,
        strips: &[Line],
        mut store: impl FnMut(usize, usize, &[f32; WIDTH]),
    ) {
        let start = |turn: &Turn| turn.pass.first + turn.first;
        let first = (self.turns).partition_point(|turn| start(turn) + turn.rows <= rows.start);
        let turns = &self.turns[first..];
        let turns = &turns[..turns.partition_point(|turn| start(turn) < rows.end)];
        let blocks = self.x.blocks();
        for (number, lines) in strips.chunks_exact(strip_lines::<Q8_0>(blocks)).enumerate() {
            let strip = Strip::<Q8_0>::new(lines, blocks);
            for turns in turns.chunks(PANEL) {
                // Turns may also have rows before and after these.
                product(isa, strip, &self.x, turns, |row, products| {
                    if rows.contains(&row) {
                        store(row, number, products);
                    }
                });
            }
        }
    }
}

/// Lines of a strip of 16 rows with so many inputs.
pub(crate) fn lines_of_16(inputs: usize) -> usize {
    strip_lines::<Q8_0>(inputs / BLOCK)
}

/// Lays out 16 rows of blocks, of equal length, as a strip of [`lines_of_16`] lines.
#[inline(always)]
pub(crate) fn pack_16<S: Simd>(s: S, rows: &[&[u8]; WIDTH], to: &mut [Line]) {
    const { assert!(WIDTH == LANES && Q8_0::SPAN == 2) };
    let records = bytes_mut(to).chunks_exact_mut(Q8_0::RECORD).enumerate();
    assert!(records.len() * Q8_0::SPAN * BYTES >= rows[0].len());
    for (number, record) in records {
        let (scales, tiles) = record.split_at_mut(Q8_0::SCALES);
        let (mut quants, mut from) = (Quants([[0.0; LANES]; WIDTH]), [std::ptr::null(); WIDTH]);
        for (c, row) in rows.iter().enumerate() {
            let blocks = row[number * Q8_0::SPAN * BYTES..].as_chunks::<BYTES>().0;
            // A last block alone is its own neighbour, which nobody reads.
            let pair = [&blocks[0], &blocks[(blocks.len() - 1).min(1)]];
            for (sub, block) in pair.into_iter().enumerate() {
                scales[2 * (sub * WIDTH + c)..][..2].copy_from_slice(&block[..2]);
            }
            // SAFETY: a block has 32 bytes after its scale, and a row of `quants` has 16 floats.
            unsafe {
                let [first, second] = [pair[0].as_ptr().add(2), pair[1].as_ptr().add(2)];
                let bytes = s.load_halves([first.cast(), second.cast()]);
                s.store(quants.0[c].as_mut_ptr(), s.flip_bytes(bytes));
            }
            from[c] = quants.0[c].as_ptr();
        }
        let tiles = tiles.as_chunks_mut::<{ Q8_0::TILE }>().0;
        let [first, second] = tiles else {
            unreachable!("a record has two tiles")
        };
        let to = [first, second].map(|tile| tile.as_mut_ptr().cast::<f32>());
        // SAFETY: a row of `quants` has 16 floats, and each tile has eight vectors of as many.
        unsafe { s.transpose(&from, to, VECTOR / size_of::<f32>()) };
    }
}

/// The bytes of two blocks of each row, which are moved four at a time, as if they were floats.
#[repr(align(64))]
struct Quants([[f32; LANES]; WIDTH]);
