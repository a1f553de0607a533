//! What a GPU does with the states of a forward, step by step. All recurrent layers share it; `recurrent.cu` says what the
//! numbers are.

use crate::states::{StateRows, StateStart};

/// There is none; before a token: the window of its slot.
const NONE: i32 = -1;
/// An empty state, or an empty window.
const EMPTY: i32 = -2;
/// The source of a token that does not exist.
pub(super) const UNUSED: i32 = i32::MAX;

/// First step, end of steps, first of what is kept and its end.
pub(super) type Part = [i32; 4];
/// Token, row of the output, slot of the state before it, and slot of the state after it.
pub(super) type Step = [i32; 4];
/// Token, slot and node.
pub(super) type Keep = [i32; 3];
/// Slot, source and the token before.
pub(super) type Token = [i32; 3];

/// See the module.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// One for each sequence.
    pub parts: Vec<Part>,
    pub steps: Vec<Step>,
    pub keeps: Vec<Keep>,
    pub tokens: Vec<Token>,
}

impl Plan {
    /// The plan of a forward with these rows, which were checked.
    pub fn new(rows: &[StateRows]) -> Self {
        let mut plan = Self::default();
        for part in rows {
            let (step, keep) = (plan.steps.len(), plan.keeps.len());
            Sequence::of(part, &plan).add_to(&mut plan);
            let ends = [step, plan.steps.len(), keep, plan.keeps.len()];
            plan.parts.push(ends.map(|n| n as i32));
        }
        plan
    }

    /// Lets `slot` become like the state after the last step, or like state `from` if there is none.
    fn write(&mut self, slot: i32, (is_after_step, from): (bool, i32)) {
        match self.steps.last_mut() {
            Some(step) if is_after_step && step[3] == NONE => step[3] = slot,
            _ => self.steps.push([NONE, NONE, from, slot]),
        }
    }
}

/// The tokens of a sequence: accepted nodes of the forward before, certain rows, and nodes.
struct Sequence<'a> {
    part: &'a StateRows,
    /// Its first token among all.
    first: usize,
    accepted: usize,
    /// Number of tokens that the state takes in.
    taken: usize,
    /// The slot of its state, if it keeps one.
    slot: i32,
    /// The slot of the state before the first token.
    start: i32,
}

impl<'a> Sequence<'a> {
    /// That of `part`, after those in `plan`.
    fn of(part: &'a StateRows, plan: &Plan) -> Self {
        let kept = part.kept.as_ref();
        let accepted = kept.map_or(0, |kept| kept.accepted.len());
        let slot = kept.map_or(NONE, |kept| kept.slot as i32);
        Self {
            part,
            first: plan.tokens.len(),
            accepted,
            taken: accepted + part.chain(),
            slot,
            start: match kept.map(|kept| kept.start) {
                None | Some(StateStart::Empty) => EMPTY,
                // The slot has the copy before the forward.
                Some(StateStart::Kept | StateStart::CopyOf(_)) => slot,
            },
        }
    }

    fn token(&self, number: usize) -> i32 {
        (self.first + number) as i32
    }

    /// The row of a token, if it is one.
    fn row(&self, number: usize) -> i32 {
        match number.checked_sub(self.accepted) {
            Some(row) => (self.part.rows.start + row) as i32,
            None => NONE,
        }
    }

    fn add_to(&self, plan: &mut Plan) {
        self.add_tokens(plan);
        self.add_taken(plan);
        self.add_nodes(plan);
    }

    fn add_tokens(&self, plan: &mut Plan) {
        let before_all = if self.start == EMPTY { EMPTY } else { NONE };
        let before = |number: usize| match number.checked_sub(1) {
            Some(before) => self.token(before),
            None => before_all,
        };
        let accepted = self.part.kept.iter().flat_map(|kept| &kept.accepted);
        let accepted = accepted.map(|&node| NONE - i32::from(node));
        let sources = accepted.chain(self.part.rows.clone().map(|row| row as i32));
        for (number, source) in sources.enumerate() {
            let before = match number.checked_sub(self.taken) {
                None => before(number),
                Some(node) => match self.part.parents[node] {
                    Some(parent) => self.token(self.taken + usize::from(parent)),
                    None => before(self.taken),
                },
            };
            plan.tokens.push([self.slot, source, before]);
        }
    }

