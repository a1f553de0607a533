//! The examples of recent requests, within a limit of memory.

use super::gain::Score;
use foretoken_core::sampling::mix;
use foretoken_engine::spec::TrainingExample;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// One of this many requests is held out: heads are measured on its examples, and do not learn from them.
const HOLDOUT: u64 = 5;
/// Maximum number of times that an example is learnt from.
const MAX_USES: u32 = 4;
/// The purpose of random numbers.
const HELD_OUT: u64 = u64::from_le_bytes(*b"held out");

/// An example and its number.
#[derive(Clone)]
pub struct Kept {
    pub number: u64,
    pub example: Arc<TrainingExample>,
    uses: u32,
}

/// The recent examples: those to learn from, and those to measure on. The oldest make room.
pub struct ExampleBuffer {
    train: VecDeque<Kept>,
    held_out: VecDeque<Kept>,
    /// Maximum bytes of the states.
    max_bytes: usize,
    bytes: usize,
    next: u64,
}

impl ExampleBuffer {
    pub fn new(max_bytes: usize) -> Self {
        Self {
            train: VecDeque::new(),
            held_out: VecDeque::new(),
            max_bytes,
            bytes: 0,
            next: 0,
        }
    }

    /// Whether the examples of a request are held out. All are, or none: parts of one text are alike.
    pub fn is_held_out(request: u64) -> bool {
        mix(request ^ HELD_OUT).is_multiple_of(HOLDOUT)
    }

    pub fn add(&mut self, example: TrainingExample) {
        self.bytes += bytes(&example);
        let held_out = Self::is_held_out(example.request);
        let kept = Kept {
            number: self.next,
            example: Arc::new(example),
            uses: 0,
        };
        self.next += 1;
        let queue = if held_out {
            &mut self.held_out
        } else {
            &mut self.train
        };
        queue.push_back(kept);
        while self.bytes > self.max_bytes {
            let oldest =
                |queue: &VecDeque<Kept>| queue.front().map_or(u64::MAX, |kept| kept.number);
            let queue = if oldest(&self.train) < oldest(&self.held_out) {
                &mut self.train
            } else {
                &mut self.held_out
            };
            let Some(dropped) = queue.pop_front() else {
                break;
            };
            self.bytes -= bytes(&dropped.example);
        }
    }

    /// The number of the next example.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Examples that were not learnt from often enough.
    pub fn left(&self) -> usize {
        let train = self.train.iter();
        train.filter(|kept| kept.uses < MAX_USES).count()
    }

    /// At most `count` examples that were not learnt from often enough: the least used ones, in an order that `seed`
    /// draws.
    pub fn take(&mut self, count: usize, seed: u64) -> Vec<Arc<TrainingExample>> {
        let mut left: Vec<&mut Kept> = self.train.iter_mut().collect();
        left.retain(|kept| kept.uses < MAX_USES);
        left.sort_unstable_by_key(|kept| (kept.uses, mix(seed ^ mix(kept.number))));
        let taken = left.into_iter().take(count);
        taken
            .map(|kept| {
                kept.uses += 1;
                kept.example.clone()
            })
            .collect()
    }

    /// The last `count` examples to measure on, of those with a number from `first` on.
    pub fn recent(&self, count: usize, first: u64) -> Vec<Kept> {
        let held_out = self.held_out.iter().rev();
        let recent = held_out.take_while(|kept| kept.number >= first);
        recent.take(count).cloned().collect()
    }

    /// Removes the scores of examples that are no longer kept.
    pub fn retain_known(&self, scores: &mut HashMap<u64, Score>) {
        let first = self.held_out.front().map_or(u64::MAX, |kept| kept.number);
        scores.retain(|number, _| *number >= first);
    }
}

fn bytes(example: &TrainingExample) -> usize {
    size_of_val(example.states.as_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    fn example(request: u64) -> TrainingExample {
        TrainingExample {
            request,
            tokens: vec![request as u32; 4],
            drawn: 0,
            states: vec![f16::ONE; 10],
            is_sampled: false,
        }
    }

    #[test]
    fn a_request_is_held_out_as_a_whole_and_old_examples_make_room() {
        let mut examples = ExampleBuffer::new(20 * 50);
        for i in 0..400 {
            // Four examples of each request.
            examples.add(example(i / 4));
        }
        assert_eq!(examples.bytes, 20 * 50);
        assert_eq!(examples.train.len() + examples.held_out.len(), 50);
        let held = |kept: &Kept| ExampleBuffer::is_held_out(kept.example.request);
        assert!(examples.held_out.iter().all(held) && !examples.train.iter().any(held));
        let kept = examples.train.iter().chain(&examples.held_out);
        assert!(kept.into_iter().all(|kept| kept.number >= 350));
        let share = (0..1000)
            .filter(|&id| ExampleBuffer::is_held_out(id))
            .count();
        assert!((150..250).contains(&share), "{share} of 1,000");
        let recent = examples.recent(3, 0);
        assert_eq!(recent.len(), 3);
        assert!(recent.is_sorted_by(|a, b| a.number > b.number));
        assert!(examples.recent(100, 400).is_empty());
    }

    #[test]
    fn each_example_is_learnt_from_equally_often_and_not_for_ever() {
        let mut examples = ExampleBuffer::new(1 << 20);
        let requests = (0..100).filter(|&id| !ExampleBuffer::is_held_out(id));
        let count = requests.map(|id| examples.add(example(id))).count();
        let mut taken = 0;
        for seed in 0.. {
            let some = examples.take(7, seed);
            if some.is_empty() {
                break;
            }
            taken += some.len();
            let uses = examples.train.iter().map(|kept| kept.uses);
            let (low, high) = (uses.clone().min().unwrap(), uses.max().unwrap());
            assert!(high - low <= 1, "{low} {high}");
        }
        assert_eq!((taken, examples.left()), (count * MAX_USES as usize, 0));
    }
}
