//! `foretoken bench`: speculative against plain decoding of single requests, through the engine,
//! in one process. The two take turns on every prompt, so that what else the machine does falls
//! on both.

mod measure;
mod report;

use crate::engine::EngineHandle;
use crate::error::{Error, Result};
use crate::prompts::{self, Prompt};
use crate::text::Text;
use indicatif::{ProgressBar, ProgressStyle};
use measure::{Sample, generate};
use report::{Pair, Report, Subject};
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

/// Tokens of the two runs that are not counted.
const WARM_UP_TOKENS: usize = 16;

/// Measures, prints a table for each temperature and writes the JSON file.
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
        println!("{skipped} of {before} prompts do not fit in {context} tokens and are left out");
    }
    if prompts.is_empty() {
        return Err(Error::setup("there is no prompt to measure"));
    }
    let runs = 2 * prompts.len() * options.temperatures.len() * options.repeat;
    println!("{} prompts, {runs} runs", prompts.len());
    for speculate in [true, false] {
        generate(engine, &prompts[0], WARM_UP_TOKENS, 0.0, speculate)?;
    }
    let pairs = measure(engine, &prompts, options)?;
    let report = Report::new(Subject::new(engine, names, options), &pairs);
    print!("{report}");
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

/// All runs: each prompt at each temperature, both ways, in alternating order.
fn measure(engine: &EngineHandle, prompts: &[Prompt], options: &Options) -> Result<Vec<Pair>> {
    let all = prompts.len() * options.temperatures.len() * options.repeat;
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} pairs, {eta} left {msg}");
    let bar = ProgressBar::new(all as u64).with_style(style.expect("the template is a constant"));
    let mut pairs = Vec::new();
    let mut speculate_first = true;
    for &temperature in &options.temperatures {
        for prompt in prompts {
            bar.set_message(prompt.category.clone());
            let (mut plain, mut speculative) = (Vec::new(), Vec::new());
            for _ in 0..options.repeat {
                for speculate in [speculate_first, !speculate_first] {
                    let sample: Sample =
                        generate(engine, prompt, options.max_tokens, temperature, speculate)?;
                    if speculate {
                        &mut speculative
                    } else {
                        &mut plain
                    }
                    .push(sample);
                }
                speculate_first = !speculate_first;
                bar.inc(1);
            }
            pairs.push(Pair::new(prompt, temperature, plain, speculative));
        }
    }
    bar.finish_and_clear();
    Ok(pairs)
}
