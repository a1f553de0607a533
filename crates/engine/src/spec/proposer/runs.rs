//! Simulated runs over prompts in random order.

use super::super::calibration::no_dearer_than_more_rows;
use super::super::cost::tests::Noise;
use super::super::displacement::Displacement;
use super::super::target_cost::MeasuredForward;
use super::tests::input;
use super::traces::{Machine, Text, TracedHead, rates};
use super::*;
use crate::spec::{Cascade, Tables};
use foretoken_core::sampling::SamplingParams;
use std::sync::Arc;

/// Runs of each case.
const RUNS: u64 = 20;
/// Prompts of a run, two of each category, and tokens of an answer.
const PROMPTS: usize = 26;
pub const ANSWER: usize = 96;
/// Steps until the cache has settled after a head's forward.
const SETTLED: usize = 12;
/// Longest draft.
const LENGTH: usize = 8;
/// Seconds of an interruption.
const INTERRUPTION: f64 = 0.1;
/// Standard deviation of a step's time.
const DEVIATION: f64 = 0.08;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Drafts {
    Tables,
    Head,
    Both,
}

/// The measured time of something that takes `seconds`: now and then something else runs.
pub struct Clock {
    noise: Noise,
    /// Steps for which the machine is slow.
    slow: usize,
    /// Seconds that the next request for a draft, and a head's next reading, are interrupted for.
    of_request: f64,
    of_reading: f64,
    /// Steps since the head's last forward.
    since_head: usize,
}

impl Clock {
    pub fn new(seed: u64) -> Self {
        Self {
            noise: Noise(seed),
            slow: 0,
            of_request: 0.0,
            of_reading: 0.0,
            since_head: SETTLED,
        }
    }

    /// What a step takes that would take `seconds` without a head, which has run a forward if it `reads`.
    fn beside_head(&mut self, machine: Machine, seconds: f64, reads: bool) -> f64 {
        self.since_head = if reads { 0 } else { self.since_head + 1 };
        let displaced = if self.since_head < SETTLED {
            machine.displaced
        } else {
            0.0
        };
        seconds * (1.0 + displaced)
    }

    fn next(&mut self) {
        self.slow = self.slow.saturating_sub(1);
        if self.noise.unit() < 0.002 {
            self.slow = 5 + self.noise.below(60);
        }
    }

    fn measured(&mut self, seconds: f64) -> f64 {
        let slow = if self.slow > 0 { 1.6 } else { 1.0 };
        seconds * slow * self.noise.factor(DEVIATION)
    }
}

/// What else runs while forwards are measured before the first request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Start {
    Quiet,
    /// Other work needs the same cores: most forwards take 1.5 to 3 times as long.
    Busy,
    /// The first request for a draft and a head's first reading are interrupted.
    Interrupted,
    /// It was not seen that the head slows the target's forwards.
    Unseen,
}

pub fn proposer(
    machine: Machine,
    drafts: Drafts,
    texts: &[Arc<Text>],
    start: Start,
    seed: u64,
) -> Proposer {
    let noise = &mut Noise(seed);
    let head = || {
        let noise = Noise(seed + 1000);
        Box::new(TracedHead::new(
            texts.to_vec(),
            machine,
            noise,
            Some(rates()),
        ))
    };
    let tables = || Tables::new(1 << 20);
    let drafter: Box<dyn Drafter> = match drafts {
        Drafts::Tables => Box::new(tables()),
        Drafts::Head => head(),
        Drafts::Both => Box::new(Cascade::new(head(), tables())),
    };
    let mut proposer = Proposer::new(drafter, BudgetMode::Adaptive);
    // The fastest of a few forwards each.
    let mut fastest = |seconds: f64| {
        let busy = |noise: &mut Noise| match start {
            Start::Quiet | Start::Interrupted | Start::Unseen => 1.0,
            Start::Busy if noise.unit() < 0.7 => 1.5 + 1.5 * noise.unit(),
            Start::Busy => 1.0,
        };
        let runs = [(); 4].map(|()| seconds * noise.factor(DEVIATION) * busy(noise));
        runs.into_iter().fold(f64::INFINITY, f64::min)
    };
    let rows = [1, 2, 4, 6, 8, 16];
    let starts = rows.map(|rows| (rows, 0));
    let forwards = starts.into_iter().chain([(1, 512), (8, 512)]);
    let forwards = forwards.map(|(rows, context)| MeasuredForward {
        rows,
        context,
        experts_read: 0,
        seconds: fastest(machine.step(1, rows, context)),
    });
    let forwards = no_dearer_than_more_rows(forwards.collect());
    proposer.budget().target().calibrate(&forwards);
    if drafts != Drafts::Tables {
        let forwards = rows.map(|rows| MeasuredForward {
            rows,
            context: 0,
            experts_read: 0,
            seconds: fastest(machine.head(rows)),
        });
        let forwards = no_dearer_than_more_rows(forwards.to_vec());
        let draft = forwards.iter().map(|one| (one.rows, one.seconds));
        (proposer.budget().draft_cost()).calibrate(&draft.collect::<Vec<_>>());
    }
    let seen = if start == Start::Unseen {
        0.0
    } else {
        machine.displaced
    };
    proposer.reading.displacement = Displacement::of(seen);
    if start == Start::Busy {
        proposer.budget().target().believe(1);
        proposer.budget().draft_cost().believe(1);
    }
    proposer
}

