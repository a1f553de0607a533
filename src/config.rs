//! Parses and validates flags and a TOML file into one [`Command`]. Only `main` imports this module.

mod chat;
mod compared;
mod draft_vocab;
mod exit;
mod file;
mod flags;
mod generated;
mod hints;
mod load_flags;
mod lora;
mod router;
mod service;
mod speculation;
#[cfg(test)]
mod tests;

use crate::bench;
use crate::convert;
use crate::engine::{EngineOptions, SpecLimits};
use crate::error::{Error, Result};
use crate::generate;
use crate::gguf::EMBEDDED;
use crate::gpus::Gpu;
use crate::kernels::quant::BlockType;
use crate::model::{Pooling, only_gguf};
use crate::train;
use crate::train::learn::LearnOptions;
use clap::Parser;
use exit::{check_command_first, check_foreign, explain};
use flags::{Cli, CliCommand, CommonOptions};
use speculation::AUTO_DRAFT;
use std::ffi::OsString;
use std::path::Path;

pub use chat::{Partner, UnnamedModel};
pub use compared::ComparedDrafter;
pub use draft_vocab::DraftVocab;
pub use exit::Exit;
pub use flags::{
    CheckOptions, GenerationConfig, GenerationFlags, HttpOptions, ListenOptions, LogFormat,
};
pub use load_flags::{Dtype, LoadFlags};
pub use lora::{LoraModule, LoraOptions};
pub use router::{ModelList, RouterConfig};
pub use service::{InstallOptions, ServiceCommand};
pub use speculation::{DrafterChoice, ModelChoice, TablesOptions};

/// A validated command.
#[derive(Debug, Clone)]
pub enum Command {
    /// Serves the model over HTTP.
    Serve(Config),
    /// Serves several models, each by a process of its own.
    Router(RouterConfig),
    /// Compares speculative with plain decoding.
    Bench(Config, Box<bench::BenchOptions>),
    /// Generates answers to prompts and writes them to a corpus.
    Generate(Config, generate::GenerateOptions),
    /// Reports what a model is and what it takes, from headers only.
    Check(Config, CheckOptions),
    /// Chats in the terminal, with a model of this process or with a server.
    Chat(Partner, crate::chat::ChatOptions),
    /// Trains a draft model for a target.
    Distill(train::DistillOptions),
    /// Converts a folder of safetensors to a quantized GGUF file.
    Convert(convert::ConvertOptions),
    /// Trains a tokenizer.
    Tokenizer(train::tokenizer::TokenizerOptions),
    /// Runs the program as a service of systemd.
    Service(ServiceCommand),
}

/// The configuration of an engine and its server.
#[derive(Debug, Clone)]
pub struct Config {
    /// The target model.
    pub model: ModelChoice,
    /// The model's name in answers.
    pub served_model_name: String,
    /// Other names that clients may send.
    pub served_model_aliases: Vec<String>,
    /// The pooling of hidden states into an embedding; `None` = the model's own.
    pub pooling: Option<Pooling>,
    /// Whether the model is a reranker that answers yes or no, whatever its files and its name say.
    pub reranker: bool,
    /// How weights are loaded, and on which device.
    pub load: LoadFlags,
    /// The GPU of another machine that `check` plans for, instead of for the device.
    pub gpu: Option<&'static Gpu>,
    /// The default sampling parameters of requests.
    pub generation: GenerationFlags,
    /// The drafter; `None` = plain decoding.
    pub drafter: Option<DrafterChoice>,
    /// Whether no flag chose it, so that a layer for further tokens drafts if the target's checkpoint has one.
    pub prefers_mtp: bool,
    /// Drafters to take in place of it, one after the other.
    pub compared: Vec<ComparedDrafter>,
    /// The blocks that a draft's safetensors become; `None` = those of `load`.
    pub draft_quantize: Option<BlockType>,
    /// The ids that a draft may predict; `None` = all that it can.
    pub draft_vocab: Option<DraftVocab>,
    /// The options of the tables, if the drafter uses them.
    pub tables: TablesOptions,
    /// The options of the head's learning while it serves; `None` = it does not learn.
    pub learn: Option<LearnOptions>,
    /// The adapters; `None` = there are none.
    pub lora: Option<LoraOptions>,
    /// The size of the KV pools.
    pub kv: KvBudget,
    /// Fraction of GPU memory that may be used, above 0 and at most 1.
    pub gpu_memory_utilization: f64,
    /// Tokens per block.
    pub block_size: usize,
    /// The options of the engine.
    pub engine: EngineOptions,
    /// The options of the HTTP server.
    pub http: HttpOptions,
    /// The form of the log.
    pub log_format: LogFormat,
    /// The collector to which traces are sent; `None` = the one that the environment names, if it names one.
    pub otlp_traces_endpoint: Option<String>,
}

