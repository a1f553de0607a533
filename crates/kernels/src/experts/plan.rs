//! How the memory of a pass is divided.

use super::ExpertChoice;
use candle_core::{Result, Tensor};

/// Rows of a group, where experts have few of them each, and where they have many.
const FEW: usize = 8;
const MANY: usize = 64;
/// Parts begin at multiples of so many words.
const ALIGNED: usize = 64;
/// Words of a group in memory.
const GROUP_WORDS: usize = 3;

/// A part of memory, in words of four bytes.
#[derive(Clone, Copy)]
pub(super) struct Part {
    start: usize,
    len: usize,
}

impl Part {
    /// The part of `all`, f32 of one dimension.
    pub fn of(self, all: &Tensor) -> Result<Tensor> {
        all.narrow(0, self.start, self.len)
    }
}

/// The words of all parts so far.
#[derive(Default)]
struct Room(usize);

impl Room {
    /// A part of `len` words.
    fn take(&mut self, len: usize) -> Part {
        let start = self.0;
        self.0 = (start + len).next_multiple_of(ALIGNED);
        Part { start, len }
    }
}

/// The memory of a pass, as parts of one tensor of f32. Only launches read and write it, which take some of it as
/// integers, and some as activations: those of sorted uses.
pub(super) struct Plan {
    /// Uses of experts.
    pub count: usize,
    /// Maximum number of rows of a group, and of groups.
    pub group_rows: usize,
    pub max_groups: usize,
    /// Of the router, and of the factor of the expert of all rows, f32.
    pub logits: Part,
    pub factors: Part,
    /// For each use its expert and weight: integers and f32.
    pub ids: Part,
    pub weights: Part,
    /// The sorted uses, the place of each among them, and the table of groups: integers.
    pub uses: Part,
    pub places: Part,
    pub table: Part,
    /// What the experts multiply, products with gate and up, activations, and products with down.
    pub inputs: Part,
    pub wide: Vec<Part>,
    pub narrow: Part,
    pub last: Part,
    /// Words of all.
    pub words: usize,
}

/// The widths of what is computed for a use.
pub(super) struct Widths<'a> {
    /// Of its row.
    pub hidden: usize,
    /// Of the products with gate and up.
    pub wide: &'a [usize],
    /// Of its activations.
    pub narrow: usize,
    /// Bytes of a value.
    pub bytes: usize,
}

impl Plan {
    /// The plan for `rows` rows.
    pub fn new(choice: &ExpertChoice, rows: usize, widths: &Widths<'_>) -> Self {
        let count = rows * choice.per_token;
        let is_many = count > FEW * choice.count;
        let group_rows = if is_many { MANY } else { FEW };
        // Of each expert one group may have fewer rows.
        let max_groups = count.min(count / group_rows + choice.count);
        let mut room = Room::default();
        let logits = room.take(rows * choice.count);
        let factors = room.take(rows);
        let [ids, weights, uses, places] = [(); 4].map(|()| room.take(count));
        let table = room.take(GROUP_WORDS * max_groups);
        let mut values =
            |width: usize| room.take((count * width * widths.bytes).div_ceil(size_of::<f32>()));
        let inputs = values(widths.hidden);
        let wide = widths.wide.iter().map(|&width| values(width)).collect();
        let (narrow, last) = (values(widths.narrow), values(widths.hidden));
        Self {
            count,
            group_rows,
            max_groups,
            logits,
            factors,
            ids,
            weights,
            uses,
            places,
            table,
            inputs,
            wide,
            narrow,
            last,
            words: room.0,
        }
    }
}
