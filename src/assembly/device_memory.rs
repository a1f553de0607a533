//! The uses of a GPU's memory.

use crate::config::{Config, KvBudget};
use crate::error::{Error, Result};
use crate::gpus::Gpu;
use crate::kernels;
use candle_core::Device;
use std::fmt;

/// Bytes that a GPU which is not here is taken to have in use before a model is loaded: what the driver keeps, and a
/// context.
const CONTEXT_BYTES: u64 = 1 << 30;
/// The entry of what was in use before a model is loaded.
const OTHERS: &str = "CUDA, other programs";

/// The uses of a GPU's memory.
#[derive(Debug, Clone)]
pub struct DeviceMemory {
    /// How messages call the GPU: by its number, if the model is on several.
    gpu: String,
    total: u64,
    /// Names and bytes.
    parts: Vec<(String, u64)>,
    /// Bytes of the experts of each layer that may be in the host's memory instead.
    experts: Vec<u64>,
}

impl DeviceMemory {
    /// The memory of a GPU with so many bytes, of which none are used.
    pub fn of(total: u64) -> Self {
        Self {
            gpu: "the GPU".into(),
            total,
            parts: Vec::new(),
            experts: Vec::new(),
        }
    }

    /// Starts with the memory in use of each of `devices` before a model is loaded; none on a CPU.
    ///
    /// # Errors
    /// The driver does not report its memory.
    pub fn here(devices: &[Device]) -> Result<Vec<Self>> {
        let mut budgets = Vec::new();
        for device in devices {
            let found = kernels::device_memory(device).map_err(Error::setup)?;
            budgets.extend(found.map(|(_, total)| Self::of(total)));
        }
        Self::note(&mut budgets, OTHERS, devices, &[])?;
        Ok(Self::numbered(budgets))
    }

    /// Starts with the memory that is taken to be in use of `count` such GPUs of another machine.
    pub fn of_others(gpu: &Gpu, count: usize) -> Vec<Self> {
        let mut budget = Self::of(gpu.memory_bytes());
        budget.add(OTHERS, CONTEXT_BYTES);
        Self::numbered(vec![budget; count])
    }

    /// `budgets` with the numbers of their GPUs from the first one on, if there are several.
    fn numbered(mut budgets: Vec<Self>) -> Vec<Self> {
        if budgets.len() > 1 {
            for (number, budget) in budgets.iter_mut().enumerate() {
                budget.gpu = format!("GPU {number}");
            }
        }
        budgets
    }

    /// Adds the memory of each of `devices` that came into use since the last entry, as `name`; `expected` bytes if they
    /// are still to be loaded, as they always are on a GPU of another machine, none where it has no entry.
    ///
    /// # Errors
    /// The driver does not report its memory.
    pub fn note(
        budgets: &mut [Self],
        name: &str,
        devices: &[Device],
        expected: &[u64],
    ) -> Result<()> {
        for (gpu, (budget, device)) in budgets.iter_mut().zip(devices).enumerate() {
            let read = kernels::device_memory(device).map_err(Error::setup)?;
            let grown = read.map(|(free, total)| (total - free).saturating_sub(budget.sum()));
            let expected = expected.get(gpu).copied().unwrap_or_default();
            let bytes = grown.unwrap_or_default().max(expected);
            if bytes > 0 || gpu == 0 {
                budget.add(name, bytes);
            }
        }
        Ok(())
    }

    /// Adds a part that takes `bytes`.
    pub fn add(&mut self, name: impl Into<String>, bytes: u64) {
        self.parts.push((name.into(), bytes));
    }

    /// Sets the bytes of the experts of each layer that may be in the host's memory instead.
    pub fn set_experts(&mut self, by_layer: Vec<u64>) {
        self.experts = by_layer;
    }

    /// Bytes that the GPU has.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Names and bytes of the uses.
    pub fn parts(&self) -> &[(String, u64)] {
        &self.parts
    }

    /// Bytes of all uses.
    pub fn sum(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Bytes left for the KV cache if no flag sets its size. A whole context takes `context` of them.
    pub fn left(&self, config: &Config, context: u64) -> Result<u64> {
        let usable = (self.total as f64 * config.gpu_memory_utilization) as u64;
        let left = usable.saturating_sub(self.sum());
        if left == 0 && config.kv == KvBudget::Default {
            return Err(Error::setup(format!(
                "nothing is left for the KV cache within --gpu-memory-utilization {}: {}{}{}",
                config.gpu_memory_utilization,
                self.in_one_line(),
                self.hint_at_shares(config),
                self.hint_at_experts(usable, context)
            )));
        }
        Ok(left)
    }

    /// Checks that there is room for a KV cache of so many bytes, whose size a flag may set.
    pub fn check(&self, cache: u64, config: &Config) -> Result<()> {
        if config.kv == KvBudget::Default || self.sum().saturating_add(cache) <= self.total {
            return Ok(());
        }
        Err(Error::setup(format!(
            "{} has no room for a KV cache of {cache} bytes: lower --num-blocks or --kv-cache-memory: {}",
            self.gpu,
            self.in_one_line()
        )))
    }

    /// Says that another GPU may have more room.
    fn hint_at_shares(&self, config: &Config) -> &'static str {
        if config.load.pipeline_parallel_size == 1 {
            return "";
        }
        "; raise --pipeline-parallel-size, or give it a smaller share in --tensor-split"
    }

    /// Says how many layers' experts must be in the host's memory to leave room for a context of `context` bytes within
    /// `usable`, if that is enough.
    fn hint_at_experts(&self, usable: u64, context: u64) -> String {
        let mut needed = self.sum().saturating_add(context);
        let mut layers = self.experts.iter().enumerate();
        let enough = layers.find_map(|(layer, bytes)| {
            needed = needed.saturating_sub(*bytes);
            (needed <= usable && *bytes > 0).then_some(layer + 1)
        });
        enough.map_or(String::new(), |layers| {
            format!("; --n-cpu-moe {layers} leaves room for a whole context")
        })
    }

    fn in_one_line(&self) -> String {
        self.to_string().replace('\n', ";")
    }
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unused = ("unused".to_owned(), self.total.saturating_sub(self.sum()));
        let total = ("total".to_owned(), self.total);
        let gpu = self.gpu.trim_start_matches("the ");
        write!(f, "{gpu} memory in GiB")?;
        for (name, bytes) in self.parts.iter().chain([&unused, &total]) {
            let gib = *bytes as f64 / f64::from(1 << 30);
            write!(f, "\n  {name:<22}{gib:>7.2}")?;
        }
        Ok(())
    }
}
