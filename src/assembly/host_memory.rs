//! Weights in this machine's memory: all on a CPU, and beside a GPU the experts of `--n-cpu-moe` and `--cpu-moe`.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::model::{Inventory, LayerSpec, ModelConfig};

/// Checks that all weights of a model, so many bytes, fit the `memory` that is left of this machine's.
///
/// # Errors
/// `Setup`, in one line that says what to do instead.
pub fn weights_fit(name: &str, weights: u64, memory: u64, is_folder: bool) -> Result<()> {
    if weights <= memory {
        return Ok(());
    }
    let smaller = smaller(is_folder);
    Err(Error::setup(format!(
        "{name}: the weights take {weights} bytes and this machine has room for {memory}: it needs {smaller}"
    )))
}

/// What is said before weights are loaded for which the memory that is `free` is not enough: if the system ends the process
/// for it, nothing else is said.
pub fn weights_warning(name: &str, weights: u64, free: u64, is_folder: bool) -> Option<String> {
    let smaller = smaller(is_folder);
    (weights > free).then(|| {
        format!(
            "{name}: the weights take {weights} bytes and only {free} are free, so the system may end this process: end other programs, or take {smaller}"
        )
    })
}

/// What takes less memory than a model, which may be in a folder of safetensors.
fn smaller(is_folder: bool) -> &'static str {
    if is_folder {
        "--quantize, a file with fewer bits a weight or a smaller model"
    } else {
        "a file with fewer bits a weight or a smaller model"
    }
}

/// Checks that experts of `host` bytes, which a GPU is to read in this machine's memory, fit `memory`.
///
/// # Errors
/// `Setup`, in one line that says what to do instead.
pub fn experts_fit(host: u64, memory: u64) -> Result<()> {
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
        experts_fit(8, 8).unwrap();
        let error = experts_fit(9, 8).unwrap_err().to_string();
        assert!(error.contains("take 9 bytes and this machine has 8: lower --n-cpu-moe"));
        assert_eq!(error.lines().count(), 1);
        weights_fit("toy", 8, 8, true).unwrap();
        for is_folder in [false, true] {
            let error = weights_fit("toy", 9, 8, is_folder).unwrap_err().to_string();
            assert!(
                error.contains("toy: the weights take 9 bytes and this machine has room for 8")
            );
            assert_eq!(error.contains("--quantize"), is_folder);
            assert_eq!(error.lines().count(), 1);
            assert_eq!(weights_warning("toy", 8, 8, is_folder), None);
            let warning = weights_warning("toy", 9, 8, is_folder).unwrap();
            assert!(
                warning.contains("toy: the weights take 9 bytes and only 8 are free"),
                "{warning}"
            );
            assert_eq!(warning.contains("--quantize"), is_folder);
            assert_eq!(warning.lines().count(), 1);
        }
    }
}
