//! The flags of `foretoken bench`.

use super::at_least_one;
use crate::bench;
use crate::error::{Error, Result};
use clap::Args;
use std::path::PathBuf;

/// The flags of `foretoken bench`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Bench")]
pub struct BenchFlags {
    /// JSON lines with "category" and "turns" (Spec-Bench's form); the first turn is the prompt.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// So many prompts of random token ids instead; needs no tokenizer.
    #[arg(long, value_name = "N")]
    pub random_prompts: Option<usize>,
    /// Length of a random prompt.
    #[arg(long, value_name = "M", default_value_t = 64)]
    pub prompt_tokens: usize,
    /// Only the first N prompts of each category.
    #[arg(long, value_name = "N")]
    pub limit_per_category: Option<usize>,
    /// Tokens to generate for each prompt at most; a text may end earlier.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub max_tokens: usize,
    /// Temperatures, separated by commas. At 0 the two texts must be equal.
    #[arg(long, value_name = "T,T", value_delimiter = ',', default_value = "0,1")]
    pub temperatures: Vec<f32>,
    /// Draft lengths to measure, each at most --spec-length, separated by commas
    /// [default: --spec-length alone].
    #[arg(long, value_name = "K,K", value_delimiter = ',')]
    pub spec_lengths: Option<Vec<usize>>,
    /// Accept each draft token with these probabilities, whatever the models say: SYNTHETIC texts,
    /// for speed alone, of pairs whose weights are not trained. Separated by commas.
    #[arg(long, value_name = "A,A", value_delimiter = ',')]
    pub synthetic_acceptance: Vec<f64>,
    /// Runs of each prompt, each way; the median time counts.
    #[arg(long, value_name = "R", default_value_t = 1)]
    pub repeat: usize,
    /// Also write everything to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl BenchFlags {
    /// `spec_length` is the largest K; 0 where nothing drafts.
    pub(super) fn validate(self, spec_length: usize, seed: u64) -> Result<bench::Options> {
        let prompts = match (self.prompts, self.random_prompts) {
            (Some(file), None) => bench::PromptSource::File(file),
            (None, Some(count)) => bench::PromptSource::Random {
                count: at_least_one("--random-prompts", count)?,
                tokens: at_least_one("--prompt-tokens", self.prompt_tokens)?,
                seed,
            },
            _ => {
                return Err(Error::setup(
                    "bench needs prompts: give either --prompts FILE.jsonl or --random-prompts N",
                ));
            }
        };
        if spec_length == 0 {
            return Err(Error::setup(
                "bench compares speculative with plain decoding: add --speculative-decoding and --draft-model MODEL or --drafter ngram",
            ));
        }
        if let Some(t) = self.temperatures.iter().find(|t| !(0.0..=2.0).contains(*t)) {
            return Err(Error::setup(format!(
                "--temperatures must be between 0 and 2, not {t}"
            )));
        }
        let spec_lengths = self.spec_lengths.unwrap_or_else(|| vec![spec_length]);
        if let Some(k) = spec_lengths
            .iter()
            .find(|k| !(1..=spec_length).contains(*k))
        {
            return Err(Error::setup(format!(
                "--spec-lengths must be between 1 and --spec-length, which is {spec_length}: one is {k}"
            )));
        }
        let rates = &self.synthetic_acceptance;
        if let Some(rate) = rates.iter().find(|rate| !(0.0..=1.0).contains(*rate)) {
            return Err(Error::setup(format!(
                "--synthetic-acceptance must be between 0 and 1, not {rate}"
            )));
        }
        Ok(bench::Options {
            prompts,
            limit_per_category: self
                .limit_per_category
                .map(|n| at_least_one("--limit-per-category", n))
                .transpose()?,
            max_tokens: at_least_one("--max-tokens", self.max_tokens)?,
            temperatures: self.temperatures,
            spec_lengths,
            synthetic_acceptance: self.synthetic_acceptance,
            repeat: at_least_one("--repeat", self.repeat)?,
            json: self.json,
        })
    }
}
