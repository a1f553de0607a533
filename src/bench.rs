//! `foretoken bench`: speculative against plain decoding of single requests, through the engine,
//! in one process. All ways of decoding take turns on every prompt, so that what else the machine
//! does falls on all alike.

mod measure;
mod report;

use crate::engine::{EngineHandle, Request};
use crate::error::{Error, Result};
use crate::prompts::{self, Prompt};
use crate::sampling::SamplingParams;
use crate::text::Text;
use measure::{Sample, generate};
use report::{Pair, Report, Subject};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;

pub use report::expected_speed_up;

/// What to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    pub prompts: PromptSource,
    /// Only the first so many prompts of each category.
    pub limit_per_category: Option<usize>,
    /// Tokens to generate for each prompt at most; a text may end earlier.
    pub max_tokens: usize,
    pub temperatures: Vec<f32>,
    /// Draft tokens a round at most (K), one measurement each; at least one of them.
    pub spec_lengths: Vec<usize>,
    /// Instead of verifying drafts, accepts their tokens with each of these probabilities; see
    /// [`Request::synthetic_acceptance`]. Empty = drafts are verified.
    pub synthetic_acceptance: Vec<f64>,
    /// Runs of each prompt, each way; the median time counts.
    pub repeat: usize,
    /// Where to write the report as JSON.
    pub json: Option<PathBuf>,
}

/// Where prompts come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptSource {
    /// JSON lines with `category` and `turns`; the first turn is the prompt.
    File(PathBuf),
    /// Random token ids.
    Random {
        count: usize,
        tokens: usize,
        seed: u64,
    },
}

/// Names for the report.
#[derive(Debug, Clone)]
pub struct Names {
    pub model: String,
    /// What drafts.
    pub drafter: String,
    /// Where both run.
    pub device: String,
}

/// One way of decoding a text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Way {
    /// Draft tokens a round at most (K); 0 = plainly.
    spec_length: usize,
    /// See [`Request::synthetic_acceptance`].
    #[serde(skip_serializing_if = "Option::is_none")]
    synthetic_acceptance: Option<f64>,
}

impl Options {
    /// Plain decoding, then each way of speculating that is compared with it: by acceptance, and
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

    /// What decodes the `number`-th prompt in this way.
    fn request(&self, number: usize, prompt: &Prompt, temperature: f32, way: Way) -> Request {
        let mut params = SamplingParams {
            temperature,
            ..SamplingParams::default()
        };
        if self.is_synthetic() {
            // Where a text that means nothing would end is no reason to stop. And what is accepted
            // is drawn by seed and position: with one seed, prompts of one length would all draw
            // the same, and more of them would tell nothing new.
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

/// Tokens of the runs that are not counted.
const WARM_UP_TOKENS: usize = 16;

/// Measures, prints a table for each temperature and draft length and writes the JSON file.
///
/// # Errors
/// `Setup`: prompts or the file to write. `Internal`: the engine failed, or a greedy text changed
/// by speculation, which must not happen; the tables are printed before that.
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
            "{skipped} of {before} prompts do not fit in {context} tokens and are left out"
        );
    }
    if prompts.is_empty() {
        return Err(Error::setup("there is no prompt to measure"));
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
        PromptSource::File(path) => {
            let text = text.ok_or_else(|| {
                Error::setup(
                    "--prompts needs a tokenizer, which this model lacks: use --random-prompts N",
                )
            })?;
            prompts::from_file(path, text)?
        }
        &PromptSource::Random {
            count,
            tokens,
            seed,
        } => prompts::random(count, tokens, seed, vocab_size),
    };
    if let Some(limit) = options.limit_per_category {
        prompts::limit_categories(&mut prompts, limit);
    }
    Ok(prompts)
}

/// All runs: each prompt at each temperature, every way, there and back in alternating order.
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
