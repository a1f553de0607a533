//! `foretoken bench`: compares speculative with plain decoding through the engine, in one process: of
//! single requests, or of many at a time (`streams`). The decoding modes alternate on each prompt, so that other
//! load on the machine affects all of them equally, and intervals over the prompts say what was decided.

mod interval;
mod measure;
mod report;
mod streams;

use crate::console::{self, Progress, say};
use crate::engine::{EngineHandle, EngineOptions, Request};
use crate::error::{Error, Result};
use crate::model::ModelSource;
use crate::parse::{at_least_one, number, temperature, up_to};
use crate::prompts::{self, Prompt};
use crate::sampling::{Acceptance, SamplingParams};
use crate::spec::{CacheScope, DraftContext};
use crate::text::Text;
use clap::{ArgGroup, Args};
use measure::{Sample, generate};
use report::{MeasuredPair, Subject};
use serde::Serialize;
use std::fs::File;
use std::path::{Path, PathBuf};

pub use crate::spec::expected_speed_up;
pub use report::BenchReport;

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

/// Names for the report.
#[derive(Debug, Clone)]
pub struct ReportNames {
    /// The name of the target model.
    pub model: String,
    /// The drafters, by their index in the engine.
    pub drafters: Vec<String>,
    /// The device that both run on.
    pub device: String,
    /// Arithmetic operations of each drafter's token over those of the target's.
    pub draft_operations: Vec<f64>,
    /// Where the target's weights are; `None` = they are random.
    pub source: Option<ModelSource>,
}

/// One decoding mode.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct BenchMode {
    /// Index of the drafter.
    drafter: usize,
    /// Maximum depth of a draft (K); 0 = plain decoding.
    spec_length: usize,
    /// Maximum number of siblings in a draft; 1 = chains.
    spec_topk: usize,
    acceptance: Acceptance,
    /// See [`Request::synthetic_acceptance`].
    #[serde(skip_serializing_if = "Option::is_none")]
    synthetic_acceptance: Option<f64>,
}

impl BenchMode {
    const PLAIN: Self = Self {
        drafter: 0,
        spec_length: 0,
        spec_topk: 1,
        acceptance: Acceptance::Coupled,
        synthetic_acceptance: None,
    };

