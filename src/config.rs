//! Flags and a TOML file become one validated [`Command`], once. Only `main` imports this.

mod flags;
#[cfg(test)]
mod tests;

use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::gguf::EMBEDDED;
use crate::{bench, convert, generate, train};
use clap::error::ErrorKind;
use clap::{Args, Parser};
use flags::{Cli, CliCommand, DrafterName, Options};
use std::ffi::OsString;
use std::path::Path;

pub use flags::{Dtype, HttpOptions, LoadFlags};

const DEFAULT_SPEC_LENGTH: usize = 5;
/// The best for the embedded pair, over both temperatures (models/default/README.md).
const EMBEDDED_SPEC_LENGTH: usize = 2;
/// After one equal token the next is equal too seldom (a quarter of the time, SmolLM2 on Spec-Bench;
/// half after two) to pay for a row where tokens are sampled.
const DEFAULT_PROMPT_LOOKUP: (usize, usize) = (2, 4);

/// What the process does, checked.
#[derive(Debug, Clone)]
pub enum Command {
    Serve(Config),
    Bench(Config, bench::Options),
    Generate(Config, generate::Options),
    Distill(train::Options),
    Convert(convert::Options),
    Tokenizer(train::tokenizer::Options),
}

/// All that an engine, and a server in front of it, need to know.
#[derive(Debug, Clone)]
pub struct Config {
    pub model: ModelChoice,
    /// Name that clients use.
    pub served_model_name: String,
    pub load: LoadFlags,
    /// What drafts; `None` = plain decoding.
    pub drafter: Option<DrafterChoice>,
    pub kv: KvBudget,
    /// Part of a GPU's memory that may be used, above 0 and at most 1.
    pub gpu_memory_utilization: f64,
    /// Tokens a block.
    pub block_size: usize,
    pub engine: EngineOptions,
    pub http: HttpOptions,
}

/// A model as the operator named it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelChoice {
    /// A Hugging Face id, a folder or a `.gguf` file.
    pub name: String,
    pub revision: Option<String>,
}

/// What drafts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DrafterChoice {
    Model(ModelChoice),
    /// Continues repeats of `min` to `max` tokens.
    Ngram {
        min: usize,
        max: usize,
    },
}

/// How large the KV pools are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// What is needed, within what there is.
    Default,
    /// Bytes, target and draft together.
    Bytes(u64),
    /// Blocks of each pool.
    Blocks(usize),
}

impl Command {
    /// Reads the command line and the file that it names.
    ///
    /// # Errors
    /// [`Exit`]: a line that says what to change, or the text of `--help` or `--version`.
    pub fn from_args(args: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, Exit> {
        let mut args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        let cli = Cli::try_parse_from(&args)?;
        let written = cli.options();
        written.check_conflicts()?;
        let Some(file) = written.config.clone() else {
            return Ok(Self::validate(cli)?);
        };
        // A file is flags written down: put before the others, it loses to them, and one parser
        // reads both.
        let from_file = file_args(&file, written)?;
        let first = std::iter::once(OsString::from("foretoken")).chain(from_file.clone());
        Cli::try_parse_from(first)
            .map_err(Exit::from)
            .and_then(|alone| Ok(alone.options().check_conflicts()?))
            .map_err(|exit| exit.in_file(&file))?;
        let start = if cli.command.is_some() { 2 } else { 1 };
        args.splice(start..start, from_file);
        Ok(Self::validate(Cli::try_parse_from(args)?)?)
    }

    fn validate(cli: Cli) -> Result<Self> {
        Ok(match cli.command {
            None => Self::Serve(cli.options.validate()?),
            Some(CliCommand::Serve(options)) => Self::Serve(options.validate()?),
            Some(CliCommand::Bench { options, bench }) => {
                let config = options.validate()?;
                let bench = bench.validate(config.engine.spec_length, config.load.seed)?;
                Self::Bench(config, bench)
            }
            Some(CliCommand::Generate { options, generate }) => {
                let config = options.validate()?;
                let generate = generate::Options {
                    seed: config.load.seed,
                    // One more set waits, so that no place in the batch is empty for long.
                    concurrency: config.engine.max_num_seqs.saturating_mul(2),
                    ..generate
                };
                Self::Generate(config, generate)
            }
            Some(CliCommand::Convert(options)) => Self::Convert(options),
            Some(CliCommand::Distill(options)) => Self::Distill(*options),
            Some(CliCommand::Tokenizer(options)) => Self::Tokenizer(options),
        })
    }
}

impl Cli {
    /// The flags of an engine, wherever they stand; the defaults, for a command without an engine.
    fn options(&self) -> &Options {
        match &self.command {
            Some(CliCommand::Serve(options)) => options,
            Some(CliCommand::Bench { options, .. } | CliCommand::Generate { options, .. }) => {
                options
            }
            _ => &self.options,
        }
    }
}

impl Options {
    fn validate(mut self) -> Result<Config> {
        if self.model.is_none() {
            self.embedded_pair()?;
        }
        let (drafter, spec_length) = self.speculation()?.unzip();
        let name = self.model.unwrap_or_default();
        let served_model_name = self
            .served_model_name
            .unwrap_or_else(|| default_served_name(&name));
        let engine = EngineOptions {
            spec_length: spec_length.unwrap_or(0),
            model_name: served_model_name.clone(),
            ..self.engine
        };
        check_step(&engine)?;
        Ok(Config {
            model: ModelChoice {
                name,
                revision: self.revision,
            },
            served_model_name,
            load: self.load,
            drafter,
            kv: match (self.num_blocks, self.kv_cache_memory) {
                (Some(blocks), _) => KvBudget::Blocks(blocks),
                (None, Some(bytes)) => KvBudget::Bytes(bytes as u64),
                (None, None) => KvBudget::Default,
            },
            gpu_memory_utilization: self.gpu_memory_utilization,
            block_size: self.block_size,
            engine,
            http: self.http,
        })
    }

