//! From a [`Config`] to an engine that waits for requests.

use crate::memory::{self, Budget};
use candle_core::{DType, Device};
use foretoken::config::{Config, DrafterChoice, Dtype, ModelChoice};
use foretoken::engine::{self, EngineHandle};
use foretoken::error::{Error, Result};
use foretoken::kernels;
use foretoken::model::{self, LoadFormat, LoadOptions, Model, ModelSource};
use foretoken::spec::{DraftModel, Drafter, NgramDrafter};
use foretoken::text::{self, Text};

/// Rows of a prompt that the draft model reads a round: as many take it a moment, and as the number
/// is a part of what makes a seeded text under sampling, it depends on no other flag.
const DRAFT_CHUNK: usize = 256;

/// An engine that waits for requests.
pub struct Loaded {
    pub engine: EngineHandle,
    /// `None`: dummy weights without a tokenizer, good enough to measure.
    pub text: Option<Text>,
    pub device: &'static str,
}

/// Everything between the flags and a running engine.
pub fn load(config: &Config) -> Result<Loaded> {
    let device = kernels::device(&config.load.device)?;
    let isa = kernels::cpu::check()?;
    if let Some(threads) = config.load.threads {
        kernels::set_threads(threads);
    }
    if device.is_cpu() {
        tracing::info!("CPU kernels: {isa:?}, {} threads", kernels::threads());
    } else {
        tracing::info!("{}", on_equal_bits(config.load.batch_invariant));
    }
    let mut budget = Budget::new(&device)?;
    let (target, text) = load_model(config, &config.model, &device)?;
    Budget::note(&mut budget, "target weights", &device)?;
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
    if draft.is_some() {
        Budget::note(&mut budget, "draft weights", &device)?;
    }
    let blocks = memory::pool_blocks(config, &*target, draft.as_deref(), budget)?;
    let drafter: Option<Box<dyn Drafter>> = match (draft, &config.drafter) {
        (Some(model), _) => Some(Box::new(DraftModel::new(
            model,
            blocks,
            config.block_size,
            DRAFT_CHUNK,
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

/// What a GPU promises of a row's bits; the CPU gives all of it without being asked.
fn on_equal_bits(batch_invariant: bool) -> &'static str {
    match batch_invariant {
        true => {
            "batch-invariant: a text depends neither on drafts, nor on other requests, nor on how its prompt is cut"
        }
        false => {
            "a text may differ in a near tie between steps of more than 16 rows and others, between cuts of its prompt and, with GGUF weights, with drafts: --batch-invariant prevents it and is slower"
        }
    }
}

/// One model and its tokenizer.
fn load_model(
    config: &Config,
    choice: &ModelChoice,
    device: &Device,
) -> Result<(Box<dyn Model>, Option<Text>)> {
    let flags = &config.load;
    let options = LoadOptions {
        dtype: match flags.dtype {
            Dtype::Auto => None,
            Dtype::F32 => Some(DType::F32),
            Dtype::Bf16 => Some(DType::BF16),
            Dtype::F16 => Some(DType::F16),
        },
        device: device.clone(),
        format: flags.load_format,
        seed: flags.seed,
        enforce_eager: flags.enforce_eager,
        batch_invariant: flags.batch_invariant,
    };
    let started = std::time::Instant::now();
    let source = ModelSource::resolve(&choice.name, choice.revision.as_deref(), options.format)?;
    // A tokenizer that is missing shows before a long load.
    let text = match &source {
        ModelSource::Gguf(file) => Some(Text::from_gguf(file.clone())?),
        ModelSource::Folder(path) => {
            // It may name the config.json itself.
            let folder = foretoken::files::folder_of(path);
            let dummy = flags.load_format == LoadFormat::Dummy;
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
