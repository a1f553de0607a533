//! Experts in the host's memory beside a GPU: `--n-cpu-moe` and `--cpu-moe`.

use super::checkpoint::{Checkpoint, Reading};
use super::memory;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::{self, Inventory, LayerSpec, ModelConfig};

/// Checks, before the weights are loaded, that this machine has the memory for the experts that a GPU is to read in it.
///
/// # Errors
/// `Setup`, in one line: it has too little.
pub fn check(config: &Config, checkpoint: &Checkpoint, is_on_gpu: bool) -> Result<()> {
    let is_asked_for = config.load.host_expert_layers() > 0;
    // Another machine has another memory.
    if !is_asked_for || !is_on_gpu || config.gpu.is_some() {
        return Ok(());
    }
    let (_, inventory) = model::inspect(&checkpoint.source, &checkpoint.options)?;
    let (_, host) = inventory.loaded_bytes();
    let memory = match checkpoint.reading {
        Reading::Weights => memory::free_memory(),
        Reading::Headers => memory::total_memory(),
    };
    fits(host, memory)
}

/// Checks that experts of `host` bytes fit this machine's `memory`.
fn fits(host: u64, memory: u64) -> Result<()> {
    if host <= memory {
        return Ok(());
    }
    Err(Error::setup(format!(
        "the experts that stay in the host's memory take {host} bytes and this machine has {memory}: lower --n-cpu-moe, or leave out --cpu-moe"
    )))
}

/// Says in the log if the flags have no effect.
pub fn log(config: &Config, model: &ModelConfig, is_on_gpu: bool) {
    if config.load.host_expert_layers() == 0 {
        return;
    }
    let mut layers = model.spec.layers.iter();
    if !is_on_gpu {
        tracing::info!(
            "--n-cpu-moe and --cpu-moe have no effect: on the CPU all weights are in the host's memory"
        );
    } else if !layers.any(|layer| LayerSpec::experts(layer).is_some()) {
        tracing::warn!("--n-cpu-moe and --cpu-moe have no effect: the model has no experts");
    }
}

/// Bytes of the experts of each layer that are not in the host's memory yet.
pub fn by_layer(inventory: &Inventory) -> Vec<u64> {
    let mut bytes = Vec::new();
    for entry in &inventory.entries {
        let Some(layer) = entry.layer else { continue };
        if bytes.len() <= layer {
            bytes.resize(layer + 1, 0);
        }
        if entry.is_of_experts() && !entry.on_host {
            bytes[layer] += entry.loaded_bytes;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_memory_is_told_in_one_line() {
        fits(8, 8).unwrap();
        let error = fits(9, 8).unwrap_err().to_string();
        assert!(error.contains("take 9 bytes and this machine has 8: lower --n-cpu-moe"));
        assert_eq!(error.lines().count(), 1);
    }
}
