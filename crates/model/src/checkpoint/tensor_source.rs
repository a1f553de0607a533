//! Where the tensors of a checkpoint come from, by their names there and in the dtypes there.

use super::finite;
use super::gguf::GgufFile;
use super::raw_tensors::{RawTensor, RawTensors};
use super::safetensors_header::TensorHeaders;
use super::shards::safetensors_files;
use crate::names;
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result, clipped, first_line};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

pub(crate) enum TensorSource {
    /// The mapped files.
    Safetensors(MmapedSafetensors),
    /// The tensors of a `pytorch_model.bin`.
    Pickled(HashMap<String, Tensor>),
    Gguf(Box<GgufFile>),
    /// The headers of safetensors that are elsewhere.
    Headers(Arc<TensorHeaders>),
    /// Random weights with this seed.
    Dummy(u64),
}

impl TensorSource {
    /// Maps the safetensors of a folder.
    ///
    /// # Errors
    /// A setup error that names the missing or broken file.
    pub fn safetensors(folder: &Path) -> Result<Self> {
        let files = safetensors_files(folder)?;
        // SAFETY: the files are only read. If someone changes a checkpoint while the server runs, they
        // get other weights or a fault, as with every mapped file.
        let mapped = unsafe { MmapedSafetensors::multi(&files) };
        let mapped = mapped.map_err(|e| Error::in_file(folder, e))?;
        Ok(Self::Safetensors(mapped))
    }

    /// Whether there is the tensor `name`. Random weights have every tensor.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Safetensors(files) => files.get(name).is_ok(),
            Self::Pickled(tensors) => tensors.contains_key(name),
            Self::Gguf(file) => file.has(name),
            Self::Headers(tensors) => tensors.contains_key(name),
            Self::Dummy(_) => true,
        }
    }

    /// The names of the tensors that are not in `read`; of a GGUF file those that it has not been asked for.
    pub fn unread(&self, read: &HashSet<String>) -> Vec<String> {
        let names: Vec<String> = match self {
            Self::Safetensors(files) => {
                let tensors = files.tensors().into_iter();
                tensors.map(|(name, _)| name).collect()
            }
            Self::Pickled(tensors) => tensors.keys().cloned().collect(),
            Self::Gguf(file) => return file.unread(),
            Self::Headers(tensors) => tensors.keys().cloned().collect(),
            Self::Dummy(_) => Vec::new(),
        };
        let unread = names.into_iter().filter(|name| !read.contains(name));
        unread.collect()
    }

    /// The tensor `name`; a quantized one is dequantized.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing, has another dtype than floats, or is not finite.
    pub fn tensor(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        match self {
            Self::Safetensors(files) => checked(files, name, device),
            Self::Pickled(tensors) => pickled(tensors, name),
            Self::Gguf(file) => file.tensor(name, device),
            Self::Headers(_) | Self::Dummy(_) => {
                Err(Error::internal("there are no weights that have values"))
            }
        }
    }

    /// The tensor `name` of bytes, which must have the shape `dims`, if its file is here.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing, or has another dtype or shape.
    pub fn bytes(&self, name: &str, dims: &[usize]) -> Result<Option<&[u8]>> {
        let raw = self.raw(name)?;
        let (dtype, found, data) = (raw.dtype, raw.dims, raw.data);
        if dtype != "U8" {
            return Err(Error::setup(format!(
                "tensor {} has dtype {}, which is not supported: only u8 is",
                clipped(name),
                clipped(&dtype)
            )));
        }
        if found != dims {
            return Err(Error::wrong_shape(name, &found, dims));
        }
        Ok(data)
    }

    /// Shape and dtype of the tensor `name`; `None` for random weights, which have any, and for GGUF files,
    /// which tell more.
    ///
    /// # Errors
    /// Returns the errors of [`TensorSource::tensor`].
    pub fn describe(&self, name: &str) -> Result<Option<(Vec<usize>, DType)>> {
        match self {
            Self::Safetensors(files) => {
                let (dtype, dims, _) = described(files, name)?;
                Ok(Some((dims, dtype)))
            }
            Self::Pickled(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| missing(name))?;
                Ok(Some((tensor.dims().to_vec(), tensor.dtype())))
            }
            Self::Headers(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| missing(name))?;
                let dtype = dtype_of(name, &tensor.dtype)?;
                Ok(Some((tensor.dims.clone(), dtype)))
            }
            Self::Gguf(_) | Self::Dummy(_) => Ok(None),
        }
    }
}

