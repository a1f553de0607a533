//! What training begins with: the weights of an earlier draft or head, `--init-from`.

use super::optimizer::ByName;
use super::{Method, student};
use crate::error::{Error, Result, first_line};
use crate::model::{
    HeadConfig, HeadKind, ModelSource, Weights, names, open_head, safetensors_files,
};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor, Var};
use std::path::Path;

/// Refuses a `path` that has nothing for `method`, before the target runs over the corpus.
///
/// # Errors
/// `Setup`, naming the path.
pub fn check(path: &Path, method: Method) -> Result<()> {
    if is_gguf(path) {
        open(path, method).map(drop)
    } else {
        safetensors(path).map(drop)
    }
}

/// Replaces the weights `vars` of a draft, or of a head that `method` trains, by those in `path`: a folder, or a head's GGUF
/// file. If that has fewer layers, but at least half as many, its upper layers are repeated on top, which is a far
/// better start than random layers (Du et al. 2024, "Stacking Your Transformers", section 3).
///
/// # Errors
/// `Setup`, naming the path, if the weights cannot be read or have another shape.
pub fn load_weights(
    path: &Path,
    method: Method,
    vars: &ByName<Var>,
    device: &Device,
) -> Result<()> {
    let set = |weight: &mut dyn FnMut(&str) -> Option<Tensor>| {
        student::set(vars, |name| weight(name)?.to_device(device).ok())
            .map_err(|e| Error::in_file(path, e))
    };
    if is_gguf(path) {
        let mut weights = open(path, method)?.1;
        return set(&mut |name| weights.dense(name).ok());
    }
    let weights = safetensors(path)?;
    let saved = layers(weights.tensors().iter().map(|(name, _)| &**name));
    let wanted = layers(vars.keys().map(String::as_str));
    set(&mut |name| {
        let weight = weights.load(&stacked(name, saved, wanted), &Device::Cpu);
        weight.ok()?.to_dtype(DType::F32).ok()
    })
}

/// The ids that the head in `path` predicts: those of its `d2t`.
///
/// # Errors
/// `Setup`, naming the path, if it cannot be read.
pub fn head_ids(path: &Path, method: Method) -> Result<Vec<u32>> {
    let wrong = |e: &dyn std::fmt::Display| Error::in_file(path, e);
    if is_gguf(path) {
        let (head, mut weights) = open(path, method)?;
        let ids = weights.output_ids(&head.shape)?;
        return match ids {
            Some(ids) => Ok(ids.to_vec1()?),
            None => Ok((0..head.shape.vocab_size as u32).collect()),
        };
    }
    let offsets = (safetensors(path)?.load(names::OUTPUT_IDS, &Device::Cpu))
        .and_then(|offsets| offsets.to_vec1::<i64>())
        .map_err(|e| wrong(&first_line(&e)))?;
    let ids = (0..).zip(offsets).map(|(row, offset)| {
        u32::try_from(row + offset).map_err(|_| wrong(&"tensor d2t has an id below 0"))
    });
    ids.collect()
}

/// The configuration of the head in `path`, which `method` trains.
///
/// # Errors
/// `Setup`, naming the path, if there is no such head.
pub fn head_config(path: &Path, method: Method) -> Result<HeadConfig> {
    match method.head() {
        Some(kind) if !is_gguf(path) => HeadConfig::from_json(path, kind),
        _ => Ok(open(path, method)?.0),
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "gguf")
}

/// Opens a GGUF file with a head that `method` trains.
fn open(path: &Path, method: Method) -> Result<(HeadConfig, Weights)> {
    let source = ModelSource::Gguf(path.into());
    let Some(kind) = method.head() else {
        return Err(Error::in_file(
            path,
            "of GGUF files only heads can be trained on: give --init-from a folder",
        ));
    };
    if HeadKind::of(&source)? != Some(kind) {
        return Err(Error::in_file(path, "it is no head of this --method"));
    }
    open_head(&source, kind)
}

fn safetensors(folder: &Path) -> Result<MmapedSafetensors> {
    let files = safetensors_files(folder)?;
    // SAFETY: the files are only read. If someone changes them meanwhile, they get other weights or a
    // fault.
    unsafe { MmapedSafetensors::multi(&files) }.map_err(|e| Error::in_file(folder, e))
}

/// The number of layers that tensors of these names belong to.
fn layers<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    let layers = names.filter_map(names::layer_of);
    layers.map(|(layer, _)| layer + 1).max().unwrap_or(0)
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
