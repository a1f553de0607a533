//! Loads a model from a checkpoint.

mod options;
mod spread;

use crate::checkpoint::gguf::GgufFile;
use crate::config::gpu;
use crate::config::{GGUF_HEADS, ModelConfig, read_json};
use crate::decoder::graphs::GraphedDecoder;
use crate::decoder::{Decoder, output_name};
use crate::heads::HeadKind;
use crate::heads::assistant::{AssistantConfig, AssistantHead};
use crate::heads::config::HeadConfig;
use crate::heads::draft::DraftHead;
use crate::heads::medusa::MedusaHeads;
use crate::heads::mtp::MtpNames;
use crate::packed::PackedConfig;
use crate::source::{LoadFormat, ModelSource};
use crate::weights::Weights;
use crate::weights::dtypes::Dtypes;
use crate::weights::inventory::{self, Inventory, SharedInventory};
use crate::{Ends, HeadTarget, LoadedModel};
use candle_core::{DType, Tensor};
use foretoken_core::console;
use foretoken_core::error::{Error, Result, caught};
use foretoken_core::files;
use foretoken_core::gguf::GgufSource;
use foretoken_core::kv::{KvCacheDtype, KvForm};
use foretoken_core::model::Head;
use foretoken_kernels::quant::BlockType;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

pub use options::{DraftVocabulary, LoadOptions};

impl DraftVocabulary {
    /// The `ends` of a target like `config` for a head that shares its output layer: with the rows of these ids alone,
    /// which are read from the checkpoint.
    fn cut(
        &self,
        ends: &Ends,
        config: &ModelConfig,
        inventory: Option<&SharedInventory>,
    ) -> Result<Ends> {
        let (source, options) = &*self.target;
        let config = config.clone().with_output_ids(&self.ids);
        let config = config.map_err(Error::setup)?;
        let weights = open(source, options)?.1.with_names(config.spec.names);
        let mut weights = weights.headers_only(inventory);
        let linear = weights.output_linear(output_name(&config), &config)?;
        let output = ends.output.clone();
        Ok(Ends {
            output: output.cut_to(linear, &mut weights, &config)?,
            ..ends.clone()
        })
    }
}

/// Loads the model of `source`.
///
/// # Errors
/// A setup error, in one line, if files are missing or broken, or the model is not supported.
pub fn load(source: &ModelSource, options: &LoadOptions) -> Result<Box<dyn LoadedModel>> {
    caught("the model", || load_checked(source, options, None))
}

/// The model of `source` without its weights, and the list of its tensors: reads only headers. All checks of
/// [`load`] are made, except those of the weights' values. A forward fails.
///
/// # Errors
/// Returns the errors of [`load`].
pub fn inspect(
    source: &ModelSource,
    options: &LoadOptions,
) -> Result<(Box<dyn LoadedModel>, Inventory)> {
    inspected("the model", options, |options, list| {
        load_checked(source, options, Some(list))
    })
}

/// As [`inspect`], for a head that [`load_head`] loads.
///
/// # Errors
/// Returns the errors of [`load_head`].
pub fn inspect_head(
    source: &ModelSource,
    kind: HeadKind,
    options: &LoadOptions,
    target: &dyn LoadedModel,
) -> Result<(Box<dyn Head>, Inventory)> {
    let target = HeadTarget::of(target)?;
    inspected("the head", options, |options, list| {
        load_head_checked(source, kind, options, &target, Some(list))
    })
}

/// What `load` makes of headers, and the list of tensors that it fills. Nothing is recorded as graphs: without weights
/// there is nothing to record.
fn inspected<T>(
    what: &str,
    options: &LoadOptions,
    load: impl FnOnce(&LoadOptions, &SharedInventory) -> Result<T>,
) -> Result<(T, Inventory)> {
    let list = SharedInventory::default();
    let options = LoadOptions {
        enforce_eager: true,
        ..options.clone()
    };
    let loaded = caught(what, || load(&options, &list))?;
    Ok((loaded, inventory::take(&list)))
}