impl RawTensors for TensorSource {
    fn has(&self, name: &str) -> bool {
        self.has(name)
    }

    fn raw(&self, name: &str) -> Result<RawTensor<'_>> {
        match self {
            Self::Safetensors(files) if files.get(name).is_err() => Err(missing(name)),
            Self::Safetensors(files) => {
                let stored = files.get(name).map_err(|e| broken(name, &e))?;
                Ok(RawTensor {
                    dtype: format!("{:?}", stored.dtype()),
                    dims: stored.shape().to_vec(),
                    bytes: stored.data().len() as u64,
                    data: Some(stored.data()),
                })
            }
            Self::Headers(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| missing(name))?;
                Ok(RawTensor {
                    dtype: tensor.dtype.clone(),
                    dims: tensor.dims.clone(),
                    bytes: tensor.bytes(),
                    data: None,
                })
            }
            Self::Pickled(_) => Err(Error::setup(format!(
                "tensor {} is packed, which is supported in safetensors only",
                clipped(name)
            ))),
            Self::Gguf(_) | Self::Dummy(_) => Err(Error::internal("only safetensors have bytes")),
        }
    }
}

/// Dtype, shape and bytes of the tensor `name` of `files`; an error if its dtype needs scales.
fn described<'a>(
    files: &'a MmapedSafetensors,
    name: &str,
) -> Result<(DType, Vec<usize>, &'a [u8])> {
    let stored = files.get(name).map_err(|e| broken(name, &e))?;
    let dtype = dtype_of(name, &format!("{:?}", stored.dtype()))?;
    Ok((dtype, stored.shape().to_vec(), stored.data()))
}

/// The dtype of the tensor `name` that safetensors call `dtype`; an error if it needs scales.
fn dtype_of(name: &str, dtype: &str) -> Result<DType> {
    match dtype {
        "F64" => Ok(DType::F64),
        "F32" => Ok(DType::F32),
        "F16" => Ok(DType::F16),
        "BF16" => Ok(DType::BF16),
        _ if [names::OUTPUT_IDS, names::GROUPED_IDS].contains(&name) => Ok(DType::I64),
        other => Err(Error::setup(format!(
            "tensor {} has dtype {}, which is not supported: only f64, f32, f16 and bf16 are",
            clipped(name),
            clipped(other)
        ))),
    }
}

/// The tensor `name` of `files`; an error if its dtype needs scales, or it is not finite.
fn checked(files: &MmapedSafetensors, name: &str, device: &Device) -> Result<Tensor> {
    let (dtype, _, data) = described(files, name)?;
    if !finite::floats(dtype, data) {
        return Err(finite::error(name));
    }
    files.load(name, device).map_err(|e| broken(name, &e))
}

fn missing(name: &str) -> Error {
    Error::setup(format!("tensor {name} is missing"))
}

fn broken(name: &str, e: &candle_core::Error) -> Error {
    Error::setup(format!("tensor {name}: {}", first_line(e)))
}

/// The tensor `name` of `tensors`, in the order of rows; an error if it is not finite.
fn pickled(tensors: &HashMap<String, Tensor>, name: &str) -> Result<Tensor> {
    let tensor = tensors.get(name).ok_or_else(|| missing(name))?;
    // Also of whole numbers, which have no NaN.
    let wide = tensor.to_dtype(DType::F32)?.flatten_all()?;
    let wide = wide.to_vec1::<f32>()?;
    if wide.iter().all(|value| value.is_finite()) {
        Ok(tensor.contiguous()?)
    } else {
        Err(finite::error(name))
    }
}
