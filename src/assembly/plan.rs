//! What is served: the models, the drafters and the sizes of the KV pools. `check` prints a plan, and `load` executes it.

use super::adapters;
use super::checkpoint::{Checkpoint, Reading, Target, draft_options, target_options};
use super::device_memory::DeviceMemory;
use super::draft_vocab;
use super::drafts::{LoadedDraft, tables_instead};
use super::host_memory;
use super::known;
use super::learn;
use super::memory::{self, Cache, HostWeights};
use crate::config::{Config, DrafterChoice, GenerationConfig, LoadFlags, ModelChoice};
use crate::error::{Error, Result};
use crate::http::Adapters;
use crate::kernels;
use crate::model::{
    self, DraftVocabulary, EmbeddingSpec, LoadOptions, LoadedModel, Model, ModelSource,
    RerankerSpec,
};
use crate::train::learn::Learning;
use candle_core::Device;

/// What the flags and the files decide together.
pub struct Plan {
    /// The flags, with the drafter that the files decide for.
    pub config: Config,
    /// The device that computes; the CPU if the plan is for a GPU of another machine.
    pub device: Device,
    pub target: Target,
    /// How texts are embedded; `None` = they are not embedded.
    pub embeddings: Option<EmbeddingSpec>,
    /// How documents are judged; `None` = the model is no reranker.
    pub reranker: Option<RerankerSpec>,
    /// The adapters that are served; `None` = there are none.
    pub adapters: Option<Adapters>,
    /// The drafter, or those that are compared; none if the target decodes plainly.
    pub drafts: Vec<PlannedDraft>,
    /// Why the checkpoint's own layer will not draft, although no flag chose another drafter.
    pub draft_refused: Option<String>,
    /// The ids that a draft may predict; `None` = all that it can.
    pub draft_vocabulary: Option<DraftVocabulary>,
    pub learning: Option<Learning>,
    pub cache: Cache,
    /// The uses of the memory of each GPU; none on a CPU.
    pub memory: Vec<DeviceMemory>,
}

/// A drafter that is to be built.
pub struct PlannedDraft {
    pub choice: DrafterChoice,
    /// Whether tables continue the drafts of a model.
    pub with_tables: bool,
    /// The model or head; `None` if it has none.
    pub draft: Option<LoadedDraft>,
}

impl Plan {
    /// Decides what `config` asks for, by what the files say.
    ///
    /// # Errors
    /// `Setup`, in one line: a flag is wrong, a file is missing or not supported, or there is too little memory.
    pub fn of(config: &Config, reading: Reading) -> Result<Self> {
        let devices = open_devices(config)?;
        let device = devices[0].clone();
        config.engine.check_disk()?;
        let mut memory = match config.gpu {
            Some(gpu) => DeviceMemory::of_others(gpu, devices.len()),
            None => DeviceMemory::here(&devices)?,
        };
        memory::check_limits(config)?;
        let options = target_options(config, &devices);
        let checkpoint = Checkpoint::find(&config.model, options, reading)?;
        // A draft that is not known yet is checked later.
        let is_auto = config.has_auto_draft();
        let autos: Vec<bool> = wanted(config).iter().map(Wanted::is_auto).collect();
        if !is_auto {
            check_quantize(config, &checkpoint.source)?;
        }
        check_named(config)?;
        let is_on_gpu = !memory.is_empty();
        let target = Target::open(checkpoint, &config.engine)?;
        host_memory::log(config, target.model.config(), is_on_gpu);
        log_split(&*target.model);
        let embeddings = embeddings(config, &target.checkpoint.source, &*target.model)?;
        let reranker = reranker(config, &target)?;
        if let [memory] = &mut memory[..] {
            memory.set_experts(host_memory::by_layer(&target.inventory));
        }
        let bytes = target.model.split().bytes(&target.inventory);
        DeviceMemory::note(&mut memory, "target weights", &devices, &bytes)?;
        let adapters = adapters::load(config, &*target.model, &memory)?;
        if config.lora.is_some() {
            let (model, loaded) = (&*target.model, adapters.as_ref());
            let bytes = adapters::bytes_by_gpu(config, model, loaded, devices.len());
            DeviceMemory::note(&mut memory, "adapters", &devices, &bytes)?;
        }
        if let Some(spec) = &embeddings {
            tracing::info!("embeddings: {spec}");
        }
        if let Some(spec) = &reranker {
            tracing::info!("reranker: {spec}");
        }
        let mut config = config.clone();
        if !target.model.generates() {
            tracing::info!(
                "the model has no output layer: it serves embeddings only, without drafts"
            );
            config.drafter = None;
            config.compared.clear();
        }
        if is_auto {
            known::resolve(&mut config, &device, &target)?;
            check_quantize(&config, &target.checkpoint.source)?;
        }
        let draft_options = LoadOptions {
            draft_vocabulary: draft_vocab::of(&config, &target)?,
            ..draft_options(&config, &device)
        };
        let vocabulary = draft_options.draft_vocabulary.as_ref();
        let preferred = preferred(&mut config, &target, vocabulary);
        let draft_refused = preferred.as_ref().err().map(tables_instead);
        let mut learning = learn::open(&config, draft_options.clone(), &*target.model)?;
        let learned = learning.as_mut().and_then(|learning| learning.head.take());
        let mut first = learned
            .map(LoadedDraft::of_head)
            .or(preferred.unwrap_or(None));
        let mut drafts = Vec::new();
        for (wanted, is_auto) in wanted(&config).into_iter().zip(autos) {
            let Wanted {
                mut choice,
                with_tables,
                is_open,
            } = wanted;
            let own = if is_open {
                LoadedDraft::further_layer(&target, vocabulary)
            } else {
                Ok(None)
            };
            if let Err(e) = &own {
                tracing::warn!("{}", tables_instead(e));
            }
            let draft = match first.take().or(own.unwrap_or(None)) {
                Some(draft) => {
                    if is_open {
                        choice = DrafterChoice::Mtp;
                    }
                    Some(draft)
                }
                None => LoadedDraft::open(&choice, &target, draft_options.clone())
                    .map_err(|e| if is_auto { of_auto(&e) } else { e })?,
            };
            if let Some(draft) = &draft {
                DeviceMemory::note(&mut memory, "draft weights", &devices, &[draft.bytes()])?;
            }
            drafts.push(PlannedDraft {
                choice,
                with_tables,
                draft,
            });
        }
        if vocabulary.is_some() && drafts.iter().all(|planned| planned.draft.is_none()) {
            return Err(draft_vocab::no_network(draft_refused.as_deref()));
        }
        let networks = || drafts.iter().filter_map(|planned| planned.draft.as_ref());
        let with_pools: Vec<&dyn Model> = networks().map(LoadedDraft::model).collect();
        let weights = HostWeights {
            bytes: target.bytes() + networks().map(LoadedDraft::bytes).sum::<u64>(),
            are_loaded: target.is_loaded(),
        };
        let cache = memory::cache(&config, &*target.model, &with_pools, weights, &mut memory)?;
        Ok(Self {
            config,
            device,
            target,
            embeddings,
            reranker,
            adapters,
            drafts,
            draft_refused,
            learning,
            cache,
            memory,
            draft_vocabulary: draft_options.draft_vocabulary,
        })
    }