    /// Whether texts must be those of plain decoding.
    fn is_comparable(&self, temperature: f32) -> bool {
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
    fn ways(&self) -> Vec<BenchMode> {
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
    fn request(
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

/// Hands out the scopes of runs. What a run's tables learn is kept from other modes, which would
/// profit from it, and from all later runs. Warm tables learn from the runs of a repeat, and are left before the next
/// one, which gives the same answers.
struct Scopes {
    /// The number of modes, if tables are warm.
    warm: Option<usize>,
    last: u64,
}

impl Scopes {
    /// The scope of a run in the `way`-th mode.
    fn of(&mut self, way: usize) -> CacheScope {
        if self.warm.is_some() {
            return CacheScope(self.last + way as u64);
        }
        self.last += 1;
        CacheScope(self.last)
    }

    /// Leaves the tables that are warm.
    fn leave(&mut self) {
        self.last += self.warm.unwrap_or(0) as u64;
    }
}

/// Tokens per warm-up run, which is not measured.
const WARM_UP_TOKENS: usize = 16;

/// Measures, prints a table for each temperature and mode and writes the files. What can be written is, whatever becomes of
/// the rest.
///
/// # Errors
/// The errors of [`measure`]. `Setup`: stdout or a file; one that cannot be opened is told before anything is measured.
/// `Internal`: speculation changed a text, which is a bug; the tables are printed before this error.
pub fn run(
    engine: &EngineHandle,
    text: Option<&Text>,
    names: &ReportNames,
    options: &BenchOptions,
) -> Result<()> {
    for path in options.json.iter().chain(&options.csv) {
        let opened = File::options().create(true).append(true).open(path);
        opened.map_err(|e| Error::in_file(path, e))?;
    }
    let report = measure(engine, text, names, options)?;
    let json = options
        .json
        .as_deref()
        .map_or(Ok(()), |path| report.write(path));
    let csv = options
        .csv
        .as_deref()
        .map_or(Ok(()), |path| report.write_csv(path));
    console::print(&report).and(json).and(csv)?;
    report.check_equal()
}

/// Measures what the `options` ask for.
///
/// # Errors
/// `Setup`: the prompts. `Internal`: the engine failed.
pub fn measure(
    engine: &EngineHandle,
    text: Option<&Text>,
    names: &ReportNames,
    options: &BenchOptions,
) -> Result<BenchReport> {
    let bench = Bench {
        engine,
        options,
        ways: options.ways(),
        prompts: load(options, options.prompts.as_deref(), text, engine)?,
        warm: match &options.warm {
            Some(path) => load(options, Some(path), text, engine)?,
            None => Vec::new(),
        },
    };
    let subject = Subject::new(names, options)?;
    bench.warm_up()?;
    Ok(if options.streams.is_empty() {
        BenchReport::new(subject, &bench.measure()?)
    } else {
        BenchReport::of_loads(subject, bench.measure_streams()?)
    })
}

/// The prompts of `file`, random ones, or the built-in ones, without those that do not fit the context.
fn load(
    options: &BenchOptions,
    file: Option<&Path>,
    text: Option<&Text>,
    engine: &EngineHandle,
) -> Result<Vec<Prompt>> {
    let limits = engine.limits();
    let context = limits.max_model_len;
    let tokenizer = |what: &str| {
        text.ok_or_else(|| {
            Error::setup(format!(
                "{what} need a tokenizer, which this model lacks: use --random-prompts N"
            ))
        })
    };
    let mut prompts = match (file, options.random_prompts) {
        (Some(path), _) => prompts::from_file(path, tokenizer("--prompts and --warm")?)?,
        (None, Some(count)) => prompts::random(
            count,
            options.prompt_tokens,
            options.seed,
            limits.vocab_size,
        ),
        (None, None) => prompts::built_in(tokenizer("the built-in prompts")?)?,
    };
    if let Some(limit) = options.limit_per_category {
        prompts::limit_categories(&mut prompts, limit);
    }
    let before = prompts.len();
    prompts.retain(|prompt| prompt.tokens.len() < context);
    if prompts.len() < before {
        let skipped = before - prompts.len();
        say(format_args!(
            "{skipped} of {before} prompts do not fit in {context} tokens and are skipped"
        ));
    }
    if prompts.is_empty() {
        Err(Error::setup("there are no prompts to measure"))
    } else {
        Ok(prompts)
    }
}

/// The subject of a benchmark.
struct Bench<'a> {
    engine: &'a EngineHandle,
    options: &'a BenchOptions,
    /// The modes; the first is plain decoding.
    ways: Vec<BenchMode>,
    prompts: Vec<Prompt>,
    /// Prompts that are answered before, so that the tables know the answers.
    warm: Vec<Prompt>,
}

impl Bench<'_> {
    fn scopes(&self) -> Scopes {
        Scopes {
            warm: (!self.warm.is_empty()).then_some(self.ways.len()),
            last: 0,
        }
    }

    /// Those of runs that are not measured.
    fn unmeasured() -> Scopes {
        Scopes {
            warm: None,
            last: u64::MAX / 2,
        }
    }

    /// Runs each mode for a few tokens.
    fn warm_up(&self) -> Result<()> {
        let mut scopes = Self::unmeasured();
        for (number, &way) in self.ways.iter().enumerate().rev() {
            let (prompt, scope) = (&self.prompts[0], scopes.of(number));
            let mut request = self.options.request(0, prompt, 0.0, way, scope);
            request.max_tokens = Some(WARM_UP_TOKENS);
            self.generate(way, request)?;
        }
        Ok(())
    }

    /// Generates one text in mode `way`.
    fn generate(&self, way: BenchMode, request: Request) -> Result<Sample> {
        self.engine.use_drafter(way.drafter)?;
        generate(self.engine, request)
    }

    /// Answers the prompts of `--warm` in each speculative mode, with tables that were empty before.
    fn warm_tables(&self, temperature: f32, scopes: &mut Scopes) -> Result<()> {
        scopes.leave();
        for (number, prompt) in self.warm.iter().enumerate() {
            for (index, &way) in self.ways.iter().enumerate().skip(1) {
                let (seed, scope) = (self.prompts.len() + number, scopes.of(index));
                let request = self.options.request(seed, prompt, temperature, way, scope);
                self.generate(way, request)?;
            }
        }
        Ok(())
    }

    /// Runs each prompt at each temperature in every mode; the order of the modes reverses each time, and so does that
    /// of a prompt's repeats.
    fn measure(&self) -> Result<Vec<MeasuredPair>> {
        let (options, ways) = (self.options, &self.ways);
        let runs = ways.len() * self.prompts.len() * options.temperatures.len() * options.repeat;
        say(format_args!("{} prompts, {runs} runs", self.prompts.len()));
        let mut progress = Progress::new("bench", "runs", runs as u64);
        let (mut pairs, mut scopes) = (Vec::new(), self.scopes());
        let mut order: Vec<usize> = (0..ways.len()).rev().collect();
        for &temperature in &options.temperatures {
            let mut samples: Vec<Vec<Vec<Sample>>> =
                vec![vec![Vec::new(); ways.len()]; self.prompts.len()];
            for _ in 0..options.repeat {
                self.warm_tables(temperature, &mut scopes)?;
                let prompts = self.prompts.iter().zip(&mut samples);
                for (number, (prompt, samples)) in prompts.enumerate() {
                    for &way in &order {
                        let scope = scopes.of(way);
                        let request =
                            options.request(number, prompt, temperature, ways[way], scope);
                        samples[way].push(self.generate(ways[way], request)?);
                        progress.step(prompt.category.as_str());
                    }
                    order.reverse();
                }
                if self.prompts.len().is_multiple_of(2) {
                    order.reverse();
                }
            }
            for (prompt, samples) in self.prompts.iter().zip(&samples) {
                let speculative = ways.iter().zip(samples).skip(1);
                pairs.extend(speculative.map(|(&way, speculative)| {
                    MeasuredPair::new(prompt, temperature, way, &samples[0], speculative)
                }));
            }
        }
        progress.end();
        Ok(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_tables_serve_one_repeat() {
        let mut scopes = Scopes {
            warm: Some(3),
            last: 0,
        };
        let mut repeat = || {
            scopes.leave();
            let [first, again] = [(); 2].map(|()| [0, 1, 2].map(|way| scopes.of(way)));
            assert_eq!(first, again);
            first
        };
        let all = [repeat(), repeat(), repeat()].concat();
        let distinct: std::collections::HashSet<CacheScope> = all.iter().copied().collect();
        assert_eq!(distinct.len(), 9);
    }

    #[test]
    fn each_run_begins_with_empty_tables() {
        let mut scopes = Scopes {
            warm: None,
            last: 0,
        };
        let first = scopes.of(1);
        scopes.leave();
        assert_ne!(scopes.of(1), first);
    }
}
