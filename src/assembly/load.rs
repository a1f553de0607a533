//! Loads the models of a [`Config`] and starts the engine.

use super::checkpoint::{Reading, Target};
use super::corpus;
use super::cost_cache;
use super::known::KnownDraft;
use super::learn;
use super::plan::{Plan, PlannedDraft};
use crate::bench::ReportNames;
use crate::config::{Config, TablesOptions};
use crate::engine::{self, EngineHandle, EngineOptions, EngineThread};
use crate::error::{Error, Result};
use crate::http::{Adapters, ModelFiles, ServerInfo};
use crate::model::{self, EmbeddingSpec, LoadFormat, Model, ModelSource, RerankerSpec};
use crate::spec::{Cascade, Drafter, LearnerLink, LearningDrafter, Tables};
use crate::text::Text;
use crate::train::learn::Learning;
use std::collections::BTreeMap;
use std::sync::Arc;

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
    /// The way in which documents are judged; `None` = the model is no reranker.
    pub reranker: Option<RerankerSpec>,
    /// The adapters that are served; `None` = there are none.
    pub adapters: Option<Arc<Adapters>>,
}

impl Loaded {
    /// The names of what was loaded, for the report of `bench`.
    pub fn report_names(&self, config: &Config) -> ReportNames {
        let loaded = self.info.drafter.iter().map(|(name, _)| name.clone());
        let compared = config.compared.iter().map(|one| one.name.clone());
        ReportNames {
            model: config.served_model_name.clone(),
            drafters: if config.compared.is_empty() {
                // Which the checkpoint may have chosen.
                loaded.collect()
            } else {
                compared.collect()
            },
            device: self.device.into(),
            draft_operations: self.draft_operations.clone(),
            source: (config.load.load_format == LoadFormat::Auto).then(|| self.source.clone()),
        }
    }
}

/// Loads the models, sizes the KV pools and starts the engine, whose thread the caller keeps until the engine's work is
/// done.
pub fn load(config: &Config) -> Result<(Loaded, EngineThread)> {
    load_with(config, None, |target| target)
}

/// As [`load`], but with the target that `wrap` makes of the loaded one, and with the drafter `own` of the caller in the
/// place of the configured one, if it is given.
pub fn load_with(
    config: &Config,
    own: Option<Box<dyn Drafter>>,
    wrap: impl FnOnce(Box<dyn Model>) -> Box<dyn Model>,
) -> Result<(Loaded, EngineThread)> {
    let plan = Plan::of(config, Reading::Weights)?;
    if let Some(why) = &plan.draft_refused {
        tracing::warn!("{why}");
    }
    plan.cache.log(&plan.config, plan.memory.clone());
    if tracing::enabled!(tracing::Level::INFO)
        && let Some(known) = KnownDraft::unused(&plan.config, &plan.device, &plan.target)
    {
        tracing::info!(
            "a draft is known for this model, {known}: {}",
            known.command
        );
    }
    // Nothing is known of a drafter of the caller.
    let cost_cache = cost_cache::of(&plan).filter(|_| own.is_none());
    let (device, config) = (plan.device_name(), &plan.config);
    let files = files(&plan.target);
    let (target, text, blocks) = (plan.target.model, plan.target.text, plan.cache.blocks);
    let operations = |planned: &PlannedDraft| {
        (planned.draft.as_ref()).map_or(0.0, |draft| draft.operations(&*target))
    };
    let draft_operations = plan.drafts.iter().map(operations).collect();
    let (mut link, learner) = plan.learning.map(Learning::split).unzip();
    let drafters = match own {
        Some(own) => vec![own],
        None => (plan.drafts.into_iter())
            .map(|planned| drafter(config, planned, blocks, text.as_deref(), link.take()))
            .collect::<Result<_>>()?,
    };
    let engine = engine::spawn_with(
        wrap(target),
        drafters,
        blocks,
        config.block_size,
        EngineOptions {
            calibrate: true,
            model_identity: model_identity(config, &plan.target.checkpoint.source, device),
            cost_cache,
            ..config.engine.clone()
        },
    )?;
    let thread = EngineThread::new(engine.clone(), EngineThread::PATIENCE);
    if let Some(learner) = learner {
        learn::start(learner, &engine)?;
    }
    let source = plan.target.checkpoint.source;
    let info = ServerInfo {
        files,
        ..info(config, &source, device, blocks)
    };
    let loaded = Loaded {
        draft_operations,
        info,
        engine,
        text,
        source,
        device,
        embeddings: plan.embeddings,
        reranker: plan.reranker,
        adapters: plan.adapters.map(Arc::new),
    };
    Ok((loaded, thread))
}

