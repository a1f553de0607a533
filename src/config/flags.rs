//! The flags of the command line. Each is checked on its own, not against others.

use super::load_flags::LoadFlags;
use super::lora::LoraFlags;
use super::service::ServiceCommand;
use super::speculation::SpeculationFlags;
use crate::bench;
use crate::chat;
use crate::convert;
use crate::engine::EngineOptions;
use crate::error::{Error, Result};
use crate::generate;
use crate::gpus::Gpu;
use crate::http::model_router::API_KEY_VARIABLE;
use crate::http::{HttpLimits, OriginOptions, SamplingDefaults, Tls};
use crate::model::Pooling;
use crate::parse::{at_least_one, bytes, number, seconds};
use crate::text::{ReasoningFormat, ToolFormat};
use crate::train;
use clap::builder::NonEmptyStringValueParser;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use std::path::PathBuf;
use std::time::Duration;

/// OpenAI-compatible inference server with lossless speculative decoding.
///
/// Without a subcommand, it serves: `foretoken MODEL`. A TOML file (--config) can set every flag by its long name. The
/// command line overrides the file, and the file overrides the defaults.
#[derive(Debug, Parser)]
#[command(
    name = "foretoken",
    version,
    long_version = env!("FORETOKEN_VERSION"),
    args_conflicts_with_subcommands = true,
    args_override_self = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<CliCommand>,
    #[command(flatten)]
    pub options: CommonOptions,
}