fn load_checked(
    source: &ModelSource,
    options: &LoadOptions,
    inventory: Option<&SharedInventory>,
) -> Result<Box<dyn LoadedModel>> {
    let (mut config, weights) = open(source, options)?;
    if GGUF_HEADS.contains(&&*config.architecture) {
        return Err(Error::setup(
            "this is a draft head, not a model: give it as --draft-model beside its target",
        ));
    }
    if let Some(vocabulary) = &options.draft_vocabulary {
        let cut = config.with_output_ids(&vocabulary.ids);
        config = cut.map_err(Error::setup)?;
    }
    if options.are_for_gpu() {
        gpu::check(&config)?;
    }
    let progress = progress(config.num_layers());
    let mut weights = weights.with_host_experts(options.host_expert_layers);
    if !options.more_devices.is_empty() {
        weights = weights.with_split(spread::split(source, options, &config)?);
    }
    let mut decoder = Decoder::load(config, weights.headers_only(inventory), progress)?;
    if options.are_for_gpu() && options.batch_invariant {
        decoder = decoder.with_batch_invariance()?;
    }
    // A graph is of one GPU.
    let is_on_one = options.more_devices.is_empty();
    if options.device.is_cuda() && is_on_one && !options.enforce_eager {
        return Ok(Box::new(GraphedDecoder::new(decoder, options.one_launch)?));
    }
    Ok(Box::new(decoder))
}

/// The configuration and the open checkpoint of the model of `source`.
fn open(source: &ModelSource, options: &LoadOptions) -> Result<(ModelConfig, Weights)> {
    let device = &options.device;
    match (source, options.format) {
        (ModelSource::Gguf(source), LoadFormat::Auto) => {
            let file = GgufFile::open(source)?;
            let dtypes = pick_dtypes(options, || Ok(DType::F16))?;
            Ok((file.config().clone(), Weights::gguf(file, dtypes, device)))
        }
        (ModelSource::Gguf(_), LoadFormat::Dummy) => Err(Error::setup(
            "dummy weights take their shapes from a config.json: give its folder, not a GGUF file",
        )),
        (ModelSource::Folder(folder), format) => {
            let config = ModelConfig::from_json(folder)?;
            let mut dtypes = pick_dtypes(options, || declared_dtype(folder))?;
            if format == LoadFormat::Dummy && options.tensors.is_none() {
                // There are no files, so the config decides the dtype of matrices.
                let declared = || declared_dtype(folder);
                dtypes.matrices = Some(dtypes.matrices.map_or_else(declared, Ok)?);
            }
            let weights = match weights_elsewhere(dtypes, options) {
                Some(weights) => weights,
                None => Weights::safetensors(folder, dtypes, device)?,
            };
            let weights = weights.packed(config.packed.clone(), declared_dtype(folder)?);
            Ok((config, weights))
        }
    }
}

/// Loads the head of kind `kind` in `source`, which drafts for `target`.
///
/// # Errors
/// A setup error, in one line: files are missing or broken, the head is not supported, or it does not fit
/// the target; then it says what differs.
pub fn load_head(
    source: &ModelSource,
    kind: HeadKind,
    options: &LoadOptions,
    target: &dyn LoadedModel,
) -> Result<Box<dyn Head>> {
    load_head_of(source, kind, options, &HeadTarget::of(target)?)
}

/// As [`load_head`], for a target that may be elsewhere.
///
/// # Errors
/// Returns the errors of [`load_head`].
pub fn load_head_of(
    source: &ModelSource,
    kind: HeadKind,
    options: &LoadOptions,
    target: &HeadTarget,
) -> Result<Box<dyn Head>> {
    caught("the head", || {
        load_head_checked(source, kind, options, target, None)
    })
}

