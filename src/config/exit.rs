//! What a command line gives instead of a command: a text, or an error in one line, also about flags of other servers.

use super::hints;
use crate::error::{Error, Result};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
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

/// Refuses other servers' commands and short flags of several letters, which the parser would take for
/// something else.
pub(super) fn check_foreign(args: &[OsString]) -> Result<()> {
    if let Some(word) = args.get(1).and_then(|word| word.to_str())
        && let Some(hint) = hints::instead_of_command(word)
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
    match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Text(e.render().to_string()),
        _ => Error::setup(one_line(e)).into(),
    }
}

/// clap's message and tip on one line, without the usage and the hint to `--help`.
fn one_line(e: &clap::Error) -> String {
    let text = e.render().to_string();
    let lines = text.lines().map(str::trim);
    let message: Vec<_> = lines
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    message.join("; ").trim_start_matches("error: ").to_owned()
}