/// The subcommands; serving is the default.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Serve (the default).
    #[command(args_override_self = true)]
    Serve(#[command(flatten)] Box<CommonOptions>),
    /// Serve several models at one address, each by a process that starts with the first request for it.
    /// Flags after -- are flags of `serve` for all models: foretoken router --models-dir DIR -- --max-num-seqs 8.
    #[command(args_override_self = true)]
    Router(#[command(flatten)] Box<RouterFlags>),
    /// Chat in the terminal: with MODEL, which this process serves for it, or, if MODEL is a URL (http://...),
    /// with a server of OpenAI's API there. --model then names one of its models [default: the first], and the
    /// API key is --api-key, OPENAI_API_KEY or FORETOKEN_API_KEY. Without MODEL, a terminal offers the models that fit
    /// this machine.
    #[command(args_override_self = true)]
    Chat {
        // Its few flags come first in the help.
        #[command(flatten)]
        chat: chat::ChatOptions,
        #[command(flatten)]
        options: Box<CommonOptions>,
    },
    /// Compare speculative with plain decoding, one request at a time.
    #[command(args_override_self = true)]
    Bench {
        #[command(flatten)]
        options: Box<CommonOptions>,
        #[command(flatten)]
        bench: Box<bench::BenchOptions>,
    },
    /// Generate the model's answers to prompts, many at once, and write them to a corpus; or answer the requests of a
    /// batch file.
    #[command(args_override_self = true, visible_alias = "run-batch")]
    Generate {
        #[command(flatten)]
        options: Box<CommonOptions>,
        #[command(flatten)]
        generate: generate::GenerateOptions,
    },
    /// Say what a model is, what it takes here and which drafts fit, or why it cannot be served; reads only
    /// headers.
    #[command(args_override_self = true)]
    Check {
        #[command(flatten)]
        check: CheckOptions,
        #[command(flatten)]
        options: Box<CommonOptions>,
    },
    /// Convert a folder of safetensors to one quantized GGUF file.
    #[command(args_override_self = true)]
    Convert(#[command(flatten)] convert::ConvertOptions),
    /// Train a draft model for a target.
    #[command(args_override_self = true)]
    Distill(#[command(flatten)] Box<train::DistillOptions>),
    /// Train a tokenizer for a model that is trained from scratch.
    #[command(args_override_self = true)]
    Tokenizer(#[command(flatten)] train::tokenizer::TokenizerOptions),
    /// Run as a service of systemd.
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Write the script with which a shell completes commands and flags.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual page, or that of a command, in roff: foretoken man | man -l -
    Man {
        /// A command, such as chat.
        #[arg(value_name = "COMMAND")]
        name: Option<String>,
    },
}

/// The flags of `foretoken check`.
#[derive(Debug, Clone, Args)]
pub struct CheckOptions {
    /// Print a JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Plan for this GPU, which need not be here, instead of for --device: h100, l4, "rtx 4090".
    #[arg(long, value_name = "NAME", value_parser = Gpu::parse)]
    pub gpu: Option<&'static Gpu>,
    /// The arguments after `check`.
    #[arg(skip)]
    pub args: Vec<String>,
}

/// The flags of `foretoken router`.
#[derive(Debug, Clone, Args)]
pub struct RouterFlags {
    /// Folder with models: each .gguf file, and each folder with a config.json or .gguf files, named as its file or folder.
    /// It is read again when clients ask for the list of models or for an unknown one.
    #[arg(long, value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
    /// TOML file with models, each a table [[model]] with `name`, `model`, `args` and `lora-modules`, and with flags by their
    /// long names. Paths of models and adapters in it are relative to its folder.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Maximum number of models that are loaded at a time. Another one takes the place of the least recently used.
    #[arg(long, alias = "models-max", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub max_loaded: usize,
    /// Seconds after which the process of a model that no request uses ends; 0 = never.
    #[arg(long, alias = "sleep-idle-seconds", value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub idle: Duration,
    #[command(flatten)]
    pub listen: ListenOptions,
    /// Form of the log on stderr: json = one object per line.
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        help_heading = "Observability"
    )]
    pub log_format: LogFormat,
    /// Flags of `serve` for all models.
    #[arg(last = true, value_name = "FLAGS OF SERVE")]
    pub args: Vec<String>,
}

/// The flags that `serve`, `chat`, `bench`, `generate` and `check` share.
#[derive(Debug, Clone, Args)]
pub struct CommonOptions {
    // The heading of flags before these is not theirs.
    /// The model, as for --model.
    #[arg(value_name = "MODEL", help_heading = None::<&str>)]
    pub name: Option<String>,
    /// TOML file whose keys are these flags' long names, with - or _. Paths in it are relative to its folder.
    #[arg(long, value_name = "FILE", help_heading = None::<&str>)]
    pub config: Option<PathBuf>,

    /// Model: a Hugging Face id, a folder with config.json and safetensors, a .gguf file, or a name of Ollama's that
    /// docs/models.md lists, such as qwen3:4b [default: foretoken-demo, a small model that is part of the program, with its draft].
    #[arg(short, long, help_heading = "Model")]
    pub model: Option<String>,
    /// Branch, tag or commit of a Hugging Face model. A gated model needs HF_TOKEN.
    #[arg(long, help_heading = "Model")]
    pub revision: Option<String>,
    /// Names that clients may use; answers have the first [default: --model; for a .gguf file, or a
    /// folder with a single one, the file's name without .gguf].
    #[arg(long, value_name = "NAME", num_args = 1.., action = ArgAction::Set, help_heading = "Model",
          value_parser = NonEmptyStringValueParser::new())]
    pub served_model_name: Vec<String>,
    /// Which hidden states make an embedding: that of the last token, or the mean of all [default: what the
    /// model's modules.json or .gguf file says; without either there is no /v1/embeddings].
    #[arg(long, value_enum, help_heading = "Model")]
    pub pooling: Option<Pooling>,
    /// Serves the model as a reranker: asked whether a document answers a query, it says yes or no, and /v1/rerank and
    /// /v1/score have the probability of yes. A model whose files or name say that it is one needs no flag.
    #[arg(long, help_heading = "Model")]
    pub reranker: bool,
    #[command(flatten)]
    pub load: LoadFlags,
    #[command(flatten)]
    pub generation: GenerationFlags,

    #[command(flatten)]
    pub speculation: SpeculationFlags,
    #[command(flatten)]
    pub lora: LoraFlags,

    /// KV cache memory of target and draft together: 2GiB, 512MiB, 1.5GB or plain bytes
    /// [default: the size of --max-num-seqs full contexts, at most 2 GiB and a quarter of the free
    /// memory].
    #[arg(long, value_name = "SIZE", value_parser = bytes, help_heading = "Memory")]
    pub kv_cache_memory: Option<usize>,
    /// Fraction of GPU memory for weights, workspace and KV cache. The cache takes what the others
    /// leave, unless --kv-cache-memory or --num-blocks sets its size.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, help_heading = "Memory",
          value_parser = number("a number above 0 and at most 1", |&share: &f64| share > 0. && share <= 1.))]
    pub gpu_memory_utilization: f64,
    /// Size of the KV cache in blocks, for the target and the draft each.
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Memory")]
    pub num_blocks: Option<usize>,
    /// Tokens per KV block.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one,
          help_heading = "Memory")]
    pub block_size: usize,

    /// Form of the log on stderr: json = one object per line.
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t,
        help_heading = "Observability"
    )]
    pub log_format: LogFormat,
    /// URL to which traces of requests are sent by OTLP over HTTP [default: what
    /// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says]. Needs a program that was
    /// built with --features otel.
    #[arg(long, value_name = "URL", value_parser = otlp_endpoint, help_heading = "Observability")]
    pub otlp_traces_endpoint: Option<String>,

    #[command(flatten)]
    pub engine: EngineOptions,
    #[command(flatten)]
    pub http: HttpOptions,
}

