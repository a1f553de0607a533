//! `foretoken bench`: compares speculative with plain decoding of single requests through the engine,
//! in one process. The decoding modes alternate on every prompt, so that other load on the machine
//! affects all of them equally.

mod measure;
mod report;

use crate::engine::{EngineHandle, Request};
use crate::error::{Error, Result};
use crate::parse::{at_least_one, number, temperature};
use crate::prompts::{self, Prompt};
use crate::sampling::SamplingParams;
use crate::text::Text;
use clap::{ArgGroup, Args};
use measure::{Sample, generate};
use report::{Pair, Report, Subject};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;

pub use report::expected_speed_up;

/// The flags of `foretoken bench`, without those of the engine.
#[derive(Debug, Clone, PartialEq, Args)]
#[command(next_help_heading = "Bench")]
#[group(skip)]
#[command(group(ArgGroup::new("source of prompts").required(true)))]
pub struct Options {
    /// JSON lines with "category" and "turns" (Spec-Bench's format); the first turn is the prompt.
    #[arg(long, value_name = "FILE", group = "source of prompts")]
    pub prompts: Option<PathBuf>,
    /// Number of prompts of random token ids; needs no tokenizer.
    #[arg(long, value_name = "N", value_parser = at_least_one, group = "source of prompts")]
    pub random_prompts: Option<usize>,
    /// Length of a random prompt in tokens.
    #[arg(long, value_name = "M", default_value_t = 64, value_parser = at_least_one)]
    pub prompt_tokens: usize,
    /// Use only the first N prompts of each category.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub limit_per_category: Option<usize>,
    /// Maximum tokens to generate per prompt; a text may end earlier.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    pub max_tokens: usize,
    /// Temperatures, separated by commas. At 0, plain and speculative text must be equal.
    #[arg(long, value_name = "T,T", value_delimiter = ',', default_value = "0,1",
          value_parser = temperature)]
    pub temperatures: Vec<f32>,
    /// Draft lengths (K) to measure, each at most --spec-length, separated by commas
    /// [default: --spec-length].
    #[arg(long, value_name = "K,K", value_delimiter = ',')]
    pub spec_lengths: Vec<usize>,
    /// Accept each draft token with these probabilities, separated by commas, whatever the models
    /// compute. The texts are SYNTHETIC: use this only to measure the speed of untrained pairs.
    // See [`Request::synthetic_acceptance`]. Empty = drafts are verified.
    #[arg(long, value_name = "A,A", value_delimiter = ',',
          value_parser = number("a number between 0 and 1", |rate: &f64| (0.0..=1.0).contains(rate)))]
    pub synthetic_acceptance: Vec<f64>,
    /// Runs per prompt and decoding mode; the median time is reported.
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = at_least_one)]
    pub repeat: usize,
    /// Also write the report to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Seed of random prompts, from the engine's --seed.
    #[arg(skip)]
    pub seed: u64,
}

/// Names for the report.
#[derive(Debug, Clone)]
pub struct Names {
    pub model: String,
    /// The drafter.
    pub drafter: String,
    /// The device that both run on.
    pub device: String,
}

/// One decoding mode.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Way {
    /// Maximum draft tokens per round (K); 0 = plain decoding.
    spec_length: usize,
    /// See [`Request::synthetic_acceptance`].
    #[serde(skip_serializing_if = "Option::is_none")]
    synthetic_acceptance: Option<f64>,
}

impl Options {
    /// Completes and checks the options for an engine with this `seed` and at most `spec_length`
    /// draft tokens per round (0 = no drafter).
    ///
    /// # Errors
    /// `Setup`: there is no drafter, or a draft length is out of range.
    pub fn validate(mut self, spec_length: usize, seed: u64) -> Result<Self> {
        if spec_length == 0 {
            return Err(Error::setup(
                "bench compares speculative with plain decoding: add --speculative-decoding and --draft-model MODEL or --drafter ngram",
            ));
        }
        if self.spec_lengths.is_empty() {
            self.spec_lengths.push(spec_length);
        }
        let range = 1..=spec_length;
        if let Some(k) = self.spec_lengths.iter().find(|k| !range.contains(k)) {
            return Err(Error::setup(format!(
                "--spec-lengths must be between 1 and --spec-length, which is {spec_length}: one is {k}"
            )));
        }
        self.seed = seed;
        Ok(self)
    }

    /// Plain decoding, then each speculative mode that is compared with it, ordered by acceptance and
    /// then by length.
    fn ways(&self) -> Vec<Way> {
        let way = |spec_length, synthetic_acceptance| Way {
            spec_length,
            synthetic_acceptance,
        };
        let rates = self.synthetic_acceptance.iter();
        let mut acceptances: Vec<Option<f64>> = rates.copied().map(Some).collect();
        if acceptances.is_empty() {
            acceptances.push(None);
        }
        let mut ways = vec![way(0, None)];
        for acceptance in acceptances {
            ways.extend(self.spec_lengths.iter().map(|&k| way(k, acceptance)));
        }
        ways
    }

