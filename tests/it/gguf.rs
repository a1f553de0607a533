//! GGUF files of every block type, against candle's Llama on the same weights.

use crate::common::rig::distance;
use crate::common::tiny::*;
use crate::common::tiny_gguf::{llama3_factors, write_gguf};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device};

#[test]
fn gguf_of_floats_equals_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (llama_config(16), tensors(16, DType::F32));
    let factors = llama3_factors(&config);
    assert!(
        factors[0] == 1. && factors[7] == 8.,
        "the scaling shows: {factors:?}"
    );
    let tokens = short_prompt(60);
    let want = candles_logits(&config, &tensors, &tokens);
    let file = folder.path().join("model.gguf");
    for (kind, tolerance) in [(GgmlDType::F32, 1e-4), (GgmlDType::F16, 0.1)] {
        write_gguf(&file, &tensors, kind, &factors);
        let got = logits(open(&file).unwrap(), &tokens);
        let far = distance(&got[59], &want);
        assert!(far < tolerance, "{kind:?}: logits differ by {far}");
    }
}

/// Every block type against the same file dequantized: what differs is the rounding of activations
/// (and, for types that become Q8_0, of weights) to 8 bits.
#[test]
fn gguf_of_every_block_type() {
    use GgmlDType::*;
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (llama_config(16), tensors(16, DType::F32));
    let factors = llama3_factors(&config);
    let file = folder.path().join("model.gguf");
    let tokens = short_prompt(12);
    for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        write_gguf(&file, &tensors, kind, &factors);
        let got = logits(open(&file).unwrap(), &tokens);
        let rounded = tensors.iter().map(|(name, t)| {
            let t = match t.rank() {
                2 => QTensor::quantize(t, kind)
                    .unwrap()
                    .dequantize(&Device::Cpu)
                    .unwrap(),
                _ => t.clone(),
            };
            (name.clone(), t)
        });
        let want = candles_logits(&config, &rounded.collect(), &tokens);
        let size = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        let far = distance(&got[11], &want);
        assert!(
            far < 0.12 * size,
            "{kind:?}: logits up to {size} differ by {far}"
        );
    }
}