/// The sampling parameters of requests that do not name them.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct GenerationFlags {
    /// Where the sampling parameters of requests that do not name them come from: auto = the model's
    /// generation_config.json, or the general.sampling keys of a .gguf file; vllm = nowhere, so that
    /// they are OpenAI's; or a generation_config.json, or a folder that has one.
    #[arg(long, value_name = "auto|vllm|PATH", default_value = "auto",
          value_parser = |text: &str| Ok::<_, std::convert::Infallible>(GenerationConfig::of(text)))]
    pub generation_config: GenerationConfig,
    /// A JSON object with such parameters, instead of those of --generation-config:
    /// '{"temperature": 0.6, "top_k": 20}'.
    #[arg(long, value_name = "JSON", value_parser = sampling_defaults)]
    pub override_generation_config: Option<SamplingDefaults>,
}

/// The source of sampling parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GenerationConfig {
    /// The model's own files.
    Auto,
    /// None.
    Ignored,
    /// A `generation_config.json`, or a folder that has one.
    Path(PathBuf),
}

impl GenerationConfig {
    fn of(text: &str) -> Self {
        match text {
            "auto" => Self::Auto,
            // vLLM's own defaults are OpenAI's.
            "vllm" => Self::Ignored,
            path => Self::Path(path.into()),
        }
    }
}

/// Parses a JSON object of sampling parameters, all of whose names must be known.
fn sampling_defaults(text: &str) -> Result<SamplingDefaults, String> {
    let known = SamplingDefaults::names();
    let names = || format!("expected a JSON object with {}", known.join(", "));
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|e| format!("{e}: {}", names()))?;
    match object.keys().find(|name| !known.contains(&name.as_str())) {
        Some(name) => Err(format!("unknown name {name:?}: {}", names())),
        None => SamplingDefaults::from_json(text).map_err(|e| e.to_string()),
    }
}

/// The options of the HTTP server.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP")]
pub struct HttpOptions {
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags have docs")]
    pub listen: ListenOptions,
    /// How the model writes tool calls [default: as its chat template says; hermes if that knows no
    /// tools].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub tool_call_parser: Option<ToolFormat>,
    /// Format of the model's reasoning, which replies then have as reasoning_content [default: openai_gptoss if
    /// the chat template has its channels; otherwise all text is content].
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub reasoning_parser: Option<ReasoningFormat>,
    /// Tokens that the model may think before its thought is closed, unless a request says it; -1 = no limit, 0 = no
    /// thought.
    #[arg(long, value_name = "N", default_value = "-1", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..))]
    pub reasoning_budget: i64,
    /// Read names of special tokens as text if a client writes them in a chat. Names that the chat template writes stay
    /// tokens.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub no_parse_special: bool,
    /// Refuse a max_tokens that the context has no room for, instead of cutting it to what fits.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub strict_max_tokens: bool,
    /// Responses of /v1/responses that are stored at most, for clients that ask for them again or continue them; 0 = none.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub max_stored_responses: usize,
    /// What the names of metrics that vLLM has, too, begin with, before a colon: vllm for dashboards, routers and
    /// benchmarks that read vLLM's.
    #[arg(long, value_name = "NAME", default_value = "foretoken", value_parser = metrics_prefix,
          help_heading = "Observability")]
    pub metrics_prefix: String,
    /// Shut down, as after SIGTERM, when stdin ends: for a program that starts the server and keeps a pipe to it.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub exit_on_stdin_end: bool,
}

