//! What `check` says of GPUs, which may be elsewhere.

use super::device_memory::DeviceMemory;
use crate::gpus::Gpu;
use serde::Serialize;
use std::ops::Range;

/// A GPU, and what the model takes of its memory. Sizes are in bytes.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    /// Of a GPU that is not here.
    #[serde(flatten)]
    data_sheet: Option<DataSheet>,
    memory_bytes: u64,
    /// The share of the memory for all uses.
    memory_utilization: f64,
    uses: Vec<Use>,
    /// The first layer that it has, and the number of the one after its last.
    layers: Range<usize>,
}

/// What the maker says of a GPU.
#[derive(Debug, Serialize)]
struct DataSheet {
    name: &'static str,
    compute_capability: String,
    /// In bytes a second.
    memory_bandwidth: f64,
}

/// A use of memory.
#[derive(Debug, Serialize)]
struct Use {
    name: String,
    bytes: u64,
}

impl GpuReport {
    /// `memory` has the uses of a GPU, which is like `gpu` if it is not here, beside the KV caches of `cache` bytes. It has
    /// these layers.
    pub fn of(
        gpu: Option<&Gpu>,
        utilization: f64,
        (memory, cache): (&DeviceMemory, u64),
        layers: Range<usize>,
    ) -> Self {
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
        let data_sheet = gpu.map(|gpu| DataSheet {
            name: gpu.name,
            compute_capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
            memory_bandwidth: gpu.bandwidth(),
        });
        Self {
            data_sheet,
            memory_bytes: memory.total(),
            memory_utilization: utilization,
            uses,
            layers,
        }
    }

    /// The rows of the table on these GPUs: names and values; `size` writes a size in bytes.
    pub fn rows(all: &[&Self], size: impl Fn(u64) -> String) -> Vec<(String, String)> {
        let mut rows = Vec::new();
        let is_single = all.len() == 1;
        let kind = all.first().and_then(|gpu| gpu.kind(&size));
        if let Some(kind) = kind {
            rows.push(if is_single {
                ("GPU".to_owned(), kind)
            } else {
                ("GPUs".to_owned(), format!("{} of {kind}", all.len()))
            });
        }
        for (number, gpu) in all.iter().enumerate() {
            let memory = gpu.memory(&size);
            rows.push(if is_single {
                ("GPU memory".to_owned(), memory)
            } else {
                let (first, last) = (gpu.layers.start, gpu.layers.end.saturating_sub(1));
                let layers = format!("layers {first} to {last}; {memory}");
                (format!("GPU {number}"), layers)
            });
        }
        rows
    }

    /// What the GPU is; `None` = it is here.
    fn kind(&self, size: impl Fn(u64) -> String) -> Option<String> {
        let DataSheet {
            name,
            compute_capability,
            memory_bandwidth,
        } = self.data_sheet.as_ref()?;
        Some(format!(
            "{name} with {} and {:.0} GB/s, compute capability {compute_capability}, by its data sheet",
            size(self.memory_bytes),
            memory_bandwidth / 1e9,
        ))
    }

    /// What takes its memory.
    fn memory(&self, size: impl Fn(u64) -> String) -> String {
        let uses = (self.uses.iter()).map(|one| format!("{} {}", one.name, size(one.bytes)));
        let all = self.uses.iter().map(|one| one.bytes).sum();
        format!(
            "fits: {} of {}, of which --gpu-memory-utilization {} allows {}: {}",
            size(all),
            size(self.memory_bytes),
            self.memory_utilization,
            size((self.memory_bytes as f64 * self.memory_utilization) as u64),
            uses.collect::<Vec<_>>().join("; ")
        )
    }
}
