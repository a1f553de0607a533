//! Estimates of the speed of plain decoding, for `check` and for the choice of a model.

use crate::config::LoadFlags;
use crate::gpus::Gpu;
use crate::kernels;
use crate::model::{Inventory, LayerSpec, LoadedModel, TensorEntry};
use candle_core::DType;
use serde::Serialize;

/// What a step of one row on a GPU takes for a layer beside the products with weights, in seconds: attention, norms,
/// launches and waiting. With the two numbers below it gives the steps that were measured on an H100 and an H200 to 10%
/// (benches/README.md).
const GPU_LAYER_SECONDS: f64 = 17e-6;
/// Seconds that quantized weights of a byte take beside their reading.
const GPU_UNPACKING_SECONDS: f64 = 0.32e-12;
/// The share of a GPU's bandwidth that the reading of weights reaches.
const GPU_SHARE: f64 = 0.8;

/// Bytes a second that the CPU reads from memory, measured now with the threads of the flags; nothing if a GPU computes.
pub fn cpu_bandwidth(flags: &LoadFlags) -> Option<f64> {
    let device = kernels::device(&flags.device).ok()?;
    if let Some(threads) = flags.threads {
        kernels::set_threads(threads).ok()?;
    }
    device.is_cpu().then(kernels::read_bandwidth)
}

/// An estimate of the speed of plain decoding: each token reads the weights once.
#[derive(Debug, Serialize)]
pub struct Decode {
    /// In bytes a second: measured, or of a GPU's data sheet.
    memory_bandwidth: f64,
    weights_bytes_per_token: u64,
    /// Those of them that a GPU reads in the host's memory, and in bytes a second, how fast.
    host_bytes_per_token: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_bandwidth: Option<f64>,
    /// The share of the bandwidth that is taken to be reached.
    share: f64,
    /// Seconds that a token is taken to need beside the reading of weights, with a short context.
    seconds_beside_weights: f64,
    tokens_per_second: f64,
}

impl Decode {
    /// That on the CPU. The bandwidth is measured now.
    pub fn here(model: &dyn LoadedModel, inventory: &Inventory) -> Self {
        let read = Read::by(model, inventory);
        Self::of(&read, kernels::read_bandwidth(), 1., 0.)
    }

    /// That on `gpu`.
    pub fn on(gpu: &Gpu, model: &dyn LoadedModel, inventory: &Inventory) -> Self {
        let layers = model.config().num_layers();
        Self::on_gpu(gpu, layers, &Read::by(model, inventory))
    }

    /// That of a model with so many layers.
    fn on_gpu(gpu: &Gpu, layers: usize, read: &Read) -> Self {
        let beside =
            GPU_LAYER_SECONDS * layers as f64 + GPU_UNPACKING_SECONDS * read.quantized as f64;
        let here = Self::of(read, gpu.bandwidth(), GPU_SHARE, beside);
        if read.host == 0 {
            return here;
        }
        let bandwidth = gpu.host_bandwidth();
        let seconds = 1. / here.tokens_per_second + read.host as f64 / bandwidth;
        Self {
            host_bandwidth: Some(bandwidth),
            tokens_per_second: 1. / seconds,
            ..here
        }
    }

    /// That of reading what is not in another memory, with a `share` of `bandwidth`, and of `beside` seconds more.
    fn of(read: &Read, bandwidth: f64, share: f64, beside: f64) -> Self {
        let seconds = read.here.max(1) as f64 / (share * bandwidth) + beside;
        Self {
            memory_bandwidth: bandwidth,
            weights_bytes_per_token: read.here + read.host,
            host_bytes_per_token: read.host,
            host_bandwidth: None,
            share,
            seconds_beside_weights: beside,
            tokens_per_second: 1. / seconds,
        }
    }

    /// The estimate and what it assumes; `size` writes a size in bytes.
    pub fn text(&self, size: impl Fn(u64) -> String) -> String {
        let bytes = size(self.weights_bytes_per_token - self.host_bytes_per_token);
        let start = format!(
            "about {:.0} tokens/s without drafts: an estimate",
            self.tokens_per_second
        );
        if self.seconds_beside_weights == 0. {
            let bandwidth = size(self.memory_bandwidth as u64);
            return format!("{start}, from {bandwidth}/s of memory bandwidth and {bytes} a token");
        }
        let host = self.host_bandwidth.map_or(String::new(), |bandwidth| {
            let bytes = size(self.host_bytes_per_token);
            format!(", {bytes} at {:.0} GB/s from the host", bandwidth / 1e9)
        });
        format!(
            "{start}, from {bytes} a token at {:.0}% of {:.0} GB/s{host}, and {:.2} ms for all else with a short context",
            100. * self.share,
            self.memory_bandwidth / 1e9,
            1e3 * self.seconds_beside_weights
        )
    }
}

/// Bytes of the weights that a token is computed with: not those of an embedding that is not the output layer, too, of which
/// it needs one row, nor those of other experts than its own.
struct Read {
    /// In the memory of the device that computes.
    here: u64,
    /// In the host's memory beside a GPU.
    host: u64,
    /// Those that are quantized.
    quantized: u64,
}

impl Read {
    fn by(model: &dyn LoadedModel, inventory: &Inventory) -> Self {
        let is_tied = model.config().tie_word_embeddings;
        // All layers that have experts have the same number.
        let mut layers = model.config().spec.layers.iter();
        let experts = layers.find_map(LayerSpec::experts);
        let read = |entry: &TensorEntry| match experts {
            _ if inventory.is_looked_up(entry, is_tied) => 0,
            Some(experts) if entry.is_of_experts() => {
                entry.loaded_bytes * experts.per_token as u64 / experts.count as u64
            }
            _ => entry.loaded_bytes,
        };
        let sum = |counts: &dyn Fn(&TensorEntry) -> bool| {
            inventory.sum(|entry| if counts(entry) { read(entry) } else { 0 })
        };
        let dense = [DType::F32, DType::F16, DType::BF16].map(|dtype| dtype.as_str());
        Self {
            here: sum(&|entry| !entry.on_host),
            host: sum(&|entry| entry.on_host),
            quantized: sum(&|entry| !dense.contains(&entry.loaded.as_str())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps in ms that were measured, those of Llama with 1,024 tokens of context, whose K and V are among the bytes:
    /// benches/README.md.
    #[test]
    fn measured_steps_of_gpus_are_estimated_to_10_percent() {
        for (gpu, layers, bytes, quantized, measured) in [
            ("h100", 28, 6.54e9, 0., 2.81),
            ("h200", 28, 6.54e9, 0., 2.27),
            ("h200", 28, 1.97e9, 1.86e9, 1.54),
            ("h200", 16, 0.74e9, 0.71e9, 0.76),
            ("h100", 30, 0.27e9, 0., 1e3 / 1632.),
        ] {
            let name = Gpu::parse(gpu).unwrap();
            let read = Read {
                here: bytes as u64,
                host: 0,
                quantized: quantized as u64,
            };
            let decode = Decode::on_gpu(name, layers, &read);
            let ratio = 1e3 / decode.tokens_per_second / measured;
            assert!((ratio - 1.).abs() < 0.1, "{gpu}, {bytes}: {ratio}");
        }
    }
}