/// Address, authentication, page and limits of a listener.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP")]
pub struct ListenOptions {
    /// Address to listen on. Only this machine can reach the default; every machine can reach
    /// 0.0.0.0, so set --api-key with it.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port; 0 = a free one, which the last line of the start-up names.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Bearer token that clients must send. May be given several times: clients with different keys share
    /// neither drafts nor cached prefixes. The environment variable, which may have several keys, one a line, or a
    /// list in the file of --config, keeps keys out of the process list.
    #[arg(
        long,
        value_name = "KEY",
        env = API_KEY_VARIABLE,
        hide_env_values = true,
        value_parser = api_keys
    )]
    pub api_key: Vec<ApiKeys>,
    /// Certificate in PEM with which clients speak HTTPS (HTTP/1.1 and HTTP/2), before those that signed it. Needs
    /// --tls-key.
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert in PEM.
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Seconds in which running requests may finish after SIGTERM or SIGINT.
    #[arg(long, value_name = "SECONDS", default_value = "30",
          value_parser = seconds)]
    pub shutdown_timeout: Duration,
    /// Serve only the API, without the web page at /.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub no_ui: bool,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags have docs")]
    pub limits: HttpLimits,
    #[command(flatten)]
    #[allow(missing_docs, reason = "its flags have docs")]
    pub origins: OriginOptions,
}

/// The keys of one `--api-key`, or of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKeys(Vec<String>);

impl ListenOptions {
    /// The keys of which clients must send one; none = they need none.
    pub fn api_keys(&self) -> impl Iterator<Item = &str> {
        let keys = self.api_key.iter().flat_map(|keys| &keys.0);
        keys.map(String::as_str)
    }

    /// Whether a list of these flags, those of the command line, replaces the file's key `name`: it would else be added to
    /// that of the file.
    pub(super) fn replaces(&self, name: &str) -> bool {
        match name {
            "api-key" => !self.api_key.is_empty(),
            "allowed-hosts" => !self.origins.allowed_hosts.is_empty(),
            "allowed-origins" => !self.origins.allowed_origins.is_empty(),
            _ => false,
        }
    }

    /// With what clients speak TLS; `None` = without.
    ///
    /// # Errors
    /// `Setup`: one of the two files is not named, or cannot be used.
    pub fn tls(&self) -> Result<Option<Tls>> {
        match (&self.tls_cert, &self.tls_key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Tls::from_files(certificate, key).map(Some),
            _ => Err(Error::setup(
                "--tls-cert and --tls-key belong together: give both, or neither",
            )),
        }
    }
}

/// Form of the log.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "the names of values say it")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

fn otlp_endpoint(url: &str) -> Result<String, &'static str> {
    let is_http = ["http://", "https://"]
        .iter()
        .any(|scheme| url.starts_with(scheme));
    match (cfg!(feature = "otel"), is_http) {
        (false, _) => Err(
            "this program was built without traces: build it with cargo build --release --features otel",
        ),
        (true, false) => Err(
            "must begin with http:// or https://: traces are sent by OTLP over HTTP, usually to port 4318",
        ),
        (true, true) => Ok(url.into()),
    }
}

/// Parses what the names of metrics begin with.
fn metrics_prefix(name: &str) -> Result<String, &'static str> {
    let begins = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if begins && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
        return Ok(name.into());
    }
    Err("must have letters, digits and _ only, and no digit first")
}

/// Parses keys, one a line. A file of them ends with a line break, also a secret that is made of it; on Windows, lines end
/// with two characters.
fn api_keys(text: &str) -> Result<ApiKeys, &'static str> {
    let keys = text.lines().map(str::trim).filter(|key| !key.is_empty());
    let keys: Vec<String> = keys.map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(
            "the API key is empty: give a key, or leave out --api-key and FORETOKEN_API_KEY",
        );
    }
    Ok(ApiKeys(keys))
}
