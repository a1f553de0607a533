//! The first weights of a training: those of an earlier draft or head, `--init-from`.

use super::head_weights::{first_layer, of_shape, output_ids, untrained};
use super::optimizer::ByName;
use super::spec::{EAGLE_LAYER, TrainSpec};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor, Var};
use foretoken_core::error::{Error, Result, first_line};
use foretoken_model::{
    HeadConfig, HeadKind, ModelConfig, ModelSource, Weights, names, open_head, safetensors_files,
};
use std::path::Path;

/// Refuses a `path` whose weights are not those that `spec` needs, before `target` runs over the corpus.
///
/// # Errors
/// `Setup`, naming the path and what does not fit.
pub fn check(path: &Path, spec: &TrainSpec, target: Option<&ModelConfig>) -> Result<()> {
    if let (Some(kind), Some(target)) = (spec.method.head(), target) {
        let (head, mut weights) = open(path, kind)?;
        if let Some(what) = untrained(&head, &mut weights).map_err(|e| Error::in_file(path, e))? {
            let what = format!("its head has {what}, which distill does not train");
            return Err(Error::in_file(path, what));
        }
        fits(&head, spec, target).map_err(|e| Error::in_file(path, e))?;
        ids_of(path, (&head, &mut weights), &spec.config)?;
    }
    let mut weight = reader(path, spec)?;
    let mut shapes = spec.shapes().into_iter();
    shapes.try_for_each(|(name, dims)| weight(&name, &dims).map(drop))
}

/// Whether the weights of `head` have the same meaning in the head `spec`.
fn fits(head: &HeadConfig, spec: &TrainSpec, target: &ModelConfig) -> Result<(), String> {
    let taps = head.taps_of(target)?;
    if taps != spec.taps {
        let list: Vec<String> = taps.iter().map(usize::to_string).collect();
        let (list, ours) = (list.join(","), &spec.taps);
        return Err(format!(
            "its head reads the layers {list}, not {ours:?}: give --taps {list}"
        ));
    }
    let (theirs, ours) = (head.shape.num_layers(), spec.config.num_layers());
    if theirs != ours {
        return Err(format!(
            "num_hidden_layers of its head is {theirs}, but {ours} in the one to train"
        ));
    }
    let rank = head.markov_rank();
    let rank = rank.map_err(|e| format!("{e}: no other can be trained"))?;
    if rank != spec.markov_rank {
        return Err(format!(
            "markov_rank of its head is {rank}, not {}: leave out --markov-rank",
            spec.markov_rank
        ));
    }
    Ok(())
}

/// Replaces the weights `vars` of the student `spec` by those in `path`: a folder, or a head's GGUF file. If a draft
/// model there has fewer layers, but at least half as many, its upper layers are repeated on top, which is a far better
/// start than random layers (Du et al. 2024, "Stacking Your Transformers", section 3).
///
/// # Errors
/// `Setup`, naming the path, if the weights cannot be read or have another shape.
pub fn load_weights(
    path: &Path,
    spec: &TrainSpec,
    vars: &ByName<Var>,
    device: &Device,
) -> Result<()> {
    let mut weight = reader(path, spec)?;
    for (name, var) in vars {
        var.set(&weight(name, var.dims())?.to_device(device)?)?;
    }
    Ok(())
}

/// Reads a weight in f32, by its name alone.
type StoredReader = Box<dyn FnMut(&str) -> Result<Tensor>>;

/// Returns a reader of the weights in `path` for the student `spec`. It reads a weight in f32, by the name and the shape
/// that training gives it.
fn reader(
    path: &Path,
    spec: &TrainSpec,
) -> Result<impl FnMut(&str, &[usize]) -> Result<Tensor> + use<>> {
    let mut read: StoredReader = match spec.method.head() {
        Some(kind) => {
            let mut weights = open(path, kind)?.1;
            let layer = first_layer(&weights);
            Box::new(move |name: &str| weights.dense(&name.replace(EAGLE_LAYER, layer)))
        }
        None => of_model(path, spec.config.num_layers())?,
    };
    let path = path.to_owned();
    Ok(move |name: &str, dims: &[usize]| {
        let weight = read(name).and_then(|weight| of_shape(weight, name, dims));
        weight.map_err(|e| Error::in_file(&path, e))
    })
}

