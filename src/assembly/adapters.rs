//! Loads the adapters that the flags name.

use super::device_memory::DeviceMemory;
use super::memory;
use crate::config::{Config, LoraOptions};
use crate::error::{Error, Result};
use crate::http::Adapters;
use crate::model::{LoadedModel, LoraTarget};
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// The adapters of a server of `target`, in the memory of `gpus` or, on a CPU, of this machine; `None` = it has none.
///
/// # Errors
/// `Setup`, in one line that names the adapter: it is missing, broken or not supported.
pub fn load(
    config: &Config,
    target: &dyn LoadedModel,
    gpus: &[DeviceMemory],
) -> Result<Option<Adapters>> {
    let Some(lora) = &config.lora else {
        return Ok(None);
    };
    let found = target.lora_target().ok_or_else(|| {
        let what = "this model takes no LoRA adapters: leave out --enable-lora and --lora-modules";
        Error::setup(what)
    })?;
    let most = max_bytes(lora, found);
    let (memory, owner) = match gpus {
        [] => (memory::total_memory(), "this machine"),
        [gpu] => (gpu.total(), "the GPU"),
        gpus => (gpus.iter().map(DeviceMemory::total).sum(), "the GPUs"),
    };
    if lora.limits.may_update && most > memory {
        return Err(Error::setup(format!(
            "{} adapters of rank {} take up to {most} bytes and {owner} has {memory}: lower --max-loras or --max-lora-rank",
            lora.limits.max_loras, lora.limits.max_rank
        )));
    }
    let adapters = Adapters::new(Arc::new(found.clone()), lora.limits);
    let first = std::iter::once(&config.served_model_name);
    let taken: Vec<String> = first.chain(&config.served_model_aliases).cloned().collect();
    for module in &lora.modules {
        let loaded = adapters.load(&module.name, &module.path, false, &taken);
        loaded.map_err(|e| Error::setup(format!("--lora-modules {}: {e}", module.name)))?;
    }
    Ok(Some(adapters))
}

/// Checks that the adapters that are loaded at start are in folders.
///
/// # Errors
/// `Setup`, in one line that names the adapter.
pub fn check_folders(lora: &LoraOptions) -> Result<()> {
    match lora.modules.iter().find(|module| !module.path.is_dir()) {
        Some(module) => Err(Error::setup(format!(
            "--lora-modules {}: {} is no folder of this machine; of the Hub, `hf download` makes one",
            module.name,
            module.path.display()
        ))),
        None => Ok(()),
    }
}

/// The bytes of as many adapters as may be loaded. Nothing else is known of what clients will load.
fn max_bytes(lora: &LoraOptions, target: &LoraTarget) -> u64 {
    let each = target.max_bytes(lora.limits.max_rank);
    each.saturating_mul(lora.limits.max_loras as u64)
}

/// The bytes that the adapters of a server of `target` take: of those that are `loaded`; if clients load more, the most
/// that they can take.
fn bytes(config: &Config, target: &dyn LoadedModel, loaded: Option<&Adapters>) -> u64 {
    let loaded = loaded.map(Adapters::loaded).unwrap_or_default();
    let loaded: u64 = loaded.iter().map(|adapter| adapter.bytes()).sum();
    let updated = config.lora.as_ref().filter(|lora| lora.limits.may_update);
    match updated.zip(target.lora_target()) {
        Some((lora, target)) => loaded.max(max_bytes(lora, target)),
        None => loaded,
    }
}

/// Those of [`bytes`] on each of `gpus` GPUs, about: adapters are taken to change all layers alike.
pub fn bytes_by_gpu(
    config: &Config,
    target: &dyn LoadedModel,
    loaded: Option<&Adapters>,
    gpus: usize,
) -> Vec<u64> {
    let all = bytes(config, target, loaded);
    let share = |gpu: usize| {
        let of = target.lora_target()?;
        Some(of.max_bytes_on(gpu, 1) as f64 / of.max_bytes(1).max(1) as f64)
    };
    let of = |gpu| (all as f64 * share(gpu).unwrap_or_default()) as u64;
    (0..gpus).map(of).collect()
}

/// The entry of an adapter in the report of `foretoken check`.
#[derive(Debug, Serialize)]
pub struct AdapterReport {
    name: String,
    rank: usize,
    /// Size of the adapter in memory, in bytes.
    bytes: u64,
}

impl AdapterReport {
    pub fn all(adapters: Option<&Adapters>) -> Vec<Self> {
        let loaded = adapters.map(Adapters::loaded).unwrap_or_default();
        let of = loaded.iter().map(|adapter| Self {
            name: adapter.name().to_owned(),
            rank: adapter.rank(),
            bytes: adapter.bytes(),
        });
        of.collect()
    }
}

impl fmt::Display for AdapterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (rank {})", self.name, self.rank)
    }
}
