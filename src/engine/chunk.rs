//! How many rows of prompts a step may carry while others decode. No tensors, no clock.

use std::time::Duration;

/// Rows before anything was measured: a slow machine computes them in a moment, and a fast one
/// soon learns that it may take more.
const FIRST_ROWS: f64 = 32.0;
/// Rows at least. Where even these take longer, a prompt would otherwise never be read.
const MIN_ROWS: f64 = 16.0;

/// Chooses the chunk so that the prompts' share of a step takes no longer than those who decode
/// beside them are to wait.
///
/// It keeps one number, the seconds of a row in the steps that carried prompts beside decoding, and
/// averages each new step in with a weight of one half. So a chunk is never more than twice the one
/// before, one slow step shrinks it at once, and it follows the rows of a long prompt, which become
/// dearer with the context they attend to. What a step costs without any row is shared out among
/// its rows; as the next chunk is measured in its turn this settles where the whole step takes as
/// long as it may.
#[derive(Debug, Clone)]
pub struct PromptChunk {
    /// Seconds.
    max_wait: f64,
    seconds_per_row: f64,
}

impl PromptChunk {
    /// A policy under which nobody waits longer than about `max_wait` for another's prompt.
    pub fn new(max_wait: Duration) -> Self {
        let max_wait = max_wait.as_secs_f64().max(1e-6);
        Self {
            max_wait,
            seconds_per_row: max_wait / FIRST_ROWS,
        }
    }

    /// Rows that the prompts of the next step may have together, if others decode beside them.
    pub fn rows(&self) -> usize {
        (self.max_wait / self.seconds_per_row).max(MIN_ROWS) as usize
    }

    /// Learns from a step that took so long and had `rows` rows, `prompt_rows` of them of prompts,
    /// the others of sequences that decoded.
    pub fn note(&mut self, rows: usize, prompt_rows: usize, seconds: Duration) {
        let seconds = seconds.as_secs_f64();
        // A small chunk says little about a large one: most of it is what any step costs.
        let says_little = 2 * prompt_rows < self.rows() && seconds < self.max_wait;
        if prompt_rows > 0 && prompt_rows < rows && !says_little {
            self.seconds_per_row = (self.seconds_per_row + seconds / rows as f64) / 2.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_WAIT: Duration = Duration::from_millis(100);
    /// Rows of a step that decode.
    const DECODING: usize = 8;

    /// Seconds of a step without rows, of a row, and of a row's attention to 1,000 tokens.
    struct Machine {
        step: f64,
        row: f64,
        attention: f64,
    }

    impl Machine {
        fn seconds(&self, rows: usize, context: usize) -> f64 {
            self.step + rows as f64 * (self.row + self.attention * context as f64 / 1000.0)
        }

        /// Reads a prompt beside others who decode; gives the rows and the seconds of each step.
        fn read(&self, chunk: &mut PromptChunk, prompt: usize, most: usize) -> Vec<(usize, f64)> {
            let (mut steps, mut read) = (Vec::new(), 0);
            while read < prompt {
                let rows = chunk.rows().min(most).min(prompt - read);
                let seconds = self.seconds(rows + DECODING, read);
                chunk.note(rows + DECODING, rows, Duration::from_secs_f64(seconds));
                steps.push((rows, seconds));
                read += rows;
            }
            steps
        }
    }

    /// A CPU of two cores with a small model; its last rows cost thrice what its first do.
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
            // And no shorter than it must, but for the start and the end.
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
        // Short prompts do not make it forget what a long one costs.
        for _ in 0..100 {
            FAST.read(&mut chunk, 5, 2048);
        }
        assert_eq!(chunk.rows(), last);
        // Ten seconds in which the machine did something else: careful at once, and soon over it.
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

    /// Where nobody decoded, nobody waited; and a GPU's clock says nothing of such steps, as
    /// nothing of them is read back.
    #[test]
    fn prompts_alone_and_decoding_alone_say_nothing() {
        let mut chunk = PromptChunk::new(MAX_WAIT);
        let first = chunk.rows();
        chunk.note(2048, 2048, Duration::from_micros(1));
        chunk.note(DECODING, 0, Duration::from_secs(1));
        assert_eq!((chunk.rows(), first), (32, 32));
    }
}