/// The size of the KV pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// Enough for `max_num_seqs` sequences of full context length, within the available memory.
    Default,
    /// Total bytes of target and draft.
    Bytes(u64),
    /// Blocks per pool.
    Blocks(usize),
}

impl Command {
    /// Parses the command line and the TOML file of `--config`.
    ///
    /// # Errors
    /// [`Exit`]: a one-line error that says what to change, or the text of `--help`, `--version`, `completions` or `man`.
    pub fn from_args(args: impl IntoIterator<Item = impl Into<OsString>>) -> Result<Self, Exit> {
        let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
        check_foreign(&args)?;
        let cli = Cli::try_parse_from(&args).map_err(|e| explain(&args, &e))?;
        check_command_first(&cli, &args)?;
        match &cli.command {
            Some(CliCommand::Router(flags)) => return router::command((**flags).clone(), &args),
            Some(CliCommand::Completions { shell }) => {
                return Err(Exit::Text(generated::completions(*shell)));
            }
            Some(CliCommand::Man { name }) => {
                return Err(Exit::Text(generated::manual(name.as_deref())?));
            }
            _ => {}
        }
        let written = cli.options();
        written.check_conflicts()?;
        let Some(file) = written.config.clone() else {
            return Ok(Self::validate(cli, &args)?);
        };
        // The file's keys become flags before those of the command line: one parser reads both,
        // and the command line overrides the file.
        let from_file = file::args(&file, written)?;
        let first = std::iter::once(OsString::from("foretoken")).chain(from_file.clone());
        Cli::try_parse_from(first)
            .map_err(Exit::from)
            .and_then(|alone| Ok(alone.options().check_conflicts()?))
            .map_err(|exit| exit.in_file(&file))?;
        let start = if cli.command.is_some() { 2 } else { 1 };
        let mut all = args.clone();
        all.splice(start..start, from_file);
        Ok(Self::validate(Cli::try_parse_from(all)?, &args)?)
    }

    /// The form of the lines on stderr; text for commands without the flag.
    pub fn log_format(&self) -> LogFormat {
        match self {
            Self::Serve(config)
            | Self::Bench(config, _)
            | Self::Generate(config, _)
            | Self::Check(config, _) => config.log_format,
            Self::Chat(Partner::Model(config), _) => config.log_format,
            Self::Chat(Partner::Unnamed(unnamed), _) => unnamed.log_format(),
            Self::Router(config) => config.log_format,
            Self::Chat(Partner::Server(_), _)
            | Self::Distill(_)
            | Self::Convert(_)
            | Self::Tokenizer(_)
            | Self::Service(_) => LogFormat::Text,
        }
    }

    /// `args` is the command line, without what a file adds.
    fn validate(cli: Cli, args: &[OsString]) -> Result<Self> {
        let command = Self::of_cli(cli, args)?;
        let not_served = match &command {
            Self::Bench(config, _) | Self::Generate(config, _) | Self::Check(config, _) => config,
            Self::Chat(Partner::Model(config), _) => &**config,
            _ => return Ok(command),
        };
        if not_served.lora.is_some() && matches!(command, Self::Bench(..) | Self::Generate(..)) {
            return Err(Error::setup(
                "adapters (--enable-lora, --lora-modules) belong to serve and chat: leave them out with bench and generate",
            ));
        }
        refuse_learning(not_served)?;
        Ok(command)
    }

