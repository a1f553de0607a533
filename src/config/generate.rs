//! The flags of `foretoken generate`.

use super::at_least_one;
use crate::error::{Error, Result};
use crate::generate;
use clap::Args;
use std::path::PathBuf;

/// The flags of `foretoken generate`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Generate")]
pub struct GenerateFlags {
    /// JSON lines with "prompt", or "turns", of which the first counts.
    #[arg(long, value_name = "FILE")]
    pub prompts: PathBuf,
    /// Corpus to write, as JSON lines. What it holds already is not generated again.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Texts a prompt.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub samples: usize,
    /// Only the first N prompts of each category.
    #[arg(long, value_name = "N")]
    pub limit_per_category: Option<usize>,
    /// Tokens a text at most.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_tokens: usize,
    /// Sampling temperature; 0 = greedy.
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    pub temperature: f32,
    /// Smallest set of most probable tokens whose mass reaches this; 1 = all.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
}

impl GenerateFlags {
    pub(super) fn validate(self, max_num_seqs: usize, seed: u64) -> Result<generate::Options> {
        if !(0.0..=2.0).contains(&self.temperature) {
            return Err(Error::setup(format!(
                "--temperature must be between 0 and 2, not {}",
                self.temperature
            )));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::setup(format!(
                "--top-p must be above 0 and at most 1, not {}",
                self.top_p
            )));
        }
        Ok(generate::Options {
            prompts: self.prompts,
            out: self.out,
            samples: at_least_one("--samples", self.samples)?,
            max_tokens: at_least_one("--max-tokens", self.max_tokens)?,
            temperature: self.temperature,
            top_p: self.top_p,
            limit_per_category: self
                .limit_per_category
                .map(|n| at_least_one("--limit-per-category", n))
                .transpose()?,
            seed,
            // One more set waits, so that no place in the batch is empty for long.
            concurrency: max_num_seqs.saturating_mul(2),
        })
    }
}