    fn is_synthetic(&self) -> bool {
        !self.synthetic_acceptance.is_empty()
    }

    /// The request that decodes the `number`-th prompt in mode `way`.
    fn request(&self, number: usize, prompt: &Prompt, temperature: f32, way: Way) -> Request {
        let mut params = SamplingParams {
            temperature,
            ..SamplingParams::default()
        };
        if self.is_synthetic() {
            // An EOS in a meaningless text is no reason to stop. Acceptance is drawn by seed and
            // position: with a single seed, prompts of equal length would all draw the same values
            // and add no information.
            params.ignore_eos = true;
            params.seed = number as u64;
        }
        Request {
            prompt: prompt.tokens.clone(),
            params,
            max_tokens: Some(self.max_tokens),
            spec_length: Some(way.spec_length),
            synthetic_acceptance: way.synthetic_acceptance,
            ..Request::default()
        }
    }
}

/// Tokens per warm-up run, which is not measured.
const WARM_UP_TOKENS: usize = 16;

/// Measures, prints a table for each temperature and draft length and writes the JSON file.
///
/// # Errors
/// `Setup`: the prompts or the output file. `Internal`: the engine failed, or speculation changed a
/// greedy text, which is a bug; the tables are printed before this error.
pub fn run(
    engine: &EngineHandle,
    text: Option<&Text>,
    names: &Names,
    options: &Options,
) -> Result<()> {
    let context = engine.limits().max_model_len;
    let mut prompts = load(options, text, engine.limits().vocab_size)?;
    let before = prompts.len();
    prompts.retain(|prompt| prompt.tokens.len() < context);
    if prompts.len() < before {
        let skipped = before - prompts.len();
        let _ = writeln!(
            io::stdout(),
            "{skipped} of {before} prompts do not fit in {context} tokens and are skipped"
        );
    }
    if prompts.is_empty() {
        return Err(Error::setup("there are no prompts to measure"));
    }
    let ways = options.ways();
    let runs = ways.len() * prompts.len() * options.temperatures.len() * options.repeat;
    let _ = writeln!(io::stdout(), "{} prompts, {runs} runs", prompts.len());
    for &way in ways.iter().rev() {
        let mut request = options.request(0, &prompts[0], 0.0, way);
        request.max_tokens = Some(WARM_UP_TOKENS);
        generate(engine, request)?;
    }
    let pairs = measure(engine, &prompts, options)?;
    let report = Report::new(Subject::new(names, options), &pairs);
    let _ = write!(io::stdout(), "{report}");
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    report.check_equal()
}

/// The prompts that `options` names.
fn load(options: &Options, text: Option<&Text>, vocab_size: usize) -> Result<Vec<Prompt>> {
    let mut prompts = match &options.prompts {
        Some(path) => {
            let text = text.ok_or_else(|| {
                Error::setup(
                    "--prompts needs a tokenizer, which this model lacks: use --random-prompts N",
                )
            })?;
            prompts::from_file(path, text)?
        }
        None => {
            let count = options.random_prompts.unwrap_or(0);
            prompts::random(count, options.prompt_tokens, options.seed, vocab_size)
        }
    };
    if let Some(limit) = options.limit_per_category {
        prompts::limit_categories(&mut prompts, limit);
    }
    Ok(prompts)
}

/// Runs each prompt at each temperature in every mode; the order of the modes reverses each time.
fn measure(engine: &EngineHandle, prompts: &[Prompt], options: &Options) -> Result<Vec<Pair>> {
    let ways = options.ways();
    let all = ways.len() * prompts.len() * options.temperatures.len() * options.repeat;
    let template = "{wide_bar} {pos}/{len} runs, {eta} left {msg}";
    let bar = crate::progress::bar(template, all as u64);
    let mut pairs = Vec::new();
    let mut order: Vec<usize> = (0..ways.len()).rev().collect();
    for &temperature in &options.temperatures {
        for (number, prompt) in prompts.iter().enumerate() {
            bar.set_message(prompt.category.clone());
            let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); ways.len()];
            for _ in 0..options.repeat {
                for &way in &order {
                    let request = options.request(number, prompt, temperature, ways[way]);
                    samples[way].push(generate(engine, request)?);
                    bar.inc(1);
                }
                order.reverse();
            }
            let speculative = ways.iter().zip(&samples).skip(1);
            pairs.extend(speculative.map(|(&way, speculative)| {
                Pair::new(prompt, temperature, way, &samples[0], speculative)
            }));
        }
    }
    bar.finish_and_clear();
    Ok(pairs)
}
