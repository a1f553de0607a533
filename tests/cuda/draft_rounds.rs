//! Random schedules of requests that are drafted for on a GPU, with mischief in the middle of rounds of drafting, between
//! what a GPU is asked for and what the host reads: clients leave, draws fail, logits are not finite. The pools are small,
//! so that sequences wait for one another.

use super::disturbed::{Disturbed, Mischief};
use super::texts::eagle3;
use super::{BLOCK_SIZE, BLOCKS, gpu, model, shape, tokens};
use crate::common::{PROMPT_WAIT, assert_idle, chains, greedy, run};
use candle_core::{DType, Tensor};
use foretoken::engine::{self, CollectedEvents, EngineOptions, EngineThread, Events, Request};
use foretoken::error::{Error, Result};
use foretoken::model::{Draw, ForwardOutput, Model};
use foretoken::sampling::{SamplingParams, mix};
use foretoken::spec::{BudgetMode, DraftModel, Drafter};
use std::sync::{Arc, Mutex};

/// Maximum rows of a step, few enough for a row to have the same bits in any.
const STEP: usize = 64;
const MAX_NUM_SEQS: usize = 5;
const REQUESTS: usize = 8;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = mix(self.0);
        (self.0 % below as u64) as usize
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.roll(choices.len())].clone()
    }
}

/// Clients leave, draws fail, and logits are not finite.
struct Accidents {
    dice: Dice,
    /// The clients that are still to leave.
    leaving: Vec<Events>,
    left: usize,
    failed: usize,
    poisoned: usize,
}

impl Accidents {
    fn new(seed: u64) -> Self {
        Self {
            dice: Dice(seed),
            leaving: Vec::new(),
            left: 0,
            failed: 0,
            poisoned: 0,
        }
    }

    fn let_one_leave(&mut self) {
        if self.dice.roll(6) == 0 && self.leaving.pop().is_some() {
            self.left += 1;
        }
    }
}

impl Mischief for Accidents {
    fn before_forward(&mut self) {
        self.let_one_leave();
    }

    fn draw(
        &mut self,
        draw: &mut Draw<'_>,
        output: &ForwardOutput,
        place: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.let_one_leave();
        match self.dice.roll(12) {
            0 => {
                self.failed += 1;
                Err(Error::internal("a draw failed"))
            }
            1 => {
                self.poisoned += 1;
                let logits = &output.logits;
                let (rows, vocab) = logits.dims2()?;
                let row = self.dice.roll(rows);
                let nan = Tensor::new(vec![f32::NAN; vocab], logits.device())?;
                let parts = [
                    logits.narrow(0, 0, row)?,
                    nan.unsqueeze(0)?,
                    logits.narrow(0, row + 1, rows - row - 1)?,
                ];
                let parts = parts.iter().filter(|part| part.elem_count() > 0);
                let logits = Tensor::cat(&parts.collect::<Vec<_>>(), 0)?;
                draw(&ForwardOutput::of(logits), place)
            }
            _ => draw(output, place),
        }
    }
}

/// How a client ends its request.
#[derive(Debug, Clone, Copy)]
enum Client {
    Stays,
    /// Its text is complete after so many tokens, as at a stop string.
    Stops(usize),
    /// It leaves in the middle of a round.
    Leaves,
}

/// Greedy, sampled, filtered, biased, and penalized, whose tokens the host reads one by one. Prompts may begin alike.
fn request(dice: &mut Dice) -> Request {
    let params = SamplingParams {
        seed: dice.roll(1000) as u64,
        temperature: dice.of(&[0.0, 0.0, 0.8, 1.0]),
        top_k: dice.of(&[0, 0, 20]),
        top_p: dice.of(&[1.0, 1.0, 0.8]),
        repetition_penalty: dice.of(&[1.0, 1.0, 1.0, 1.0, 1.0, 1.3]),
        logit_bias: dice.of(&[vec![], vec![], vec![(7, 3.0), (9, -100.0)]]),
        ..SamplingParams::default()
    };
    let first = dice.of(&[0, 0, 40, 90]);
    let len = 2 + dice.roll(40);
    Request {
        params,
        spec_length: dice.of(&[None, None, None, Some(0), Some(1), Some(2)]),
        ..greedy(&tokens(first + len)[first..], 1 + dice.roll(24))
    }
}

/// The events of `events` so far when its client is content.
fn received(mut events: Events, client: Client) -> CollectedEvents {
    let mut all = CollectedEvents::default();
    while all.finish.is_none() {
        let event = events.blocking_recv().expect("a last event");
        all.add(event).unwrap_or_else(|e| panic!("{e}"));
        if let Client::Stops(tokens) = client
            && all.tokens.len() >= tokens
        {
            all.tokens.truncate(tokens);
            events.stop(tokens);
            break;
        }
    }
    all
}

/// Requests, how their clients end them, and their texts without drafts, alone.
fn requests(dice: &mut Dice, plain: &EngineThread) -> Vec<(Request, Client, CollectedEvents)> {
    let one = |_| {
        let mut request = request(dice);
        let mut alone = run(plain, request.clone());
        if dice.roll(4) == 0 {
            let ids = alone.ids();
            request.params.stop_token_ids = vec![ids[dice.roll(ids.len())]];
            alone = run(plain, request.clone());
        }
        let client = match dice.roll(5) {
            0 | 1 => Client::Leaves,
            2 => Client::Stops(1 + dice.roll(alone.tokens.len())),
            _ => Client::Stays,
        };
        (request, client, alone)
    };
    (0..REQUESTS).map(one).collect()
}

