//! CLI -> Command -> load -> serve.

#[path = "main/allocator.rs"]
mod allocator;
#[path = "main/chat.rs"]
mod chat;
#[path = "main/choose.rs"]
mod choose;
#[cfg(all(test, feature = "embedded-model"))]
#[path = "main/engine_crash.rs"]
mod engine_crash;
#[path = "main/exit.rs"]
mod exit;
#[cfg(test)]
#[path = "../tests/common/hooked.rs"]
#[allow(dead_code, reason = "each test file uses its part")]
mod hooked;
#[path = "main/log.rs"]
mod log;
#[path = "main/program.rs"]
mod program;
#[path = "main/renewal.rs"]
mod renewal;
#[path = "main/router.rs"]
mod router;
#[path = "main/serve.rs"]
mod serve;
#[path = "main/service.rs"]
mod service;
#[path = "main/stdin.rs"]
mod stdin;

use foretoken::assembly::load::{self, Loaded};
use foretoken::assembly::{self, check, defaults};
use foretoken::bench;
use foretoken::config::{Command, Config, Exit, LogFormat, Partner, ServiceCommand};
use foretoken::console;
use foretoken::convert;
use foretoken::engine::EngineThread;
use foretoken::error::{Error, Result, clipped};
use foretoken::files;
use foretoken::generate;
use foretoken::generate::batch::{self, BatchFiles};
use foretoken::http::{self, InProcess};
use foretoken::kernels;
use foretoken::signals;
use foretoken::text::Text;
use foretoken::train;
use log::LineWriter;
use serve::Entrance;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use stdin::StdinEnd;
use tracing::Level;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    allocator::keep_freed_memory();
    let command = match Command::from_args(std::env::args_os()) {
        Err(Exit::Text(text)) => console::print(format!("{}\n", text.trim_end())).map(|()| None),
        Err(Exit::Wrong(e)) => Err(e),
        Ok(command) => Ok(Some(command)),
    };
    if let Ok(Some(Command::Distill(_))) = command {
        one_thread_per_op();
    }
    let Ok(log) = LineWriter::new(std::io::stderr()) else {
        return ExitCode::FAILURE;
    };
    log.take_panics();
    let result = command.and_then(|command| match command {
        None => Ok(()),
        Some(command) => {
            check_environment()?;
            start_log(&command, &log)?;
            signals::end_first_process(exit::at_once)?;
            run(&command, &log)
        }
    });
    finish(result, &log).into()
}

/// Says what went wrong, and returns the exit code. Ends the process at once if an engine's thread hangs.
fn finish(result: Result<()>, log: &LineWriter) -> u8 {
    let code = result.err().map_or(0, |e| fail(&e, log));
    log.flush();
    if EngineThread::one_hangs() {
        exit::at_once(code);
    }
    code
}

fn run(command: &Command, log: &LineWriter) -> Result<()> {
    match command {
        Command::Serve(config) => {
            let stdin = StdinEnd::watch(config.http.exit_on_stdin_end)?;
            let entrance = Entrance::open(&config.http.listen)?;
            let (loaded, _thread) = load::load(config)?;
            serve::serve(config, entrance, loaded, log, stdin)
        }
        Command::Router(config) => router::run(config, log),
        Command::Bench(config, options) => {
            files::check_exist(options.prompts.iter().chain(&options.warm))?;
            let (loaded, _thread) = load::load(config)?;
            let names = loaded.report_names(config);
            bench::run(&loaded.engine, loaded.text.as_deref(), &names, options)
        }
        Command::Generate(config, options) => {
            files::check_exist(options.prompts.iter().chain(&options.input_file))?;
            let folder = options.out.parent();
            files::check_exist(folder.filter(|folder| !folder.as_os_str().is_empty()))?;
            let (loaded, _thread) = load::load(config)?;
            let text = loaded.text.clone().ok_or_else(|| {
                Error::setup("generate needs a tokenizer.json beside config.json")
            })?;
            match &options.input_file {
                None => generate::run(&loaded.engine, &text, options),
                Some(requests) => answer_batch(config, loaded, text, requests, options),
            }
        }
        Command::Check(config, options) => check::run(config, options),
        Command::Chat(Partner::Model(config), options) => chat::run(config, options),
        Command::Chat(Partner::Unnamed(unnamed), options) => chat::run_unnamed(unnamed, options),
        Command::Chat(Partner::Server(endpoint), options) => {
            foretoken::chat::run(endpoint, options)
        }
        Command::Distill(options) => train::run(options).map(drop),
        Command::Convert(options) => convert::run(options),
        Command::Tokenizer(options) => train::tokenizer::run(options),
        Command::Service(ServiceCommand::Install(options)) => service::install(options),
    }
}

