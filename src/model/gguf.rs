//! Reads the tensors of a GGUF file by their Hugging Face names, with rows in Hugging Face's order.

use super::config::ModelConfig;
use super::matrix::{Matrix, Packed, Quantized, unquantized};
use super::rope::Rope;
use super::{finite, names};
use crate::error::{Error, Result, first_line};
use crate::gguf::{GgufSource, Reader};
use crate::kernels::quant::QuantMatrix;
use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// An open GGUF file.
pub struct GgufFile {
    content: Content,
    reader: Box<dyn Reader>,
    path: String,
    config: ModelConfig,
    /// Number of converted matrices, by original type and result.
    converted: BTreeMap<(String, &'static str), usize>,
    /// Names of the tensors that were read.
    read: HashSet<String>,
}

impl GgufFile {
    /// Opens `source` and reads its header.
    ///
    /// # Errors
    /// A setup error that names the file: not there, not GGUF, or a model that is not supported.
    pub fn open(source: &GgufSource) -> Result<Self> {
        let (content, reader) = source.open()?;
        let path = source.path();
        Ok(Self {
            config: ModelConfig::from_gguf(&content, path)?,
            content,
            reader,
            path: path.display().to_string(),
            converted: BTreeMap::new(),
            read: HashSet::new(),
        })
    }

    /// The file's header.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Whether the file has the tensor `name` (its full Hugging Face name).
    pub fn has(&self, name: &str) -> bool {
        self.gguf_name(name)
            .is_some_and(|name| self.content.tensor_infos.contains_key(&name))
    }

    /// llama.cpp's name of a tensor. That of a norm depends on its place in the layer.
    fn gguf_name(&self, name: &str) -> Option<String> {
        let norm = names::layer_of(name).and_then(|(layer, part)| {
            let norms = &self.config.spec.layers.get(layer)?.norms;
            let norm = norms.gguf_name(part.strip_suffix(".weight")?)?;
            Some(format!("blk.{layer}.{norm}.weight"))
        });
        norm.or_else(|| names::gguf(name))
    }

    /// The matrix `name` (its Hugging Face name without `.weight`), with its rows in this order. It keeps its
    /// blocks if a kernel takes them; f32, f16 and bf16 tensors are converted to `dtype`, or kept if that is
    /// `None`.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has another shape.
    pub fn matrix(
        &mut self,
        name: &str,
        shape: (usize, usize),
        order: Option<&[u32]>,
        dtype: Option<DType>,
        device: &Device,
    ) -> Result<Arc<dyn Matrix>> {
        // Rows are reordered in the memory of the host.
        let read_to = if order.is_some() {
            &Device::Cpu
        } else {
            device
        };
        let tensor = self.read(&format!("{name}.weight"), read_to)?;
        let found = tensor.shape().dims();
        if found != [shape.0, shape.1] {
            return Err(Error::wrong_shape(name, found, &[shape.0, shape.1]));
        }
        let tensor = match order {
            Some(order) => in_order(&tensor, order, device)?,
            None => tensor,
        };
        let kind = tensor.dtype();
        if let Some(own) = float_dtype(kind) {
            return unquantized(&tensor.dequantize(device)?, dtype.or(Some(own)));
        }
        // candle has NEON kernels; on aarch64, ours would be plain Rust.
        if !device.is_cpu() || cfg!(target_arch = "aarch64") {
            return Ok(Arc::new(Quantized::new(tensor)?));
        }
        let (outputs, inputs) = shape;
        let matrix = if QuantMatrix::keeps(kind, inputs) {
            self.count(kind, "tiles of the same blocks");
            QuantMatrix::from_blocks(kind, &tensor.data()?, outputs, inputs)?
        } else {
            self.count(kind, "Q8_0");
            let floats = tensor.dequantize(device)?.flatten_all()?.to_vec1::<f32>()?;
            QuantMatrix::from_floats(&floats, outputs, inputs)?
        };
        Ok(Arc::new(Packed::new(matrix)))
    }

    /// The tensor `name` (its full Hugging Face name), in f32.
    ///
    /// # Errors
    /// A setup error if it is missing.
    pub fn tensor(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        Ok(self.read(name, device)?.dequantize(device)?)
    }