/// What distinguishes the target, and how it computes K and V, from other models.
fn model_identity(config: &Config, source: &ModelSource, device: &str) -> String {
    let load = &config.load;
    let seed = (load.load_format == LoadFormat::Dummy).then_some(load.seed);
    let how = format!(
        "{} {device} {:?} {:?} {:?} {seed:?} {} {:?}",
        env!("CARGO_PKG_VERSION"),
        load.dtype,
        load.kv_cache_dtype,
        load.load_format,
        load.batch_invariant,
        load.quantize,
    );
    let (samples, version) = (model::fingerprint(source, &how), model::version(source));
    format!("{samples:016x} {version:016x} {how}")
}

/// Describes the model that is served, and the options that it is served with.
fn info(config: &Config, source: &ModelSource, device: &str, num_blocks: usize) -> ServerInfo {
    let (load, engine) = (&config.load, &config.engine);
    let acceptance = format!("{:?}", engine.acceptance).to_lowercase();
    // All on which a text depends besides its request.
    let how = format!(
        "{} {device} {acceptance} {:?} {:?} {:?} {} {} {:?} {} {}",
        env!("CARGO_PKG_VERSION"),
        load.dtype,
        load.kv_cache_dtype,
        load.load_format,
        load.seed,
        load.batch_invariant,
        load.quantize,
        config.http.no_parse_special,
        config.http.reasoning_budget,
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
        prefix_cache_disk_size: (engine.prefix_cache_disk.as_ref())
            .map(|_| engine.prefix_cache_disk_size),
        max_num_seqs: engine.max_num_seqs,
        max_num_batched_tokens: engine.max_num_batched_tokens,
        files: ModelFiles::default(),
    }
}

/// Describes the files of a model.
fn files(target: &Target) -> ModelFiles {
    let inventory = &target.inventory;
    let mut values = BTreeMap::<&str, u64>::new();
    for entry in &inventory.entries {
        *values.entry(&entry.stored).or_default() += entry.elements;
    }
    let most = values.into_iter().max_by_key(|(_, values)| *values);
    let format = match target.checkpoint.source {
        ModelSource::Gguf(_) => "gguf",
        ModelSource::Folder(_) => "safetensors",
    };
    ModelFiles {
        format: format.into(),
        architecture: target.model.config().architecture.clone(),
        parameters: inventory.sum(|entry| entry.elements),
        quantization: most.map_or_else(String::new, |(name, _)| name.to_owned()),
        bytes: inventory.sum(|entry| entry.stored_bytes),
    }
}

/// Builds a drafter; `link` connects it with a learner.
fn drafter(
    config: &Config,
    planned: PlannedDraft,
    blocks: usize,
    text: Option<&Text>,
    link: Option<LearnerLink>,
) -> Result<Box<dyn Drafter>> {
    let tables = || tables(&config.tables, text);
    let Some(draft) = planned.draft else {
        return match planned.choice.simple() {
            Some(drafter) => Ok(drafter),
            None => Ok(Box::new(tables()?)),
        };
    };
    let prefix_caching = !config.engine.no_prefix_caching;
    let mut model = draft.drafter(blocks, config.block_size, prefix_caching)?;
    if let Some(link) = link {
        model = Box::new(LearningDrafter::new(model, link));
    }
    Ok(if planned.with_tables {
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