pub fn state(id: usize, text: &Text) -> SequenceState {
    let prompt = text.tokens[..text.prompt_len].to_vec();
    let params = SamplingParams {
        temperature: if text.is_sampled { 1.0 } else { 0.0 },
        ..SamplingParams::default()
    };
    SequenceState::new(id as u64, prompt, params)
}

fn observe(proposer: &mut Proposer, states: &[SequenceState], before: &[usize]) {
    let all = states.iter().zip(before);
    let committed = all.map(|(state, &before)| state.committed(before..state.kv_len));
    proposer.observe(&committed.collect::<Vec<_>>());
}

/// Seconds that the texts take in this order, so many at a time, without those in which the target reads prompts.
/// Without a proposer nothing is drafted.
fn seconds(
    machine: Machine,
    texts: &[Arc<Text>],
    streams: usize,
    mut proposer: Option<Proposer>,
    start: Start,
    seed: u64,
) -> f64 {
    let alternates = streams == 1;
    let mut clock = Clock::new(seed);
    if start == Start::Interrupted {
        (clock.of_request, clock.of_reading) = (INTERRUPTION, INTERRUPTION);
    }
    let (mut total, mut next) = (0.0, 0);
    let mut states: Vec<SequenceState> = Vec::new();
    loop {
        while states.len() < streams && next < texts.len() {
            let mut first = [state(next, &texts[next])];
            next += 1;
            // The order reverses each time.
            if let Some(proposer) = proposer.as_mut().filter(|_| alternates && next % 2 == 1) {
                for other in next.max(2) - 1..=next {
                    run_plain(
                        machine,
                        &texts[other - 1],
                        10_000 + other,
                        proposer,
                        &mut clock,
                    );
                }
            }
            if let Some(proposer) = &mut proposer {
                total += read_prompt(machine, proposer, &mut first, &mut clock);
            }
            let [mut first] = first;
            first.kv_len = first.prompt_len;
            first.push(texts[next - 1].tokens[first.prompt_len]);
            states.push(first);
        }
        if states.is_empty() {
            return total;
        }
        clock.next();
        total += step(machine, texts, &mut states, proposer.as_mut(), &mut clock);
        let is_done =
            |state: &SequenceState| state.tokens.len() == texts[state.id as usize].tokens.len();
        if let Some(proposer) = &mut proposer {
            states
                .iter()
                .filter(|state| is_done(state))
                .for_each(|state| proposer.end(state));
        }
        states.retain(|state| !is_done(state));
    }
}

/// Lets a prompt be read; returns the seconds that the head takes for it.
pub fn read_prompt(
    machine: Machine,
    proposer: &mut Proposer,
    first: &mut [SequenceState; 1],
    clock: &mut Clock,
) -> f64 {
    let rows = first[0].prompt_len;
    proposer.resume(&first[0], 0, |len| len);
    let mut inputs = [StepInput {
        rows,
        ..input(&mut first[0], 0)
    }];
    let is_tapped = proposer.propose(&mut inputs, 1 << 20)[0].is_tapped;
    let mut reading = 0.0;
    if is_tapped {
        proposer.drafter.pool(|pool| {
            clock.since_head = 0;
            reading = machine.reading(rows);
            pool.network.read = (rows, reading + std::mem::take(&mut clock.of_reading));
        });
    }
    proposer.note_step(&StepCost {
        sequences: 1,
        base_rows: rows,
        tokens: 1,
        target_seconds: machine.one_row * 0.1 * rows as f64,
        ..StepCost::default()
    });
    first[0].kv_len = rows;
    observe(proposer, first, &[0]);
    reading
}

