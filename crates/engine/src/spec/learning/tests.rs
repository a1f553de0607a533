//! What becomes an example, and what does not.

use super::*;
use crate::spec::draft::DraftContext;
use candle_core::Device;
use std::sync::mpsc::{channel, sync_channel};

const WIDTH: usize = 3;
const PROMPT: usize = 40;

/// Drafts nothing.
struct Silent;

impl Drafter for Silent {
    fn propose(&mut self, requests: &mut [DraftRequest<'_>]) -> Result<Vec<Draft>> {
        Ok(requests.iter().map(|_| Draft::default()).collect())
    }
}

struct Bench {
    drafter: LearningDrafter,
    examples: Receiver<TrainingExample>,
    _heads: std::sync::mpsc::Sender<Box<dyn Head>>,
}

impl Bench {
    fn new(waiting: usize) -> Self {
        let (sender, examples) = sync_channel(waiting);
        let (heads, receiver) = channel();
        let link = LearnerLink {
            examples: sender,
            heads: receiver,
            dropped: IntCounter::new("dropped", "dropped").unwrap(),
        };
        Self {
            drafter: LearningDrafter::new(Box::new(Silent), link),
            examples,
            _heads: heads,
        }
    }

    /// A step that computed the positions `new` of a text of sequence `id`.
    fn step(&mut self, id: SeqId, new: std::ops::Range<usize>, context: &DraftContext) {
        let tokens: Vec<u32> = (0..=new.end as u32)
            .map(|i| token(id, i as usize))
            .collect();
        let states = new.clone().flat_map(|i| [state(id, i); WIDTH]);
        let hidden = Tensor::from_iter(states, &Device::Cpu).unwrap();
        let committed = Committed {
            hidden: Some(hidden.reshape((new.len(), WIDTH)).unwrap()),
            ..Committed::new(id, &tokens, PROMPT, new, context)
        };
        self.drafter.learn(&[committed]);
    }

    /// A whole text: its prompt in two chunks, then `rounds` of three tokens.
    fn text(&mut self, id: SeqId, rounds: usize, context: &DraftContext) {
        self.step(id, 0..30, context);
        self.step(id, 30..PROMPT, context);
        for round in 0..rounds {
            let start = PROMPT + 3 * round;
            self.step(id, start..start + 3, context);
        }
        self.drafter.end(id);
    }

    /// Everything that was handed over. What is wrong in an example fails.
    fn taken(&mut self) -> Vec<TrainingExample> {
        let examples: Vec<TrainingExample> = self.examples.try_iter().collect();
        for example in &examples {
            let rows = example.tokens.len() - 2;
            assert_eq!(example.states.len(), rows * WIDTH);
            let first = (0..1000).find(|&i| token(example.request, i) == example.tokens[0]);
            let first = first.unwrap();
            for (i, &id) in example.tokens.iter().enumerate() {
                assert_eq!(id, token(example.request, first + i));
            }
            for (i, states) in example.states.chunks(WIDTH).enumerate() {
                let wanted = f16::from_f32(state(example.request, first + i));
                assert_eq!(states, [wanted; WIDTH], "row {i}");
            }
            assert_eq!(example.drawn, PROMPT.saturating_sub(first));
        }
        examples
    }
}

fn token(id: SeqId, position: usize) -> u32 {
    id as u32 * 1000 + position as u32
}

fn state(id: SeqId, position: usize) -> f32 {
    (id * 100) as f32 + position as f32 / 8.0
}

fn trainable(scope: u64) -> DraftContext {
    DraftContext {
        scope: CacheScope(scope),
        may_persist: true,
        ..DraftContext::default()
    }
}

#[test]
fn a_text_becomes_examples_with_the_end_of_its_prompt() {
    let mut bench = Bench::new(16);
    bench.text(1, 10, &trainable(5));
    let examples = bench.taken();
    assert_eq!(examples.len(), 1);
    assert_eq!(examples[0].tokens[0], token(1, PROMPT - PROMPT_ROWS));
    // The positions up to 69 were computed; the token after is drawn and has no states.
    assert_eq!(examples[0].tokens.last(), Some(&token(1, 70)));
    assert_eq!(examples[0].drawn, PROMPT_ROWS);

    bench.text(2, 100, &trainable(5));
    let examples = bench.taken();
    let rows: Vec<usize> = examples.iter().map(|l| l.tokens.len() - 2).collect();
    // Where an example ends with a step, the token after the next one is not known yet.
    let last = PROMPT_ROWS + 300 - 2 * EXAMPLE_ROWS - 1;
    assert_eq!(rows, [EXAMPLE_ROWS - 1, EXAMPLE_ROWS, last]);
    assert_eq!(examples[1].tokens[0], token(2, 8 + EXAMPLE_ROWS));
    // A text without drawn tokens is not learned from.
    bench.text(3, 0, &trainable(5));
    assert!(bench.taken().is_empty());
}

/// Texts of another scope, which another API key or salt has, and those that may not train a head, stay out.
#[test]
fn only_one_scope_is_learned_from() {
    let mut bench = Bench::new(16);
    let silent = DraftContext {
        may_persist: false,
        ..trainable(5)
    };
    bench.text(1, 10, &silent);
    assert!(bench.taken().is_empty());
    for (id, scope) in [(2, 5), (3, 6), (4, 5), (5, 0)] {
        bench.text(id, 10, &trainable(scope));
    }
    let requests: Vec<SeqId> = bench.taken().iter().map(|l| l.request).collect();
    assert_eq!(requests, [2, 4]);
    assert!(bench.drafter.open.is_empty());
}

#[test]
fn positions_that_were_not_read_begin_an_example_anew_and_none_is_learned_from_twice() {
    let mut bench = Bench::new(16);
    let context = trainable(5);
    bench.step(1, 0..PROMPT, &context);
    bench.step(1, 40..50, &context);
    bench.step(1, 60..70, &context);
    bench.drafter.end(1);
    let examples = bench.taken();
    assert_eq!(examples.len(), 1);
    assert_eq!(
        (examples[0].tokens[0], examples[0].drawn),
        (token(1, 60), 0)
    );

    // A preempted sequence is observed from its start again.
    bench.step(2, 0..PROMPT, &context);
    bench.step(2, 40..90, &context);
    bench.drafter.forget(2);
    bench.step(2, 0..90, &context);
    bench.step(2, 90..110, &context);
    bench.drafter.end(2);
    let examples = bench.taken();
    assert_eq!(examples.len(), 1);
    assert_eq!(examples[0].tokens[0], token(2, 90));
}

#[test]
fn nobody_waits_for_a_learner_that_is_slow_or_gone() {
    let mut bench = Bench::new(2);
    (0..5).for_each(|id| bench.text(id, 10, &trainable(5)));
    assert_eq!(bench.drafter.link.dropped.get(), 3);
    assert_eq!(bench.taken().len(), 2);
    let Bench {
        mut drafter,
        examples,
        ..
    } = bench;
    drop(examples);
    send(
        &drafter.link,
        OpenExample {
            rows: 8,
            tokens: (0..9).collect(),
            states: vec![f16::ONE; 8],
            ..OpenExample::default()
        }
        .close(1),
    );
    assert_eq!(drafter.link.dropped.get(), 4);
    assert!(drafter.propose(&mut []).unwrap().is_empty());
}
