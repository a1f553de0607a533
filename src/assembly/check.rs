//! `foretoken check`: what a model is and takes on this machine, from headers alone.

use super::adapters::AdapterReport;
use super::candidates;
use super::checkpoint::Reading;
use super::decode::Decode;
use super::defaults;
use super::drafts::Candidate;
use super::gpu_report::GpuReport;
use super::head_counts::HeadCounts;
use super::known::{KnownDraft, quoted};
use super::memory;
use super::plan::Plan;
use crate::config::{CheckOptions, Config, DrafterChoice};
use crate::console;
use crate::error::{Error, Result};
use crate::gguf::GgufSource;
use crate::model::{LoadFormat, ModelSource, TensorEntry, known};
use crate::text::Text;
use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::Path;

/// A model that can be served. Sizes are in bytes, lengths in tokens.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    servable: bool,
    architecture: String,
    layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// The attention heads of all layers. Layers may differ.
    attention: Vec<HeadCounts>,
    vocabulary: usize,
    context: usize,
    parameters: u64,
    /// Whether the weights are on this machine.
    downloaded: bool,
    /// `None`: there is no file, because random weights are asked for.
    file_bytes: Option<u64>,
    /// The types of the file's tensors, and how many of them have each.
    file_types: BTreeMap<String, usize>,
    tokenizer: &'static str,
    tokens: usize,
    chat_template: bool,
    /// Whether the template tells the model of tools.
    knows_tools: bool,
    /// The reason why the template fails with tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    tools_refused: Option<String>,
    /// Whether the template keeps system messages, which otherwise become part of the user's.
    keeps_system: bool,
    tool_call_format: Option<String>,
    /// The reasoning format of the chat template. `--reasoning-parser` turns it on.
    reasoning_format: Option<String>,
    /// Whether the model has an output layer.
    generates: bool,
    /// How hidden states become an embedding.
    embeddings: Option<String>,
    /// How documents are judged.
    reranker: Option<String>,
    device: &'static str,
    /// Size of all weights in memory.
    weights_bytes: u64,
    /// Size of the experts among them that a GPU reads in the host's memory.
    host_experts_bytes: u64,
    weights_types: BTreeMap<String, usize>,
    kv_bytes_per_token: usize,
    kv_bytes_of_context: u64,
    /// Number of tokens that the KV cache holds with these flags.
    kv_cache_tokens: usize,
    kv_cache_bytes: u64,
    memory_bytes: u64,
    free_memory_bytes: u64,
    /// The GPU of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuReport>,
    /// Further ones of `--pipeline-parallel-size`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    more_gpus: Vec<GpuReport>,
    decode: Option<Decode>,
    /// The adapters of `--lora-modules`.
    adapters: Vec<AdapterReport>,
    /// The draft of `--draft-model`, or the checkpoint's own.
    draft: Option<Candidate>,
    /// Why the checkpoint's own draft will not draft.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_refused: Option<String>,
    /// The head beside the model's files, or the published draft of the model, and the command that uses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    known_draft: Option<KnownDraft>,
    /// The models and heads on this machine that could draft.
    drafts: Vec<Candidate>,
    /// The command that serves the model as it was checked, with the best drafter that is known here.
    command: String,
}

/// Checks the model and prints what it is, or why it cannot be served.
///
/// # Errors
/// `Setup`: why it cannot be served, or stdout cannot be written to.
pub fn run(config: &Config, options: &CheckOptions) -> Result<()> {
    let result = report(config, options);
    if !options.json {
        return console::print(result?);
    }
    let json = match &result {
        Ok(report) => serde_json::to_string_pretty(report),
        Err(e) => {
            let refused =
                json!({"model": config.model.name, "servable": false, "error": e.to_string()});
            serde_json::to_string_pretty(&refused)
        }
    };
    let json = json.map_err(|e| Error::internal(format!("the report: {e}")))?;
    console::print(format!("{json}\n"))?;
    result.map(drop)
}

