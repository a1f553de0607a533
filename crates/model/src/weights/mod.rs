//! The sources of weights: safetensors, a GGUF file, or a seed. All use Hugging Face's names.

pub(crate) mod dtypes;
pub(crate) mod dummy;
mod heads;
mod host_experts;
mod ids;
pub(crate) mod inventory;
mod noted;
mod packed;
mod requantize;
mod stack;
mod vectors;

use crate::checkpoint::gguf::GgufFile;
use crate::checkpoint::pickle;
use crate::checkpoint::safetensors_header::TensorHeaders;
use crate::checkpoint::shards::safetensors_files;
use crate::checkpoint::tensor_source::TensorSource;
use crate::config::ModelConfig;
use crate::layers::linear::{Embedding, Linear};
use crate::matrix::{self, Matrix, Unread};
use crate::names::{self, Layout};
use crate::source::ModelSource;
use crate::split::LayerSplit;
use candle_core::{DType, Device, Tensor};
use dtypes::Dtypes;
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::files;
use foretoken_kernels::quant::BlockType;
use host_experts::HostExperts;
use inventory::SharedInventory;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

pub use stack::{Stack, StackForm};

/// An open checkpoint, and the dtypes and the device that its tensors are converted to.
pub struct Weights {
    source: TensorSource,
    layout: Layout,
    /// Parts of names, ours and those of the checkpoint.
    names: &'static [(&'static str, &'static str)],
    dtypes: Dtypes,
    device: Device,
    /// How matrices are packed, if they are.
    packing: Option<packed::Packing>,
    /// The names of the tensors that were read. A GGUF file counts them itself.
    read: HashSet<String>,
    /// Filled if only headers are read.
    inventory: Option<SharedInventory>,
    /// Where the experts of layers are.
    experts: HostExperts,
    /// The GPUs of layers, if there are several.
    split: Option<LayerSplit>,
}

impl Weights {
    /// Maps the safetensors of a folder: the files that `model.safetensors.index.json` names, otherwise
    /// `model.safetensors`.
    ///
    /// # Errors
    /// A setup error that names the missing or broken file.
    pub fn safetensors(folder: &Path, dtypes: Dtypes, device: &Device) -> Result<Self> {
        let source = TensorSource::safetensors(folder)?;
        Ok(Self {
            layout: Layout::of(|name| source.has(name)),
            ..Self::new(source, dtypes, device)
        })
    }

    /// The weights of a head's folder: safetensors, otherwise a pickle.
    ///
    /// # Errors
    /// A setup error that names the missing or broken file.
    pub fn of_head(folder: &Path, dtypes: Dtypes, device: &Device) -> Result<Self> {
        match (safetensors_files(folder), pickle::file_in(folder)) {
            (Err(_), Some(pickled)) => {
                let source = TensorSource::Pickled(pickle::read(&pickled)?);
                Ok(Self::new(source, dtypes, device))
            }
            _ => Self::safetensors(folder, dtypes, device),
        }
    }

    /// Opens the checkpoint of `source`, to read single tensors on the CPU.
    ///
    /// # Errors
    /// A setup error that names the missing or broken file.
    pub fn open(source: &ModelSource) -> Result<Self> {
        let dtypes = Dtypes::all(DType::F32);
        match source {
            ModelSource::Gguf(file) => Ok(Self::gguf(GgufFile::open(file)?, dtypes, &Device::Cpu)),
            ModelSource::Folder(folder) => {
                Self::safetensors(files::folder_of(folder), dtypes, &Device::Cpu)
            }
        }
    }

    /// The tensors of an open GGUF file.
    pub fn gguf(file: GgufFile, dtypes: Dtypes, device: &Device) -> Self {
        Self::new(TensorSource::Gguf(Box::new(file)), dtypes, device)
    }

    /// The tensors of safetensors that are not on this machine, for `Weights::headers_only`.
    pub fn headers(tensors: Arc<TensorHeaders>, dtypes: Dtypes, device: &Device) -> Self {
        let source = TensorSource::Headers(tensors);
        Self {
            layout: Layout::of(|name| source.has(name)),
            ..Self::new(source, dtypes, device)
        }
    }

    /// Random weights from `seed`, scaled so that activations keep their magnitude from layer to layer.
    pub fn dummy(seed: u64, dtypes: Dtypes, device: &Device) -> Self {
        Self::new(TensorSource::Dummy(seed), dtypes, device)
    }