    /// The tokens that the state takes in, and the slots that get it.
    fn add_taken(&self, plan: &mut Plan) {
        for len in 0..=self.taken {
            if let Some(token) = len.checked_sub(1) {
                let from = if token == 0 { self.start } else { NONE };
                plan.steps
                    .push([self.token(token), self.row(token), from, NONE]);
            }
            let copies = self.part.kept.iter().flat_map(|kept| &kept.copies);
            let copies = copies.filter(|(at, _)| *at == len);
            let copies = copies.map(|&(_, slot)| slot as i32);
            // The last one: the others are made of the window before it. Without tokens it stays as it is.
            let own = len == self.taken && self.slot != NONE;
            let own = own && (len > 0 || self.start == EMPTY);
            for slot in copies.chain(own.then_some(self.slot)) {
                plan.write(slot, (len > 0, if len > 0 { NONE } else { EMPTY }));
                let last = len.checked_sub(1).map_or(EMPTY, |last| self.token(last));
                plan.keeps.push([last, slot, NONE]);
            }
        }
    }

    /// The nodes of the draft. One that does not follow the node before it begins with the sequence's state, and takes in
    /// its ancestors again.
    fn add_nodes(&self, plan: &mut Plan) {
        let parents = &self.part.parents;
        // The node whose state there is, or the tokens that were taken in.
        let mut held = (self.taken > 0 || self.start == EMPTY).then_some(None);
        for (node, &parent) in parents.iter().enumerate() {
            let token = self.taken + node;
            if held != Some(parent) {
                let mut ancestors = Vec::new();
                let mut next = parent;
                while let Some(ancestor) = next.map(usize::from) {
                    ancestors.push(self.taken + ancestor);
                    next = parents[ancestor];
                }
                // Without a slot, the state is computed again, too.
                let taken = 0..if self.slot == NONE { self.taken } else { 0 };
                let again = taken.chain(ancestors.into_iter().rev());
                let mut from = if self.slot == NONE { EMPTY } else { self.slot };
                for token in again {
                    plan.steps.push([self.token(token), NONE, from, NONE]);
                    from = NONE;
                }
                plan.steps
                    .push([self.token(token), self.row(token), from, NONE]);
            } else {
                plan.steps
                    .push([self.token(token), self.row(token), NONE, NONE]);
            }
            held = Some(Some(node as u16));
            if self.slot != NONE {
                plan.keeps.push([self.token(token), self.slot, node as i32]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::states::KeptState;

    const N: i32 = NONE;

    fn kept(slot: u32, start: StateStart, accepted: &[u16], copies: &[(usize, u32)]) -> KeptState {
        KeptState {
            slot,
            start,
            accepted: accepted.to_vec(),
            copies: copies.to_vec(),
        }
    }

    /// A prompt that begins, with a copy after its first token, and a sequence without a state.
    #[test]
    fn prompts_are_taken_in_from_an_empty_state() {
        let prompt = StateRows {
            rows: 0..2,
            parents: Vec::new(),
            kept: Some(kept(3, StateStart::Empty, &[], &[(1, 5)])),
        };
        let other = StateRows {
            rows: 2..3,
            parents: Vec::new(),
            kept: None,
        };
        let want = Plan {
            parts: vec![[0, 2, 0, 2], [2, 3, 2, 2]],
            steps: vec![[0, 0, EMPTY, 5], [1, 1, N, 3], [2, 2, EMPTY, N]],
            keeps: vec![[0, 5, N], [1, 3, N]],
            tokens: vec![[3, 0, EMPTY], [3, 1, 0], [N, 2, EMPTY]],
        };
        assert_eq!(Plan::new(&[prompt, other]), want);
    }

    /// Two accepted nodes, a row, and a tree: 0, 1 after 0, 2, 3 after 1.
    #[test]
    fn branches_begin_with_the_state_of_the_sequence() {
        let tree = StateRows {
            rows: 7..12,
            parents: vec![None, Some(0), None, Some(1)],
            kept: Some(kept(4, StateStart::Kept, &[1, 3], &[(3, 6)])),
        };
        let want = Plan {
            parts: vec![[0, 10, 0, 6]],
            steps: vec![
                [0, N, 4, N],
                [1, N, N, N],
                [2, 7, N, 6],
                [N, N, N, 4],
                [3, 8, N, N],
                [4, 9, N, N],
                [5, 10, 4, N],
                [3, N, 4, N],
                [4, N, N, N],
                [6, 11, N, N],
            ],
            keeps: vec![
                [2, 6, N],
                [2, 4, N],
                [3, 4, 0],
                [4, 4, 1],
                [5, 4, 2],
                [6, 4, 3],
            ],
            tokens: vec![
                [4, -2, N],
                [4, -4, 0],
                [4, 7, 1],
                [4, 8, 2],
                [4, 9, 3],
                [4, 10, 2],
                [4, 11, 4],
            ],
        };
        assert_eq!(Plan::new(&[tree]), want);
    }
}