/// The configuration of the head of kind `kind` in `source`, and its tensors, to read single ones in f32.
///
/// # Errors
/// A setup error, in one line, that names what is missing, broken or not supported.
pub fn open_head(source: &ModelSource, kind: HeadKind) -> Result<(HeadConfig, Weights)> {
    let head = match source {
        ModelSource::Gguf(file) => {
            let options = LoadOptions::default();
            let dtypes = pick_dtypes(&options, || Ok(DType::F32))?;
            open_gguf_head(file, kind, dtypes, &options)?.0
        }
        ModelSource::Folder(folder) => HeadConfig::from_json(folder, kind)?,
    };
    Ok((head, Weights::open(source)?))
}

/// The values of `weight` in f32 after loading by `options`, which may round them to blocks.
///
/// # Errors
/// A setup error, if its values do not fit the blocks.
pub fn as_loaded(weight: &Tensor, options: &LoadOptions) -> Result<Tensor> {
    if weight.rank() != 2 {
        return Ok(weight.clone());
    }
    let dtypes = pick_dtypes(options, || Ok(DType::F16))?;
    Weights::dummy(0, dtypes, &options.device).as_loaded(weight)
}

fn load_head_checked(
    source: &ModelSource,
    kind: HeadKind,
    options: &LoadOptions,
    target: &HeadTarget,
    inventory: Option<&SharedInventory>,
) -> Result<Box<dyn Head>> {
    let HeadTarget { config, ends, .. } = target;
    let dtypes = dtypes_of_head(options, ends)?;
    if let (HeadKind::Medusa, ModelSource::Folder(folder)) = (kind, source) {
        if options.draft_vocabulary.is_some() {
            return Err(no_draft_vocabulary("Medusa heads"));
        }
        let weights = weights_of_head(folder, dtypes, options, None)?;
        let (weights, (_, json)) = (weights.headers_only(inventory), read_json(folder)?);
        let heads = MedusaHeads::load(&json, weights, config, ends)?;
        return Ok(Box::new(heads));
    }
    if let (HeadKind::Assistant, ModelSource::Folder(folder)) = (kind, source) {
        if options.draft_vocabulary.is_some() {
            return Err(no_draft_vocabulary("assistants of Gemma 4"));
        }
        let (file, json) = read_json(folder)?;
        let head = AssistantConfig::parse(&json).map_err(|e| Error::in_file(&file, e))?;
        if options.are_for_gpu() {
            gpu::check(&head.shape)?;
        }
        let weights = weights_of_head(folder, dtypes, options, head.shape.packed.clone())?;
        let head = AssistantHead::load(head, weights.headers_only(inventory), target)?;
        return Ok(Box::new(head));
    }
    let (mut head, weights) = match source {
        ModelSource::Gguf(file) => open_gguf_head(file, kind, dtypes, options)?,
        ModelSource::Folder(folder) => {
            let head = HeadConfig::from_json(folder, kind)?;
            let packed = head.shape.packed.clone();
            (head, weights_of_head(folder, dtypes, options, packed)?)
        }
    };
    if options.are_for_gpu() {
        gpu::check(&head.shape)?;
    }
    let weights = weights.headers_only(inventory);
    let taps = head.taps_of(config).map_err(Error::setup)?;
    // Not every head says it.
    head.shape.vocab_size = config.vocab_size;
    let mut cut = None;
    if let Some(vocabulary) = &options.draft_vocabulary {
        if head.path.is_any() {
            return Err(no_draft_vocabulary("heads that draft along paths"));
        }
        head.shape = (head.shape.with_output_ids(&vocabulary.ids)).map_err(Error::setup)?;
        if kind == HeadKind::Eagle || weights.have_head() == Some(false) {
            cut = Some(vocabulary.cut(ends, config, inventory)?);
        }
    }
    let ends = cut.as_ref().unwrap_or(ends);
    // Rotary positions have no end, and a published limit is often that of the training texts.
    let context = &mut head.shape.max_position_embeddings;
    *context = (*context).max(config.max_position_embeddings);
    let head = DraftHead::load(head, taps, weights, config, ends)?;
    Ok(Box::new(head))
}