fn report(config: &Config, options: &CheckOptions) -> Result<Report> {
    let plan = Plan::of(config, Reading::Headers)?;
    let text = plan.target.text.as_deref().ok_or_else(|| {
        Error::setup(
            "serving needs a tokenizer.json beside config.json; bench --random-prompts does not",
        )
    })?;
    defaults::of(&config.generation, &plan.target.checkpoint.source)?;
    Ok(Report::of(&plan, text, &options.args))
}

impl Report {
    /// Describes `plan`, which `args` ask for, with the model's tokenizer.
    fn of(plan: &Plan, text: &Text, args: &[String]) -> Self {
        let (config, target, cache) = (&plan.config, &plan.target, &plan.cache);
        let (model, inventory) = (&*target.model, &target.inventory);
        let (source, options) = (&target.checkpoint.source, &target.checkpoint.options);
        // At the Hub, of which headers were read.
        let is_remote = options.tensors.is_some()
            || matches!(source, ModelSource::Gguf(GgufSource::Headers(_)));
        // Otherwise the shapes are those of `config.json`.
        let is_known = is_remote || options.format != LoadFormat::Dummy;
        let shape = model.config();
        let estimate = || match config.gpu {
            Some(gpu) => Some(Decode::on(gpu, model, inventory)),
            None => (!plan.is_on_gpu()).then(|| Decode::here(model, inventory)),
        };
        let gpus = plan.memory.iter().zip(&cache.by_gpu).enumerate();
        let mut gpus = gpus.map(|(number, (memory, per_token))| {
            let pools = (per_token.iter().sum::<usize>() * cache.tokens) as u64;
            let (share, layers) = (
                config.gpu_memory_utilization,
                model.split().layers_on(number),
            );
            GpuReport::of(config.gpu, share, (memory, pools), layers)
        });
        let mut drafts = plan
            .drafts
            .iter()
            .filter_map(|planned| planned.draft.as_ref());
        let count = |of: fn(&TensorEntry) -> &str| {
            let mut types = BTreeMap::new();
            for entry in &inventory.entries {
                *types.entry(of(entry).to_owned()).or_default() += 1;
            }
            types
        };
        let per_token = model.kv_shape().bytes_per_token();
        let value = |name: Option<clap::builder::PossibleValue>| Some(name?.get_name().to_owned());
        let named = config.http.tool_call_parser;
        let named = named.map(|format| text.meant_tool_format(format));
        let tools = named.or(text.tool_format());
        let reasoning = config.http.reasoning_parser.or(text.reasoning_format());
        let known_draft = KnownDraft::unused(config, &plan.device, target);
        let fitting = candidates::fitting(plan, text);
        let draft = drafts.next().and_then(|draft| draft.candidate.clone());
        let best = match draft {
            Some(_) => None,
            None => best_draft(config, known_draft.as_ref(), &fitting),
        };
        Self {
            model: config.model.name.clone(),
            servable: true,
            architecture: shape.architecture.clone(),
            layers: shape.num_layers(),
            hidden_size: shape.hidden_size,
            intermediate_size: shape.intermediate_size,
            heads: shape.num_heads,
            kv_heads: shape.num_kv_heads,
            head_dim: shape.head_dim,
            attention: HeadCounts::of_layers(shape),
            vocabulary: shape.vocab_size,
            context: shape.max_position_embeddings,
            parameters: inventory.sum(|entry| entry.elements),
            downloaded: is_known && !is_remote,
            file_bytes: is_known.then(|| inventory.sum(|entry| entry.stored_bytes)),
            file_types: if is_known {
                count(|entry| &entry.stored)
            } else {
                BTreeMap::new()
            },
            tokenizer: text.kind(),
            tokens: text.vocab_size(),
            chat_template: text.has_chat_template(),
            knows_tools: text.knows_tools(),
            tools_refused: text.tools_refused().map(str::to_owned),
            keeps_system: text.has_chat_template() && !text.lacks_system(),
            tool_call_format: tools.and_then(|format| value(format.to_possible_value())),
            reasoning_format: reasoning.and_then(|format| value(format.to_possible_value())),
            generates: model.generates(),
            embeddings: plan.embeddings.as_ref().map(ToString::to_string),
            reranker: plan.reranker.as_ref().map(ToString::to_string),
            adapters: AdapterReport::all(plan.adapters.as_ref()),
            device: plan.device_name(),
            weights_bytes: inventory.sum(|entry| entry.loaded_bytes),
            host_experts_bytes: inventory.loaded_bytes().1,
            weights_types: count(|entry| &entry.loaded),
            kv_bytes_per_token: per_token,
            kv_bytes_of_context: (per_token * cache.longest) as u64,
            kv_cache_tokens: cache.tokens,
            kv_cache_bytes: (per_token * cache.tokens) as u64,
            memory_bytes: memory::total_memory(),
            free_memory_bytes: memory::free_memory(),
            gpu: gpus.next(),
            more_gpus: gpus.collect(),
            decode: model.generates().then(estimate).flatten(),
            draft,
            draft_refused: plan.draft_refused.clone(),
            command: command(args, best),
            known_draft,
            drafts: fitting,
        }
    }

