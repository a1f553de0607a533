//! What the command line accepts. Each flag is checked by itself, none against another.

use crate::engine::EngineOptions;
use crate::model::LoadFormat;
use crate::parse::{at_least_one, number};
use crate::{bench, convert, generate, train};
use bytesize::ByteSize;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// OpenAI-compatible inference server with lossless speculative decoding.
///
/// Without a subcommand it serves. Every flag can stand in a TOML file (--config), under its long
/// name; a flag on the command line wins over the file, the file over the defaults.
#[derive(Debug, Parser)]
#[command(
    name = "foretoken",
    version,
    args_conflicts_with_subcommands = true,
    args_override_self = true
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<CliCommand>,
    #[command(flatten)]
    pub options: Options,
}

/// What to do; serving is the default.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Serve (the same as no subcommand).
    #[command(args_override_self = true)]
    Serve(#[command(flatten)] Box<Options>),
    /// Measure speculative against plain decoding, one request at a time.
    #[command(args_override_self = true)]
    Bench {
        #[command(flatten)]
        options: Box<Options>,
        #[command(flatten)]
        bench: bench::Options,
    },
    /// Write the model's own answers to prompts into a corpus, many at once.
    #[command(args_override_self = true)]
    Generate {
        #[command(flatten)]
        options: Box<Options>,
        #[command(flatten)]
        generate: generate::Options,
    },
    /// Write a folder of safetensors as one GGUF file, quantized.
    #[command(args_override_self = true)]
    Convert(#[command(flatten)] convert::Options),
    /// Train a draft model for a target.
    #[command(args_override_self = true)]
    Distill(#[command(flatten)] Box<train::Options>),
    /// Train a tokenizer for a model that is to be trained from nothing.
    #[command(args_override_self = true)]
    Tokenizer(#[command(flatten)] train::tokenizer::Options),
}

/// The flags that serving and measuring share.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// TOML file whose keys are these flags' long names, with - or _.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Model: a Hugging Face id, a folder with config.json and safetensors, or a .gguf file
    /// [default: foretoken-demo, a small model that is a part of the program, with its draft].
    #[arg(long, help_heading = "Model")]
    pub model: Option<String>,
    /// Branch, tag or commit of a Hugging Face model. A gated model needs HF_TOKEN.
    #[arg(long, help_heading = "Model")]
    pub revision: Option<String>,
    /// Name that clients use [default: --model, of a .gguf file its name].
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub served_model_name: Option<String>,
    #[command(flatten)]
    pub load: LoadFlags,

    /// Decode speculatively; needs --draft-model or --drafter ngram.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", help_heading = "Speculation")]
    pub speculative_decoding: Option<bool>,
    /// Small model with the target's vocabulary: an id, a folder or a .gguf file.
    #[arg(long, value_name = "MODEL", help_heading = "Speculation")]
    pub draft_model: Option<String>,
    /// Branch, tag or commit of the draft model.
    #[arg(long, value_name = "REVISION", help_heading = "Speculation")]
    pub draft_revision: Option<String>,
    /// Draft tokens a round at most [default: 5].
    #[arg(long, value_name = "K", help_heading = "Speculation")]
    pub spec_length: Option<usize>,
    /// What drafts: a model, or repeats found in the text so far [default: model].
    #[arg(long, value_enum, help_heading = "Speculation")]
    pub drafter: Option<DrafterName>,
    /// Shortest repeated run of tokens that the ngram drafter continues [default: 2].
    #[arg(long, value_name = "N", help_heading = "Speculation")]
    pub prompt_lookup_min: Option<usize>,
    /// Longest run it looks for first [default: 4].
    #[arg(long, value_name = "N", help_heading = "Speculation")]
    pub prompt_lookup_max: Option<usize>,

    /// Memory of the KV cache, target and draft together: 2GiB, 512MiB, 1.5GB or plain bytes
    /// [default: what --max-num-seqs full contexts take, at most 2 GiB and a quarter of the free
    /// memory].
    #[arg(long, value_name = "SIZE", value_parser = bytes, help_heading = "Memory")]
    pub kv_cache_memory: Option<usize>,
    /// Part of a GPU's memory that may be used for weights, workspace and, unless the next two say
    /// otherwise, a KV cache that takes what these leave.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, help_heading = "Memory",
          value_parser = number("a number above 0 and at most 1", |&share: &f64| share > 0. && share <= 1.))]
    pub gpu_memory_utilization: f64,
    /// Size of the KV cache in blocks instead; target and draft each get that many.
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = "Memory")]
    pub num_blocks: Option<usize>,
    /// Tokens a block.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one,
          help_heading = "Memory")]
    pub block_size: usize,

    #[command(flatten)]
    pub engine: EngineOptions,
    #[command(flatten)]
    pub http: HttpOptions,
}

/// How models are loaded, the target and the draft.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct LoadFlags {
    /// Type of weights and KV cache; auto = the checkpoint's, the cache f16 on the CPU. GGUF files
    /// keep their quantized weights.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// On a GPU, launch every kernel by itself instead of replaying decode steps as CUDA graphs.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub enforce_eager: bool,
    /// On a GPU, keep to kernels that give a row the same bits in any step, so that no text depends on
    /// other requests, on drafts or on how its prompt was cut; slower. The CPU always does.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub batch_invariant: bool,
    /// CPU threads that compute [default: the physical cores that this process may use].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub threads: Option<usize>,
    /// dummy = random weights in the model's shape; only config.json is read.
    #[arg(long, value_enum, default_value_t)]
    pub load_format: LoadFormat,
    /// Seed of dummy weights, of random bench prompts and of generated texts.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
}

/// Where and for whom to listen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "HTTP")]
pub struct HttpOptions {
    /// Address to listen on. The default is reachable from this machine alone; 0.0.0.0 is
    /// reachable from everywhere, so set --api-key with it.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port; 0 takes a free one, which the last line of the start-up tells.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Bearer token that clients must send. The variable keeps it out of the process list.
    #[arg(
        long,
        value_name = "KEY",
        env = "FORETOKEN_API_KEY",
        hide_env_values = true,
        value_parser = api_key
    )]
    pub api_key: Option<String>,
    /// Seconds that running requests get after SIGTERM or SIGINT.
    #[arg(long, value_name = "SECONDS", default_value = "30",
          value_parser = |text: &str| text.parse().map(Duration::from_secs))]
    pub shutdown_timeout: Duration,
    /// Largest request body; a size like --kv-cache-memory.
    #[arg(long, value_name = "SIZE", default_value = "2MiB", value_parser = bytes)]
    pub max_body_bytes: usize,
}

/// Type of weights and KV cache.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// The checkpoint's; for the KV cache on the CPU f16.
    #[default]
    Auto,
    #[value(alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
}

/// What drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrafterName {
    Model,
    Ngram,
}

/// A size in bytes, not 0.
fn bytes(text: &str) -> Result<usize, String> {
    match text.parse::<ByteSize>()?.as_u64() {
        0 => Err("must be at least 1 byte".into()),
        n => Ok(usize::try_from(n).unwrap_or(usize::MAX)),
    }
}

fn api_key(text: &str) -> Result<String, &'static str> {
    match text {
        "" => Err("the API key is empty: give a key, or leave out --api-key and FORETOKEN_API_KEY"),
        key => Ok(key.into()),
    }
}