/// What [`load_mtp`] loads, in messages.
const MTP: &str = "the layer for further tokens";

/// Loads the layer for further tokens that the checkpoint of `target`, in `source`, may have, as a draft head;
/// `None` if it has none.
///
/// # Errors
/// `Setup`, in one line, if it cannot be loaded.
pub fn load_mtp(
    source: &ModelSource,
    options: &LoadOptions,
    target: &dyn LoadedModel,
) -> Result<Option<Box<dyn Head>>> {
    caught(MTP, || load_mtp_checked(source, options, target, None))
}

/// As [`inspect`], for the head that [`load_mtp`] loads.
///
/// # Errors
/// Returns the errors of [`load_mtp`].
pub fn inspect_mtp(
    source: &ModelSource,
    options: &LoadOptions,
    target: &dyn LoadedModel,
) -> Result<Option<(Box<dyn Head>, Inventory)>> {
    let (head, inventory) = inspected(MTP, options, |options, list| {
        load_mtp_checked(source, options, target, Some(list))
    })?;
    Ok(head.map(|head| (head, inventory)))
}

fn load_mtp_checked(
    source: &ModelSource,
    options: &LoadOptions,
    target: &dyn LoadedModel,
    inventory: Option<&SharedInventory>,
) -> Result<Option<Box<dyn Head>>> {
    let config = target.config();
    let Some(ends) = target.ends().filter(|_| config.spec.mtp.is_some()) else {
        return Ok(None);
    };
    let dtypes = dtypes_of_head(options, &ends)?;
    let weights = match source {
        ModelSource::Gguf(file) => Weights::gguf(GgufFile::open(file)?, dtypes, &options.device),
        ModelSource::Folder(folder) => {
            weights_of_head(folder, dtypes, options, config.packed.clone())?
        }
    };
    let Some(names) = MtpNames::of(&weights, config) else {
        return Ok(None);
    };
    let vocabulary = options.draft_vocabulary.as_ref();
    let cut = vocabulary.filter(|_| names.head.is_none());
    let cut = cut.map(|vocabulary| vocabulary.cut(&ends, config, inventory));
    let ends = cut.transpose()?.unwrap_or(ends);
    let weights = weights.headers_only(inventory);
    let ids = vocabulary.map(|vocabulary| &vocabulary.ids);
    let head = DraftHead::load_mtp(&names, weights, config, &ends, ids)?;
    Ok(Some(Box::new(head)))
}

/// The error that `heads` cannot be cut to a part of the vocabulary.
fn no_draft_vocabulary(heads: &str) -> Error {
    Error::setup(format!(
        "--draft-vocab is not supported for {heads}: leave it out"
    ))
}

/// The weights of a head in `folder`, whose matrices are packed as `packed` says.
fn weights_of_head(
    folder: &Path,
    dtypes: Dtypes,
    options: &LoadOptions,
    packed: Option<PackedConfig>,
) -> Result<Weights> {
    let weights = match weights_elsewhere(dtypes, options) {
        Some(weights) => weights,
        None => Weights::of_head(files::folder_of(folder), dtypes, &options.device)?,
    };
    Ok(weights.packed(packed, declared_dtype(folder)?))
}

/// The weights of which no file is on this machine, if `options` ask for such: random ones, or headers.
fn weights_elsewhere(dtypes: Dtypes, options: &LoadOptions) -> Option<Weights> {
    let device = &options.device;
    (options.format == LoadFormat::Dummy).then(|| match &options.tensors {
        Some(tensors) => Weights::headers(tensors.clone(), dtypes, device),
        None => Weights::dummy(options.seed, dtypes, device),
    })
}

fn open_gguf_head(
    source: &GgufSource,
    kind: HeadKind,
    dtypes: Dtypes,
    options: &LoadOptions,
) -> Result<(HeadConfig, Weights)> {
    let file = GgufFile::open(source)?;
    let head = HeadConfig::from_gguf(file.header(), kind, file.config().clone())
        .map_err(|e| Error::in_file(source.path(), e))?;
    Ok((head, Weights::gguf(file, dtypes, &options.device)))
}

