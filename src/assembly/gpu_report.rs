//! What `check --gpu` says of a GPU that is not here.

use super::device_memory::DeviceMemory;
use crate::gpus::Gpu;
use serde::Serialize;

/// A GPU, and what the model takes of its memory. Sizes are in bytes.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    name: &'static str,
    compute_capability: String,
    memory_bytes: u64,
    /// In bytes a second, of the data sheet.
    memory_bandwidth: f64,
    /// The share of the memory for all uses.
    memory_utilization: f64,
    uses: Vec<Use>,
}

/// A use of memory.
#[derive(Debug, Serialize)]
struct Use {
    name: String,
    bytes: u64,
}

impl GpuReport {
    /// `memory` has the uses of `gpu` beside the KV caches of `cache` bytes.
    pub fn of(gpu: &Gpu, utilization: f64, memory: &DeviceMemory, cache: u64) -> Self {
        let mut uses: Vec<Use> = (memory.parts().iter())
            .map(|(name, bytes)| Use {
                name: name.clone(),
                bytes: *bytes,
            })
            .collect();
        uses.push(Use {
            name: "KV cache".into(),
            bytes: cache,
        });
        let (major, minor) = gpu.capability;
        Self {
            name: gpu.name,
            compute_capability: format!("{major}.{minor}"),
            memory_bytes: gpu.memory_bytes(),
            memory_bandwidth: gpu.bandwidth(),
            memory_utilization: utilization,
            uses,
        }
    }

    /// The rows of the table: names and values; `size` writes a size in bytes.
    pub fn rows(&self, size: impl Fn(u64) -> String) -> [(&'static str, String); 2] {
        let memory = size(self.memory_bytes);
        let gpu = format!(
            "{} with {memory} and {:.0} GB/s, compute capability {}, by its data sheet",
            self.name,
            self.memory_bandwidth / 1e9,
            self.compute_capability
        );
        let uses = (self.uses.iter()).map(|one| format!("{} {}", one.name, size(one.bytes)));
        let all = self.uses.iter().map(|one| one.bytes).sum();
        let fits = format!(
            "fits: {} of {memory}, of which --gpu-memory-utilization {} allows {}: {}",
            size(all),
            self.memory_utilization,
            size((self.memory_bytes as f64 * self.memory_utilization) as u64),
            uses.collect::<Vec<_>>().join("; ")
        );
        [("GPU", gpu), ("GPU memory", fits)]
    }
}
