//! The user's input: an edited line of a terminal, or a line of anything else.

use crate::error::{Error, Result};
use crate::signals::Interrupt;
use futures_util::FutureExt;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{self, IsTerminal};
use tokio::runtime::Runtime;

const PROMPT: &str = ">>> ";

/// The source of lines.
pub enum Input {
    Terminal(Box<DefaultEditor>),
    /// A file, a pipe or a program.
    Lines,
}

/// The result of reading a line.
pub enum TypedLine {
    Line(String),
    /// Ctrl-C on an unfinished line.
    Interrupted,
    End,
}

impl Input {
    pub fn new() -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Self::Lines);
        }
        let config = rustyline::Config::builder().auto_add_history(true).build();
        let editor = DefaultEditor::with_config(config).map_err(|e| failed(&e))?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    /// Whether somebody types.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Waits for the next line, on a thread of `runtime` if it needs one, or for an `interrupt`.
    ///
    /// # Errors
    /// `Setup`, if there is no reading it.
    pub fn next(&mut self, runtime: &Runtime, interrupt: &mut Interrupt) -> Result<TypedLine> {
        match self {
            // While a line is edited, Ctrl-C is a key and no signal.
            Self::Terminal(editor) => match editor.readline(PROMPT) {
                Ok(line) => {
                    // One that came before the line is not meant for its answer.
                    while let Some(Some(())) = interrupt.recv().now_or_never() {}
                    Ok(TypedLine::Line(line))
                }
                Err(ReadlineError::Interrupted) => Ok(TypedLine::Interrupted),
                Err(ReadlineError::Eof) => Ok(TypedLine::End),
                Err(e) => Err(failed(&e)),
            },
            Self::Lines => runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => Ok(TypedLine::End),
                    line = tokio::task::spawn_blocking(read_line) => {
                        line.map_err(|e| failed(&e))?.map_err(|e| failed(&e))
                    }
                }
            }),
        }
    }
}

fn read_line() -> io::Result<TypedLine> {
    let mut line = String::new();
    Ok(match io::stdin().read_line(&mut line)? {
        0 => TypedLine::End,
        _ => TypedLine::Line(line),
    })
}

fn failed(e: &impl std::fmt::Display) -> Error {
    Error::setup(format!("cannot read stdin: {e}"))
}
