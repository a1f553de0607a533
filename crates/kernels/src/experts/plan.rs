//! How the memory of a pass is divided.

use super::ExpertChoice;
use candle_core::{Result, Tensor};

/// Rows of a group, where experts have few of them each, and where they have many.
const FEW: usize = 8;
const MANY: usize = 64;
/// Parts begin at multiples of so many values.
const ALIGNED: usize = 64;
/// Words of a group in memory.
const GROUP_WORDS: usize = 3;

/// Values of a tensor of one dimension.
#[derive(Clone, Copy)]
pub(super) struct Part {
    start: usize,
    len: usize,
}

impl Part {
    /// The part of `all`.
    pub fn of(self, all: &Tensor) -> Result<Tensor> {
        all.narrow(0, self.start, self.len)
    }
}

/// A tensor that is divided into parts.
#[derive(Default)]
pub(super) struct Room {
    /// Values of the parts so far.
    pub len: usize,
}

impl Room {
    /// A part of `len` values.
    pub fn take(&mut self, len: usize) -> Part {
        let start = self.len;
        self.len = (start + len).next_multiple_of(ALIGNED);
        Part { start, len }
    }
}

/// The numbers of a pass, as parts of a tensor of `words` f32. Ids, uses, places and the table of groups are integers of
/// as many bytes.
pub(super) struct Plan {
    /// Uses of experts.
    pub count: usize,
    /// Maximum number of rows of a group, and of groups.
    pub group_rows: usize,
    pub max_groups: usize,
    /// Of the router, and of the factor of the expert of all rows.
    pub logits: Part,
    pub factors: Part,
    /// For each use its expert and weight.
    pub ids: Part,
    pub weights: Part,
    /// The sorted uses, and the place of each among them.
    pub uses: Part,
    pub places: Part,
    pub table: Part,
    pub words: usize,
}

impl Plan {
    /// The plan for `rows` rows.
    pub fn new(choice: &ExpertChoice, rows: usize, has_factor: bool) -> Self {
        let count = rows * choice.per_token;
        let is_many = count > FEW * choice.count;
        let group_rows = if is_many { MANY } else { FEW };
        // Of each expert one group may have fewer rows.
        let max_groups = count.min(count / group_rows + choice.count);
        let mut room = Room::default();
        let logits = room.take(rows * choice.count);
        let factors = room.take(if has_factor { rows } else { 0 });
        let [ids, weights, uses, places] = [(); 4].map(|()| room.take(count));
        let table = room.take(GROUP_WORDS * max_groups);
        Self {
            words: room.len,
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
        }
    }
}
