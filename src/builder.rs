//! Embeds foretoken in another program.

use crate::assembly::load::{Loaded, load_with};
use crate::assembly::{self, defaults};
use crate::config::{Command, Config, Exit};
use crate::engine::{EngineHandle, EngineThread};
use crate::error::{Error, Result};
use crate::http::AppState;
use crate::spec::Drafter;
use crate::text::Text;
use std::fmt;
use std::sync::Arc;

/// The source of draft tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Drafting {
    /// The source that the program chooses without flags: the draft that comes with the model, otherwise tables.
    #[default]
    Auto,
    /// No source: plain decoding.
    Off,
    /// Tables of the tokens that followed the same tokens before.
    Tables,
    /// A draft model or a head: a Hugging Face id, a folder or a `.gguf` file.
    Model(String),
}

/// Loads a model and starts an engine for it, as the program `foretoken` does.
///
/// ```no_run
/// use foretoken::{Drafting, Foretoken};
///
/// # fn main() -> foretoken::error::Result<()> {
/// let running = Foretoken::load("model.gguf").drafter(Drafting::Auto).start()?;
/// let text = running.text()?;
/// let request = foretoken::engine::Request {
///     prompt: text.encode("The sky is blue because", true)?,
///     max_tokens: Some(32),
///     ..foretoken::engine::Request::default()
/// };
/// let answer = running.engine().submit(request)?.blocking_collect()?;
/// println!("{}", text.decode(&answer.ids(), true));
/// # Ok(())
/// # }
/// ```
pub struct Foretoken {
    model: String,
    drafting: Drafting,
    own: Option<Box<dyn Drafter>>,
    flags: Vec<String>,
}

impl Foretoken {
    /// The model with this name: a Hugging Face id, a folder, a `.gguf` file, or one that is part of the program.
    pub fn load(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            drafting: Drafting::default(),
            own: None,
            flags: Vec::new(),
        }
    }

    /// Sets the source of draft tokens.
    pub fn drafter(mut self, drafting: Drafting) -> Self {
        self.drafting = drafting;
        self
    }

    /// Sets a drafter of the caller as the source of draft tokens.
    pub fn own_drafter(mut self, drafter: impl Drafter + 'static) -> Self {
        self.drafting = Drafting::Tables;
        self.own = Some(Box::new(drafter));
        self
    }

    /// Further flags of the program, as docs/flags.md has them: `["--max-model-len", "4096"]`. All models of a process
    /// compute with the same threads, so only its first one may have `--threads` other than these.
    pub fn flags<S: Into<String>>(mut self, flags: impl IntoIterator<Item = S>) -> Self {
        self.flags.extend(flags.into_iter().map(S::into));
        self
    }

    /// Loads the model and its draft, and starts the engine.
    ///
    /// # Errors
    /// `Setup`, in one line: a flag is wrong, a file is missing, or there is too little memory.
    pub fn start(self) -> Result<Running> {
        let drafting: &[&str] = match &self.drafting {
            Drafting::Auto => &[],
            Drafting::Off => &["--speculative-decoding=false"],
            Drafting::Tables => &["--drafter", "tables"],
            Drafting::Model(name) => &["--draft-model", name],
        };
        let flags = ["foretoken", "--model", &self.model].into_iter();
        let flags = flags.chain(drafting.iter().copied());
        let flags = flags.chain(self.flags.iter().map(String::as_str));
        let config = match Command::from_args(flags) {
            Ok(Command::Serve(config)) => config,
            Ok(_) => return Err(Error::setup("flags of `foretoken serve` are expected")),
            Err(Exit::Wrong(error)) => return Err(error),
            Err(Exit::Text(_)) => return Err(Error::setup("--help and --version start nothing")),
        };
        let (loaded, thread) = load_with(&config, self.own, |target| target)?;
        Ok(Running {
            config,
            loaded,
            thread,
        })
    }
}

impl fmt::Debug for Foretoken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Foretoken({})", self.model)
    }
}

/// A running engine. When it is dropped, the engine ends.
pub struct Running {
    config: Config,
    loaded: Loaded,
    thread: EngineThread,
}

impl Running {
    /// Returns the handle of the engine, to which requests are sent.
    pub fn engine(&self) -> &EngineHandle {
        &self.loaded.engine
    }

    /// The model's tokenizer and chat template.
    ///
    /// # Errors
    /// `Setup`, if the model came without a tokenizer.
    pub fn text(&self) -> Result<&Arc<Text>> {
        let none = || Error::setup("this model came without a tokenizer");
        self.loaded.text.as_ref().ok_or_else(none)
    }

    /// The state of the HTTP API for this engine, for [`http::router`](crate::http::router); and the engine's thread, to be
    /// kept until nothing is served any more.
    ///
    /// # Errors
    /// `Setup`, if the model came without a tokenizer, or its `generation_config.json` cannot be read.
    pub fn into_api(self) -> Result<(AppState, EngineThread)> {
        let text = self.text()?.clone();
        let (sampling, _) = defaults::of(&self.config.generation, &self.loaded.source)?;
        let state = assembly::state(&self.config, self.loaded, text, sampling)?;
        Ok((state, self.thread))
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Running({})", self.config.model.name)
    }
}
