//! Whether a head reads a text: it pays only while its drafts are expected to save more time than reading
//! takes and than the target's forwards take longer beside it. Pure: no tensors, no clock.
//!
//! A head that may draft needs the target's hidden states of all tokens and reads the whole prompt, though
//! with many sequences in a step a draft seldom pays for its rows. So a text begins with the head, or goes on
//! without it until fewer sequences run; the head then starts with the states that come next.

use super::budget::{Base, Budget, DraftForecast};
use super::displacement::Displacement;
use super::draft::{Forecast, SeqId};
use super::features::MAX_UNREAD;
use std::ops::Range;

/// The share that each step has in the averages.
const WEIGHT: f64 = 0.02;
/// The weight of the past in the work of steps, which changes with the requests, and in what reading costs.
const DECAY: f64 = 0.995;
/// Steps between two looks at whether reading pays.
const LOOK_EVERY: u32 = 32;
/// Looked at again at once when the load has changed by this factor.
const LOAD_CHANGE: f64 = 1.25;
/// Sequences whose drafts are weighed together at most.
const MAX_SEQUENCES: usize = 32;
/// One of this many sequences is read in any case: without drafts nobody knows what they would be worth. And one is not
/// where [`DOUBT`] decides: without it nobody knows what reading costs the target's forwards.
const READ_EVERY: SeqId = 32;
/// The share by which a head may slow the target's forwards. What saves more is read without a doubt.
const DOUBT: f64 = 0.25;
/// Tokens that are taken to have come without a prompt, before anything has run.
const FIRST_TOKENS: f64 = 64.0;
/// Steps of an answer of usual length, because nobody knows how long it will be.
const ANSWER_STEPS: f64 = 256.0;
/// Rows that the target always computes again for a head that lacks them: those that it leaves unread at the end of a text,
/// and what its prefix lacks of whole blocks.
const MAX_LACK: usize = MAX_UNREAD + 32;

/// What is known of the load, of the work of recent steps and of what a head takes to read.
#[derive(Debug)]
pub struct Reading {
    /// Sequences of a step: rises at once, falls slowly.
    load: f64,
    /// Prompt rows and new tokens of recent steps, of the texts that may have drafts.
    prompt_rows: f64,
    tokens: f64,
    /// Rows that the head has read ahead of a request, and their seconds.
    rows: f64,
    seconds: f64,
    /// What a head that reads costs the target's forwards.
    pub displacement: Displacement,
    /// Seconds of a step that it gains for greedy and for sampled texts, and whether it would gain any if drafts were as
    /// good as they may be, as of `looked_load`; and steps since then.
    gains: [f64; 2],
    may_pay: [bool; 2],
    /// Whether it would whatever the displacement is.
    surely_pays: [bool; 2],
    looked_load: f64,
    steps: u32,
}

impl Default for Reading {
    /// Reading pays until something else is known.
    fn default() -> Self {
        Self {
            load: 0.0,
            prompt_rows: 0.0,
            tokens: FIRST_TOKENS,
            rows: 0.0,
            seconds: 0.0,
            displacement: Displacement::default(),
            gains: [f64::INFINITY; 2],
            may_pay: [true; 2],
            surely_pays: [true; 2],
            looked_load: 0.0,
            steps: 0,
        }
    }
}

impl Reading {
    /// Whether the head shall read the text of the sequence `id` from here on.
    pub fn pays(&self, id: SeqId, is_sampled: bool) -> bool {
        let pays = self.gains[usize::from(is_sampled)] > 0.0;
        id.is_multiple_of(READ_EVERY) || pays && !self.is_control(id, is_sampled)
    }

    /// Whether the text is not read, so that others can be compared with it.
    pub fn is_control(&self, id: SeqId, is_sampled: bool) -> bool {
        let is_in_doubt =
            self.displacement.is_known() && !self.surely_pays[usize::from(is_sampled)];
        is_in_doubt && id % READ_EVERY == READ_EVERY / 2
    }

    /// Whether the target shall compute the positions `lacking` again, which it has cached and the head has not: if there
    /// are few, or drafts are expected to save more time in an answer. Otherwise the head begins after them.
    pub fn pays_again(&self, budget: &Budget, lacking: Range<usize>, is_sampled: bool) -> bool {
        let saved = ANSWER_STEPS * self.gains[usize::from(is_sampled)];
        lacking.len() <= MAX_LACK || saved > budget.prompt_seconds(lacking)
    }

    /// Notes that a step with so many sequences, those with prompt rows included, is about to run. Returns
    /// whether it is time for [`Reading::look`].
    pub fn begin_step(&mut self, sequences: usize) -> bool {
        let sequences = sequences as f64;
        self.load = sequences.max(self.load + WEIGHT * (sequences - self.load));
        self.steps += 1;
        let change = self.load / self.looked_load;
        self.steps >= LOOK_EVERY || !(1.0 / LOAD_CHANGE..LOAD_CHANGE).contains(&change)
    }

    /// Whether to read such a text all the same, to learn what drafts are worth, and the seconds that its first
    /// `rows` rows take.
    pub fn hopes(&self, rows: usize, is_sampled: bool) -> Option<f64> {
        self.may_pay[usize::from(is_sampled)].then_some(self.row_seconds() * rows as f64)
    }

    fn row_seconds(&self) -> f64 {
        self.seconds / self.rows.max(1.0)
    }

