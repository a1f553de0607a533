//! `foretoken bench`: compares speculative with plain decoding through the engine, in one process: of
//! single requests, or of many at a time (`streams`). The decoding modes alternate on each prompt, so that other
//! load on the machine affects all of them equally, and intervals over the prompts say what was decided.

mod interval;
mod measure;
mod options;
mod report;
mod streams;

use crate::console::{self, Progress, say};
use crate::engine::{EngineHandle, Request};
use crate::error::{Error, Result};
use crate::model::ModelSource;
use crate::prompts::{self, Prompt};
use crate::spec::CacheScope;
use crate::text::Text;
use measure::{Sample, generate};
use options::BenchMode;
use report::{MeasuredPair, Subject};
use std::fs::File;
use std::path::Path;

pub use crate::spec::expected_speed_up;
pub use options::{BenchOptions, NO_DRAFTER};
pub use report::BenchReport;

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
    check_files(options)?;
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

/// Checks, before anything is measured, that the files of the report can be written.
///
/// # Errors
/// `Setup`, naming the file.
pub fn check_files(options: &BenchOptions) -> Result<()> {
    for path in options.json.iter().chain(&options.csv) {
        let opened = File::options().create(true).append(true).open(path);
        opened.map_err(|e| Error::in_file(path, e))?;
    }
    Ok(())
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
