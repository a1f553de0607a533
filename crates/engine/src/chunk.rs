//! How many prompt rows a step may carry. No tensors, no clock.

use std::time::Duration;

/// Initial number of rows, before any measurement: few enough for a slow machine; on a fast machine
/// the number soon grows.
const FIRST_ROWS: f64 = 32.0;
/// Minimum number of rows. Without it, a prompt would never be read on a machine where even these
/// rows take longer than allowed.
const MIN_ROWS: f64 = 16.0;
/// Maximum number of rows of a chunk that others can interrupt. A row of a chunk of 64 rows costs 1.3 times as much in
/// matrix products as one of a chunk of 512 rows, and one of 256 rows is within a few percent of it.
const MAX_INTERRUPTIBLE_ROWS: usize = 256;

/// Chooses the chunk so that the prompts' share of a step takes no longer than other sequences may
/// wait: those that decode in the step, and those that arrive during it. A chunk that those can
/// interrupt may take longer.
///
/// It keeps one number: the seconds per row of the steps that carried prompts. Each new step enters
/// this average with a weight of one half. So a chunk is at most twice the previous one, one slow
/// step shrinks it at once, and it adapts to a long prompt, whose rows grow more expensive with the
/// context they attend to. The seconds per row include a share of the step's fixed cost; because
/// every chunk is measured in turn, the size settles where the whole step takes
/// the allowed time.
#[derive(Debug, Clone)]
pub struct PromptChunk {
    /// Seconds.
    max_wait: f64,
    seconds_per_row: f64,
    /// Rows of the last chunk, if nobody but its request was there; otherwise 0.
    undisturbed: usize,
}

impl PromptChunk {
    /// A policy under which a sequence waits in a step at most about `max_wait` for the prompts of
    /// others.
    pub fn new(max_wait: Duration) -> Self {
        let max_wait = max_wait.as_secs_f64().max(1e-6);
        Self {
            max_wait,
            seconds_per_row: max_wait / FIRST_ROWS,
            undisturbed: 0,
        }
    }

    /// Maximum number of prompt rows in the next step if other sequences decode in it.
    pub fn rows(&self) -> usize {
        (self.max_wait / self.seconds_per_row).max(MIN_ROWS) as usize
    }

    /// Maximum number of prompt rows in the next step if nothing decodes in it: half, because only
    /// those wait that arrive during the step, and they wait for the rest of it and for the one that
    /// reads their prompt.
    pub fn rows_alone(&self) -> usize {
        self.rows().div_ceil(2)
    }

    /// Maximum number of prompt rows in the next step if nobody but their request is there. The first such chunk has
    /// [`PromptChunk::rows_alone`] rows, for which those who arrive wait. Each further one has twice as many rows as the one
    /// before, and who arrives interrupts it. So every prompt is read, whoever arrives, and an interruption discards at most
    /// twice the rows that were read since the last one.
    pub fn next_undisturbed(&mut self) -> usize {
        let grown = (2 * self.undisturbed).min(MAX_INTERRUPTIBLE_ROWS);
        self.undisturbed = grown.max(self.rows_alone());
        self.undisturbed
    }

    /// Notes that the last step was interrupted, or that others are there in the next one.
    pub fn note_others(&mut self) {
        self.undisturbed = 0;
    }

    /// Seconds that those who arrive wait for the rest of a step rather than interrupt it: half of what
    /// [`PromptChunk::rows_alone`] rows take.
    pub fn patience(&self) -> f64 {
        self.max_wait / 4.0
    }