    /// Describes what the chat template knows.
    fn template(&self) -> String {
        if !self.chat_template {
            return "none: only /v1/completions".into();
        }
        let tools = match (&self.tools_refused, self.knows_tools) {
            (Some(why), _) => format!("yes; it fails with tools: {why}"),
            (None, false) => "yes; it knows no tools".into(),
            (None, true) => "yes, with tools".into(),
        };
        if self.keeps_system {
            tools
        } else {
            tools + "; system messages become part of the user's"
        }
    }
}

/// The draft to serve with, where neither a flag nor the checkpoint itself chooses a drafter: the known draft, or else a head
/// of this machine that fits, or else a model.
fn best_draft<'a>(
    config: &Config,
    known: Option<&'a KnownDraft>,
    fitting: &'a [Candidate],
) -> Option<&'a str> {
    if let Some(known) = known {
        return Some(&known.name);
    }
    let is_open = config.prefers_mtp && matches!(config.drafter, Some(DrafterChoice::Tables));
    let head = fitting.iter().find(|draft| draft.kind != Candidate::MODEL);
    let best = head.or(fitting.first()).filter(|_| is_open);
    best.map(|draft| draft.name.as_str())
}

/// The command that serves what `check` was asked about with `args`, with a `draft` if they have none.
fn command(args: &[String], draft: Option<&str>) -> String {
    let mut words: Vec<String> = ["foretoken", "serve"].map(str::to_owned).to_vec();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--json" => {}
            "--gpu" => drop(args.next()),
            other if other.starts_with("--gpu=") => {}
            other => words.push(quoted(other)),
        }
    }
    if let Some(draft) = draft {
        words.extend(["--draft-model".to_owned(), quoted(draft)]);
    }
    words.join(" ")
}

/// A size for people: `98.1 MB`.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// A number of parameters for people: `134.5 M`.
fn count(parameters: u64) -> String {
    match parameters {
        0..1_000_000_000 => format!("{:.1} M", parameters as f64 / 1e6),
        _ => format!("{:.2} B", parameters as f64 / 1e9),
    }
}

/// `211 Q4_1, 61 F32`, most first.
fn types(types: &BTreeMap<String, usize>) -> String {
    let mut all: Vec<_> = types.iter().collect();
    all.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let parts = all.iter().map(|(name, count)| format!("{count} {name}"));
    parts.collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (parameters, bytes) = (count(self.parameters), size(self.bytes));
        write!(f, "{} ({}, {parameters}, {bytes})", self.name, self.kind)
    }
}