/// Chooses the dtypes. A GPU computes in one dtype; the CPU reads weights in any dtype and computes in
/// f32.
fn pick_dtypes(options: &LoadOptions, declared: impl Fn() -> Result<DType>) -> Result<Dtypes> {
    let is_cpu = !options.are_for_gpu();
    let own = match options.dtype.map_or_else(declared, Ok)? {
        // Precise enough, and half the memory to read of f32.
        own if is_cpu && options.dtype.is_none() && own != DType::F32 => DType::F16,
        own => own,
    };
    let (kv, kv_form) = match options.kv_cache_dtype {
        KvCacheDtype::Auto => (own, None),
        KvCacheDtype::F32 => (DType::F32, None),
        KvCacheDtype::Bf16 => (DType::BF16, None),
        KvCacheDtype::F16 => (DType::F16, None),
        KvCacheDtype::Q8_0 => (own, Some(KvForm::Blocks(BlockType::Q8_0))),
        KvCacheDtype::Fp8 if is_cpu => {
            return Err(Error::setup(
                "--kv-cache-dtype fp8 is not supported on the CPU: auto, f32, bf16, f16 and q8_0 are accepted",
            ));
        }
        KvCacheDtype::Fp8 => (own, Some(KvForm::Float8)),
    };
    if !is_cpu && kv != own {
        let (kv, own) = (kv.as_str(), own.as_str());
        return Err(Error::setup(format!(
            "--kv-cache-dtype {kv} is not supported on a GPU that computes in {own} (--dtype): auto, {own}, q8_0 and fp8 are accepted"
        )));
    }
    match own {
        DType::F32 | DType::F16 | DType::BF16 => Ok(Dtypes {
            activations: if is_cpu { DType::F32 } else { own },
            matrices: if is_cpu { options.dtype } else { Some(own) },
            blocks: options.quantize,
            kv,
            kv_form,
            on_gpu: !is_cpu,
        }),
        other => Err(Error::setup(format!(
            "dtype {} is not supported: only f32, f16 and bf16 are",
            other.as_str()
        ))),
    }
}

/// The dtypes of a draft head beside a target with these `ends`: they share layers and activations.
fn dtypes_of_head(options: &LoadOptions, ends: &Ends) -> Result<Dtypes> {
    let is_cpu = !options.are_for_gpu();
    let declared = if is_cpu {
        DType::F16
    } else {
        ends.norm.dtype()
    };
    pick_dtypes(options, || Ok(declared))
}

/// `torch_dtype` (or, since transformers 5, `dtype`) of the folder's `config.json`; bf16 if none.
fn declared_dtype(path: &Path) -> Result<DType> {
    let (_, json) = read_json(path)?;
    let name = json.get("torch_dtype").or(json.get("dtype"));
    Ok(match name.and_then(|name| name.as_str()) {
        Some("float32") => DType::F32,
        Some("float16") => DType::F16,
        _ => DType::BF16,
    })
}

/// Time before any progress is shown.
const PATIENCE: Duration = Duration::from_secs(1);

/// Shows the progress of loading so many `layers`, of which each call is one: a bar on a terminal, otherwise log lines;
/// nothing in the first second.
fn progress(layers: usize) -> impl FnMut() {
    let template = "loading {wide_bar} {pos}/{len} layers";
    let bar = (std::io::stderr().is_terminal()).then(|| console::bar(template, layers as u64));
    let (mut loaded, mut next) = (0, Instant::now() + PATIENCE);
    move || {
        loaded += 1;
        match &bar {
            Some(bar) if loaded == layers => bar.finish_and_clear(),
            _ if Instant::now() < next => {}
            Some(bar) => bar.set_position(loaded as u64),
            None => {
                tracing::info!("loading: {loaded} of {layers} layers");
                next = Instant::now() + 10 * PATIENCE;
            }
        }
    }
}
