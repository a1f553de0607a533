//! Reads adapters in PEFT's layout, checked against the base model.

use super::config::LoraConfig;
use super::place::{AdapterWeights, Place};
use super::{LinearPart, LoraAdapter};
use crate::checkpoint::finite;
use crate::checkpoint::safetensors_header::{self, TensorHeaders};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result, caught, clipped};
use foretoken_core::model::{Adapter, AdapterLoader};
use foretoken_kernels::{LoraPair, LoraPart};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

/// The file's name.
const FILE: &str = "adapter_model.safetensors";
/// Where names of modules begin.
const PREFIX: &str = "base_model.model.";
/// What precedes the number of a layer in the names of modules, in different classes.
const LAYERS: [&str; 4] = [
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "layers.",
];
const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";
/// Maximum bytes of a value in a file.
const MAX_VALUE_BYTES: usize = 4;

/// What adapters can change of a base model. Clones share it.
#[derive(Debug, Clone)]
pub struct LoraTarget {
    /// The weights of each linear layer.
    sites: Arc<[Vec<LinearPart>]>,
    place: Place,
}

impl AdapterLoader for LoraTarget {
    fn load(&self, name: &str, folder: &Path, max_rank: usize) -> Result<Arc<dyn Adapter>> {
        caught("the adapter", || {
            let config = LoraConfig::read(folder)?;
            let file = folder.join(FILE);
            let found = self.read(&config, &file, max_rank);
            let (weights, rank, bytes) = found.map_err(|e| Error::in_file(&file, e))?;
            Ok(Arc::new(LoraAdapter {
                name: name.to_owned(),
                folder: folder.to_owned(),
                id: RandomState::new().hash_one(name),
                weights,
                rank,
                bytes,
            }) as Arc<dyn Adapter>)
        })
    }
}

impl LoraTarget {
    /// The target of a model with these linear layers, each on one of `devices` by its index, with activations in
    /// `dtype`. Their weights have the names of Hugging Face.
    pub(crate) fn new(
        sites: Vec<(usize, Vec<LinearPart>)>,
        devices: &[Device],
        dtype: DType,
    ) -> Self {
        let (gpus, sites): (_, Vec<_>) = sites.into_iter().unzip();
        Self {
            sites: sites.into(),
            place: Place::new(devices.to_vec(), gpus, dtype),
        }
    }

    /// Frees the memory on a GPU of adapters that nobody has any more. The thread that computes with the model calls it
    /// before each forward.
    pub(crate) fn free_unused(&self) {
        self.place.free_unused();
    }

    /// The weights that adapters can change: their names without `.weight`, outputs and inputs.
    pub fn weights(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let parts = self.sites.iter().flatten();
        parts.map(|part| (part.name.as_str(), part.outputs, part.inputs))
    }

    /// The largest size of an adapter of this rank in the memory of the model's device, in bytes.
    pub fn max_bytes(&self, rank: usize) -> u64 {
        self.max_bytes_of(rank, |_| true)
    }

    /// That in the memory of the GPU with this index, of a model on several.
    pub fn max_bytes_on(&self, gpu: usize, rank: usize) -> u64 {
        self.max_bytes_of(rank, |site| self.place.gpu(site) == gpu)
    }

    fn max_bytes_of(&self, rank: usize, is_meant: impl Fn(usize) -> bool) -> u64 {
        let sites = self.sites.iter().enumerate();
        let parts = sites.filter(|&(site, _)| is_meant(site));
        let sums = parts
            .flat_map(|(_, parts)| parts)
            .map(|part| (part.outputs + part.inputs) as u64);
        sums.sum::<u64>()
            .saturating_mul(rank as u64)
            .saturating_mul(self.place.value_bytes(MAX_VALUE_BYTES) as u64)
    }

    /// The weights, the largest rank, and the size of all.
    fn read(
        &self,
        config: &LoraConfig,
        file: &Path,
        max_rank: usize,
    ) -> Result<(AdapterWeights, usize, u64)> {
        if !file.is_file() {
            return Err(Error::setup(format!(
                "it is missing, or not a file: adapters are read from {FILE}"
            )));
        }
        let mut opened = File::open(file).map_err(|e| Error::setup(e.to_string()))?;
        let mut headers = TensorHeaders::new();
        safetensors_header::read(&mut opened, &mut headers)?;
        let wanted = self.check(config, &headers, max_rank)?;
        // All tensors are as large as they may be, and their bytes are in the file.
        let tensors = read_tensors(&mut opened, &headers)?;
        let sites = self.sites.iter().enumerate().map(|(index, parts)| {
            let parts = parts.iter().enumerate().map(|(place, part)| {
                let pair = wanted.get(&(index, place));
                let pair = pair.map(|found| found.pair(part, &tensors));
                Ok::<_, Error>(LoraPart {
                    outputs: part.outputs,
                    inputs: part.inputs,
                    pair: pair.transpose()?,
                })
            });
            parts.collect::<Result<Vec<_>>>()
        });
        let sites = sites.collect::<Result<Vec<_>>>()?;
        let rank = wanted.values().map(|found| found.rank).max();
        let bytes = tensors.values().map(|tensor| {
            let own = tensor.dtype().size_in_bytes();
            (tensor.elem_count() * self.place.value_bytes(own)) as u64
        });
        let bytes = bytes.sum();
        Ok((self.place.put(sites)?, rank.unwrap_or_default(), bytes))
    }