/// The table.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: String| writeln!(f, "{name:<18}{value}");
        let file = known::find(&self.model).filter(|_| !Path::new(&self.model).exists());
        let file = file.map_or(String::new(), |known| {
            format!(" ({}, {})", known.file, known.licence)
        });
        row("model", format!("{}{file}", self.model))?;
        row("architecture", self.architecture.clone())?;
        let heads = match self.attention.as_slice() {
            [all] => all.to_string(),
            groups => {
                let groups = groups.iter().map(|of| format!("{} with {of}", of.layers));
                groups.collect::<Vec<_>>().join(", ")
            }
        };
        row(
            "layers",
            format!(
                "{} of hidden size {}, MLP {}, {heads}",
                self.layers, self.hidden_size, self.intermediate_size
            ),
        )?;
        row("vocabulary", format!("{} ids", self.vocabulary))?;
        row("context", format!("{} tokens", self.context))?;
        row("parameters", count(self.parameters))?;
        let file = match self.file_bytes {
            Some(bytes) => {
                let there = if self.downloaded {
                    ""
                } else {
                    " (not downloaded)"
                };
                format!("{}: {}{there}", size(bytes), types(&self.file_types))
            }
            None => "weights are not on this machine; shapes are those of config.json".into(),
        };
        row("file", file)?;
        let tokenizer = format!("{}, {} tokens", self.tokenizer, self.tokens);
        row("tokenizer", tokenizer)?;
        row("chat template", self.template())?;
        let none = |format: &Option<String>| format.clone().unwrap_or("none recognized".into());
        row("tool calls", none(&self.tool_call_format))?;
        let reasoning = match &self.reasoning_format {
            Some(format) => format!("{format}, with --reasoning-parser {format}"),
            None => "none recognized".into(),
        };
        row("reasoning", reasoning)?;
        if let Some(how) = &self.embeddings {
            row("embeddings", how.clone())?;
        }
        if let Some(how) = &self.reranker {
            row("reranker", how.clone())?;
        }
        for adapter in &self.adapters {
            row("adapter", adapter.to_string())?;
        }
        let weights = format!(
            "{}: {}",
            size(self.weights_bytes),
            types(&self.weights_types)
        );
        row(&format!("weights ({})", self.device), weights)?;
        if self.host_experts_bytes > 0 {
            let bytes = size(self.host_experts_bytes);
            row("host memory", format!("{bytes} of them, experts"))?;
        }
        let mut cache = format!("{} a token", size(self.kv_bytes_per_token as u64));
        write!(
            cache,
            ", {} for a whole context; {} for {} tokens with these flags",
            size(self.kv_bytes_of_context),
            size(self.kv_cache_bytes),
            self.kv_cache_tokens
        )?;
        row("KV cache", cache)?;
        let gpus: Vec<&GpuReport> = self.gpu.iter().chain(&self.more_gpus).collect();
        for (name, value) in GpuReport::rows(&gpus, size) {
            row(&name, value)?;
        }
        if gpus.is_empty() {
            let (total, free) = (size(self.memory_bytes), size(self.free_memory_bytes));
            row("memory here", format!("{total}, {free} free"))?;
        }
        if !self.generates {
            row("texts", "none: it has no output layer".into())?;
            return row("serve it", self.command.clone());
        }
        let decode = match &self.decode {
            Some(decode) => decode.text(size),
            None => "not estimated for this GPU: --gpu NAME estimates it".into(),
        };
        row("decode", decode)?;
        if let Some(draft) = &self.draft {
            row("draft", draft.to_string())?;
        }
        if let Some(why) = &self.draft_refused {
            row("draft", why.clone())?;
        }
        if let Some(known) = &self.known_draft {
            row("known draft", known.to_string())?;
        }
        if self.drafts.is_empty() {
            row("drafts that fit", "none in the cache".into())?;
        }
        for (i, draft) in self.drafts.iter().enumerate() {
            let title = if i == 0 { "drafts that fit" } else { "" };
            row(title, draft.to_string())?;
        }
        row("serve it", self.command.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_serves_what_was_checked() {
        let args = |line: &str| -> Vec<String> { line.split(' ').map(str::to_owned).collect() };
        assert_eq!(
            command(&args("qwen3:4b --json --max-model-len 4096"), Some("o/h")),
            "foretoken serve qwen3:4b --max-model-len 4096 --draft-model o/h"
        );
        for gpu in ["--gpu h100 m", "m --gpu=h100 --json"] {
            assert_eq!(command(&args(gpu), None), "foretoken serve m");
        }
        assert_eq!(command(&[], None), "foretoken serve");
        let spaced = ["my models/a.gguf".to_owned()];
        assert_eq!(command(&spaced, None), "foretoken serve 'my models/a.gguf'");
    }
}
