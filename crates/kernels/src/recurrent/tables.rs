//! The rows of a forward by their sequences, for recurrent layers, and what a GPU needs to know of them.

use super::plan::{Keep, Part, Plan, Step, Token, UNUSED};
use crate::graph::Values;
use crate::states::StateRows;
use crate::writes::Writes;
use candle_core::{Device, Result, Tensor};
use std::sync::OnceLock;

/// The rows of a forward by their sequences. All recurrent layers share them.
#[derive(Debug)]
pub struct StateBatch {
    rows: Vec<StateRows>,
    /// What a GPU needs of them, sent there once.
    tables: OnceLock<StateTables>,
}

/// The size of [`StateTables`]. Forwards of equal capacity and of equally many rows launch the same grids.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct StateCapacity {
    /// Maximum number of sequences.
    parts: usize,
    /// Maximum number of steps: of tokens, some of which are taken in several times, and of states that are written.
    steps: usize,
    /// Maximum number of windows and nodes that are kept.
    keeps: usize,
    /// Maximum number of tokens: of rows, and of accepted nodes.
    tokens: usize,
}

/// What the kernels of recurrent layers do in a forward, in GPU memory.
///
/// The contents come only from rows that were checked.
#[derive(Debug)]
pub struct StateTables {
    /// u32: parts, steps, what is kept, and tokens, one after the other.
    all: Tensor,
    capacity: StateCapacity,
    /// Rows of the forward, padding included.
    rows: usize,
}

impl StateBatch {
    /// A batch of these rows.
    pub fn new(rows: Vec<StateRows>) -> Self {
        Self {
            rows,
            tables: OnceLock::new(),
        }
    }

    /// The rows of each sequence.
    pub fn rows(&self) -> &[StateRows] {
        &self.rows
    }

    /// The capacity for `rows` that are similar to these, rounded up so that few graphs are needed: steps take in about
    /// as many accepted nodes as they have rows.
    pub fn capacity_of(states: &[StateRows], rows: usize) -> StateCapacity {
        StateCapacity::of(&Plan::new(states)).rounded_up(rows)
    }

    /// Sends to a GPU what the layers need in a forward of `rows` rows, large enough for `capacity` (`None` = just for these
    /// rows). A layer calls it if it was not called before.
    ///
    /// # Errors
    /// If the forward has not so many rows, or the device fails.
    pub fn send(
        &self,
        device: &Device,
        rows: usize,
        capacity: Option<StateCapacity>,
    ) -> Result<&StateTables> {
        if let Some(tables) = self.tables.get() {
            return Ok(tables);
        }
        let tables = StateTables::send(&self.rows, device, rows, capacity)?;
        Ok(self.tables.get_or_init(|| tables))
    }

    /// Adds to `writes` what another forward of as many rows needs, in the place of what was sent.
    ///
    /// # Errors
    /// If it has more rows or exceeds the capacity.
    pub fn replace(&self, states: &[StateRows], writes: &mut Writes) -> Result<()> {
        match self.tables.get() {
            Some(tables) => tables.replace(states, writes),
            None if states.is_empty() && self.rows.is_empty() => Ok(()),
            None => candle_core::bail!("states: nothing was sent"),
        }
    }
}

impl StateCapacity {
    fn of(plan: &Plan) -> Self {
        Self {
            parts: plan.parts.len().max(1),
            steps: plan.steps.len().max(1),
            keeps: plan.keeps.len().max(1),
            tokens: plan.tokens.len().max(1),
        }
    }

    /// For forwards of `rows` rows.
    fn rounded_up(self, rows: usize) -> Self {
        let at_least = |count: usize, least: usize| count.max(least).next_power_of_two();
        Self {
            parts: self.parts.next_power_of_two(),
            steps: at_least(self.steps, 4 * rows),
            keeps: at_least(self.keeps, 2 * rows),
            tokens: at_least(self.tokens, 2 * rows),
        }
    }

    fn holds(self, needs: Self) -> bool {
        needs.parts <= self.parts
            && needs.steps <= self.steps
            && needs.keeps <= self.keeps
            && needs.tokens <= self.tokens
    }

