//! CLI -> Command -> load -> serve.

#[path = "main/load.rs"]
mod load;
#[path = "main/log.rs"]
mod log;
#[path = "main/memory.rs"]
mod memory;
#[path = "main/serve.rs"]
mod serve;

use foretoken::bench;
use foretoken::config::{Command, DrafterChoice, Exit};
use foretoken::convert;
use foretoken::error::{Error, Result};
use foretoken::generate;
use foretoken::train;
use log::LineWriter;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A step allocates and frees the same few sizes again and again, some of them large: with the
/// system's allocator that was a twentieth of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let command = match Command::from_args(std::env::args_os()) {
        Err(Exit::Text(text)) => {
            // Whoever reads it may have gone; that is no error.
            let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
            return ExitCode::SUCCESS;
        }
        Err(Exit::Wrong(e)) => Err(e),
        Ok(command) => Ok(command),
    };
    if let Ok(Command::Distill(_)) = command {
        one_thread_an_op();
    }
    let Ok(log) = LineWriter::new(std::io::stderr()) else {
        return ExitCode::FAILURE;
    };
    log.take_panics();
    let result = command.and_then(|command| {
        start_log(&command, &log);
        run(&command, &log)
    });
    let code = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(&e, &log),
    };
    log.flush();
    code
}

fn run(command: &Command, log: &LineWriter) -> Result<()> {
    match command {
        Command::Serve(config) => serve::serve(config, load::load(config)?, log),
        Command::Bench(config, options) => {
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
        Command::Generate(config, options) => {
            let loaded = load::load(config)?;
            let text = loaded.text.as_ref().ok_or_else(|| {
                Error::setup("generate needs a tokenizer.json beside config.json")
            })?;
            generate::run(&loaded.engine, text, options)
        }
        Command::Distill(options) => train::run(options).map(drop),
        Command::Convert(options) => convert::run(options),
        Command::Tokenizer(options) => train::tokenizer::run(options),
    }
}

/// Training shares out micro-batches. Threads of candle's own inside of each would only be in each
/// other's way: that took a quarter of the speed.
fn one_thread_an_op() {
    let name = "CANDLE_NUM_THREADS";
    if std::env::var_os(name).is_none() {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var(name, "1") };
    }
}

/// Logs go to `log`, which is stderr, at the level that RUST_LOG sets. What other commands do is not
/// news.
fn start_log(command: &Command, log: &LineWriter) {
    let level = match command {
        Command::Serve(_) => "foretoken=info,warn",
        _ => "warn",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let log = log.clone();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || log.clone())
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .init();
}

/// One line in `log`, whatever a library's message looks like. 2 = the operator can mend it.
fn fail(e: &Error, log: &LineWriter) -> ExitCode {
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
    log.line(&format!("error: {}", lines.join("; ")));
    ExitCode::from(match e {
        Error::Internal(_) => 1,
        Error::Setup(_) | Error::Request { .. } => 2,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_restarts_what_is_our_fault_alone() {
        let log = LineWriter::new(std::io::sink()).unwrap();
        assert_eq!(fail(&Error::internal("the device is lost"), &log), 1.into());
        assert_eq!(fail(&Error::setup("no such model"), &log), 2.into());
    }
}