/// Answers the `requests` of a batch.
fn answer_batch(
    config: &Config,
    loaded: Loaded,
    text: Arc<Text>,
    requests: &Path,
    options: &generate::GenerateOptions,
) -> Result<()> {
    let (sampling, _) = defaults::of(&config.generation, &loaded.source)?;
    let engine = loaded.engine.clone();
    // A key is for those who come over the network, and nobody can ask for a response after the end.
    let state = assembly::state(config, loaded, text, sampling)?
        .with_api_keys(Vec::new())
        .with_max_stored_responses(0);
    let files = BatchFiles {
        input: requests,
        out: &options.out,
        max_body_bytes: config.http.listen.limits.max_body_bytes,
        concurrency: options.concurrency,
    };
    batch::run(&engine, &InProcess::new(http::router(state)), files)
}

/// Limits candle to one thread per op. Training already runs micro-batches in parallel, and candle's
/// own threads on top of that cost a quarter of the speed.
fn one_thread_per_op() {
    let name = "CANDLE_NUM_THREADS";
    if std::env::var_os(name).is_none() {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var(name, "1") };
    }
}

/// Sends logs to `log` (stderr) at the level that RUST_LOG sets, in the form of `--log-format`. By default
/// `serve` logs at info and the other commands at warn.
///
/// # Errors
/// `Setup`, if RUST_LOG cannot be read.
fn start_log(command: &Command, log: &LineWriter) -> Result<()> {
    let format = command.log_format();
    log.set_format(format);
    let level = match command {
        Command::Serve(_) | Command::Router(_) => "foretoken=info,warn",
        _ => "warn",
    };
    // A file of Docker Compose makes an empty one of a variable that is not set.
    let set = std::env::var_os(EnvFilter::DEFAULT_ENV).filter(|value| !value.is_empty());
    let filter = match set {
        None => EnvFilter::new(level),
        Some(_) => EnvFilter::try_from_default_env().map_err(|e| {
            let what = clipped(&e.to_string());
            Error::setup(format!("{}: {what}", EnvFilter::DEFAULT_ENV))
        })?,
    };
    let log = log.clone();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || log.clone())
        .log_internal_errors(false);
    match format {
        LogFormat::Text => {
            let has_colours = std::io::stderr().is_terminal() && foretoken::chat::shows_colours();
            lines.with_ansi(has_colours).init();
        }
        LogFormat::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .init(),
    }
    Ok(())
}

/// Checks the numbers of threads that libraries read from the environment: they panic on those that they
/// do not like.
///
/// # Errors
/// `Setup`, naming the variable.
fn check_environment() -> Result<()> {
    let max = kernels::max_threads();
    for (name, min) in [
        ("TOKIO_WORKER_THREADS", 1),
        // 0 is the default of these.
        ("RAYON_NUM_THREADS", 0),
        ("CANDLE_NUM_THREADS", 0),
    ] {
        let Some(value) = std::env::var_os(name) else {
            continue;
        };
        let threads = value.to_str().and_then(|text| text.parse().ok());
        if !threads.is_some_and(|threads: usize| (min..=max).contains(&threads)) {
            return Err(Error::setup(format!(
                "{name} must be a whole number from {min} to {max}"
            )));
        }
    }
    Ok(())
}

/// Writes the error to `log` as one line, even if a library's message has several. Exit code 2 = the
/// operator can fix it.
fn fail(e: &Error, log: &LineWriter) -> u8 {
    let text = e.to_string();
    // candle appends a backtrace to its messages if RUST_BACKTRACE is set.
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
    log.note(Level::ERROR, "error: ", &clipped(&lines.join("; ")));
    match e {
        Error::Internal(_) => 1,
        Error::Setup(_) | Error::Request { .. } => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_distinguish_internal_errors_from_setup_errors() {
        let log = LineWriter::new(std::io::sink()).unwrap();
        assert_eq!(fail(&Error::internal("the device is lost"), &log), 1);
        assert_eq!(fail(&Error::setup("no such model"), &log), 2);
    }
}