    /// The name of the device in reports.
    pub fn device_name(&self) -> &'static str {
        if self.is_on_gpu() { "cuda" } else { "cpu" }
    }

    /// Whether the plan is for a GPU, of this machine or of another.
    pub fn is_on_gpu(&self) -> bool {
        self.config.gpu.is_some() || !self.device.is_cpu()
    }
}

/// The devices of the flags, which are checked and have their threads: several are GPUs. The CPU is in the place of a GPU of
/// another machine.
fn open_devices(config: &Config) -> Result<Vec<Device>> {
    let flags = &config.load;
    let count = flags.pipeline_parallel_size;
    if let Some(gpu) = config.gpu {
        gpu.check().map_err(Error::setup)?;
        return Ok(vec![Device::Cpu; count]);
    }
    let devices = kernels::devices(&flags.device, count).map_err(|e| {
        Error::setup(match count {
            1 => e,
            _ => format!("--pipeline-parallel-size {count}: {e}"),
        })
    })?;
    let isa = kernels::cpu::check().map_err(Error::setup)?;
    if let Some(threads) = flags.threads {
        kernels::set_threads(threads).map_err(Error::setup)?;
    }
    if devices[0].is_cpu() {
        tracing::info!("CPU kernels: {isa:?}, {} threads", kernels::threads());
    } else {
        tracing::info!("{}", determinism_notice(flags));
    }
    Ok(devices)
}

/// Says which layers are on which of several GPUs.
fn log_split(model: &dyn LoadedModel) {
    let (split, layers) = (model.split(), model.config().num_layers());
    if split.count() == 1 {
        return;
    }
    for gpu in 0..split.count() {
        let own = split.layers_on(gpu);
        let (first, last) = (own.start, own.end - 1);
        tracing::info!("GPU {gpu} has the layers {first} to {last} of {layers}");
    }
}

/// Describes the bit equality that a GPU guarantees; the CPU always guarantees all of it.
fn determinism_notice(flags: &LoadFlags) -> &'static str {
    if flags.batch_invariant {
        "batch-invariant: a text does not depend on drafts, other requests or prompt chunks"
    } else {
        "at a near tie a text may depend on whether a step has more than 256 rows and on prompt chunks: --batch-invariant prevents this and is slower"
    }
}

