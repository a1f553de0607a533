//! What a command line gives instead of a command: a text, or an error in one line, also about flags of other servers.

use super::flags::Cli;
use super::hints;
use crate::error::{Error, Result};
use crate::model::known;
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::error::Error as _;
use std::ffi::OsString;
use std::num::IntErrorKind::InvalidDigit;
use std::num::ParseIntError;
use std::path::Path;

/// The reason why parsing returned no [`Command`](super::Command).
#[derive(Debug)]
pub enum Exit {
    /// The text of `--help`, `--version`, `completions` or `man`: print it to stdout and exit with 0.
    Text(String),
    /// An invalid flag, file or combination of them: exit with 2.
    Wrong(Error),
}

impl Exit {
    /// Adds the name of the file to the error.
    pub(super) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Wrong(e) => Error::in_file(path, e).into(),
            text @ Self::Text(_) => text,
        }
    }
}

impl From<Error> for Exit {
    fn from(e: Error) -> Self {
        Self::Wrong(e)
    }
}

impl From<clap::Error> for Exit {
    fn from(e: clap::Error) -> Self {
        explain(&[], &e)
    }
}

/// Whether `args` are those of serving, with its model and its engine.
fn has_options(args: &[OsString]) -> bool {
    let others = [
        "convert",
        "distill",
        "tokenizer",
        "service",
        "completions",
        "man",
    ];
    !args
        .get(1)
        .is_some_and(|first| others.iter().any(|other| first == other))
}

/// Refuses misspelled commands, and other servers' commands and short flags of several letters, which the parser would
/// take for something else.
pub(super) fn check_foreign(args: &[OsString]) -> Result<()> {
    if let Some(word) = args.get(1).and_then(|word| word.to_str())
        && let Some(hint) = instead_of_command(word)
        && !Path::new(word).exists()
    {
        return Err(Error::setup(format!("there is no command {word}: {hint}")));
    }
    let words = args.iter().skip(1).filter_map(|arg| arg.to_str());
    match hints::long_short_flag(words).filter(|_| has_options(args)) {
        Some((flag, hint)) => Err(Error::setup(format!("{flag} is no flag here: {hint}"))),
        None => Ok(()),
    }
}

/// What somebody may have meant who names `word` as a model, if it is another server's command or nearly one of ours.
fn instead_of_command(word: &str) -> Option<String> {
    if let Some(hint) = hints::instead_of_command(word) {
        return Some(hint.into());
    }
    let cli = Cli::command();
    let is_word = word.bytes().all(|byte| byte.is_ascii_lowercase());
    if !is_word || cli.find_subcommand(word).is_some() || known::find(word).is_some() {
        return None;
    }
    let commands = cli.get_subcommands().map(clap::Command::get_name);
    hints::near(word, commands).map(|command| format!("did you mean {command}?"))
}

/// clap's error for `args`; of a flag of other servers it says what there is instead.
pub(super) fn explain(args: &[OsString], e: &clap::Error) -> Exit {
    let unknown = match (e.kind(), e.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) => Some(flag.as_str()),
        _ => None,
    };
    let is_flag = |flag: &&str| flag.starts_with('-') && has_options(args);
    if let Some(flag) = unknown.filter(is_flag)
        && let Some(hint) = hints::instead_of(flag)
    {
        return Error::setup(format!("{flag} is no flag here: {hint}")).into();
    }
    let text = match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            return Exit::Text(e.render().to_string());
        }
        // clap's message is the whole help.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => missing_command(e),
        _ => one_line(e),
    };
    let is_of_place = matches!(
        e.kind(),
        ErrorKind::UnknownArgument | ErrorKind::ArgumentConflict
    );
    let text = match late_command(args).filter(|_| is_of_place) {
        Some(command) => format!("a command comes first: foretoken {command} ... ({text})"),
        None => text,
    };
    Error::setup(text).into()
}

/// The command of `args` that flags come before.
fn late_command(args: &[OsString]) -> Option<&str> {
    let mut words = args.iter().skip(1).map(|arg| arg.to_str().unwrap_or(""));
    if !words.next()?.starts_with('-') {
        return None;
    }
    words.find(|word| is_command(word))
}

fn is_command(word: &str) -> bool {
    Cli::command().find_subcommand(word).is_some()
}

/// Refuses a command after flags that stands where a model may.
pub(super) fn check_command_first(cli: &Cli, args: &[OsString]) -> Result<()> {
    let model = cli
        .options
        .name
        .as_deref()
        .filter(|_| cli.command.is_none());
    match model.filter(|name| is_command(name) && !Path::new(name).exists()) {
        Some(command) if late_command(args) == Some(command) => Err(Error::setup(format!(
            "a command comes first: foretoken {command} ..."
        ))),
        _ => Ok(()),
    }
}

/// What a command lacks that has commands of its own.
fn missing_command(e: &clap::Error) -> String {
    let text = e.render().to_string();
    let usage = text.lines().find_map(|line| line.strip_prefix("Usage: "));
    format!("a command is missing: {}", usage.unwrap_or_default())
}

/// clap's message and tip on one line, without the usage and the hint to `--help`.
fn one_line(e: &clap::Error) -> String {
    let mut text = e.render().to_string();
    let number = e
        .source()
        .and_then(|source| source.downcast_ref::<ParseIntError>());
    if let Some(wrong) = number.filter(|wrong| wrong.kind() == &InvalidDigit) {
        text = text.replace(&wrong.to_string(), "must be a whole number");
    }
    let lines = text.lines().map(str::trim);
    let message: Vec<_> = lines
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        // A flag that nobody knows is no value.
        .filter(|line| !line.is_empty() && !line.starts_with("tip: to pass"))
        .collect();
    let message = message.join("; ").replace(":; ", ": ");
    message.trim_start_matches("error: ").to_owned()
}
