//! The flags of `foretoken bench`, and the decoding modes and requests that they ask for.

use crate::engine::{EngineOptions, Request};
use crate::error::{Error, Result};
use crate::parse::{at_least_one, number, temperature, up_to};
use crate::prompts::Prompt;
use crate::sampling::{Acceptance, SamplingParams};
use crate::spec::{CacheScope, DraftContext};
use clap::{ArgGroup, Args};
use serde::Serialize;
use std::path::PathBuf;

/// Tokens of all random prompts together.
const MAX_RANDOM_TOKENS: usize = 1 << 28;

/// The flags of `foretoken bench`, without those of the engine.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Bench")]
#[group(skip)]
#[command(group(ArgGroup::new("source of prompts")))]
pub struct BenchOptions {
    /// JSON lines with "prompt", or with "turns" (Spec-Bench's format), of which the first is the prompt; "id" and
    /// "category" may be added, "suffix" to "prompt" for what is missing between both, and
    /// "prediction" for what the answer is expected to be [default: 20 built-in prompts of 7 categories].
    #[arg(long, value_name = "FILE", group = "source of prompts")]
    pub prompts: Option<PathBuf>,
    /// Number of prompts of random token ids; needs no tokenizer.
    #[arg(long, value_name = "N", value_parser = up_to::<1_000_000>, group = "source of prompts")]
    pub random_prompts: Option<usize>,
    /// Length of a random prompt in tokens.
    #[arg(long, value_name = "M", default_value_t = 64, value_parser = up_to::<{ 1 << 24 }>)]
    pub prompt_tokens: usize,
    /// Use only the first N prompts of each category.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit_per_category: Option<usize>,
    /// Maximum tokens to generate per prompt; a text may end earlier.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = up_to::<{ 1 << 30 }>)]
    pub max_tokens: usize,
    /// Temperatures, separated by commas. Plain and speculative text must be equal, except that the
    /// rejection rule samples other texts.
    #[arg(long, value_name = "T,T", value_delimiter = ',', default_value = "0,1",
          value_parser = temperature)]
    pub temperatures: Vec<f32>,
    /// Drafters to compare, separated by commas: names of --drafter, of which model, eagle3 and parallel (or head) are
    /// that of --draft-model; the name of a draft model or head; auto, the drafter that serve would take; none, plain
    /// decoding again, as a control. +tables after a model's lets tables continue its drafts, as serve does, for example
    /// tables,head,head+tables [default: auto].
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',')]
    pub drafters: Vec<String>,
    /// Draft lengths (K) to measure, each at most --spec-length, separated by commas
    /// [default: --spec-length].
    #[arg(long, value_name = "K,K", value_delimiter = ',')]
    pub spec_lengths: Vec<usize>,
    /// Acceptance rules to measure, separated by commas [default: --acceptance].
    #[arg(long, value_name = "RULE,RULE", value_enum, value_delimiter = ',')]
    pub acceptances: Vec<Acceptance>,
    /// Numbers of siblings in a draft to measure, each at most --spec-topk, separated by commas;
    /// 1 = chains [default: --spec-topk].
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = up_to::<{ 1 << 16 }>)]
    pub spec_topks: Vec<usize>,
    /// Instead of each prompt alone, measure tokens per second of N requests at a time, prompts
    /// included, for each of these N, separated by commas.
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = up_to::<{ 1 << 16 }>)]
    pub streams: Vec<usize>,
    /// Let the tables know the answers to the prompts of FILE (the same or others): each speculative
    /// mode gives them first, unmeasured, at each temperature and number of streams and for each repeat. Otherwise each run
    /// begins with empty tables.
    #[arg(long, value_name = "FILE")]
    pub warm: Option<PathBuf>,
    /// Accept each draft token with these probabilities, separated by commas, whatever the models
    /// compute. The texts are SYNTHETIC: use this only to measure the speed of untrained pairs.
    // See [`Request::synthetic_acceptance`]. Empty = drafts are verified.
    #[arg(long, value_name = "A,A", value_delimiter = ',',
          value_parser = number("a number between 0 and 1", |rate: &f64| (0.0..=1.0).contains(rate)))]
    pub synthetic_acceptance: Vec<f64>,
    /// Runs per prompt and decoding mode; the median time is reported.
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = up_to::<1_000_000>)]
    pub repeat: usize,
    /// Also write the report to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Also write a line for each prompt, drafter and temperature to this file, as CSV.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Seed of random prompts, from the engine's --seed.
    #[arg(skip)]
    pub seed: u64,
    /// The command line, for the report.
    #[arg(skip)]
    pub flags: Vec<String>,
}

/// The name of [`BenchOptions::drafters`] that stands for plain decoding.
pub const NO_DRAFTER: &str = "none";

/// One decoding mode.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct BenchMode {
    /// Index of the drafter.
    pub(super) drafter: usize,
    /// Maximum depth of a draft (K); 0 = plain decoding.
    pub(super) spec_length: usize,
    /// Maximum number of siblings in a draft; 1 = chains.
    pub(super) spec_topk: usize,
    pub(super) acceptance: Acceptance,
    /// See [`Request::synthetic_acceptance`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) synthetic_acceptance: Option<f64>,
}

impl BenchMode {
    pub(super) const PLAIN: Self = Self {
        drafter: 0,
        spec_length: 0,
        spec_topk: 1,
        acceptance: Acceptance::Coupled,
        synthetic_acceptance: None,
    };

