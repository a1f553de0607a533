//! Reads the tensors of a GGUF file by their Hugging Face names, with rows in Hugging Face's order.

use super::finite;
use crate::config::ModelConfig;
use crate::layers::rope::RopeSpec;
use crate::matrix::{Matrix, Packed, WeightForm, quantized, unquantized_for};
use crate::names;
use crate::spec::Norms;
use crate::weights::dtypes::Dtypes;
use candle_core::quantized::{QStorage, QTensor};
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::gguf::{GgufParts, GgufSource, Header, TensorPlace};
use foretoken_kernels::quant::{BlockType, QuantMatrix};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// The open GGUF files of a model.
pub struct GgufFile {
    header: Header,
    parts: GgufParts,
    path: String,
    config: ModelConfig,
    /// Number of converted matrices, by original type and result.
    converted: BTreeMap<(BlockType, &'static str), usize>,
    /// Names of the tensors that were read.
    read: HashSet<String>,
}

impl GgufFile {
    /// Opens `source` and reads its header.
    ///
    /// # Errors
    /// A setup error that names the file: not there, not GGUF, or a model that is not supported.
    pub fn open(source: &GgufSource) -> Result<Self> {
        let (header, parts) = source.open()?;
        let path = source.path();
        Ok(Self {
            config: ModelConfig::from_gguf(&header, path)?,
            header,
            parts,
            path: path.display().to_string(),
            converted: BTreeMap::new(),
            read: HashSet::new(),
        })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The type and the shape of the tensor `name` (its full Hugging Face name), which counts as read.
    ///
    /// # Errors
    /// A setup error if it is missing.
    pub fn describe(&mut self, name: &str) -> Result<(BlockType, Vec<usize>)> {
        let gguf = self.known_name(name)?;
        let place = self.place(&gguf)?;
        let found = (place.kind, place.dims.clone());
        self.read.insert(gguf);
        Ok(found)
    }

    /// The shape of the tensor that llama.cpp calls `name`, if there is one.
    pub fn dims(&self, name: &str) -> Option<&[usize]> {
        let place = self.header.tensors.get(name)?;
        Some(&place.dims)
    }

    /// The values of the tensor that llama.cpp calls `name`, row after row.
    ///
    /// # Errors
    /// A setup error if it is missing, cannot be read, or is not finite.
    pub fn values(&mut self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.raw(name)?.floats(&Device::Cpu)?;
        Ok(tensor.flatten_all()?.to_vec1()?)
    }

    /// Counts the tensor `name` (its full Hugging Face name) as read.
    pub fn skip(&mut self, name: &str) {
        self.read.extend(self.gguf_name(name));
    }

    /// Whether the file has the tensor `name` (its full Hugging Face name).
    pub fn has(&self, name: &str) -> bool {
        self.gguf_name(name)
            .is_some_and(|name| self.header.tensors.contains_key(&name))
    }

    /// llama.cpp's name of a tensor. That of a norm depends on its place in the layer.
    fn gguf_name(&self, name: &str) -> Option<String> {
        let norm = names::layer_of(name).and_then(|(layer, part)| {
            let norms = self.config.spec.layers.get(layer).map(|layer| &layer.norms);
            // A layer that predicts further tokens is not among them.
            let norms = norms.unwrap_or(&Norms::BEFORE);
            let norm = norms.gguf_name(part.strip_suffix(".weight")?)?;
            let full = |norm: &str| format!("blk.{layer}.{norm}.weight");
            // Seed-OSS has the norm before the MLP under this name.
            let other = full("post_attention_norm");
            let tensors = &self.header.tensors;
            let is_other = norms.after_attention.is_none()
                && norm == "ffn_norm"
                && !tensors.contains_key(&full(norm))
                && tensors.contains_key(&other);
            Some(if is_other { other } else { full(norm) })
        });
        let known = norm.or_else(|| names::gguf(name))?;
        // LFM2 has another name for the norm before the output layer, and Falcon-H1 for that before the MLP.
        let other = match known.strip_suffix("_norm.weight") {
            Some("output") => Some("token_embd_norm.weight".to_owned()),
            Some(part) if part.ends_with(".ffn") => Some(format!("{part}_norm")),
            _ => None,
        };
        let tensors = &self.header.tensors;
        let is_there =
            |other: &String| !tensors.contains_key(&known) && tensors.contains_key(other);
        Some(other.filter(is_there).unwrap_or(known))
    }

    /// The matrix `name` (its Hugging Face name without `.weight`), with its rows, or some of them, in this order. It keeps its
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
        dtypes: &Dtypes,
        device: &Device,
    ) -> Result<Arc<dyn Matrix>> {
        let mut tensor = self.weights(name, dtypes)?;
        if tensor.dims != [shape.0, shape.1] {
            return Err(Error::wrong_shape(name, &tensor.dims, &[shape.0, shape.1]));
        }
        if let Some(order) = order {
            tensor.data = in_order(&tensor.data, shape.0, order);
            tensor.dims[0] = order.len();
        }
        let shape = (tensor.dims[0], shape.1);
        self.matrix_of(tensor, shape, dtypes, device)
    }