    fn of_cli(cli: Cli, args: &[OsString]) -> Result<Self> {
        Ok(match cli.command {
            None => Self::Serve(cli.options.validate()?),
            Some(CliCommand::Serve(options)) => Self::Serve(options.validate()?),
            Some(CliCommand::Router(flags)) => router::of_flags(*flags)?,
            Some(CliCommand::Bench { options, bench }) => {
                let mut config = options.validate()?;
                if config.engine.prefix_cache_disk.is_some() {
                    return Err(Error::setup(
                        "bench never caches prefixes: leave out --prefix-cache-disk",
                    ));
                }
                // It runs the same prompts again and again, and each run must cost the same.
                config.engine.no_prefix_caching = true;
                // What it learns is of modes that nobody serves, as of synthetic acceptance.
                config.engine.no_cost_cache = true;
                let mut bench = bench.validate(&config.engine, config.load.seed)?;
                bench.flags = flags(args);
                config.compared = ComparedDrafter::all(&bench.drafters, &config)?;
                Self::Bench(config, Box::new(bench))
            }
            Some(CliCommand::Generate { options, generate }) => {
                let config = options.validate()?;
                let generate = generate::GenerateOptions {
                    seed: config.load.seed,
                    // A second batch waits in the queue, so that a free slot is filled at once.
                    concurrency: config.engine.max_num_seqs.saturating_mul(2),
                    ..generate
                };
                Self::Generate(config, generate)
            }
            Some(CliCommand::Check { check, options }) => {
                let check = CheckOptions {
                    args: flags(args),
                    ..check
                };
                let mut config = options.validate()?;
                if check.gpu.is_some() && config.load.device == "cpu" {
                    return Err(Error::setup(
                        "--gpu plans for a GPU, and --device cpu for the CPU: leave one out",
                    ));
                }
                config.gpu = check.gpu;
                Self::Check(config, check)
            }
            Some(CliCommand::Chat { chat, options }) => {
                Self::Chat(chat::partner(*options, args)?, chat)
            }
            Some(CliCommand::Convert(options)) => Self::Convert(options),
            Some(CliCommand::Distill(options)) => Self::Distill(*options),
            Some(CliCommand::Tokenizer(options)) => Self::Tokenizer(options),
            Some(CliCommand::Service(command)) => Self::Service(command),
            Some(CliCommand::Completions { .. } | CliCommand::Man { .. }) => {
                return Err(Error::internal("a text is no command"));
            }
        })
    }
}

impl Cli {
    /// The engine flags of the subcommand, or the top-level ones if it has none.
    fn options(&self) -> &CommonOptions {
        match &self.command {
            Some(CliCommand::Serve(options)) => options,
            Some(
                CliCommand::Bench { options, .. }
                | CliCommand::Generate { options, .. }
                | CliCommand::Check { options, .. }
                | CliCommand::Chat { options, .. },
            ) => options,
            _ => &self.options,
        }
    }
}

impl CommonOptions {
    fn validate(mut self) -> Result<Config> {
        self.load.check_conflicts()?;
        self.model = self.name.take().or(self.model);
        if self.model.is_none() {
            self.check_names()?;
            self.embedded_pair()?;
        }
        let (drafter, spec_length) = self.speculation.validate(&self.engine.spec)?.unzip();
        let name = self.model.unwrap_or_default();
        let mut names = self.served_model_name.into_iter();
        let served_model_name = names.next().unwrap_or_else(|| default_served_name(&name));
        let aliases: Vec<String> = names.collect();
        let served = std::iter::once(&served_model_name).chain(&aliases);
        let served: Vec<&str> = served.map(String::as_str).collect();
        let lora = self.lora.validate(&served)?;
        let engine = EngineOptions {
            max_loras: lora.as_ref().map_or(0, |lora| lora.limits.max_loras),
            spec: SpecLimits {
                length: spec_length.unwrap_or(0),
                ..self.engine.spec
            },
            model_name: served_model_name.clone(),
            ..self.engine
        };
        Ok(Config {
            model: ModelChoice {
                name,
                revision: self.revision,
            },
            served_model_name,
            served_model_aliases: aliases,
            pooling: self.pooling,
            reranker: self.reranker,
            load: self.load,
            gpu: None,
            generation: self.generation,
            drafter,
            prefers_mtp: self.speculation.is_unchosen(),
            compared: Vec::new(),
            draft_quantize: self.speculation.draft_quantize,
            draft_vocab: self.speculation.draft_vocab.clone(),
            tables: self.speculation.tables(),
            lora,
            learn: self
                .speculation
                .learning(self.http.listen.api_keys().count())?,
            kv: match (self.num_blocks, self.kv_cache_memory) {
                (Some(blocks), _) => KvBudget::Blocks(blocks),
                (None, Some(bytes)) => KvBudget::Bytes(bytes as u64),
                (None, None) => KvBudget::Default,
            },
            gpu_memory_utilization: self.gpu_memory_utilization,
            block_size: self.block_size,
            engine,
            http: self.http,
            log_format: self.log_format,
            otlp_traces_endpoint: self.otlp_traces_endpoint,
        })
    }