    /// Refuses two answers to one question, when both stand in the same place.
    fn check_conflicts(&self) -> Result<()> {
        if self.kv_cache_memory.is_some() && self.num_blocks.is_some() {
            return Err(Error::setup(
                "--kv-cache-memory and --num-blocks both set the size of the KV cache: leave one out",
            ));
        }
        if self.draft_model.is_some() && self.drafter == Some(DrafterName::Ngram) {
            return Err(Error::setup(
                "--drafter ngram uses no model: leave out --draft-model or --drafter ngram",
            ));
        }
        Ok(())
    }

    /// What is served where no model is named: the embedded one, with its own draft unless the
    /// operator says otherwise.
    fn embedded_pair(&mut self) -> Result<()> {
        let [target, draft] = EMBEDDED else {
            return Err(Error::setup(
                "--model is missing: give a Hugging Face id, a folder or a .gguf file",
            ));
        };
        self.model = Some(target.name.into());
        if self.drafter != Some(DrafterName::Ngram) && self.draft_model.is_none() {
            self.draft_model = Some(draft.name.into());
            self.speculative_decoding.get_or_insert(true);
            self.spec_length.get_or_insert(EMBEDDED_SPEC_LENGTH);
        }
        Ok(())
    }

    /// The long name of a drafting flag that was given.
    fn drafting_flag(&self) -> Option<&'static str> {
        [
            ("--draft-model", self.draft_model.is_some()),
            ("--drafter", self.drafter.is_some()),
            ("--draft-revision", self.draft_revision.is_some()),
            ("--spec-length", self.spec_length.is_some()),
            ("--prompt-lookup-min", self.prompt_lookup_min.is_some()),
            ("--prompt-lookup-max", self.prompt_lookup_max.is_some()),
        ]
        .into_iter()
        .find_map(|(name, given)| given.then_some(name))
    }

    fn speculation(&self) -> Result<Option<(DrafterChoice, usize)>> {
        match (self.speculative_decoding, self.drafting_flag()) {
            (None, Some(flag)) => Err(Error::setup(format!(
                "{flag} has no effect alone: add --speculative-decoding"
            ))),
            // Said aloud, "false" switches off what the file sets up.
            (None | Some(false), _) => Ok(None),
            (Some(true), _) => Ok(Some((self.drafter()?, self.drafted_tokens()?))),
        }
    }

    fn drafted_tokens(&self) -> Result<usize> {
        match self.spec_length.unwrap_or(DEFAULT_SPEC_LENGTH) {
            0 => Err(Error::setup(
                "--spec-length must be at least 1; to decode plainly, leave out --speculative-decoding",
            )),
            length => Ok(length),
        }
    }

    fn drafter(&self) -> Result<DrafterChoice> {
        match (self.drafter, &self.draft_model) {
            (Some(DrafterName::Ngram), _) => {
                let (default_min, default_max) = DEFAULT_PROMPT_LOOKUP;
                let min = self.prompt_lookup_min.unwrap_or_else(|| {
                    default_min.min(self.prompt_lookup_max.unwrap_or(default_min))
                });
                let max = self.prompt_lookup_max.unwrap_or(default_max.max(min));
                if min == 0 || min > max {
                    return Err(Error::setup(format!(
                        "--prompt-lookup-min must be between 1 and --prompt-lookup-max: they are {min} and {max}"
                    )));
                }
                Ok(DrafterChoice::Ngram { min, max })
            }
            (_, Some(model)) => Ok(DrafterChoice::Model(ModelChoice {
                name: model.clone(),
                revision: self.draft_revision.clone(),
            })),
            (_, None) => Err(Error::setup(
                "--speculative-decoding needs something that drafts: add --draft-model MODEL or --drafter ngram",
            )),
        }
    }
}