    /// The `count` matrices of the tensor `name` (its Hugging Face name without `.weight`), one after another.
    ///
    /// # Errors
    /// Returns the errors of [`GgufFile::matrix`].
    pub fn matrices(
        &mut self,
        name: &str,
        count: usize,
        shape: (usize, usize),
        dtypes: &Dtypes,
        device: &Device,
    ) -> Result<Vec<Arc<dyn Matrix>>> {
        let stored = self.weights(name, dtypes)?;
        let dims = [count, shape.0, shape.1];
        if stored.dims != dims {
            return Err(Error::wrong_shape(name, &stored.dims, &dims));
        }
        // Rows are whole blocks, so each matrix has as many bytes.
        let parts = stored.data.chunks_exact(stored.data.len() / count);
        let parts = parts.map(|data| Stored {
            kind: stored.kind,
            dims: vec![shape.0, shape.1],
            data: data.to_vec(),
        });
        parts
            .map(|part| self.matrix_of(part, shape, dtypes, device))
            .collect()
    }

    fn matrix_of(
        &mut self,
        tensor: Stored,
        shape: (usize, usize),
        dtypes: &Dtypes,
        device: &Device,
    ) -> Result<Arc<dyn Matrix>> {
        let (outputs, inputs) = shape;
        let kind = tensor.kind;
        match WeightForm::of_gguf(kind, inputs, dtypes.matrices, dtypes.on_gpu) {
            WeightForm::Dense(dtype) => {
                unquantized_for(&tensor.floats(device)?, Some(dtype), dtypes.on_gpu)
            }
            WeightForm::Tiles(other) if other != kind => {
                self.count(kind, "Q8_0");
                let floats = tensor.floats(&Device::Cpu)?.flatten_all()?;
                let floats = floats.to_vec1::<f32>()?;
                let matrix = QuantMatrix::from_floats(&floats, outputs, inputs)?;
                Ok(Arc::new(Packed::new(matrix)))
            }
            form => {
                if form != WeightForm::Blocks(kind) {
                    self.count(kind, "tiles of the same blocks");
                }
                quantized(form, tensor.data, shape, device)
            }
        }
    }

    /// The tensor `name` (its full Hugging Face name), in f32.
    ///
    /// # Errors
    /// A setup error if it is missing.
    pub fn tensor(&mut self, name: &str, device: &Device) -> Result<Tensor> {
        self.read(name)?.floats(device)
    }

    /// The divisors of the frequencies, one for each pair of a head: those of Llama 3's RoPE scaling, or of a
    /// [`LongScaling`](crate::layers::rope::LongScaling).
    ///
    /// # Errors
    /// If it exists but cannot be read.
    pub fn rope_factors(&mut self) -> Result<Option<Vec<f32>>> {
        let takes = |rope: &&RopeSpec| rope.factor_tensor().is_some();
        let rope = self.config.ropes().find(takes);
        let of_rope = rope.and_then(RopeSpec::factor_tensor);
        let rope = rope.or_else(|| self.config.ropes().next());
        let pairs = rope.map_or(0, |rope| rope.width / 2);
        let name = of_rope.unwrap_or("rope_freqs.weight");
        if of_rope.is_some() {
            // The factors of short and of long contexts, of which only one tensor is used.
            let all = self.header.tensors.keys().cloned();
            self.read
                .extend(all.filter(|name| name.starts_with("rope_factors_")));
        } else if !self.header.tensors.contains_key(name) {
            return Ok(None);
        }
        let tensor = self.raw(name)?.floats(&Device::Cpu)?;
        let factors = tensor.flatten_all()?.to_vec1::<f32>()?;
        if factors.len() != pairs {
            return Err(Error::wrong_shape(name, &[factors.len()], &[pairs]));
        }
        let max_positions = self.config.max_position_embeddings;
        let is_finite = |rope: &RopeSpec| rope.has_finite_angles(max_positions, Some(&factors));
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
            tracing::info!("weights converted for this device: {}", parts.join(", "));
        }
    }

