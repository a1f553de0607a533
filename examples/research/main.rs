//! `bench` for researchers: it can make rows dear, and says below the report what papers expect of the figures.
//! `cargo run --release --example research -- [--row-penalty F] FLAGS`, with the flags of `foretoken bench`

mod penalty;
mod sequoia;
mod theory;

use clap::Parser;
use foretoken::assembly::load;
use foretoken::bench::{self, BenchReport};
use foretoken::config::{Command, Exit};
use foretoken::console;
use foretoken::error::{Error, Result};
use penalty::RowPenalty;
use serde_json::{Value, json};
use std::fmt;
use std::path::PathBuf;
use theory::Theory;

#[derive(Debug, Parser)]
#[command(name = "research", about = "foretoken bench, for researchers")]
struct Flags {
    /// Make each row of a target step but the first cost F one-row steps more, to see how drafts
    /// behave where rows are dear.
    #[arg(long, value_name = "F", default_value_t = 0.0, value_parser = row_penalty)]
    row_penalty: f64,
    /// Flags of `foretoken bench`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    bench: Vec<String>,
}

fn row_penalty(text: &str) -> Result<f64, String> {
    let cost = text.parse().ok().filter(|cost| (0.0..=10.0).contains(cost));
    cost.ok_or_else(|| "must be a number between 0 and 10".into())
}

const LEGEND: &str = "\
Theorem 3.11 of Leviathan et al. 2023: arithmetic operations, as if all K were drafted in every round.
Sequoia: the best tree of so many nodes by the acceptance rates of siblings (Chen et al. 2024).";

/// What a run measured, and what papers expect of it.
pub struct Study {
    report: BenchReport,
    /// The JSON report, with the figures of theory and the cost of rows.
    pub json: Value,
    /// The figures of each speculative mode, in the order of the report.
    modes: Vec<Theory>,
    row_penalty: f64,
    json_file: Option<PathBuf>,
    csv_file: Option<PathBuf>,
}

impl Study {
    /// Runs the benchmark that the flags `args` describe.
    ///
    /// # Errors
    /// The text of `--help`, a wrong flag, or the errors of [`bench::measure`].
    pub fn measure(args: impl IntoIterator<Item = String>) -> Result<Self> {
        let args = std::iter::once("research".to_owned()).chain(args);
        let flags = Flags::try_parse_from(args).map_err(|e| Error::setup(e.to_string()))?;
        let bench = ["foretoken".to_owned(), "bench".to_owned()];
        let (mut config, options) = match Command::from_args(bench.into_iter().chain(flags.bench)) {
            Ok(Command::Bench(config, options)) => (config, options),
            Ok(_) => return Err(Error::setup("flags of `foretoken bench` are expected")),
            Err(Exit::Wrong(error)) => return Err(error),
            Err(Exit::Text(text)) => return Err(Error::setup(text)),
        };
        bench::check_files(&options)?;
        // Another machine's costs, or those of an earlier run, are none of this one's.
        config.engine.no_cost_cache = true;
        let row_penalty = flags.row_penalty;
        let (loaded, _thread) = load::load_with(&config, None, |target| {
            if row_penalty > 0.0 {
                Box::new(RowPenalty::new(target, row_penalty))
            } else {
                target
            }
        })?;
        let names = loaded.report_names(&config);
        let text = loaded.text.as_deref();
        let report = bench::measure(&loaded.engine, text, &names, &options)?;
        let json = serde_json::to_value(&report).map_err(|e| Error::internal(e.to_string()))?;
        Ok(Self {
            json_file: options.json,
            csv_file: options.csv,
            ..Self::of(report, json, row_penalty)
        })
    }

    fn of(report: BenchReport, mut json: Value, row_penalty: f64) -> Self {
        let operations = json["subject"]["draft_operations"].clone();
        json["subject"]["row_penalty"] = json!(row_penalty);
        let mut modes = Vec::new();
        for mode in json["temperatures"].as_array_mut().into_iter().flatten() {
            let index = |name: &str| mode[name].as_u64().unwrap_or(0) as usize;
            let (k, drafter) = (index("spec_length"), index("drafter"));
            let share = operations[drafter].as_f64().unwrap_or(0.0);
            let add = |group: &mut Value| {
                let theory = Theory::of(group, k, share);
                if let (Value::Object(group), Ok(Value::Object(figures))) =
                    (group, serde_json::to_value(&theory))
                {
                    group.extend(figures);
                }
                theory
            };
            let categories = mode["categories"].as_array_mut();
            categories
                .into_iter()
                .flatten()
                .for_each(|group| drop(add(group)));
            modes.push(add(&mut mode["overall"]));
        }
        Self {
            report,
            json,
            modes,
            row_penalty,
            json_file: None,
            csv_file: None,
        }
    }

    /// Writes the JSON report to the file of `--json` and the rows of `bench` to that of `--csv`, and prints the tables.
    ///
    /// # Errors
    /// A file that cannot be written, or a text that speculation changed.
    pub fn publish(&self) -> Result<()> {
        if let Some(file) = &self.json_file {
            let json = format!("{:#}\n", self.json);
            std::fs::write(file, json).map_err(|e| Error::in_file(file, e))?;
        }
        if let Some(file) = &self.csv_file {
            self.report.write_csv(file)?;
        }
        console::print(self)?;
        self.report.check_equal()
    }
}

impl fmt::Display for Study {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.report)?;
        if self.row_penalty > 0.0 {
            let penalty = self.row_penalty;
            writeln!(f, "\neach further row costs {penalty} one-row steps more")?;
        }
        let modes = self.json["temperatures"].as_array();
        let modes = modes.into_iter().flatten().zip(&self.modes);
        // Drafts that chance accepts say nothing of theories.
        let mut verified = modes
            .filter(|(mode, _)| mode["synthetic_acceptance"].is_null())
            .peekable();
        if verified.peek().is_some() {
            writeln!(f, "\n{LEGEND}")?;
        }
        for (mode, theory) in verified {
            let drafter = mode["drafter"].as_u64().unwrap_or(0) as usize;
            writeln!(
                f,
                "\ntemperature {}, {}, K = {}, siblings = {}, {}",
                mode["temperature"],
                self.json["subject"]["drafters"][drafter]
                    .as_str()
                    .unwrap_or("nothing"),
                mode["spec_length"],
                mode["spec_topk"],
                mode["acceptance"].as_str().unwrap_or_default()
            )?;
            theory.fmt_lines(f, &mode["overall"])?;
        }
        Ok(())
    }
}

fn main() {
    // Prints --help, or what is wrong with the flags of this example.
    Flags::parse();
    let study = Study::measure(std::env::args().skip(1));
    if let Err(e) = study.and_then(|study| study.publish()) {
        eprintln!("error: {e}");
        std::process::exit(2);
    }
}
