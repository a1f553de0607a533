//! The rows of one sequence in a forward, from the scheduler to the kernels.

use std::ops::Range;

/// The rows of one sequence in a forward.
#[derive(Debug, Clone)]
pub struct Span {
    /// The rows of the forward that belong to the sequence.
    pub rows: Range<usize>,
    /// The number of the sequence's tokens in the pool before these rows.
    pub context: usize,
    /// Block table: position `p` of the sequence is in block `blocks[p / block_size]`. The K and V of
    /// row `i` of the span are at position `context + i`.
    pub blocks: Vec<u32>,
    /// Ancestor mask: bit `j` of entry `i` is set if row `i` of the span sees row `j` of it; a row sees
    /// itself, and may see later rows. All rows see the whole context. `None` = causal. At most 64 rows.
    pub tree: Option<Vec<u64>>,
}

impl Span {
    /// A span whose rows see those before them.
    pub fn causal(rows: Range<usize>, context: usize, blocks: &[u32]) -> Self {
        Self {
            rows,
            context,
            blocks: blocks.to_vec(),
            tree: None,
        }
    }

    /// Whether row `row` of this span sees row `other` of it.
    pub fn sees(&self, row: usize, other: usize) -> bool {
        match &self.tree {
            None => other <= row,
            Some(mask) => mask[row] >> other & 1 == 1,
        }
    }

    /// The slot, in blocks of `block_size`, of the token that is `back` before row `row` of this span: in the
    /// sequence, or up the row's branch of a tree. `None` before the first token.
    pub fn slot_before(&self, row: usize, back: usize, block_size: usize) -> Option<u32> {
        let position = match &self.tree {
            None => (self.context + row).checked_sub(back)?,
            Some(masks) => {
                // Its ancestors and itself. A parent comes before its node, so the nearest is the last one.
                let mut path = masks[row] & (u64::MAX >> (63 - row));
                let len = path.count_ones() as usize;
                if back < len {
                    (0..back).for_each(|_| path ^= 1 << path.ilog2());
                    self.context + path.ilog2() as usize
                } else {
                    self.context.checked_sub(back + 1 - len)?
                }
            }
        };
        let block = self.blocks[position / block_size];
        Some(block * block_size as u32 + (position % block_size) as u32)
    }

    /// The spans of `rows` alone, in a forward in which these rows attend and the K and V of all are in the
    /// pool. `None` if they are all rows, or not ascending, or some but not all of a tree.
    pub fn of_rows(spans: &[Self], rows: &[u32]) -> Option<Vec<Self>> {
        let are_all = spans.last().is_none_or(|last| last.rows.end == rows.len());
        if are_all || !rows.is_sorted_by(|a, b| a < b) {
            return None;
        }
        let (mut some, mut count) = (Vec::new(), 0);
        for span in spans {
            let inside = |row: &u32| span.rows.contains(&(*row as usize));
            let first = rows.partition_point(|row| (*row as usize) < span.rows.start);
            let own: Vec<usize> = (rows[first..].iter().take_while(|row| inside(row)))
                .map(|&row| row as usize - span.rows.start)
                .collect();
            if span.tree.is_some() && !own.is_empty() && own.len() < span.rows.len() {
                return None;
            }
            for run in own.chunk_by(|a, b| a + 1 == *b) {
                some.push(Self {
                    rows: count..count + run.len(),
                    context: span.context + run[0],
                    ..span.clone()
                });
                count += run.len();
            }
        }
        Some(some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_attend_alone_keep_their_context() {
        let span = |rows: Range<usize>, context, tree: Option<Vec<u64>>| Span {
            rows,
            context,
            blocks: vec![0, 1, 2],
            tree,
        };
        let tree = || Some(vec![0b01, 0b11]);
        let spans = [
            span(0..4, 3, None),
            span(4..6, 5, tree()),
            span(6..9, 0, None),
        ];
        let of = |rows: &[u32]| {
            let some = Span::of_rows(&spans, rows)?;
            let plain = |span: Span| (span.rows, span.context, span.tree);
            Some(some.into_iter().map(plain).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]), Some(vec![]));
        assert_eq!(of(&[3, 8]), Some(vec![(0..1, 6, None), (1..2, 2, None)]));
        assert_eq!(
            of(&[0, 2, 3, 4, 5, 6]),
            Some(vec![
                (0..1, 3, None),
                (1..3, 5, None),
                (3..5, 5, tree()),
                (5..6, 0, None)
            ])
        );
        // A node of the tree alone, wrong orders, and all rows.
        assert_eq!(of(&[3, 5]), None);
        assert_eq!((of(&[8, 3]), of(&[3, 3])), (None, None));
        assert_eq!(of(&[0, 1, 2, 3, 4, 5, 6, 7, 8]), None);
        assert!(Span::of_rows(&[], &[]).is_none());
    }
}