    fn new(source: TensorSource, dtypes: Dtypes, device: &Device) -> Self {
        Self {
            source,
            layout: Layout::Model,
            names: &[],
            dtypes,
            device: device.clone(),
            packing: None,
            read: HashSet::new(),
            inventory: None,
            experts: HostExperts::default(),
            split: None,
        }
    }

    /// Sets the names of the checkpoint: the first part of each pair of `names` is replaced by the second part, one
    /// pair after the other. GGUF files ignore `names`: they have one name for each tensor, whatever the architecture.
    pub(crate) fn with_names(self, names: &'static [(&'static str, &'static str)]) -> Self {
        let names = if self.are_gguf() { &[] } else { names };
        Self { names, ..self }
    }

    /// The name in the checkpoint of the tensor that the code calls `name`.
    fn stored_name(&self, name: &str) -> String {
        let replaced = |name: String, (ours, theirs): &(&str, &str)| name.replace(ours, theirs);
        let name = self.names.iter().fold(name.to_owned(), replaced);
        self.layout.name(&name).into_owned()
    }

    /// Puts the layers of the decoder on the GPUs of `split`, and all else on the first one.
    pub(crate) fn with_split(self, split: LayerSplit) -> Self {
        let split = Some(split);
        Self { split, ..self }
    }

    /// Reads only headers, of which `inventory` gets the list: shapes and names are checked as ever, but
    /// matrices have no values and other tensors are zero.
    pub(crate) fn headers_only(self, inventory: Option<&SharedInventory>) -> Self {
        let inventory = inventory.cloned();
        Self { inventory, ..self }
    }

    /// The devices of the layers of a decoder of `layers` layers.
    pub(crate) fn split_of(&self, layers: usize) -> LayerSplit {
        let split = self.split.clone();
        split.unwrap_or_else(|| LayerSplit::on_one(&self.device, layers))
    }

    /// The dtypes of activations, matrices, and K and V.
    pub fn dtypes(&self) -> Dtypes {
        self.dtypes
    }

    /// The device of the tensors that are read now.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The layer `name` (without `.weight`) of shape `[outputs, inputs]`.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing or has another shape.
    pub fn linear(&mut self, name: &str, shape: (usize, usize), bias: bool) -> Result<Linear> {
        self.linear_in_order(name, shape, bias, None)
    }