    /// Decides for each kind of text by what drafts of a greedy and of a sampled text are expected to be, after
    /// `context` tokens.
    pub fn look(&mut self, budget: &Budget, typical: &[Forecast; 2], context: usize) {
        (self.steps, self.looked_load) = (0, self.load);
        let sequences = (self.load.round() as usize).clamp(1, MAX_SEQUENCES);
        let base = Base {
            sequences,
            rows: sequences,
            context,
        };
        // A step gives a sequence at least one token, for which the head has read its share.
        let per_token = self.row_seconds() * self.prompt_rows / self.tokens;
        let plain = budget.plain_share(base);
        let displaced = self.displacement.share();
        let cost = per_token + displaced * plain;
        for (kind, forecast) in typical.iter().enumerate() {
            let forecast = DraftForecast::of(forecast, forecast.path.len());
            let hoped = forecast.hoped_path();
            let gain = |path| budget.saved_seconds(DraftForecast { path, ..forecast }, base) - cost;
            let expected = gain(forecast.path);
            self.gains[kind] = expected;
            self.may_pay[kind] = expected > 0.0 || gain(&hoped) > 0.0;
            self.surely_pays[kind] = expected > (DOUBT - displaced) * plain;
        }
    }

    /// Learns from a step with so many prompt rows and new tokens of texts that may have drafts, and from the rows that the
    /// head has read ahead since the last one, and their seconds.
    pub fn note_step(&mut self, prompt_rows: usize, tokens: f64, read: (usize, f64)) {
        if prompt_rows > 0 || tokens > 0.0 {
            self.prompt_rows = DECAY * self.prompt_rows + prompt_rows as f64;
            self.tokens = DECAY * self.tokens + tokens;
        }
        if read.0 > 0 {
            self.rows = DECAY * self.rows + read.0 as f64;
            self.seconds = DECAY * self.seconds + read.1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::budget::BudgetMode;
    use crate::spec::target_cost::tests::dense;

    /// A machine on which up to four rows cost little more than one, and a draft model's a tenth.
    fn budget() -> Budget {
        let mut budget = Budget::new(BudgetMode::Adaptive);
        let target = [(1, 1.0), (4, 1.2), (8, 2.4), (16, 4.8)];
        budget.target().calibrate(&dense(&target));
        budget
            .draft_cost()
            .calibrate(&target.map(|(rows, seconds)| (rows, 0.1 * seconds)));
        budget
    }

    const GOOD: &[f32] = &[0.7, 0.5, 0.3];
    const BAD: &[f32] = &[0.05, 0.02];

    fn typical(paths: [&[f32]; 2]) -> [Forecast; 2] {
        paths.map(|path| Forecast {
            path: path.to_vec(),
            hope: path[0],
            pending: 1,
            at_once: false,
        })
    }

    /// Decides in each step.
    fn step(reading: &mut Reading, sequences: usize, paths: [&[f32]; 2]) {
        reading.begin_step(sequences);
        reading.look(&budget(), &typical(paths), 0);
    }

    #[test]
    fn what_is_not_known_yet_is_hoped_for() {
        let mut reading = Reading::default();
        reading.begin_step(1);
        let mut paths = typical([BAD, BAD]);
        paths[1].hope = 0.6;
        reading.look(&budget(), &paths, 0);
        assert!(!reading.pays(1, false) && !reading.pays(1, true));
        assert_eq!(reading.hopes(100, false), None);
        assert_eq!(
            reading.hopes(100, true),
            Some(0.0),
            "nothing was read so far"
        );
    }

    #[test]
    fn a_text_is_read_while_few_sequences_run() {
        let mut reading = Reading::default();
        assert!(reading.pays(1, false) && reading.pays(1, true));
        step(&mut reading, 1, [GOOD, BAD]);
        assert!(reading.pays(1, false) && !reading.pays(1, true));
        step(&mut reading, 16, [GOOD, BAD]);
        assert!(!reading.pays(1, false));
        let read = (0..1000).filter(|&id| reading.pays(id, false)).count();
        assert_eq!(read, 32, "of 1,000, to learn what drafts are worth");
        let steps = (1..).find(|_| {
            step(&mut reading, 1, [GOOD, BAD]);
            reading.pays(1, false)
        });
        assert!((50..300).contains(&steps.unwrap()), "{steps:?}");
    }

    /// A cached prompt is computed again for a head that lacks it while that takes less time than drafts save in an answer.
    #[test]
    fn a_long_prompt_is_not_computed_again() {
        let mut reading = Reading::default();
        let budget = budget();
        let again = |reading: &Reading, lacking, is_sampled| {
            reading.pays_again(&budget, lacking, is_sampled)
        };
        assert!(again(&reading, 0..20_000, false), "nothing is known");
        step(&mut reading, 1, [GOOD, BAD]);
        assert!(again(&reading, 0..200, false) && again(&reading, 19_800..20_000, false));
        assert!(!again(&reading, 0..20_000, false));
        assert!(again(&reading, 0..MAX_LACK, true) && !again(&reading, 0..200, true));
    }

    #[test]
    fn it_is_time_to_look_when_the_load_rises_and_now_and_then() {
        let (mut reading, budget) = (Reading::default(), budget());
        let mut due = |sequences| {
            let due = reading.begin_step(sequences);
            if due {
                reading.look(&budget, &typical([GOOD; 2]), 0);
            }
            due
        };
        assert!(due(2));
        assert_eq!((0..64).filter(|_| due(2)).count(), 2);
        assert!(due(3));
    }

    #[test]
    fn long_prompts_of_short_texts_are_not_read() {
        for (prompt_rows, pays) in [(200, true), (20_000, false)] {
            let mut reading = Reading::default();
            for _ in 0..400 {
                let seconds = 0.001 * prompt_rows as f64;
                reading.note_step(prompt_rows, 10.0, (prompt_rows, seconds));
            }
            step(&mut reading, 1, [GOOD; 2]);
            assert_eq!(reading.pays(1, false), pays, "{prompt_rows}");
        }
    }
}
