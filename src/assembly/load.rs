//! Loads the models of a [`Config`] and starts the engine.

use super::adapters;
use super::corpus;
use super::drafts::{LoadedDraft, mtp_refused, no_mtp, tables_instead};
use super::learn;
use super::memory::{self, DeviceMemory};
use crate::bench::RowPenalty;
use crate::config::{Config, DrafterChoice, Dtype, LoadFlags, ModelChoice, TablesOptions};
use crate::engine::{self, EngineHandle, EngineOptions};
use crate::error::{Error, Result};
use crate::http::{Adapters, ServerInfo};
use crate::kernels;
use crate::model::LoadedModel;
use crate::model::{
    self, EmbeddingSpec, HeadKind, LoadFormat, LoadOptions, Model, ModelConfig, ModelSource,
    TensorHeaders, hub_headers,
};
use crate::spec::{
    Cascade, Drafter, LearnerLink, LearningDrafter, Lookahead, NgramDrafter, Tables,
};
use crate::text::Text;
use crate::train::learn::Learning;
use candle_core::{DType, Device};
use std::sync::Arc;
use std::time::Duration;

/// A running engine and its tokenizer.
pub struct Loaded {
    pub engine: EngineHandle,
    /// `None`: dummy weights without a tokenizer, which is enough for `bench`.
    pub text: Option<Arc<Text>>,
    pub device: &'static str,
    /// Arithmetic operations of each drafter's token over those of the target's: 0 without a model.
    pub draft_operations: Vec<f64>,
    pub info: ServerInfo,
    /// The source that the target was loaded from.
    pub source: ModelSource,
    /// The way in which texts are embedded; `None` = they are not embedded.
    pub embeddings: Option<EmbeddingSpec>,
    /// The adapters that are served; `None` = there are none.
    pub adapters: Option<Arc<Adapters>>,
}

/// The engine's thread, which has ended when this is dropped.
///
/// When `main` returns, libraries are torn down, CUDA's among them. What still uses them then ends in a segmentation fault.
pub struct EngineThread(EngineHandle);

impl Drop for EngineThread {
    fn drop(&mut self) {
        /// More than a step takes. A device that hangs does not keep the process.
        const PATIENCE: Duration = Duration::from_secs(30);
        if self.0.join(PATIENCE) {
            tracing::debug!("the engine thread has ended");
        } else {
            tracing::warn!("the engine thread has not ended in {PATIENCE:?}");
        }
    }
}

/// A drafter that is to be loaded.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    choice: &'a DrafterChoice,
    /// Whether tables continue the drafts of a model.
    with_tables: bool,
}

impl<'a> Wanted<'a> {
    /// The drafters that are compared, or the drafter.
    fn all(config: &'a Config) -> Vec<Self> {
        let compared = config.compared.iter().map(|one| Self {
            choice: &one.choice,
            with_tables: one.with_tables,
        });
        let drafter = config.drafter.iter().map(|choice| Self {
            choice,
            with_tables: true,
        });
        if config.compared.is_empty() {
            drafter.collect()
        } else {
            compared.collect()
        }
    }
}

/// Loads the models, sizes the KV pools and starts the engine, whose thread the caller keeps until the engine's work is
/// done. With `row_penalty` above 0, the target's rows are made dearer; see [`RowPenalty`].
pub fn load(config: &Config, row_penalty: f64) -> Result<(Loaded, EngineThread)> {
    load_with(config, row_penalty, None)
}

