//! GGUF files of tiny Llamas, as llama.cpp would write them.

use super::tiny::*;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use serde_json::Value as Json;
use std::path::Path;

/// Reorders the rows of q or k to Llama's GGUF order, which interleaves the halves of each head.
fn interleaved(tensor: &Tensor, heads: usize) -> Tensor {
    let (rows, inputs) = tensor.dims2().unwrap();
    let half = rows / heads / 2;
    let split = tensor.reshape((heads, 2, half, inputs)).unwrap();
    let swapped = split.transpose(1, 2).unwrap().contiguous().unwrap();
    swapped.reshape((rows, inputs)).unwrap()
}

/// Writes `tensors` as a llama.cpp GGUF with matrices of `kind`, and `factors` as `rope_freqs`.
pub fn write_gguf(file: &Path, tensors: &Tensors, kind: GgmlDType, factors: &[f32]) {
    write_gguf_with(file, tensors, kind, factors, &[]);
}

/// Like [`write_gguf`], with `more` metadata, which overrides the defaults.
pub fn write_gguf_with(
    file: &Path,
    tensors: &Tensors,
    kind: GgmlDType,
    factors: &[f32],
    more: &[(&str, Value)],
) {
    let mut named: Vec<(String, QTensor)> = Vec::new();
    for (name, tensor) in tensors {
        let gguf = gguf_name(name);
        let tensor = match () {
            _ if gguf.contains("attn_q.") => interleaved(tensor, HEADS),
            _ if gguf.contains("attn_k.") => interleaved(tensor, KV_HEADS),
            _ => tensor.clone(),
        };
        let kind = if tensor.rank() == 2 {
            kind
        } else {
            GgmlDType::F32
        };
        named.push((gguf, QTensor::quantize(&tensor, kind).unwrap()));
    }
    let factors = Tensor::new(factors, &Device::Cpu).unwrap();
    let factors = QTensor::quantize(&factors, GgmlDType::F32).unwrap();
    named.push(("rope_freqs.weight".into(), factors));
    let sizes = [
        ("llama.embedding_length", HIDDEN),
        ("llama.feed_forward_length", MLP),
        ("llama.block_count", 2),
        ("llama.attention.head_count", HEADS),
        ("llama.attention.head_count_kv", KV_HEADS),
        ("llama.context_length", 256),
        ("llama.rope.dimension_count", HIDDEN / HEADS),
    ];
    let mut metadata: Vec<(&str, Value)> = sizes
        .iter()
        .map(|(name, size)| (*name, Value::U32(*size as u32)))
        .collect();
    metadata.extend([
        ("general.architecture", Value::String("llama".into())),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.freq_base", Value::F32(10000.)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
    ]);
    metadata.retain(|(key, _)| more.iter().all(|(other, _)| other != key));
    metadata.extend(more.iter().cloned());
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(k, v)| (*k, v)).collect();
    let tensors: Vec<(&str, &QTensor)> = named.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let mut out = std::fs::File::create(file).unwrap();
    gguf_file::write(&mut out, &metadata, &tensors).unwrap();
}

fn gguf_name(name: &str) -> String {
    let pairs = [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers.", "blk."),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    pairs
        .iter()
        .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// The divisor of each frequency of `config` under Llama 3's scaling.
pub fn llama3_factors(config: &Json) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let read = |config: &Json| {
        write_config(folder.path(), config);
        let config = foretoken::model::ModelConfig::from_json(folder.path()).unwrap();
        config.plain_rope().unwrap().frequencies()
    };
    let scaled = read(config);
    let mut plain = config.clone();
    plain["rope_scaling"] = Json::Null;
    read(&plain)
        .iter()
        .zip(scaled)
        .map(|(p, s)| p / s)
        .collect()
}