    /// Rejects conflicting flags that come from the same source, the command line or the file.
    fn check_conflicts(&self) -> Result<()> {
        if let (Some(name), Some(model)) = (&self.name, &self.model)
            && !chat::is_url(name)
        {
            return Err(Error::setup(format!(
                "the model is named twice, as {name} and as --model {model}: leave one out"
            )));
        }
        if self.kv_cache_memory.is_some() && self.num_blocks.is_some() {
            return Err(Error::setup(
                "--kv-cache-memory and --num-blocks both set the size of the KV cache: leave one out",
            ));
        }
        self.speculation.check_conflicts()
    }

    /// Refuses a model that comes after the names of `--served-model-name`, as one of which it is read.
    fn check_names(&self) -> Result<()> {
        let mut further = self.served_model_name.iter().skip(1);
        match further.find(|name| Path::new(name).exists()) {
            Some(model) => Err(Error::setup(format!(
                "--served-model-name reads {model} as a name: give the model first, or as --model {model}"
            ))),
            None => Ok(()),
        }
    }

    /// Selects the embedded model if `--model` is missing, with its draft unless other flags choose
    /// a drafter.
    fn embedded_pair(&mut self) -> Result<()> {
        let [target, draft] = EMBEDDED else {
            return Err(Error::setup(
                "--model is missing: give a Hugging Face id, a folder or a .gguf file",
            ));
        };
        self.model = Some(target.name.into());
        if !self.speculation.excludes_model() {
            let name = &mut self.speculation.draft_model;
            if name.as_deref().is_none_or(|name| name == AUTO_DRAFT) {
                *name = Some(draft.name.into());
            }
        }
        Ok(())
    }
}

impl Config {
    /// Whether a draft is to be found by itself, as `--draft-model auto` asks for.
    pub fn has_auto_draft(&self) -> bool {
        let compared = self.compared.iter().map(|one| &one.choice);
        let mut choices = self.drafter.iter().chain(compared);
        choices.any(|choice| choice.model().is_some_and(ModelChoice::is_auto))
    }
}

impl KvBudget {
    /// Blocks per pool. Both pools get the same number: one draft block for each target block.
    /// `bytes_per_token` has one entry per pool. `wanted_tokens`, the size of `max_num_seqs` full
    /// contexts, and `room`, in bytes, limit only the default.
    ///
    /// # Errors
    /// `Setup` if the result is less than one block.
    pub fn blocks(
        self,
        block_size: usize,
        bytes_per_token: &[usize],
        wanted_tokens: usize,
        room: u64,
    ) -> Result<usize> {
        let token_bytes = bytes_per_token.iter().sum::<usize>();
        let block_bytes = token_bytes.saturating_mul(block_size).max(1) as u64;
        let (blocks, available) = match self {
            Self::Blocks(blocks) => return Ok(blocks),
            Self::Bytes(bytes) => (bytes / block_bytes, bytes),
            Self::Default => {
                let wanted = wanted_tokens.div_ceil(block_size) as u64;
                (wanted.min(room / block_bytes), room)
            }
        };
        if blocks == 0 {
            return Err(Error::setup(format!(
                "the KV cache has {available} bytes and one block of {block_size} tokens takes {block_bytes}: raise --kv-cache-memory"
            )));
        }
        Ok(blocks as usize)
    }
}

/// The arguments after the name of the command.
fn flags(args: &[OsString]) -> Vec<String> {
    let flags = args.iter().skip(2);
    flags.map(|flag| flag.to_string_lossy().into()).collect()
}

/// Refuses a head that learns in a command that does not serve.
fn refuse_learning(config: &Config) -> Result<()> {
    if config.learn.is_some() {
        return Err(Error::setup(
            "--learn belongs to serve: leave it out with bench, generate, check and chat",
        ));
    }
    Ok(())
}

/// The file stem of a GGUF file, also of the only one in a folder; otherwise `model` itself.
fn default_served_name(model: &str) -> String {
    let only = only_gguf(Path::new(model));
    let path = only.as_deref().unwrap_or(Path::new(model));
    match (path.extension(), path.file_stem()) {
        (Some(ext), Some(stem)) if ext == "gguf" => stem.to_string_lossy().into_owned(),
        _ => model.to_owned(),
    }
}

impl CommonOptions {
    /// Whether another flag of the command line replaces the file's key `name`.
    fn replaces(&self, name: &str) -> bool {
        match name {
            "model" => self.name.is_some(),
            "num-blocks" => self.kv_cache_memory.is_some(),
            "kv-cache-memory" => self.num_blocks.is_some(),
            "tensor-split" => !self.load.tensor_split.is_empty(),
            _ => self.http.listen.replaces(name) || self.speculation.replaces(name),
        }
    }
}
