//! CLI -> Config -> load -> serve.

#[path = "main/load.rs"]
mod load;
#[path = "main/serve.rs"]
mod serve;

use foretoken::bench;
use foretoken::config::{Command, Config, DrafterChoice, Exit};
use foretoken::convert;
use foretoken::error::{Error, Result};
use foretoken::generate;
use foretoken::train;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A step allocates and frees the same few sizes again and again, some of them large: with the
/// system's allocator that was a twentieth of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let config = match Config::from_args(std::env::args_os()) {
        Ok(config) => config,
        Err(Exit::Text(text)) => {
            say(text.trim_end());
            return ExitCode::SUCCESS;
        }
        Err(Exit::Wrong(e)) => return fail(&e),
    };
    start_log(&config.command);
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(&e),
    }
}

fn run(config: &Config) -> Result<()> {
    match &config.command {
        Command::Distill(options) => train::run(options).map(drop),
        Command::Serve => serve::serve(config, load::load(config)?),
        Command::Bench(options) => {
            let loaded = load::load(config)?;
            let names = bench::Names {
                model: config.served_model_name.clone(),
                drafter: match &config.drafter {
                    Some(DrafterChoice::Model(choice)) => choice.name.clone(),
                    Some(DrafterChoice::Ngram { min, max }) => format!("ngram ({min} to {max})"),
                    None => "nothing".into(),
                },
                device: loaded.device.into(),
            };
            bench::run(&loaded.engine, loaded.text.as_ref(), &names, options)
        }
        Command::Generate(options) => {
            let loaded = load::load(config)?;
            let text = loaded.text.as_ref().ok_or_else(|| {
                Error::setup("generate needs a tokenizer.json beside config.json")
            })?;
            generate::run(&loaded.engine, text, options)
        }
        Command::Convert(options) => convert::run(options),
    }
}

/// Logs go to stderr, at the level that RUST_LOG sets. What other commands do is not
/// news.
fn start_log(command: &Command) {
    let level = match command {
        Command::Serve => "foretoken=info,warn",
        Command::Bench(_) | Command::Generate(_) | Command::Distill(_) | Command::Convert(_) => {
            "warn"
        }
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// One line on stdout. Whoever reads it may have gone; that is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// One line on stderr, whatever a library's message looks like. 2 = the operator can mend it.
fn fail(e: &Error) -> ExitCode {
    let text = e.to_string();
    // candle appends a backtrace to its messages where RUST_BACKTRACE is set.
    let is_frame = |line: &str| {
        let number = line.split_once(": ").map(|(number, _)| number);
        number.is_some_and(|number| number.parse::<usize>().is_ok())
    };
    let lines: Vec<_> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !is_frame(line))
        .filter(|line| !line.is_empty())
        .collect();
    let _ = writeln!(std::io::stderr(), "error: {}", lines.join("; "));
    ExitCode::from(match e {
        Error::Internal(_) => 1,
        Error::Setup(_) | Error::Request { .. } => 2,
    })
}