/// As [`load`], but with the drafter `own` of the caller in the place of the configured one, if it is given.
pub fn load_with(
    config: &Config,
    row_penalty: f64,
    own: Option<Box<dyn Drafter>>,
) -> Result<(Loaded, EngineThread)> {
    let device = kernels::device(&config.load.device).map_err(Error::setup)?;
    let isa = kernels::cpu::check().map_err(Error::setup)?;
    if let Some(threads) = config.load.threads {
        kernels::set_threads(threads);
    }
    if device.is_cpu() {
        tracing::info!("CPU kernels: {isa:?}, {} threads", kernels::threads());
    } else {
        tracing::info!("{}", determinism_notice(&config.load));
    }
    let mut budget = DeviceMemory::new(&device)?;
    memory::check_limits(config)?;
    let source = resolve(config, &config.model)?;
    check_quantize(config, &source)?;
    let options = load_options(&config.load, &device);
    let (target, text) = load_model(&config.model, &source, &options)?;
    let text = text.map(Arc::new);
    let embeddings = embeddings(config, &source, &*target)?;
    let adapters = adapters::load(config, &*target)?;
    if let Some(spec) = &embeddings {
        tracing::info!("embeddings: {spec}");
    }
    let mut config = config.clone();
    if !target.generates() {
        tracing::info!("the model has no output layer: it serves embeddings only, without drafts");
        config.drafter = None;
        config.compared.clear();
    }
    let mut further = None;
    if config.prefers_mtp && config.drafter.is_some() && config.compared.is_empty() {
        further = preferred_mtp(&config, &source, &device, &*target);
        if further.is_some() {
            config.drafter = Some(DrafterChoice::Mtp);
        }
    }
    let config = &config;
    DeviceMemory::note(&mut budget, "target weights", &device)?;
    let mut learning = learn::open(config, draft_options(config, &device), &*target)?;
    let mut drafts = Vec::new();
    for wanted in Wanted::all(config) {
        let learned = learning.as_mut().and_then(|learning| learning.head.take());
        let own = (&source, &*target);
        let draft = match learned.map(LoadedDraft::of_head).or(further.take()) {
            Some(head) => Some(head),
            None => load_draft(config, wanted.choice, &device, own, text.as_ref())?,
        };
        if draft.is_some() {
            DeviceMemory::note(&mut budget, "draft weights", &device)?;
        }
        drafts.push((wanted, draft));
    }
    let share = |draft: &Option<LoadedDraft>| {
        draft
            .as_ref()
            .map_or(0.0, |draft| draft.operations(&*target))
    };
    let draft_operations = drafts.iter().map(|(_, draft)| share(draft)).collect();
    let with_pools = drafts.iter().filter_map(|(_, draft)| draft.as_ref());
    let with_pools: Vec<&dyn Model> = with_pools.map(LoadedDraft::model).collect();
    let blocks = memory::pool_blocks(config, &*target, &with_pools, budget)?;
    let (mut link, learner) = learning.map(Learning::split).unzip();
    let drafters = match own {
        Some(own) => vec![own],
        None => drafts
            .into_iter()
            .map(|(wanted, draft)| {
                let text = text.as_deref();
                drafter(config, wanted, draft, blocks, text, link.take())
            })
            .collect::<Result<_>>()?,
    };
    let target: Box<dyn Model> = if row_penalty > 0.0 {
        Box::new(RowPenalty::new(target, row_penalty))
    } else {
        target
    };
    let engine = engine::spawn_with(
        target,
        drafters,
        blocks,
        config.block_size,
        EngineOptions {
            calibrate: true,
            ..config.engine.clone()
        },
    )?;
    let thread = EngineThread(engine.clone());
    if let Some(learner) = learner {
        learn::start(learner, &engine)?;
    }
    let device = if device.is_cpu() { "cpu" } else { "cuda" };
    let loaded = Loaded {
        draft_operations,
        info: info(config, &source, device, blocks),
        engine,
        text,
        source,
        device,
        embeddings,
        adapters: adapters.map(Arc::new),
    };
    Ok((loaded, thread))
}

/// Returns how the `model` of `source` embeds texts; `None` = it does not embed texts, but generates them.
pub fn embeddings(
    config: &Config,
    source: &ModelSource,
    model: &dyn LoadedModel,
) -> Result<Option<EmbeddingSpec>> {
    let spec = model::embedding_spec(source, config.pooling)?;
    if !model.generates() && spec.is_none() {
        return Err(Error::setup(
            "the model has no output layer (lm_head), so it generates no text: for embeddings, set --pooling last or --pooling mean",
        ));
    }
    Ok(spec)
}

/// Describes the model that is served, and the options that it is served with.
fn info(config: &Config, source: &ModelSource, device: &str, num_blocks: usize) -> ServerInfo {
    let (load, engine) = (&config.load, &config.engine);
    let acceptance = format!("{:?}", engine.acceptance).to_lowercase();
    // All on which a text depends besides its request.
    let how = format!(
        "{} {device} {acceptance} {:?} {:?} {} {} {:?} {}",
        env!("CARGO_PKG_VERSION"),
        load.dtype,
        load.load_format,
        load.seed,
        load.batch_invariant,
        load.quantize,
        config.http.no_parse_special,
    );
    let fingerprint = format!("fp_{:016x}", model::fingerprint(source, &how));
    let drafter = config.drafter.as_ref();
    ServerInfo {
        model: config.model.name.clone(),
        device: device.into(),
        fingerprint: Some(fingerprint.into()),
        drafter: drafter.map(|drafter| (drafter.to_string(), engine.spec.length)),
        acceptance,
        block_size: config.block_size,
        num_blocks,
        prefix_caching: !engine.no_prefix_caching,
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
    }
}

