//! Answers on their way into the pool.

use super::context_table::{ContextTable, Owner};
use std::collections::VecDeque;

/// Tokens that are added to the pool in one step.
const MAX_ADDED: usize = 1024;

/// Memory of a token of an answer, whose vector may be half empty.
const TOKEN_BYTES: usize = 2 * size_of::<u32>();

/// The answers of the requests that run, and those that have ended and are not yet in the pool, in bounded
/// memory: an answer ends where there is no room for more of it.
#[derive(Debug)]
pub struct Answers {
    /// Tokens of all answers, and their maximum.
    len: usize,
    max_len: usize,
    /// Answers that have ended, with the number of their tokens that are in the pool. The first answer is the next.
    ended: VecDeque<(u64, Vec<u32>, usize)>,
    /// Tokens that may still be added in this step.
    room: usize,
}

impl Answers {
    /// No answers, and room for those of at most `bytes`.
    pub fn new(bytes: usize) -> Self {
        Self {
            len: 0,
            max_len: bytes / TOKEN_BYTES,
            ended: VecDeque::new(),
            room: MAX_ADDED,
        }
    }

    /// Memory in use, in bytes.
    pub fn bytes(&self) -> usize {
        self.len * TOKEN_BYTES
    }

    /// Adds to `answer` what it lacks of `all` of it.
    pub fn extend(&mut self, answer: &mut Vec<u32>, all: &[u32]) {
        let new = all.get(answer.len()..).unwrap_or_default();
        let new = &new[..new.len().min(self.max_len - self.len)];
        answer.extend_from_slice(new);
        self.len += new.len();
    }

    /// Forgets the answer of a request that begins again.
    pub fn forget(&mut self, answer: &[u32]) {
        self.len -= answer.len();
    }

    /// A request of `scope` has ended with this answer. As much as this step may add goes into the pool now.
    pub fn end(&mut self, scope: u64, answer: Vec<u32>, pool: &mut ContextTable) {
        self.ended.push_back((scope, answer, 0));
        self.add(pool);
    }

    /// A step has been made: adds more to the pool.
    pub fn step(&mut self, pool: &mut ContextTable) {
        self.room = MAX_ADDED;
        self.add(pool);
    }

    fn add(&mut self, pool: &mut ContextTable) {
        while let Some((scope, answer, added)) = self.ended.front_mut() {
            let end = answer.len().min(*added + self.room);
            pool.extend(Owner::Scope(*scope), answer, *added..end);
            self.room -= end - *added;
            *added = end;
            if end < answer.len() {
                return;
            }
            self.len -= answer.len();
            self.ended.pop_front();
        }
    }
}