/// Returns how the `model` of `source` embeds texts; `None` = it does not embed texts, but generates them.
fn embeddings(
    config: &Config,
    source: &ModelSource,
    model: &dyn LoadedModel,
) -> Result<Option<EmbeddingSpec>> {
    let spec = model::embedding_spec(source, config.pooling)?;
    if let Some(spec) = &spec {
        spec.check(model.info().hidden_size).map_err(Error::setup)?;
    }
    if !model.generates() && spec.is_none() {
        return Err(Error::setup(
            "the model has no output layer (lm_head), so it generates no text: for embeddings, set --pooling last or --pooling mean",
        ));
    }
    Ok(spec)
}

/// What the names of rerankers have in common.
const RERANKER: &str = "reranker";

/// Returns how the target judges documents; `None` = neither its files, nor its name, nor a flag say that it does.
///
/// # Errors
/// `Setup`, if it is asked for and not possible.
fn reranker(config: &Config, target: &Target) -> Result<Option<RerankerSpec>> {
    let source = &target.checkpoint.source;
    let of_files = model::reranker_spec(source)?;
    if let Some(RerankerSpec::Classifier(_)) = of_files {
        return Ok(of_files);
    }
    let is_named = config.model.name.to_ascii_lowercase().contains(RERANKER);
    if of_files.is_none() && !is_named && !config.reranker {
        return Ok(None);
    }
    let generates = target.model.generates();
    let token = |word: &str| -> Result<Option<u32>> {
        let Some(text) = &target.text else {
            return Ok(None);
        };
        let ids = text.encode(word, false)?;
        Ok(ids.first().copied().filter(|_| ids.len() == 1))
    };
    let spec = match of_files {
        Some(spec) => Some(spec),
        None => token("yes")?
            .zip(token("no")?)
            .map(|(yes, no)| RerankerSpec::Answer { yes, no }),
    };
    let size = target.model.config().vocab_size;
    let is_known = |id: u32| (id as usize) < size;
    let spec = spec.filter(|spec| match spec {
        RerankerSpec::Answer { yes, no } => generates && is_known(*yes) && is_known(*no),
        RerankerSpec::Classifier(_) => true,
    });
    if spec.is_none() && config.reranker {
        return Err(Error::setup(
            "--reranker needs a model that generates, with a tokenizer in which yes and no are one token each",
        ));
    }
    Ok(spec)
}

/// Makes the target's layer for further tokens the drafter, if there is one and no flag chose another. It predicts the ids
/// of `vocabulary`.
fn preferred(
    config: &mut Config,
    target: &Target,
    vocabulary: Option<&DraftVocabulary>,
) -> Result<Option<LoadedDraft>> {
    let is_open = config.prefers_mtp && config.drafter.is_some() && config.compared.is_empty();
    if !is_open {
        return Ok(None);
    }
    let found = LoadedDraft::further_layer(target, vocabulary)?;
    if found.is_some() {
        config.drafter = Some(DrafterChoice::Mtp);
    }
    Ok(found)
}

/// A drafter that the flags ask for.
struct Wanted {
    choice: DrafterChoice,
    /// Whether tables continue its drafts.
    with_tables: bool,
    /// Whether the target's layer for further tokens drafts instead, if there is one.
    is_open: bool,
}

impl Wanted {
    /// Whether its draft is to be found by itself.
    fn is_auto(&self) -> bool {
        self.choice.model().is_some_and(ModelChoice::is_auto)
    }
}

/// The drafters that are compared, or the drafter.
fn wanted(config: &Config) -> Vec<Wanted> {
    let compared = config.compared.iter().map(|one| Wanted {
        choice: one.choice.clone(),
        with_tables: one.with_tables,
        is_open: one.is_open,
    });
    let drafter = config.drafter.iter().map(|choice| Wanted {
        choice: choice.clone(),
        with_tables: true,
        is_open: false,
    });
    if config.compared.is_empty() {
        drafter.collect()
    } else {
        compared.collect()
    }
}

/// Checks, before a long load, what the flags name beside the target.
///
/// # Errors
/// `Setup`, in one line: a draft, an adapter or the file of sampling parameters does not exist.
fn check_named(config: &Config) -> Result<()> {
    for wanted in wanted(config).iter().filter(|wanted| !wanted.is_auto()) {
        if let Some(draft) = wanted.choice.model() {
            ModelSource::check_name(&draft.name, config.load.load_format)?;
        }
    }
    if let GenerationConfig::Path(path) = &config.generation.generation_config {
        let wrong = |e| Error::setup(format!("--generation-config {}: {e}", path.display()));
        path.metadata().map_err(wrong)?;
    }
    config.lora.as_ref().map_or(Ok(()), adapters::check_folders)
}

/// The error that a draft which `auto` chose cannot be had.
fn of_auto(error: &Error) -> Error {
    Error::setup(format!("--draft-model auto: {error}"))
}

/// Checks that `--quantize` and `--draft-quantize`, if they are given, change the target, which is in `source`,
/// or a draft.
///
/// # Errors
/// `Setup`: what they would change is a GGUF file.
fn check_quantize(config: &Config, source: &ModelSource) -> Result<()> {
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