    /// As [`Weights::linear`], but output `i` is that of row `order[i]` of the checkpoint; there may be fewer outputs than
    /// rows.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(crate) fn linear_in_order(
        &mut self,
        name: &str,
        shape: (usize, usize),
        bias: bool,
        order: Option<&[u32]>,
    ) -> Result<Linear> {
        let matrix = self.matrix(name, shape, order)?;
        let bias = self.bias(name, shape.0, bias)?;
        let bias = bias.map(|bias| in_order(bias, order)).transpose()?;
        Ok(Linear::new(matrix, bias).named(name, order))
    }

    /// The output layer `name` (without `.weight`) of a model or head like `config`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(crate) fn output_linear(&mut self, name: &str, config: &ModelConfig) -> Result<Linear> {
        let ids = config.output_ids.as_deref();
        let rows = ids.map_or(config.output_size(), |_| config.vocab_size);
        self.linear_in_order(name, (rows, config.hidden_size), false, ids)
    }

    /// The token embedding `name` (without `.weight`), `[vocab, hidden]`.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn embedding(&mut self, name: &str, shape: (usize, usize)) -> Result<Embedding> {
        let matrix = self.matrix(name, shape, None)?;
        if let Some(shared) = &self.inventory {
            inventory::lock(shared).last_is_embedding();
        }
        Ok(Embedding::new(matrix, self.dtypes.activations))
    }

    /// The embedding of a draft head: its own if there is one, otherwise that of its target.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub(crate) fn embedding_of_head(
        &mut self,
        head: &ModelConfig,
        target: &Embedding,
    ) -> Result<Embedding> {
        if self.has("embed_tokens.weight") {
            self.embedding("embed_tokens", (head.vocab_size, head.hidden_size))
        } else {
            Ok(target.clone())
        }
    }

    /// Whether the checkpoint was saved without its output layer, for its hidden states.
    pub(crate) fn are_without_head(&self) -> bool {
        self.layout == Layout::Bare && !self.has("lm_head.weight")
    }

    /// Whether the checkpoint has an output layer of its own; `None` = it has no files that tell.
    pub(crate) fn have_head(&self) -> Option<bool> {
        match self.source {
            TensorSource::Dummy(_) => None,
            _ => Some(self.has("lm_head.weight")),
        }
    }

    /// Whether the checkpoint has the tensor `name`. Random weights have every tensor.
    pub fn has(&self, name: &str) -> bool {
        let is_packed = |name| self.has_packed(name);
        self.source.has(&self.stored_name(name))
            || name.strip_suffix(".weight").is_some_and(is_packed)
    }

    /// The weight of a norm, `[len]` in the compute dtype: `offset` more than what is stored.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn norm(&mut self, name: &str, len: usize, offset: f32) -> Result<Tensor> {
        let stored = self.stored(&format!("{name}.weight"), &[len])?;
        let dtype = self.dtypes.activations;
        match offset {
            0. => Ok(stored.to_dtype(dtype)?),
            // In f32, as 1 and a small number round to 1.
            _ => Ok((stored.to_dtype(DType::F32)? + f64::from(offset))?.to_dtype(dtype)?),
        }
    }

    /// The tensor `name` (its full Hugging Face name) in f32, whatever its shape; a quantized one is
    /// dequantized.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing, or the weights are random.
    pub fn dense(&mut self, name: &str) -> Result<Tensor> {
        let name = &*self.stored_name(name);
        Ok(self
            .source
            .tensor(name, &self.device)?
            .to_dtype(DType::F32)?)
    }

    /// The dtype in which the matrix `name` (its full Hugging Face name) is stored, f32 if it is quantized, and
    /// its blocks if it is.
    ///
    /// # Errors
    /// A setup error that names the tensor if it is missing.
    pub fn stored_as(&mut self, name: &str) -> Result<(DType, Option<BlockType>)> {
        let TensorSource::Gguf(file) = &mut self.source else {
            let dtype = self.source.describe(name)?.map(|(_, dtype)| dtype);
            return Ok((dtype.unwrap_or(DType::F32), None));
        };
        let kind = file.describe(name)?.0;
        let blocks = Some(kind).filter(|kind| kind.float().is_none());
        Ok((kind.float().unwrap_or(DType::F32), blocks))
    }

    /// The values, in f32, of `weight` `[outputs, inputs]` after it was loaded, unless they do not fit blocks.
    pub fn as_loaded(&self, weight: &Tensor) -> Result<Tensor> {
        self.matrix_of(weight, "of a head")?.dequantize()
    }

    /// The divisors of the RoPE frequencies, if the checkpoint contains them.
    ///
    /// # Errors
    /// If the tensor exists but cannot be read.
    pub fn rope_factors(&mut self) -> Result<Option<Vec<f32>>> {
        match &mut self.source {
            TensorSource::Gguf(file) => file.rope_factors(),
            _ => Ok(None),
        }
    }

    /// Leaves the tensor `name` (its full Hugging Face name) unread, if there is one.
    pub fn skip(&mut self, name: &str) {
        let name = self.stored_name(name);
        match &mut self.source {
            TensorSource::Gguf(file) => file.skip(&name),
            _ => drop(self.read.insert(name)),
        }
    }

    /// The prefix in the checkpoint of the names that begin with `start` at Hugging Face.
    pub(crate) fn stored_start(&self, start: &str) -> String {
        match (names::layer_of(start), self.are_gguf()) {
            (Some((layer, _)), true) => names::gguf_layer(layer),
            _ => self.stored_name(start),
        }
    }

    /// Call it when everything is loaded: logs in one line what was converted.
    ///
    /// # Errors
    /// If the checkpoint contains a tensor that was not read, and that is not `skipped` by its name: then the model
    /// computes something that we do not implement.
    pub fn finish(&self, skipped: impl Fn(&str) -> bool) -> Result<()> {
        if let TensorSource::Gguf(file) = &self.source {
            file.log_conversions();
        }
        let unread = self.source.unread(&self.read);
        let is_known = |name: &String| names::is_redundant(name) || skipped(name);
        let mut odd = unread.into_iter().filter(|name| !is_known(name));
        match odd.next() {
            None => Ok(()),
            Some(name) => Err(Error::setup(format!(
                "tensor {} (and {} more) is not supported: no layer of this architecture reads it",
                clipped(&name),
                odd.count()
            ))),
        }
    }

    /// Whether only headers are read.
    pub(crate) fn are_headers(&self) -> bool {
        self.inventory.is_some()
    }

    /// Whether they are random.
    pub(crate) fn are_random(&self) -> bool {
        matches!(self.source, TensorSource::Dummy(_))
    }

    /// Whether they are those of a GGUF file.
    pub(crate) fn are_gguf(&self) -> bool {
        matches!(self.source, TensorSource::Gguf(_))
    }

    /// The matrix `name` (without `.weight`) of `shape`, with its outputs in this order.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn matrix(
        &mut self,
        name: &str,
        shape: (usize, usize),
        order: Option<&[u32]>,
    ) -> Result<Arc<dyn Matrix>> {
        if let Some(matrix) = self.packed_matrix(name, shape, order)? {
            return Ok(matrix);
        }
        if self.inventory.is_some() {
            let (dims, shape) = ([shape.0, shape.1], ordered_shape(shape, order));
            let kept = [shape.0, shape.1];
            let format = self
                .note(
                    &format!("{name}.weight"),
                    &dims,
                    Some(&kept),
                    self.dtypes.activations,
                )?
                .name();
            return Ok(Arc::new(Unread { shape, format }));
        }
        match &mut self.source {
            TensorSource::Gguf(file) => file.matrix(name, shape, order, &self.dtypes, &self.device),
            _ => {
                let name = format!("{name}.weight");
                let tensor = in_order(self.stored(&name, &[shape.0, shape.1])?, order)?;
                self.matrix_of(&tensor, &name)
            }
        }
    }

    /// The matrix of an unquantized tensor, which is called `name`.
    fn matrix_of(&self, tensor: &Tensor, name: &str) -> Result<Arc<dyn Matrix>> {
        let form = self.dtypes.form(tensor.dtype(), tensor.dims());
        let Some(kind) = form.blocks() else {
            return matrix::unquantized_for(tensor, self.dtypes.matrices, self.dtypes.on_gpu);
        };
        let named = |e| Error::setup(format!("tensor {name}: {e}"));
        let blocks = requantize::blocks(tensor, kind).map_err(named)?;
        matrix::quantized(form, blocks, tensor.dims2()?, &self.device)
    }

    /// The tensor `name` (its full Hugging Face name) of shape `dims`, in the compute dtype.
    ///
    /// # Errors
    /// Returns the errors of [`Weights::linear`].
    pub fn tensor(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        let tensor = self.stored(name, dims)?;
        Ok(tensor.to_dtype(self.dtypes.activations)?)
    }

    /// As [`Weights::tensor`], but in f32.
    pub(crate) fn tensor_f32(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        Ok(self
            .stored_for(name, dims, DType::F32)?
            .to_dtype(DType::F32)?)
    }

    /// A tensor in the dtype in which the source stores it, which becomes one of activations.
    fn stored(&mut self, name: &str, dims: &[usize]) -> Result<Tensor> {
        self.stored_for(name, dims, self.dtypes.activations)
    }

    /// A tensor in the dtype in which the source stores it, which becomes one in `dtype`.
    fn stored_for(&mut self, name: &str, dims: &[usize], dtype: DType) -> Result<Tensor> {
        if self.inventory.is_some() {
            self.note(name, dims, None, dtype)?;
            return Ok(Tensor::zeros(dims, DType::F32, &self.device)?);
        }
        let name = &*self.stored_name(name);
        let tensor = if let TensorSource::Dummy(seed) = self.source {
            dummy::tensor(seed, name, dims)?
        } else {
            self.read.insert(name.to_owned());
            self.source.tensor(name, &self.device)?
        };
        if tensor.dims() != dims {
            return Err(Error::wrong_shape(name, tensor.dims(), dims));
        }
        Ok(tensor.to_device(&self.device)?)
    }
}

/// The shape of a matrix of this `shape` after its rows were taken in this order.
pub(crate) fn ordered_shape(shape: (usize, usize), order: Option<&[u32]>) -> (usize, usize) {
    (order.map_or(shape.0, <[u32]>::len), shape.1)
}

/// `tensor` with its rows in this order.
fn in_order(tensor: Tensor, order: Option<&[u32]>) -> Result<Tensor> {
    match order {
        None => Ok(tensor),
        Some(order) => Ok(tensor.index_select(&Tensor::new(order, tensor.device())?, 0)?),
    }
}
