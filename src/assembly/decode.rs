//! Estimates of the speed of plain decoding, for `check`.

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

/// An estimate of the speed of plain decoding: each token reads the weights once.
#[derive(Debug, Serialize)]
pub struct Decode {
    /// In bytes a second: measured, or of a GPU's data sheet.
    memory_bandwidth: f64,
    weights_bytes_per_token: u64,
    /// The share of the bandwidth that is taken to be reached.
    share: f64,
    /// Seconds that a token is taken to need beside the reading of weights, with a short context.
    seconds_beside_weights: f64,
    tokens_per_second: f64,
}

impl Decode {
    /// That on the CPU. The bandwidth is measured now.
    pub fn here(model: &dyn LoadedModel, inventory: &Inventory) -> Self {
        let (bytes, _) = bytes_per_token(model, inventory);
        Self::of(bytes, kernels::read_bandwidth(), 1., 0.)
    }

    /// That on `gpu`.
    pub fn on(gpu: &Gpu, model: &dyn LoadedModel, inventory: &Inventory) -> Self {
        let layers = model.config().num_layers();
        Self::on_gpu(gpu, layers, bytes_per_token(model, inventory))
    }

    /// That of a model with so many layers, which reads so many bytes a token, and so many of them quantized.
    fn on_gpu(gpu: &Gpu, layers: usize, (bytes, quantized): (u64, u64)) -> Self {
        let beside = GPU_LAYER_SECONDS * layers as f64 + GPU_UNPACKING_SECONDS * quantized as f64;
        Self::of(bytes, gpu.bandwidth(), GPU_SHARE, beside)
    }

    fn of(bytes: u64, bandwidth: f64, share: f64, beside: f64) -> Self {
        let seconds = bytes.max(1) as f64 / (share * bandwidth) + beside;
        Self {
            memory_bandwidth: bandwidth,
            weights_bytes_per_token: bytes,
            share,
            seconds_beside_weights: beside,
            tokens_per_second: 1. / seconds,
        }
    }

    /// The estimate and what it assumes; `size` writes a size in bytes.
    pub fn text(&self, size: impl Fn(u64) -> String) -> String {
        let bytes = size(self.weights_bytes_per_token);
        let start = format!(
            "about {:.0} tokens/s without drafts: an estimate",
            self.tokens_per_second
        );
        if self.seconds_beside_weights == 0. {
            let bandwidth = size(self.memory_bandwidth as u64);
            return format!("{start}, from {bandwidth}/s of memory bandwidth and {bytes} a token");
        }
        format!(
            "{start}, from {bytes} a token at {:.0}% of {:.0} GB/s, and {:.2} ms for all else with a short context",
            100. * self.share,
            self.memory_bandwidth / 1e9,
            1e3 * self.seconds_beside_weights
        )
    }
}

/// Bytes of the weights that a token is computed with, and those of them that are quantized: not those of an embedding that
/// is not the output layer, too, of which it needs one row, nor those of other experts than its own.
fn bytes_per_token(model: &dyn LoadedModel, inventory: &Inventory) -> (u64, u64) {
    let is_tied = model.config().tie_word_embeddings;
    // All layers that have experts have the same number.
    let mut layers = model.config().spec.layers.iter();
    let experts = layers.find_map(LayerSpec::experts);
    let read = |entry: &TensorEntry| {
        let is_looked_up = !is_tied && entry.name.contains("embed_tokens.");
        match experts {
            _ if is_looked_up => 0,
            Some(experts) if entry.is_of_experts() => {
                entry.loaded_bytes * experts.per_token as u64 / experts.count as u64
            }
            _ => entry.loaded_bytes,
        }
    };
    let dense = [DType::F32, DType::F16, DType::BF16].map(|dtype| dtype.as_str());
    let is_dense = |entry: &TensorEntry| dense.contains(&entry.loaded.as_str());
    let quantized = |entry: &TensorEntry| if is_dense(entry) { 0 } else { read(entry) };
    (inventory.sum(read), inventory.sum(quantized))
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
            let decode = Decode::on_gpu(name, layers, (bytes as u64, quantized as u64));
            let ratio = 1e3 / decode.tokens_per_second / measured;
            assert!((ratio - 1.).abs() < 0.1, "{gpu}, {bytes}: {ratio}");
        }
    }
}