    fn count(&mut self, from: BlockType, to: &'static str) {
        *self.converted.entry((from, to)).or_default() += 1;
    }

    /// llama.cpp's names of the tensors of the file that were not read.
    pub fn unread(&self) -> Vec<String> {
        let names = self.header.tensors.keys();
        names
            .filter(|name| !self.read.contains(*name))
            .cloned()
            .collect()
    }

    fn place(&self, name: &str) -> Result<&TensorPlace> {
        let place = self.header.tensors.get(name);
        place.ok_or_else(|| {
            let path = &self.path;
            Error::setup(format!("{path}: cannot find tensor {name}"))
        })
    }

    /// A tensor as it is stored, checked to be finite.
    fn raw(&mut self, name: &str) -> Result<Stored> {
        let fail = |what: String| Error::setup(format!("{}: {what}", self.path));
        let place = self.place(name)?.clone();
        let data = self.parts.read(&place);
        let data = data.map_err(|e| fail(format!("tensor {name}: {e}")))?;
        if !finite::blocks(place.kind, &data) {
            return Err(fail(format!("tensor {name} contains NaN or infinity")));
        }
        self.read.insert(name.to_owned());
        Ok(Stored {
            kind: place.kind,
            dims: place.dims,
            data,
        })
    }

    fn read(&mut self, name: &str) -> Result<Stored> {
        let gguf = self.known_name(name)?;
        self.raw(&gguf)
    }

    /// The tensor of matrices `name` (without `.weight`), whose values weights may have.
    fn weights(&mut self, name: &str, dtypes: &Dtypes) -> Result<Stored> {
        let name = self.known_name(&format!("{name}.weight"))?;
        let stored = self.raw(&name)?;
        if stored.kind == BlockType::Mxfp4 {
            dtypes.check_mxfp4(&stored.data, &name)?;
        }
        Ok(stored)
    }

    fn known_name(&self, name: &str) -> Result<String> {
        let known = self.gguf_name(name);
        known.ok_or_else(|| Error::internal(format!("no GGUF name is known for tensor {name}")))
    }
}

/// The rows `order` of the `data` of so many `rows`, in this order. Whole rows are moved, so no value changes.
pub(crate) fn in_order(data: &[u8], rows: usize, order: &[u32]) -> Vec<u8> {
    let bytes = data.len() / rows.max(1);
    let row = |&row: &u32| &data[row as usize * bytes..][..bytes];
    order.iter().map(row).collect::<Vec<_>>().concat()
}

/// A tensor as it is stored.
struct Stored {
    kind: BlockType,
    dims: Vec<usize>,
    data: Vec<u8>,
}

impl Stored {
    /// The tensor's values, in f32.
    fn floats(self, device: &Device) -> Result<Tensor> {
        if let Some(kind) = self.kind.candles() {
            // On the CPU, so that no build needs candle's kernels for blocks on a GPU.
            let storage = QStorage::from_data(Cow::Owned(self.data), &Device::Cpu, kind)?;
            let values = QTensor::new(storage, self.dims)?.dequantize(&Device::Cpu)?;
            return Ok(values.to_device(device)?);
        }
        let inputs = self.dims.last().copied().unwrap_or(1);
        let outputs = self.dims.iter().product::<usize>() / inputs;
        let tiles = QuantMatrix::from_blocks(self.kind, &self.data, outputs, inputs)?;
        Ok(Tensor::from_vec(tiles.dequantize(), self.dims, device)?)
    }
}
