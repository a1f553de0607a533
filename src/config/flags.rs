//! What the command line accepts. Nothing here is checked beyond its type.

use super::bench::BenchFlags;
use super::convert::ConvertFlags;
use super::distill::DistillFlags;
use super::generate::GenerateFlags;
use super::tokenizer::TokenizerFlags;
use bytesize::ByteSize;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

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
        bench: BenchFlags,
    },
    /// Write the model's own answers to prompts into a corpus, many at once.
    #[command(args_override_self = true)]
    Generate {
        #[command(flatten)]
        options: Box<Options>,
        #[command(flatten)]
        generate: GenerateFlags,
    },
    /// Write a folder of safetensors as one GGUF file, quantized.
    #[command(args_override_self = true)]
    Convert(#[command(flatten)] ConvertFlags),
    /// Train a draft model for a target.
    #[command(args_override_self = true)]
    Distill(#[command(flatten)] Box<DistillFlags>),
    /// Train a tokenizer for a model that is to be trained from nothing.
    #[command(args_override_self = true)]
    Tokenizer(#[command(flatten)] TokenizerFlags),
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
    /// Type of weights and KV cache; auto = the checkpoint's, the cache f16 on the CPU. GGUF files
    /// keep their quantized weights.
    #[arg(long, value_enum, default_value_t, help_heading = "Model")]
    pub dtype: Dtype,
    /// auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto", help_heading = "Model")]
    pub device: String,
    /// On a GPU, launch every kernel by itself instead of replaying decode steps as CUDA graphs.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set,
          help_heading = "Model")]
    pub enforce_eager: bool,
    /// On a GPU, keep to kernels that give a row the same bits in any step, so that no text depends on
    /// other requests, on drafts or on how its prompt was cut; slower. The CPU always does.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set,
          help_heading = "Model")]
    pub batch_invariant: bool,
    /// CPU threads that compute [default: the physical cores that this process may use].
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub threads: Option<usize>,
    /// dummy = random weights in the model's shape; only config.json is read.
    #[arg(long, value_enum, default_value_t, help_heading = "Model")]
    pub load_format: LoadFormat,
    /// Seed of dummy weights, of random bench prompts and of generated texts.
    #[arg(long, default_value_t = 0, help_heading = "Model")]
    pub seed: u64,

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
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub kv_cache_memory: Option<ByteSize>,
    /// Part of a GPU's memory that may be used for weights, workspace and, unless the next two say
    /// otherwise, a KV cache that takes what these leave.
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 0.9,
        help_heading = "Memory"
    )]
    pub gpu_memory_utilization: f64,
    /// Size of the KV cache in blocks instead; target and draft each get that many.
    #[arg(long, value_name = "N", help_heading = "Memory")]
    pub num_blocks: Option<usize>,
    /// Tokens a block.
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Memory")]
    pub block_size: usize,

    /// Longest sequence, prompt and output together [default: the model's limit].
    #[arg(long, value_name = "N", help_heading = "Scheduling")]
    pub max_model_len: Option<usize>,
    /// Requests in one batch at most.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 64,
        help_heading = "Scheduling"
    )]
    pub max_num_seqs: usize,
    /// Tokens of one target forward at most, prompt chunks and drafts together.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2048,
        help_heading = "Scheduling"
    )]
    pub max_num_batched_tokens: usize,
    /// Milliseconds, about, that running texts wait in a step for the prompts of others, which are
    /// read in chunks by the speed that was measured. More reads prompts sooner, in longer gaps.
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 100,
        help_heading = "Scheduling"
    )]
    pub max_prompt_wait: u64,
    /// Requests in the queue at most; one more is answered 429.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 512,
        help_heading = "Scheduling"
    )]
    pub max_waiting: usize,
    /// Alternatives that a request may ask for with log-probabilities.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 20,
        help_heading = "Scheduling"
    )]
    pub max_logprobs: usize,

    /// Address to listen on. The default is reachable from this machine alone; 0.0.0.0 is
    /// reachable from everywhere, so set --api-key with it.
    #[arg(long, default_value = "127.0.0.1", help_heading = "HTTP")]
    pub host: String,
    /// Port; 0 takes a free one, which the last line of the start-up tells.
    #[arg(long, default_value_t = 8000, help_heading = "HTTP")]
    pub port: u16,
    /// Bearer token that clients must send. The variable keeps it out of the process list.
    #[arg(
        long,
        value_name = "KEY",
        env = "FORETOKEN_API_KEY",
        hide_env_values = true,
        help_heading = "HTTP"
    )]
    pub api_key: Option<String>,
    /// Seconds that running requests get after SIGTERM or SIGINT.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30,
        help_heading = "HTTP"
    )]
    pub shutdown_timeout: u64,
    /// Largest request body; a size like --kv-cache-memory.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "2MiB",
        help_heading = "HTTP"
    )]
    pub max_body_bytes: ByteSize,
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

/// Where weights come from.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// What is found: safetensors or GGUF.
    #[default]
    Auto,
    /// Random, in the model's shape.
    Dummy,
}

/// What drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DrafterName {
    Model,
    Ngram,
}