/// A drafter; `draft` is its model, if it has one, and `link` what connects it with a learner.
fn drafter(
    config: &Config,
    wanted: Wanted<'_>,
    draft: Option<LoadedDraft>,
    blocks: usize,
    text: Option<&Text>,
    link: Option<LearnerLink>,
) -> Result<Box<dyn Drafter>> {
    let tables = || tables(&config.tables, text);
    let Some(draft) = draft else {
        return Ok(match wanted.choice {
            DrafterChoice::Ngram { min, max } => Box::new(NgramDrafter::new(*min, *max)),
            DrafterChoice::Lookahead => Box::new(Lookahead::default()),
            _ => Box::new(tables()?),
        });
    };
    let prefix_caching = !config.engine.no_prefix_caching;
    let mut model = draft.drafter(blocks, config.block_size, prefix_caching)?;
    if let Some(link) = link {
        model = Box::new(LearningDrafter::new(model, link));
    }
    Ok(if wanted.with_tables {
        Box::new(Cascade::new(model, tables()?))
    } else {
        model
    })
}

/// The tables, with the texts that they know from the start. A table holds fewer tokens than its
/// memory has bytes, so no more of the file is read.
fn tables(options: &TablesOptions, text: Option<&Text>) -> Result<Tables> {
    let mut tables = Tables::new(options.memory);
    let Some(file) = &options.corpus else {
        return Ok(tables);
    };
    let text = text.ok_or_else(|| {
        Error::setup("--tables-corpus needs a tokenizer, which this model lacks: leave it out")
    })?;
    let bytes = options.memory as u64;
    let (documents, is_cut) = corpus::read(file, text, bytes, |ids| tables.preload(ids))?;
    tracing::info!("tables: {documents} documents of {}", file.display());
    if is_cut {
        tracing::warn!(
            "only the first {bytes} bytes of {} are read: raise --tables-memory for more",
            file.display()
        );
    }
    Ok(tables)
}

/// Describes the bit equality that a GPU guarantees; the CPU always guarantees all of it.
fn determinism_notice(flags: &LoadFlags) -> &'static str {
    if flags.batch_invariant {
        "batch-invariant: a text does not depend on drafts, other requests or prompt chunks"
    } else {
        "at a near tie a text may depend on whether a step has more than 16 rows (64 if weights are quantized) and on prompt chunks: --batch-invariant prevents this and is slower"
    }
}

/// The draft model, the head or the target's own layers that draft; `None` if no model does.
fn load_draft(
    config: &Config,
    choice: &DrafterChoice,
    device: &Device,
    (source, target): (&ModelSource, &dyn LoadedModel),
    text: Option<&Arc<Text>>,
) -> Result<Option<LoadedDraft>> {
    let head = |choice: &ModelChoice, drafter: &str, takes: fn(HeadKind) -> bool| {
        let head = load_head(config, choice, device, target, takes)?;
        head.ok_or_else(|| {
            let name = &choice.name;
            Error::setup(format!(
                "--drafter {drafter}: {name} is no such head: leave out --drafter"
            ))
        })
    };
    Ok(Some(match choice {
        DrafterChoice::Model(choice) => {
            match load_head(config, choice, device, target, |_| true)? {
                Some(head) => head,
                None => {
                    let source = resolve(config, choice)?;
                    let options = draft_options(config, device);
                    let draft = load_model(choice, &source, &options)?;
                    if !draft.0.generates() {
                        let name = &choice.name;
                        return Err(Error::setup(format!(
                            "{name} has no output layer (lm_head), so it cannot draft"
                        )));
                    }
                    LoadedDraft::beside(target, text, draft, &choice.name)?
                }
            }
        }
        DrafterChoice::Eagle3(choice) => head(choice, "eagle3", |kind| !kind.is_parallel())?,
        DrafterChoice::Parallel(choice) => head(choice, "parallel", HeadKind::is_parallel)?,
        DrafterChoice::Own(layers) => LoadedDraft::own(target, layers.as_ref())?,
        DrafterChoice::Mtp => {
            load_mtp(config, source, device, target)?.ok_or_else(|| no_mtp(&config.model.name))?
        }
        DrafterChoice::Tables | DrafterChoice::Ngram { .. } | DrafterChoice::Lookahead => {
            return Ok(None);
        }
    }))
}

/// The layer for further tokens of the target's checkpoint, `source`; `None` if it has none.
fn load_mtp(
    config: &Config,
    source: &ModelSource,
    device: &Device,
    target: &dyn LoadedModel,
) -> Result<Option<LoadedDraft>> {
    let options = load_options(&config.load, device);
    let head = model::load_mtp(source, &options, target);
    Ok(head.map_err(mtp_refused)?.map(|head| {
        tracing::info!("{} drafts for itself: {}", config.model.name, head.layout());
        LoadedDraft::of_head(head)
    }))
}

/// As [`load_mtp`], but for a run in which no flag chose a drafter: a layer that cannot be loaded is only logged.
fn preferred_mtp(
    config: &Config,
    source: &ModelSource,
    device: &Device,
    target: &dyn LoadedModel,
) -> Option<LoadedDraft> {
    load_mtp(config, source, device, target).unwrap_or_else(|error| {
        tracing::warn!("{}", tables_instead(&error));
        None
    })
}