    /// Which part of which layer each pair of tensors is for; every tensor is one of a pair.
    fn check(
        &self,
        config: &LoraConfig,
        headers: &TensorHeaders,
        max_rank: usize,
    ) -> Result<HashMap<(usize, usize), Found>> {
        let parts = self.sites.iter().enumerate().flat_map(|(index, parts)| {
            let parts = parts.iter().enumerate();
            parts.map(move |(place, part)| (&*part.name, ((index, place), part)))
        });
        let parts: HashMap<&str, _> = parts.collect();
        let mut wanted = HashMap::new();
        let mut names: Vec<&String> = headers.keys().collect();
        names.sort();
        for name in &names {
            let module = module_of(name)?;
            let known = plain_name(module);
            let known = known.as_deref().unwrap_or(module);
            let Some(&(site, part)) = parts.get(known) else {
                return Err(self.unknown(name));
            };
            let Some(b) = name.strip_suffix(A).map(|start| format!("{start}{B}")) else {
                let a = format!("{}{A}", name.trim_end_matches(B));
                if !headers.contains_key(&a) {
                    return Err(Error::setup(format!("tensor {} is missing", clipped(&a))));
                }
                continue;
            };
            let (rank, scale) = config.of_module(module).map_err(Error::setup)?;
            if rank > max_rank {
                return Err(Error::setup(format!(
                    "rank {rank} is over the limit: raise --max-lora-rank, which is {max_rank}"
                )));
            }
            check_shape(headers, name, [rank, part.inputs])?;
            check_shape(headers, &b, [part.outputs, rank])?;
            let a = (*name).clone();
            let found = Found { a, b, rank, scale };
            if wanted.insert(site, found).is_some() {
                let name = clipped(name);
                return Err(Error::setup(format!(
                    "tensor {name} is there twice, under two names"
                )));
            }
        }
        if wanted.is_empty() {
            return Err(Error::setup("it has no tensors"));
        }
        Ok(wanted)
    }

    /// The error for a tensor of a module that adapters cannot change.
    fn unknown(&self, name: &str) -> Error {
        let parts = self.sites.iter().flatten();
        let leaves = parts.filter_map(|part| part.name.rsplit('.').next());
        let leaves: BTreeSet<&str> = leaves.collect();
        let leaves: Vec<&str> = leaves.into_iter().collect();
        Error::setup(format!(
            "tensor {} is not supported: adapters of this model can change {} of its layers",
            clipped(name),
            leaves.join(", ")
        ))
    }
}

/// The tensors of one weight.
struct Found {
    a: String,
    b: String,
    rank: usize,
    scale: f64,
}

impl Found {
    /// The two tensors of a weight, with the rows of `B` in the order of the layer's outputs.
    fn pair(&self, part: &LinearPart, tensors: &HashMap<String, Tensor>) -> Result<LoraPair> {
        let get = |name: &str| {
            let tensor = tensors.get(name);
            tensor.ok_or_else(|| Error::setup(format!("tensor {} is missing", clipped(name))))
        };
        let b = get(&self.b)?;
        Ok(LoraPair {
            down: get(&self.a)?.clone(),
            up: match &part.order {
                None => b.clone(),
                Some(order) => b.index_select(&Tensor::new(&**order, &Device::Cpu)?, 0)?,
            },
            scale: self.scale as f32,
        })
    }
}

/// The name of the module that a tensor belongs to, as PEFT's patterns see it.
fn module_of(name: &str) -> Result<&str> {
    let module = name.strip_suffix(A).or_else(|| name.strip_suffix(B));
    let module = module.and_then(|module| module.strip_suffix('.'));
    let Some(module) = module else {
        return Err(Error::setup(format!(
            "tensor {} is not supported: only those that end with {A} and {B} are",
            clipped(name)
        )));
    };
    Ok(module.strip_prefix(PREFIX).unwrap_or(module))
}

/// The name that the code has for a module of a layer; `None` = the class has names of its own.
fn plain_name(module: &str) -> Option<String> {
    let rest = LAYERS.iter().find_map(|start| module.strip_prefix(start))?;
    Some(format!("{}{rest}", LAYERS[0]))
}

fn check_shape(headers: &TensorHeaders, name: &str, wanted: [usize; 2]) -> Result<()> {
    let short = clipped(name);
    let header = headers.get(name);
    let header = header.ok_or_else(|| Error::setup(format!("tensor {short} is missing")))?;
    if header.dims != wanted {
        return Err(Error::setup(format!(
            "tensor {short} has shape {:?}, but the base model and the ranks of adapter_config.json ask for {wanted:?}",
            header.dims
        )));
    }
    if !["F32", "F16", "BF16"].contains(&&*header.dtype) {
        return Err(Error::setup(format!(
            "tensor {short} has dtype {}, which is not supported: only F32, F16 and BF16 are",
            clipped(&header.dtype)
        )));
    }
    Ok(())
}

/// All tensors of a file whose headers were checked. It is read, not mapped: whoever changes the file later changes
/// nothing here.
fn read_tensors(file: &mut File, headers: &TensorHeaders) -> Result<HashMap<String, Tensor>> {
    let failed = |e: std::io::Error| Error::setup(e.to_string());
    let len = file.seek(SeekFrom::End(0)).map_err(failed)?;
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    let data: u64 = headers.values().map(|header| header.bytes()).sum();
    let max = safetensors_header::MAX_BYTES + data;
    if len > max {
        let what = format!("it has {len} bytes, of which its tensors are {data}");
        return Err(Error::setup(what));
    }
    let mut bytes = Vec::new();
    file.take(len).read_to_end(&mut bytes).map_err(failed)?;
    let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)?;
    for (name, tensor) in &tensors {
        let sum = tensor.to_dtype(DType::F32)?.abs()?.sum_all()?;
        // Of values below infinity, a sum that overflows is possible, but no weights are so large.
        if !sum.to_scalar::<f32>()?.is_finite() {
            return Err(finite::error(&clipped(name)));
        }
    }
    Ok(tensors)
}