    /// Of each part of the tables its first number and the number of these.
    fn places(self) -> [(usize, usize); 4] {
        let lens = [
            self.parts * size_of::<Part>(),
            self.steps * size_of::<Step>(),
            self.keeps * size_of::<Keep>(),
            self.tokens * size_of::<Token>(),
        ];
        let mut end = 0;
        lens.map(|bytes| {
            let len = bytes / size_of::<i32>();
            end += len;
            (end - len, len)
        })
    }
}

impl StateTables {
    fn send(
        states: &[StateRows],
        device: &Device,
        rows: usize,
        capacity: Option<StateCapacity>,
    ) -> Result<Self> {
        let plan = plan(states, rows)?;
        let capacity = capacity.unwrap_or_else(|| StateCapacity::of(&plan));
        Ok(Self {
            all: Tensor::new(numbers(&plan, capacity)?, device)?,
            capacity,
            rows,
        })
    }

    fn replace(&self, states: &[StateRows], writes: &mut Writes) -> Result<()> {
        let numbers = numbers(&plan(states, self.rows)?, self.capacity)?;
        writes.push(&self.all, Values::U32(&numbers))
    }

    /// Parts, steps, what is kept, and tokens, for kernels.
    #[cfg(feature = "cuda")]
    pub(super) fn tensors(&self) -> Result<[Tensor; 4]> {
        let [parts, steps, keeps, tokens] = self.capacity.places();
        let of = |(start, len)| self.all.narrow(0, start, len);
        Ok([of(parts)?, of(steps)?, of(keeps)?, of(tokens)?])
    }

    /// How many sequences and tokens they have room for.
    #[cfg(feature = "cuda")]
    pub(super) fn room(&self) -> (usize, usize) {
        (self.capacity.parts, self.capacity.tokens)
    }

    /// Rows of the forward.
    #[cfg(feature = "cuda")]
    pub(super) fn rows(&self) -> usize {
        self.rows
    }
}

/// The plan of a forward of `rows` rows, of which the last may be padding.
fn plan(states: &[StateRows], rows: usize) -> Result<Plan> {
    let own = StateRows::check(states)?;
    let plan = Plan::new(states);
    // Kernels count in signed 32-bit integers.
    if own > rows || i32::try_from(plan.steps.len().max(rows)).is_err() {
        candle_core::bail!("states: {own} rows of {rows}");
    }
    Ok(plan)
}

/// The contents of tables.
fn numbers(plan: &Plan, capacity: StateCapacity) -> Result<Vec<u32>> {
    let needs = StateCapacity::of(plan);
    if !capacity.holds(needs) {
        candle_core::bail!("states: {needs:?} exceeds {capacity:?}");
    }
    let mut all = Vec::new();
    let [parts, steps, keeps, tokens] = capacity.places();
    let mut add = |numbers: &[i32], (start, len): (usize, usize), rest: i32| {
        all.extend(numbers.iter().map(|&n| n as u32));
        all.resize(start + len, rest as u32);
    };
    add(plan.parts.as_flattened(), parts, 0);
    add(plan.steps.as_flattened(), steps, 0);
    add(plan.keeps.as_flattened(), keeps, 0);
    add(plan.tokens.as_flattened(), tokens, UNUSED);
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize) -> StateRows {
        StateRows {
            rows: 0..count,
            parents: Vec::new(),
            kept: None,
        }
    }

    /// What a graph reads on replay passes the same checks as what it was recorded with.
    #[test]
    fn tables_take_no_forward_that_they_have_no_room_for() {
        let batch = StateBatch::new(vec![rows(3)]);
        let capacity = StateBatch::capacity_of(batch.rows(), 4);
        let mut writes = Writes::default();
        let mut replace = |rows: &[StateRows]| batch.replace(rows, &mut writes);
        replace(&[rows(3)]).unwrap_err();
        batch.send(&Device::Cpu, 4, Some(capacity)).unwrap();
        replace(&[rows(4)]).unwrap();
        replace(&[]).unwrap();
        replace(&[rows(5)]).unwrap_err();
        let two = |start| StateRows {
            rows: start..start + 2,
            ..rows(0)
        };
        replace(&[two(0), two(2)]).unwrap_err();
        replace(&[two(1)]).unwrap_err();
        let small = StateBatch::new(vec![rows(3)]);
        small.send(&Device::Cpu, 4, None).unwrap();
        small.replace(&[rows(4)], &mut writes).unwrap_err();
    }
}
