//! From a [`Config`] to an engine that waits for requests.

use candle_core::{DType, Device};
use foretoken::config::{Config, DrafterChoice, Dtype, KvBudget, LoadFormat, ModelChoice};
use foretoken::engine::{self, EngineHandle};
use foretoken::error::{Error, Result};
use foretoken::kernels;
use foretoken::model::{self, LoadOptions, Model, ModelSource};
use foretoken::spec::{DraftModel, Drafter, NgramDrafter};
use foretoken::text::{self, Text};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// An engine that waits for requests.
pub struct Loaded {
    pub engine: EngineHandle,
    /// `None`: dummy weights without a tokenizer, good enough to measure.
    pub text: Option<Text>,
    pub device: &'static str,
}

/// Everything between the flags and a running engine.
pub fn load(config: &Config) -> Result<Loaded> {
    let device = kernels::device(&config.device)?;
    let path = kernels::cpu::check()?;
    if let Some(threads) = config.threads {
        kernels::set_threads(threads);
    }
    if device.is_cpu() {
        tracing::info!("CPU kernels: {path:?}, {} threads", kernels::threads());
    }
    let (target, text) = load_model(config, &config.model, &device)?;
    let draft = match &config.drafter {
        Some(DrafterChoice::Model(choice)) => Some(load_draft(
            config,
            choice,
            &device,
            &*target,
            text.as_ref(),
        )?),
        _ => None,
    };
    let blocks = pool_blocks(config, &*target, draft.as_deref(), &device)?;
    let drafter: Option<Box<dyn Drafter>> = match (draft, &config.drafter) {
        (Some(model), _) => Some(Box::new(DraftModel::new(
            model,
            blocks,
            config.block_size,
            config.engine.max_num_batched_tokens,
        )?)),
        (None, Some(DrafterChoice::Ngram { min, max })) => {
            Some(Box::new(NgramDrafter::new(*min, *max)))
        }
        (None, _) => None,
    };
    let engine = engine::spawn(
        target,
        drafter,
        blocks,
        config.block_size,
        config.engine.clone(),
    )?;
    Ok(Loaded {
        engine,
        text,
        device: if device.is_cpu() { "cpu" } else { "cuda" },
    })
}

/// One model and its tokenizer.
fn load_model(
    config: &Config,
    choice: &ModelChoice,
    device: &Device,
) -> Result<(Box<dyn Model>, Option<Text>)> {
    let dummy = config.load_format == LoadFormat::Dummy;
    let options = LoadOptions {
        dtype: match config.dtype {
            Dtype::Auto => None,
            Dtype::F32 => Some(DType::F32),
            Dtype::Bf16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
        },
        device: device.clone(),
        format: if dummy {
            model::LoadFormat::Dummy
        } else {
            model::LoadFormat::Auto
        },
        seed: config.seed,
    };
    let started = std::time::Instant::now();
    let source = ModelSource::resolve(&choice.name, choice.revision.as_deref(), options.format)?;
    // A tokenizer that is missing shows before a long load.
    let text = match &source {
        ModelSource::Gguf(file) => Some(Text::from_gguf(file.clone())?),
        ModelSource::Folder(path) => {
            // It may name the config.json itself.
            let folder = path.parent().filter(|_| path.is_file()).unwrap_or(path);
            let lacking = dummy && !folder.join("tokenizer.json").exists();
            (!lacking).then(|| Text::from_folder(folder)).transpose()?
        }
    };
    let model = model::load(&source, &options)?;
    tracing::info!("{}: loaded in {:.1?}", choice.name, started.elapsed());
    Ok((model, text))
}

/// The draft model, checked against the target: ids must mean the same to both.
fn load_draft(
    config: &Config,
    choice: &ModelChoice,
    device: &Device,
    target: &dyn Model,
    text: Option<&Text>,
) -> Result<Box<dyn Model>> {
    let (draft, draft_text) = load_model(config, choice, device)?;
    if let (Some(text), Some(draft_text)) = (text, &draft_text) {
        text::check_same_tokens(text, draft_text)?;
    }
    // Output layers may be padded, but the target must know every id that is drafted.
    let (known, drafted) = (target.config().vocab_size, draft.config().vocab_size);
    if drafted > known {
        return Err(Error::setup(format!(
            "the draft model {} has {drafted} token ids and the target only {known}",
            choice.name
        )));
    }
    Ok(draft)
}

/// Blocks of each pool, as many for the draft as for the target.
fn pool_blocks(
    config: &Config,
    target: &dyn Model,
    draft: Option<&dyn Model>,
    device: &Device,
) -> Result<usize> {
    let context = target.config().max_position_embeddings;
    let longest = config
        .engine
        .max_model_len
        .map_or(context, |len| len.min(context));
    let per_token: Vec<usize> = [Some(target), draft]
        .into_iter()
        .flatten()
        .map(|model| model.kv_bytes_per_token())
        .collect();
    let wanted = longest.saturating_mul(config.engine.max_num_seqs);
    let free = device.is_cpu().then(free_memory);
    let blocks = config
        .kv
        .blocks(config.block_size, &per_token, wanted, free)?;
    let tokens = blocks * config.block_size;
    let mib = |bytes: usize| (tokens * bytes) as f64 / f64::from(1 << 20);
    tracing::info!(
        "KV cache: {tokens} tokens, {:.0} MiB for the target",
        mib(per_token[0])
    );
    if let Some(&bytes) = per_token.get(1) {
        tracing::info!(
            "KV cache: {tokens} tokens, {:.0} MiB for the draft",
            mib(bytes)
        );
    }
    if tokens < longest {
        let remedy = if config.kv == KvBudget::Default {
            "set"
        } else {
            "raise"
        };
        if config.engine.max_model_len.is_some() {
            return Err(Error::setup(format!(
                "the KV cache holds {tokens} tokens and --max-model-len is {longest}: {remedy} --kv-cache-memory"
            )));
        }
        tracing::warn!(
            "the KV cache holds {tokens} tokens, the model {longest}: {remedy} --kv-cache-memory for longer texts"
        );
    }
    Ok(blocks)
}

/// Memory that is free on this machine, or in its container.
fn free_memory() -> u64 {
    let memory = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(memory);
    let container = system
        .cgroup_limits()
        .map_or(u64::MAX, |limits| limits.free_memory);
    system.available_memory().min(container)
}