    /// Learns from a step that took `seconds` and had `rows` rows: `prompt_rows` of prompts, the
    /// others of decoding sequences.
    pub fn note(&mut self, rows: usize, prompt_rows: usize, seconds: Duration) {
        let seconds = seconds.as_secs_f64();
        // A small chunk does not predict the cost of a large one: most of its time is the fixed
        // cost of a step.
        let uninformative = 2 * prompt_rows < self.rows() && seconds < self.max_wait;
        if prompt_rows > 0 && !uninformative {
            let average = (self.seconds_per_row + seconds / rows as f64) / 2.0;
            // A chunk that can be interrupted may be longer than others may wait for. Its rows have hardly any of the fixed
            // cost, which is most of what a short step costs: they only tell that rows grow more expensive.
            let is_long = prompt_rows > self.rows();
            self.seconds_per_row = if is_long {
                average.max(self.seconds_per_row)
            } else {
                average
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_WAIT: Duration = Duration::from_millis(100);
    /// Decoding rows of each step.
    const DECODING: usize = 8;

    /// A machine's seconds for a step without rows, for a row, and for a row's attention to 1,000
    /// tokens.
    struct Machine {
        step: f64,
        row: f64,
        attention: f64,
    }

    impl Machine {
        fn seconds(&self, rows: usize, context: usize) -> f64 {
            self.step + rows as f64 * (self.row + self.attention * context as f64 / 1000.0)
        }

        /// Reads a prompt while other sequences decode; returns the rows and seconds of each step.
        fn read(&self, chunk: &mut PromptChunk, prompt: usize, limit: usize) -> Vec<(usize, f64)> {
            let (mut steps, mut read) = (Vec::new(), 0);
            while read < prompt {
                let rows = chunk.rows().min(limit).min(prompt - read);
                let seconds = self.seconds(rows + DECODING, read);
                chunk.note(rows + DECODING, rows, Duration::from_secs_f64(seconds));
                steps.push((rows, seconds));
                read += rows;
            }
            steps
        }
    }

    /// A CPU with two cores and a small model; the prompt's last rows cost three times as much as
    /// its first.
    const SLOW: Machine = Machine {
        step: 0.005,
        row: 0.0015,
        attention: 0.001,
    };
    const FAST: Machine = Machine {
        step: 0.008,
        row: 0.000_02,
        attention: 0.000_000_5,
    };

    #[test]
    fn a_step_takes_as_long_as_it_may_from_the_first_to_the_last_row_of_a_prompt() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        for _ in 0..3 {
            let steps = SLOW.read(&mut chunk, 4000, 2048);
            let own = SLOW.seconds(DECODING, 4000);
            for (rows, seconds) in &steps {
                let waited = seconds - own;
                assert!(waited < 0.13, "{rows} rows: {waited} s");
            }
            // Steps are no shorter than necessary either, except at the start and the end.
            let middle = &steps[5..steps.len() - 1];
            assert!(
                middle.iter().all(|(_, seconds)| *seconds > 0.08),
                "{steps:?}"
            );
            let (early, late) = (steps[6].0, steps[steps.len() - 2].0);
            assert!(2 * late < early, "{early}, later {late}");
        }
    }

    #[test]
    fn a_fast_machine_soon_takes_all_at_once() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        let steps = FAST.read(&mut chunk, 20_000, 2048);
        assert!(
            steps.iter().take(12).any(|step| step.0 == 2048),
            "{steps:?}"
        );
        let mut last = chunk.rows();
        // Short prompts do not erase what was learned from a long one.
        for _ in 0..100 {
            FAST.read(&mut chunk, 5, 2048);
        }
        assert_eq!(chunk.rows(), last);
        // Another process kept the machine busy for ten seconds: the chunk shrinks at once and
        // soon recovers.
        chunk.note(2048 + DECODING, 2048, Duration::from_secs(10));
        assert!(chunk.rows() < 64, "{}", chunk.rows());
        for (rows, _) in FAST.read(&mut chunk, 20_000, 2048) {
            assert!(rows <= 2 * last, "from {last} to {rows} rows");
            last = rows;
        }
        assert!(chunk.rows() > 1024, "{}", chunk.rows());
    }

    #[test]
    fn a_machine_that_is_too_slow_reads_on() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        for _ in 0..20 {
            chunk.note(DECODING + 16, 16, Duration::from_secs(5));
        }
        assert_eq!(chunk.rows(), 16);
    }

    #[test]
    fn a_prompt_alone_takes_half_of_the_time() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        let mut read = 0;
        for step in 0..100 {
            let rows = chunk.rows_alone();
            let seconds = SLOW.seconds(rows, read);
            assert!(seconds < 0.065, "{rows} rows in {seconds} s");
            assert!(step < 5 || seconds > 0.04, "{rows} rows in {seconds} s");
            chunk.note(rows, rows, Duration::from_secs_f64(seconds));
            read += rows;
        }
    }

    #[test]
    fn undisturbed_chunks_grow_and_an_interruption_costs_what_was_read_at_most_twice() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        let grown: Vec<usize> = (0..7).map(|_| chunk.next_undisturbed()).collect();
        assert_eq!(grown, [16, 32, 64, 128, 256, 256, 256]);
        chunk.note_others();
        assert_eq!(chunk.next_undisturbed(), 16);
        // Interruptions at any times.
        for every in 1..20 {
            let (mut read, mut lost) = (0, 0);
            chunk.note_others();
            for step in 0..400 {
                let rows = chunk.next_undisturbed();
                if step % every == 0 && rows > chunk.rows_alone() {
                    lost += rows;
                    chunk.note_others();
                } else {
                    read += rows;
                }
            }
            assert!(lost <= 2 * read, "every {every}: {lost} of {read}");
        }
        // A fast machine reads more in the time that others may wait.
        FAST.read(&mut chunk, 20_000, 2048);
        assert_eq!(chunk.next_undisturbed(), chunk.rows_alone());
    }

    #[test]
    fn long_chunks_do_not_hide_the_fixed_cost_of_a_step() {
        let machine = Machine {
            step: 0.06,
            row: 0.0013,
            attention: 0.000_1,
        };
        let mut chunk = PromptChunk::new(MAX_WAIT);
        let mut read = 0;
        for _ in 0..60 {
            let rows = chunk.next_undisturbed();
            let seconds = machine.seconds(rows, read);
            chunk.note(rows, rows, Duration::from_secs_f64(seconds));
            read += rows;
        }
        let waited = machine.seconds(chunk.rows(), 0);
        assert!(waited < 0.13, "{} rows in {waited} s", chunk.rows());
        // Nor do they hide that rows grow more expensive.
        let before = chunk.rows();
        for _ in 0..10 {
            chunk.note(256, 256, Duration::from_secs(2));
        }
        assert!(chunk.rows() < before, "{before}");
    }

    #[test]
    fn decoding_alone_says_nothing() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        chunk.note(DECODING, 0, Duration::from_secs(1));
        assert_eq!(chunk.rows(), 32);
    }
}