/// Runs a text without drafts in between, as `bench` does.
pub fn run_plain(
    machine: Machine,
    text: &Text,
    id: usize,
    proposer: &mut Proposer,
    clock: &mut Clock,
) {
    let mut plain = state(id, text);
    for next in text.prompt_len..text.tokens.len() {
        let rows = plain.tokens.len() - plain.kv_len;
        let mut inputs = [StepInput {
            rows,
            may_draft: false,
            ..input(&mut plain, 0)
        }];
        let proposal = proposer.propose(&mut inputs, 1 << 20).remove(0);
        assert!(proposal.draft.is_empty() && !proposal.is_tapped);
        let seconds = clock.beside_head(machine, machine.step(1, rows.min(16), next), false);
        proposer.note_step(&StepCost {
            sequences: 1,
            base_rows: rows,
            context: next,
            tokens: 1,
            target_seconds: clock.measured(seconds),
            ..StepCost::default()
        });
        plain.kv_len = plain.tokens.len();
        plain.push(text.tokens[next]);
    }
    proposer.end(&plain);
}

/// Runs a step; returns its seconds.
pub fn step(
    machine: Machine,
    texts: &[Arc<Text>],
    states: &mut [SequenceState],
    proposer: Option<&mut Proposer>,
    clock: &mut Clock,
) -> f64 {
    let sequences = states.len();
    let context = states.iter().map(|state| state.kv_len).sum::<usize>() / sequences;
    let Some(proposer) = proposer else {
        for state in states {
            state.kv_len += 1;
            let token = texts[state.id as usize].tokens[state.tokens.len()];
            state.push(token);
        }
        return machine.step(sequences, sequences, context);
    };
    let mut inputs: Vec<_> = states
        .iter_mut()
        .map(|state| input(state, LENGTH))
        .collect();
    let proposals = proposer.propose(&mut inputs, 1 << 20);
    let asked = proposer.asked.len() as f64 * machine.ask;
    let forwards = proposer.drafter.pool(|pool| pool.network.forwards.clone());
    // Those of the last request for drafts, if there was none now.
    let forwards = forwards.filter(|_| asked > 0.0).unwrap_or_default();
    let exact: f64 = forwards.iter().map(|&(rows, _)| machine.head(rows)).sum();
    let measured: f64 = forwards.iter().map(|&(_, seconds)| seconds).sum();
    let (mut nodes, mut tokens, mut before) = (0, 0, Vec::new());
    for (state, proposal) in states.iter_mut().zip(&proposals) {
        let text = &texts[state.id as usize].tokens;
        let draft = &proposal.draft.tokens;
        let rest = &text[state.tokens.len()..];
        let accepted = draft
            .iter()
            .zip(&rest[..rest.len() - 1])
            .take_while(|(a, b)| a == b);
        let new = accepted.count() + 1;
        before.push(state.kv_len);
        state.kv_len += new;
        rest[..new].iter().for_each(|&token| state.push(token));
        (nodes, tokens) = (nodes + draft.len(), tokens + new);
    }
    let alone = machine.step(sequences, sequences + nodes, context);
    let target = clock.beside_head(machine, alone, !forwards.is_empty());
    let interruption = if asked > 0.0 {
        std::mem::take(&mut clock.of_request)
    } else {
        0.0
    };
    proposer.note_step(&StepCost {
        sequences,
        base_rows: sequences,
        draft_nodes: nodes,
        context,
        experts_read: 0,
        tokens,
        target_seconds: clock.measured(target),
        draft_seconds: measured + clock.measured(asked) + interruption,
    });
    observe(proposer, states, &before);
    target + exact + asked
}

/// The speed-up of each run.
pub fn speed_ups(
    machine: Machine,
    is_sampled: bool,
    streams: usize,
    drafts: Drafts,
    start: Start,
) -> Vec<f64> {
    let text = |number| Arc::new(Text::new(number, ANSWER, is_sampled));
    // Of many streams the first and the last steps are few.
    let count = if streams > 1 { 3 * PROMPTS } else { PROMPTS };
    let texts: Vec<Arc<Text>> = (0..count).map(text).collect();
    let run = |seed: u64| {
        let (mut texts, noise) = (texts.clone(), &mut Noise(seed));
        for last in (1..texts.len()).rev() {
            texts.swap(last, noise.below(last + 1));
        }
        let plain = seconds(machine, &texts, streams, None, start, seed);
        let proposer = proposer(machine, drafts, &texts, start, seed + 50);
        plain / seconds(machine, &texts, streams, Some(proposer), start, seed + 100)
    };
    (0..RUNS).map(run).collect()
}