fn start(
    target: Box<dyn Model>,
    drafter: Option<Box<dyn Drafter>>,
    num_blocks: usize,
    length: usize,
) -> EngineThread {
    let options = EngineOptions {
        max_num_seqs: MAX_NUM_SEQS,
        max_num_batched_tokens: STEP,
        spec: chains(length),
        spec_budget: BudgetMode::Fixed,
        max_prompt_wait: PROMPT_WAIT,
        ..EngineOptions::default()
    };
    let engine = engine::spawn(target, drafter, num_blocks, BLOCK_SIZE, options).unwrap();
    EngineThread::new(engine, EngineThread::PATIENCE)
}

/// What happened in all schedules.
#[derive(Debug, Default)]
struct Seen {
    left: usize,
    failed: usize,
    poisoned: usize,
    stopped: usize,
    accepted: usize,
}

impl Seen {
    /// Runs requests on `engine` as their clients want it, and compares what they get with their texts alone. With `is_exact`,
    /// no draft token may be wrong.
    fn run(
        &mut self,
        (case, is_exact): (u64, bool),
        engine: &EngineThread,
        requests: &[(Request, Client, CollectedEvents)],
        mischief: &Mutex<Accidents>,
    ) {
        let submitted = requests.iter().map(|(request, ..)| request.clone());
        let events = engine.submit_all(submitted.collect()).unwrap();
        let mut all: Vec<_> = requests.iter().zip(events).collect();
        let leave =
            |((_, client, _), _): &mut (&(_, Client, _), _)| matches!(client, Client::Leaves);
        let leaving = all.extract_if(.., leave).map(|(_, events)| events);
        mischief.lock().unwrap().leaving.extend(leaving);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (all.into_iter())
                .map(|(known, events)| {
                    let client = known.1;
                    (known, scope.spawn(move || received(events, client)))
                })
                .collect();
            for ((request, client, alone), found) in clients {
                let found = found.join().unwrap();
                let about = format!("case {case}: {request:?} {client:?}");
                match client {
                    Client::Stops(tokens) => {
                        self.stopped += usize::from(found.finish.is_none());
                        assert_eq!(found.ids(), alone.ids()[..*tokens], "{about}");
                    }
                    _ => {
                        assert_eq!(found.ids(), alone.ids(), "{about}");
                        assert_eq!(found.finish, alone.finish, "{about}");
                    }
                }
                if is_exact {
                    assert_eq!(found.spec.accepted, found.spec.tested, "{about}");
                }
                self.accepted += found.spec.accepted;
            }
        });
        mischief.lock().unwrap().leaving.clear();
        assert_idle(engine);
    }

    fn add(&mut self, mischief: &Mutex<Accidents>) {
        let mischief = mischief.lock().unwrap();
        self.left += mischief.left;
        self.failed += mischief.failed;
        self.poisoned += mischief.poisoned;
    }
}

/// Whatever happens in the middle of a round costs the sequences that it happens to, and nobody else: texts are those
/// without drafts, the drafts of a draft model with the target's weights stay right, and in the end all blocks are free.
/// In debug builds the engine checks its invariants after every step.
#[test]
fn rounds_that_are_disturbed_cost_nobody_else() {
    let gpu = gpu();
    let folder = tempfile::tempdir().unwrap();
    let source = shape(folder.path(), "llama", 64, &[]);
    let one = |seed| model(&source, &gpu, Some(DType::BF16), seed);
    let plain = start(one(5), None, BLOCKS, 0);
    let mut seen = Seen::default();
    for case in 0..3 {
        let mut dice = Dice(case);
        let mischief = Arc::new(Mutex::new(Accidents::new(case + 1000)));
        let num_blocks = 7 + dice.roll(3);
        let length = 2 + dice.roll(4);
        let disturbed = |model: Box<dyn Model>| Disturbed {
            mischief: mischief.clone(),
            model,
        };
        let own_blocks = num_blocks - dice.roll(3);
        let draft = match case % 3 {
            2 => {
                let head = Disturbed {
                    mischief: mischief.clone(),
                    model: eagle3(&source, &gpu, &*one(5), [0, 1, 2]),
                };
                DraftModel::of_head(Box::new(head), own_blocks, BLOCK_SIZE, STEP)
            }
            other => {
                let model = Box::new(disturbed(one(5 + other)));
                DraftModel::new(model, own_blocks, BLOCK_SIZE, STEP)
            }
        };
        let target = Box::new(disturbed(one(5)));
        let engine = start(target, Some(Box::new(draft.unwrap())), num_blocks, length);
        let requests = requests(&mut dice, &plain);
        seen.run((case, case % 3 == 0), &engine, &requests, &mischief);
        seen.add(&mischief);
    }
    assert_idle(&plain);
    println!("{seen:?}");
    assert!(seen.left > 0 && seen.stopped > 0, "{seen:?}");
    assert!(seen.failed > 0 && seen.poisoned > 0, "{seen:?}");
    assert!(seen.accepted > 10, "{seen:?}");
}