/// The head that `choice` names; `None` if it is an ordinary model, or a kind that is not taken.
fn load_head(
    config: &Config,
    choice: &ModelChoice,
    device: &Device,
    target: &dyn LoadedModel,
    takes: fn(HeadKind) -> bool,
) -> Result<Option<LoadedDraft>> {
    let options = draft_options(config, device);
    let source = resolve(config, choice)?;
    let Some(kind) = HeadKind::of(&source)?.filter(|&kind| takes(kind)) else {
        return Ok(None);
    };
    let named = |e| Error::setup(format!("{}: {e}", choice.name));
    let model = model::load_head(&source, kind, &options, target).map_err(named)?;
    tracing::info!("{}: a head drafts: {}", choice.name, model.layout());
    Ok(Some(LoadedDraft::of_head(model)))
}

/// The options with which the flags load a draft.
pub fn draft_options(config: &Config, device: &Device) -> LoadOptions {
    let options = load_options(&config.load, device);
    LoadOptions {
        quantize: config.draft_quantize.or(options.quantize),
        ..options
    }
}

/// The options with which the flags load a target.
pub fn load_options(flags: &LoadFlags, device: &Device) -> LoadOptions {
    LoadOptions {
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
        quantize: flags.quantize,
        tensors: None,
    }
}

/// Checks that `--quantize` and `--draft-quantize`, if they are given, change the target, which is in `source`,
/// or a draft.
///
/// # Errors
/// `Setup`: what they would change is a GGUF file.
pub fn check_quantize(config: &Config, source: &ModelSource) -> Result<()> {
    let (all, of_draft) = (config.load.quantize, config.draft_quantize);
    if all.or(of_draft).is_none() {
        return Ok(());
    }
    let no_effect = |flag: &str, name: &str| {
        Error::setup(format!(
            "{flag} has no effect on {name}: a GGUF file is quantized as it is; leave it out, or name a folder of safetensors"
        ))
    };
    let draft = config.drafter.as_ref().and_then(DrafterChoice::model);
    let mut changes_draft = false;
    if let Some(draft) = draft {
        let (name, revision) = (&draft.name, draft.revision.as_deref());
        let format = config.load.load_format;
        let (draft, _) = ModelSource::resolve_headers(name, revision, format)?;
        changes_draft = matches!(draft, ModelSource::Folder(_));
        if let (Some(kind), false) = (of_draft, changes_draft) {
            return Err(no_effect(&format!("--draft-quantize {kind}"), name));
        }
    }
    match (all, source) {
        (Some(kind), ModelSource::Gguf(_)) if !changes_draft || of_draft.is_some() => {
            Err(no_effect(&format!("--quantize {kind}"), &config.model.name))
        }
        _ => Ok(()),
    }
}

fn resolve(config: &Config, choice: &ModelChoice) -> Result<ModelSource> {
    let format = config.load.load_format;
    ModelSource::resolve(&choice.name, choice.revision.as_deref(), format)
}

/// The tensors of the model `name` of the Hub, if `resolve_headers` found no weights of it on this machine but some
/// were asked for: then `found` is `Dummy`.
///
/// # Errors
/// The errors of [`hub_headers::tensors`].
pub fn tensors_elsewhere(
    flags: &LoadFlags,
    name: &str,
    revision: Option<&str>,
    found: LoadFormat,
) -> Result<Option<Arc<TensorHeaders>>> {
    if found == flags.load_format {
        return Ok(None);
    }
    hub_headers::tensors(name, revision)
}

/// The tokenizer of a model; `None` if dummy weights have none.
///
/// # Errors
/// `Setup`, naming the file.
pub fn read_text(source: &ModelSource, format: LoadFormat) -> Result<Option<Text>> {
    Ok(match source {
        ModelSource::Gguf(file) => Some(Text::from_gguf(file.clone())?),
        ModelSource::Folder(path) => {
            // `path` may be the config.json itself.
            let folder = crate::files::folder_of(path);
            let dummy = format == LoadFormat::Dummy;
            let missing = dummy && !folder.join("tokenizer.json").exists();
            (!missing).then(|| Text::from_folder(folder)).transpose()?
        }
    })
}

/// Loads one model and its tokenizer.
fn load_model(
    choice: &ModelChoice,
    source: &ModelSource,
    options: &LoadOptions,
) -> Result<(Box<dyn LoadedModel>, Option<Text>)> {
    let started = std::time::Instant::now();
    // What is wrong with the model itself is said first, and a missing tokenizer before a long load.
    if let ModelSource::Folder(path) = source {
        ModelConfig::from_json(path)?;
    }
    let text = read_text(source, options.format)?;
    let model = model::load(source, options)?;
    tracing::info!("{}: loaded in {:.1?}", choice.name, started.elapsed());
    Ok((model, text))
}
