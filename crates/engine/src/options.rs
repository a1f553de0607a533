//! The options of the engine: its flags, and what a program that embeds it sets.

use super::cost_cache::CostCache;
use crate::spec::BudgetMode;
use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::Acceptance;
#[cfg(feature = "clap")]
use foretoken_core::{
    model::MAX_TREE_NODES,
    parse::{at_least_one, bytes, number},
};
use foretoken_kernels as kernels;
use std::path::PathBuf;
use std::time::Duration;

/// Limits of the scheduler and of drafts.
#[derive(Debug, Clone)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "Scheduling")
)]
pub struct EngineOptions {
    /// Longest sequence, prompt and output together; at most the model's limit, which is the default.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = at_least_one))]
    pub max_model_len: Option<usize>,
    /// Maximum number of requests in one batch.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_num_seqs,
          value_parser = at_least_one))]
    pub max_num_seqs: usize,
    /// Maximum number of tokens in one target forward, prompt chunks and drafts together.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_num_batched_tokens,
          value_parser = at_least_one))]
    pub max_num_batched_tokens: usize,
    /// Approximate milliseconds per step that running texts wait for the prompts of others. Chunk
    /// sizes follow from measured speed. A higher value reads prompts sooner but leaves longer
    /// gaps.
    #[cfg_attr(feature = "clap", arg(long, value_name = "MS", default_value = "100",
          value_parser = |text: &str| text.parse().map(Duration::from_millis)))]
    pub max_prompt_wait: Duration,
    /// Maximum number of requests in the queue; further requests are answered 429.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_waiting,
          value_parser = at_least_one))]
    pub max_waiting: usize,
    /// Maximum number of alternatives that a request may ask for with log-probabilities.
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", default_value_t = Self::default().max_logprobs))]
    pub max_logprobs: usize,
    /// Compute every prompt as a whole, instead of starting after the longest prefix whose keys and values
    /// are still in the KV cache. No text depends on it on the CPU.
    #[cfg_attr(feature = "clap", arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = clap::ArgAction::Set))]
    pub no_prefix_caching: bool,
    /// Folder in which the prefix cache is kept, too, so that a prompt is read once, also by later processes.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_name = "DIR", help_heading = "Memory")
    )]
    pub prefix_cache_disk: Option<PathBuf>,
    /// Maximum size of the files in that folder, of all models: 10GiB, 500MB or plain bytes. The oldest ones go first.
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", default_value = "10GiB", value_parser = bytes,
          requires = "prefix_cache_disk", help_heading = "Memory"))]
    pub prefix_cache_disk_size: usize,
    /// Limits of drafts.
    #[cfg_attr(feature = "clap", command(flatten))]
    pub spec: SpecLimits,
    /// The acceptance rule of requests that name none.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_enum, default_value_t, help_heading = "Speculation")
    )]
    pub acceptance: Acceptance,
    /// How much of what a drafter proposes is verified.
    #[cfg_attr(
        feature = "clap",
        arg(long, value_enum, default_value_t, help_heading = "Speculation")
    )]
    pub spec_budget: BudgetMode,
    /// Learn anew what drafts cost and how often they are accepted, instead of beginning with what this machine has
    /// learned of the same models before. No text depends on it.
    #[cfg_attr(feature = "clap", arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = clap::ArgAction::Set,
          help_heading = "Speculation"))]
    pub no_cost_cache: bool,
    /// Where to keep what is learned; `None` = nowhere.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub cost_cache: Option<CostCache>,
    /// Whether the costs of steps are measured before the first request.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub calibrate: bool,
    /// Limits of a step that are not set by flags.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub step_limits: StepLimits,
    /// Maximum number of different adapters of requests; 0 = requests have none.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub max_loras: usize,
    /// Name in logs and metrics.
    #[cfg_attr(feature = "clap", arg(skip = Self::default().model_name))]
    pub model_name: String,
    /// Differs where the models' files or how they are loaded differ, so that nothing on disk is taken for what another
    /// model computed.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub model_identity: String,
}

impl EngineOptions {
    /// Checks that the prefix cache can be kept on disk, if it is asked for.
    ///
    /// # Errors
    /// `Setup`, naming the flag.
    pub fn check_disk(&self) -> Result<()> {
        if self.prefix_cache_disk.is_some() && self.no_prefix_caching {
            return Err(Error::setup(
                "--prefix-cache-disk keeps the prefix cache: leave out --no-prefix-caching",
            ));
        }
        Ok(())
    }

    /// Tokens of the longest sequence of a model for `context` tokens.
    ///
    /// # Errors
    /// `Setup`: more are asked for.
    pub fn longest(&self, context: usize) -> Result<usize> {
        match self.max_model_len {
            Some(wanted) if wanted > context => Err(Error::setup(format!(
                "--max-model-len {wanted} is more than the model takes, which is {context} tokens: lower it, or leave it out"
            ))),
            wanted => Ok(wanted.unwrap_or(context)),
        }
    }
}

/// Limits of the drafts of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "clap",
    derive(clap::Args),
    command(next_help_heading = "Speculation"),
    group(skip)
)]
pub struct SpecLimits {
    /// Maximum depth (K); 0 without a drafter.
    #[cfg_attr(feature = "clap", arg(skip))]
    pub length: usize,
    /// Maximum number of draft tokens of a request in a step, 1 to 64.
    #[cfg_attr(feature = "clap", arg(long = "spec-nodes", value_name = "N", default_value_t = Self::default().nodes,
          value_parser = up_to_a_tree))]
    pub nodes: usize,
    /// Maximum number of siblings in a draft, 1 to 64; 1 = chains. The default is 4 in a program
    /// built with CUDA, otherwise 1.
    #[cfg_attr(feature = "clap", arg(long = "spec-topk", value_name = "N", default_value_t = Self::default().topk,
          value_parser = up_to_a_tree))]
    pub topk: usize,
}

/// Parses a number of draft nodes.
#[cfg(feature = "clap")]
fn up_to_a_tree(text: &str) -> Result<usize, String> {
    number(
        format!("a whole number between 1 and {MAX_TREE_NODES}"),
        |n: &usize| (1..=MAX_TREE_NODES).contains(n),
    )(text)
}

impl Default for SpecLimits {
    /// No drafts, and the other limits' defaults.
    fn default() -> Self {
        Self {
            length: 0,
            nodes: 15,
            // Siblings pay where rows are nearly free. On the measured CPUs a chain is as good or better.
            topk: if kernels::HAS_CUDA { 4 } else { 1 },
        }
    }
}

/// Limits of one step apart from its rows, which a server does not set. Each is at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLimits {
    /// Maximum number of rows that score tokens of prompts: each costs a row of logits over the whole
    /// vocabulary.
    pub scored_rows: usize,
    /// Maximum number of draft rows, for the same reason.
    pub draft_rows: usize,
    /// Maximum number of waiting sequences that are looked at and not admitted.
    pub looks: usize,
}

impl Default for StepLimits {
    fn default() -> Self {
        Self {
            scored_rows: 256,
            draft_rows: 256,
            looks: 64,
        }
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_prompt_wait: Duration::from_millis(100),
            max_waiting: 512,
            max_logprobs: 20,
            no_prefix_caching: false,
            prefix_cache_disk: None,
            prefix_cache_disk_size: 10 << 30,
            spec: SpecLimits::default(),
            acceptance: Acceptance::default(),
            spec_budget: BudgetMode::default(),
            no_cost_cache: false,
            cost_cache: None,
            calibrate: false,
            step_limits: StepLimits::default(),
            max_loras: 0,
            model_name: "model".into(),
            model_identity: String::new(),
        }
    }
}