/// Returns a reader of the weights of the draft model in `folder`, for a draft of `wanted` layers.
fn of_model(folder: &Path, wanted: usize) -> Result<StoredReader> {
    let refused = |what: String| Err(Error::in_file(folder, what));
    if is_gguf(folder) {
        return refused(
            "of GGUF files only heads can be trained on: give --init-from a folder".into(),
        );
    }
    let files = safetensors_files(folder)?;
    // SAFETY: the files are only read. If someone changes them meanwhile, they get other weights or a
    // fault.
    let weights = unsafe { MmapedSafetensors::multi(&files) };
    let weights = weights.map_err(|e| Error::in_file(folder, e))?;
    let tensors = weights.tensors();
    let layers = tensors.iter().filter_map(|(name, _)| names::layer_of(name));
    let saved = layers.map(|(layer, _)| layer + 1).max().unwrap_or(0);
    if saved > wanted {
        return refused(format!(
            "it has {saved} layers, more than the {wanted} of the draft to train"
        ));
    }
    Ok(Box::new(move |name: &str| {
        let weight = weights.load(&stacked(name, saved, wanted), &Device::Cpu);
        (weight.and_then(|weight| weight.to_dtype(DType::F32)))
            .map_err(|e| Error::setup(first_line(&e)))
    }))
}

/// The ids that the head of kind `kind` in `path` predicts, for a head of shape `wanted`.
///
/// # Errors
/// `Setup`, naming the path, if it cannot be read, or the ids are not as many or not those of a trained head.
pub fn head_ids(path: &Path, kind: HeadKind, wanted: &ModelConfig) -> Result<Vec<u32>> {
    let (head, mut weights) = open(path, kind)?;
    ids_of(path, (&head, &mut weights), wanted)
}

fn ids_of(
    path: &Path,
    (head, weights): (&HeadConfig, &mut Weights),
    wanted: &ModelConfig,
) -> Result<Vec<u32>> {
    let ids = output_ids(head, weights).map_err(|e| Error::in_file(path, e))?;
    if ids.len() != wanted.output_size() || !ids.is_sorted_by(|a, b| a < b) {
        let count = ids.len();
        let what = format!(
            "its head predicts {count} ids: give --draft-vocab-size {count}, and a head for the same target"
        );
        return Err(Error::in_file(path, what));
    }
    Ok(ids)
}

/// The configuration of the head of kind `kind` in `path`.
///
/// # Errors
/// `Setup`, naming the path, if there is no such head.
pub fn head_config(path: &Path, kind: HeadKind) -> Result<HeadConfig> {
    Ok(open(path, kind)?.0)
}

fn is_gguf(path: &Path) -> bool {
    path.extension() == Some("gguf".as_ref())
}

/// Opens a folder or a GGUF file with a head of kind `kind`.
fn open(path: &Path, kind: HeadKind) -> Result<(HeadConfig, Weights)> {
    let source = if is_gguf(path) {
        ModelSource::Gguf(path.into())
    } else {
        ModelSource::Folder(path.into())
    };
    if HeadKind::of(&source)? != Some(kind) {
        return Err(Error::in_file(path, "it is no head of this --method"));
    }
    open_head(&source, kind)
}

/// The tensor that `name` of `wanted` layers begins with, if there are `saved`.
fn stacked(name: &str, saved: usize, wanted: usize) -> String {
    match names::layer_of(name) {
        Some((layer, part)) if layer >= saved && layer + saved >= wanted => {
            names::layer(layer + saved - wanted, part)
        }
        _ => name.to_owned(),
    }
}