    /// The divisors of the frequencies, one for each pair of a head: those of Llama 3's RoPE scaling, or of a
    /// [`LongScaling`](super::rope::LongScaling).
    ///
    /// # Errors
    /// If it exists but cannot be read.
    pub fn rope_factors(&mut self) -> Result<Option<Vec<f32>>> {
        let of_rope = self.config.ropes().find_map(Rope::factor_tensor);
        let name = of_rope.unwrap_or("rope_freqs.weight");
        if of_rope.is_some() {
            // Those of short or of long contexts, of which only one is used.
            let all = self.content.tensor_infos.keys().cloned();
            self.read
                .extend(all.filter(|name| name.starts_with("rope_factors_")));
        } else if !self.content.tensor_infos.contains_key(name) {
            return Ok(None);
        }
        let tensor = self.raw(name, &Device::Cpu)?.dequantize(&Device::Cpu)?;
        let factors = tensor.flatten_all()?.to_vec1::<f32>()?;
        let pairs = self.config.ropes().next().map_or(0, |rope| rope.width / 2);
        if factors.len() != pairs {
            return Err(Error::wrong_shape(name, &[factors.len()], &[pairs]));
        }
        let max_positions = self.config.max_position_embeddings;
        let is_finite = |rope: &Rope| rope.has_finite_angles(max_positions, Some(&factors));
        if !self.config.ropes().all(is_finite) {
            return Err(Error::setup(format!(
                "{}: {name} makes angles infinite: a factor is too small",
                self.path
            )));
        }
        Ok(Some(factors))
    }

    /// Logs in one line which block types were converted.
    pub fn log_conversions(&self) {
        let parts = self
            .converted
            .iter()
            .map(|((from, to), count)| format!("{count} {from} to {to}"));
        let parts: Vec<String> = parts.collect();
        if !parts.is_empty() {
            tracing::info!("weights converted for this CPU: {}", parts.join(", "));
        }
    }

    fn count(&mut self, from: GgmlDType, to: &'static str) {
        *self.converted.entry((format!("{from:?}"), to)).or_default() += 1;
    }

    /// llama.cpp's names of the tensors of the file that were not read.
    pub fn unread(&self) -> Vec<String> {
        let names = self.content.tensor_infos.keys();
        names
            .filter(|name| !self.read.contains(*name))
            .cloned()
            .collect()
    }

    /// A tensor as it is stored, checked to be finite.
    fn raw(&mut self, name: &str, device: &Device) -> Result<QTensor> {
        let fail = |what: String| Error::setup(format!("{}: {what}", self.path));
        let tensor = self.content.tensor(&mut self.reader, name, &Device::Cpu);
        let tensor = tensor.map_err(|e| fail(first_line(&e)))?;
        let data = tensor.data()?;
        if !finite::blocks(tensor.dtype(), &data) {
            return Err(fail(format!("tensor {name} contains NaN or infinity")));
        }
        self.read.insert(name.to_owned());
        if device.is_cpu() {
            drop(data);
            return Ok(tensor);
        }
        let storage = QStorage::from_data(data, device, tensor.dtype())?;
        Ok(QTensor::new(storage, tensor.shape().clone())?)
    }

    fn read(&mut self, name: &str, device: &Device) -> Result<QTensor> {
        let gguf = self
            .gguf_name(name)
            .ok_or_else(|| Error::internal(format!("no GGUF name is known for tensor {name}")))?;
        self.raw(&gguf, device)
    }
}

/// A tensor of which row `i` is row `order[i]` of `tensor`. Whole rows are moved, so no value changes.
fn in_order(tensor: &QTensor, order: &[u32], device: &Device) -> Result<QTensor> {
    let data = tensor.data()?;
    let row_bytes = data.len() / order.len().max(1);
    let mut out = Vec::with_capacity(data.len());
    for &row in order {
        out.extend_from_slice(&data[row as usize * row_bytes..][..row_bytes]);
    }
    let storage = QStorage::from_data(Cow::Owned(out), device, tensor.dtype())?;
    Ok(QTensor::new(storage, tensor.shape().clone())?)
}

/// The dtype of a tensor that is not quantized; `None` if it is quantized.
fn float_dtype(kind: GgmlDType) -> Option<DType> {
    match kind {
        GgmlDType::F32 => Some(DType::F32),
        GgmlDType::F16 => Some(DType::F16),
        GgmlDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}