impl KvBudget {
    /// Blocks of each pool: both pools get the same number, so that a block of the draft's stands
    /// beside each of the target's. `bytes_per_token` has one entry a pool; `wanted_tokens` is
    /// what `max_num_seqs` full contexts take and bounds the default alone, as does `room`, in bytes.
    ///
    /// # Errors
    /// `Setup` when that is less than one block.
    pub fn blocks(
        self,
        block_size: usize,
        bytes_per_token: &[usize],
        wanted_tokens: usize,
        room: u64,
    ) -> Result<usize> {
        let block_bytes = (bytes_per_token.iter().sum::<usize>() * block_size) as u64;
        let (blocks, given) = match self {
            Self::Blocks(blocks) => return Ok(blocks),
            Self::Bytes(bytes) => (bytes / block_bytes, bytes),
            Self::Default => {
                let wanted = wanted_tokens.div_ceil(block_size) as u64;
                (wanted.min(room / block_bytes), room)
            }
        };
        if blocks == 0 {
            return Err(Error::setup(format!(
                "the KV cache has {given} bytes and one block of {block_size} tokens takes {block_bytes}: raise --kv-cache-memory"
            )));
        }
        Ok(blocks as usize)
    }
}

fn check_step(engine: &EngineOptions) -> Result<()> {
    let (rows, drafted) = (engine.max_num_batched_tokens, engine.spec_length);
    if rows > drafted {
        return Ok(());
    }
    Err(Error::setup(format!(
        "--max-num-batched-tokens must be at least {}, one more than a draft has tokens: it is {rows}",
        drafted.saturating_add(1)
    )))
}

/// A path to a GGUF file is no name to type into a client; its stem is.
fn default_served_name(model: &str) -> String {
    let path = Path::new(model);
    match (path.extension(), path.file_stem()) {
        (Some(ext), Some(stem)) if ext == "gguf" => stem.to_string_lossy().into_owned(),
        _ => model.to_owned(),
    }
}

/// The file's keys as flags, without those that `written` answers in another way.
fn file_args(path: &Path, written: &Options) -> Result<Vec<OsString>> {
    let fail = |what: String| Error::in_file(path, what);
    let text = std::fs::read_to_string(path).map_err(|e| Error::in_file(path, e))?;
    let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e
            .span()
            .map_or(1, |s| text[..s.start].lines().count().max(1));
        fail(format!("line {line}: {}", e.message()))
    })?;
    let known = Options::augment_args(clap::Command::new("foretoken"));
    let mut args = Vec::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        if name == "config" || !known.get_arguments().any(|a| a.get_long() == Some(&name)) {
            return Err(fail(format!(
                "unknown key `{key}`: keys are the long flags of `foretoken --help`"
            )));
        }
        let value = match value {
            toml::Value::String(s) => s,
            toml::Value::Integer(n) => n.to_string(),
            toml::Value::Boolean(b) => b.to_string(),
            _ => {
                return Err(fail(format!(
                    "`{key}` must be a string, a whole number or a boolean"
                )));
            }
        };
        if !written.replaces(&name) {
            args.push(format!("--{name}={value}").into());
        }
    }
    Ok(args)
}

impl Options {
    /// Whether the command line answers the question of `name` by another flag.
    fn replaces(&self, name: &str) -> bool {
        match name {
            "num-blocks" => self.kv_cache_memory.is_some(),
            "kv-cache-memory" => self.num_blocks.is_some(),
            "draft-model" | "draft-revision" => self.drafter == Some(DrafterName::Ngram),
            "drafter" => self.draft_model.is_some(),
            _ => false,
        }
    }
}

/// Why there is no [`Config`].
#[derive(Debug)]
pub enum Exit {
    /// The operator asked for `--help` or `--version`: print this to stdout, exit with 0.
    Text(String),
    /// A flag, the file or their combination is wrong: exit with 2.
    Wrong(Error),
}

impl Exit {
    /// Names the file at fault.
    fn in_file(self, path: &Path) -> Self {
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
        match e.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                Self::Text(e.render().to_string())
            }
            _ => Self::Wrong(Error::setup(one_line(&e))),
        }
    }
}

/// clap's message and tip, without usage and the pointer to `--help`.
fn one_line(e: &clap::Error) -> String {
    let text = e.render().to_string();
    let lines = text.lines().map(str::trim);
    let told: Vec<_> = lines
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty())
        .collect();
    told.join("; ").trim_start_matches("error: ").to_owned()
}