    /// Whether texts must be those of plain decoding.
    pub(super) fn is_comparable(&self, temperature: f32) -> bool {
        let lossless = temperature == 0.0 || self.acceptance == Acceptance::Coupled;
        lossless && self.synthetic_acceptance.is_none()
    }
}

/// Completes `list` with the engine's value, `limit`, if it is empty.
///
/// # Errors
/// `Setup`: a number in it is not between 1 and `limit`.
fn complete(list: &mut Vec<usize>, limit: usize, names: [&str; 2]) -> Result<()> {
    if list.is_empty() {
        list.push(limit);
    }
    let [plural, flag] = names;
    match list.iter().find(|n| !(1..=limit).contains(*n)) {
        None => Ok(()),
        Some(n) => Err(Error::setup(format!(
            "{plural} must be between 1 and {flag}, which is {limit}: one is {n}"
        ))),
    }
}

impl BenchOptions {
    /// Completes and checks the options for an engine with this `seed`.
    ///
    /// # Errors
    /// `Setup`: there is no drafter, or a number is over the engine's.
    pub fn validate(mut self, engine: &EngineOptions, seed: u64) -> Result<Self> {
        if self
            .random_prompts
            .unwrap_or(0)
            .saturating_mul(self.prompt_tokens)
            > MAX_RANDOM_TOKENS
        {
            return Err(Error::setup(format!(
                "--random-prompts times --prompt-tokens must be at most {MAX_RANDOM_TOKENS}"
            )));
        }
        if self.overwrites_another() {
            return Err(Error::setup(
                "--json and --csv overwrite their files: give each one of its own",
            ));
        }
        if engine.spec.length == 0 {
            return Err(Error::setup(
                "bench compares speculative with plain decoding: leave out --speculative-decoding=false",
            ));
        }
        let names = ["--spec-lengths", "--spec-length"];
        complete(&mut self.spec_lengths, engine.spec.length, names)?;
        let names = ["--spec-topks", "--spec-topk"];
        complete(&mut self.spec_topks, engine.spec.topk, names)?;
        if !self.streams.is_empty() {
            if self.csv.is_some() {
                return Err(Error::setup(
                    "--csv has a line for each prompt, and --streams measures many together: leave one out",
                ));
            }
            let names = ["--streams", "--max-num-seqs"];
            complete(&mut self.streams, engine.max_num_seqs, names)?;
        }
        if self.acceptances.is_empty() {
            self.acceptances.push(engine.acceptance);
        }
        self.seed = seed;
        Ok(self)
    }

    /// Whether a file that is written has another use.
    fn overwrites_another(&self) -> bool {
        let (json, csv) = (self.json.as_ref(), self.csv.as_ref());
        let read = [self.prompts.as_ref(), self.warm.as_ref()];
        let is_read = |file: Option<&PathBuf>| file.is_some() && read.contains(&file);
        is_read(json) || is_read(csv) || json.is_some() && json == csv
    }

    /// Plain decoding, then each speculative mode that is compared with it, ordered by synthetic
    /// acceptance, drafter, rule, siblings and length.
    pub(super) fn ways(&self) -> Vec<BenchMode> {
        let rates = self.synthetic_acceptance.iter();
        let mut rates: Vec<Option<f64>> = rates.copied().map(Some).collect();
        if rates.is_empty() {
            rates.push(None);
        }
        let mut ways = vec![BenchMode::PLAIN];
        for synthetic_acceptance in rates {
            for drafter in 0..self.drafters.len().max(1) {
                if self
                    .drafters
                    .get(drafter)
                    .is_some_and(|name| name == NO_DRAFTER)
                {
                    let control = BenchMode {
                        drafter,
                        ..BenchMode::PLAIN
                    };
                    // The first is what it is compared with.
                    if !ways[1..].contains(&control) {
                        ways.push(control);
                    }
                    continue;
                }
                for &acceptance in &self.acceptances {
                    for &spec_topk in &self.spec_topks {
                        ways.extend(self.spec_lengths.iter().map(|&spec_length| BenchMode {
                            drafter,
                            spec_length,
                            spec_topk,
                            acceptance,
                            synthetic_acceptance,
                        }));
                    }
                }
            }
        }
        ways
    }

    fn is_synthetic(&self) -> bool {
        !self.synthetic_acceptance.is_empty()
    }

    /// The request that decodes the `number`-th prompt in mode `way`, with the tables of `scope`.
    pub(super) fn request(
        &self,
        number: usize,
        prompt: &Prompt,
        temperature: f32,
        way: BenchMode,
        scope: CacheScope,
    ) -> Request {
        let params = SamplingParams {
            temperature,
            // An EOS in a meaningless text is no reason to stop.
            ignore_eos: self.is_synthetic(),
            // Chance decides by seed and position: with a single seed, prompts of equal length would
            // all draw the same numbers and add no information.
            seed: number as u64,
            stop_token_ids: match self.is_synthetic() {
                true => Vec::new(),
                false => prompt.ends.clone(),
            },
            ..SamplingParams::default()
        };
        Request {
            prompt: prompt.tokens.clone(),
            params,
            max_tokens: Some(self.max_tokens),
            spec_length: Some(way.spec_length),
            spec_topk: Some(way.spec_topk),
            acceptance: Some(way.acceptance),
            synthetic_acceptance: way.synthetic_acceptance,
            draft_context: DraftContext {
                scope,
                prediction: prompt.prediction.as_slice().into(),
                ..DraftContext::default()
            },
            ..Request::default()
        }
    }
}
