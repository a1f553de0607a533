//! GGUF files of tiny Llamas, as llama.cpp would write them.

use super::tiny::*;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use foretoken::kernels::quant::{BlockType, QuantMatrix};
use serde_json::Value as Json;
use std::path::{Path, PathBuf};

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

/// Gives the matrices of `file`, which has them in `Q4_0`, random blocks of a type of no more bytes that candle
/// cannot write. Returns `tensors` with the values of these blocks.
pub fn with_blocks(file: &Path, kind: BlockType, tensors: &Tensors) -> Tensors {
    let mut bytes = std::fs::read(file).unwrap();
    let content = gguf_file::Content::read(&mut std::io::Cursor::new(&bytes)).unwrap();
    let replaced = tensors.iter().map(|(name, tensor)| {
        let gguf = gguf_name(name);
        let Ok((outputs, inputs)) = tensor.dims2() else {
            return (name.clone(), tensor.clone());
        };
        let blocks = blocks_of(kind, outputs * inputs / kind.block_size());
        put_blocks(&mut bytes, &content, &gguf, kind, &blocks);
        let matrix = QuantMatrix::from_blocks(kind, &blocks, outputs, inputs).unwrap();
        let values = Tensor::from_vec(matrix.dequantize(), (outputs, inputs), &Device::Cpu);
        let values = match values.unwrap() {
            q if gguf.contains("attn_q.") => halves(&q, HEADS),
            k if gguf.contains("attn_k.") => halves(&k, KV_HEADS),
            other => other,
        };
        (name.clone(), values)
    });
    let replaced = replaced.collect();
    std::fs::write(file, bytes).unwrap();
    replaced
}

/// Gives the tensor `name` of a file `bytes`, which has more bytes, blocks of a type that candle cannot write.
pub fn put_blocks(
    bytes: &mut [u8],
    content: &gguf_file::Content,
    name: &str,
    kind: BlockType,
    blocks: &[u8],
) {
    assert!(kind.candles().is_none(), "candle writes {kind}");
    let info = &content.tensor_infos[name];
    // After the name: the number of dimensions, these, the type.
    let key = [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat();
    let found = bytes.windows(key.len()).position(|at| at == key).unwrap();
    let at = found + key.len() + 4 + 8 * info.shape.rank();
    bytes[at..at + 4].copy_from_slice(&kind.number().to_le_bytes());
    let start = (content.tensor_data_offset + info.offset) as usize;
    bytes[start..start + blocks.len()].copy_from_slice(blocks);
}

/// Undoes [`interleaved`].
fn halves(tensor: &Tensor, heads: usize) -> Tensor {
    let (rows, inputs) = tensor.dims2().unwrap();
    let split = tensor
        .reshape((heads, rows / heads / 2, 2, inputs))
        .unwrap();
    let swapped = split.transpose(1, 2).unwrap().contiguous().unwrap();
    swapped.reshape((rows, inputs)).unwrap()
}

/// Random blocks whose values are up to about 0.5.
pub fn blocks_of(kind: BlockType, count: usize) -> Vec<u8> {
    let mut state = count as u32 | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    let blocks = (0..count).flat_map(|_| {
        let mut block: Vec<u8> = (0..kind.type_size()).map(|_| next()).collect();
        let scale: f32 = match kind {
            BlockType::Iq4Xs => 1e-4,
            BlockType::Iq3S | BlockType::Iq3Xxs => 0.001,
            BlockType::Iq1S | BlockType::Iq1M => 0.03,
            _ => 0.004,
        };
        let scale = half::f16::from_f32(scale).to_bits();
        match kind {
            // Up to 12 times a sixteenth of a half or of a quarter.
            BlockType::Mxfp4 => block[0] = 123 + block[0] % 2,
            BlockType::Iq1M => {
                for i in 0..4 {
                    let scales = &mut block[49 + 2 * i];
                    *scales = *scales & 15 | ((scale >> (4 * i)) as u8) << 4;
                }
            }
            _ => block[..2].copy_from_slice(&scale.to_le_bytes()),
        }
        block
    });
    blocks.collect()
}

/// Writes the model of `file` in `count` files beside it; returns their names.
pub fn split(file: &Path, count: usize) -> Vec<PathBuf> {
    let mut reader = std::fs::File::open(file).unwrap();
    let content = gguf_file::Content::read(&mut reader).unwrap();
    let mut names: Vec<&String> = content.tensor_infos.keys().collect();
    names.sort();
    let stem = file.file_stem().unwrap().to_string_lossy();
    let parts = (0..count).map(|part| {
        let of_part = names.iter().skip(part).step_by(count);
        let tensors: Vec<(&str, QTensor)> = of_part
            .map(|name| {
                let tensor = content.tensor(&mut reader, name, &Device::Cpu).unwrap();
                (name.as_str(), tensor)
            })
            .collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, t)| (*name, t)).collect();
        let mut metadata = vec![
            ("split.no", Value::U16(part as u16)),
            ("split.count", Value::U16(count as u16)),
            ("split.tensors.count", Value::I32(names.len() as i32)),
        ];
        if part == 0 {
            let all = content.metadata.iter();
            metadata.extend(all.map(|(key, value)| (key.as_str(), value.clone())));
        }
        let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
        let name = format!("{stem}-{:05}-of-{count:05}.gguf", part + 1);
        let path = file.with_file_name(name);
        let mut out = std::fs::File::create(&path).unwrap();
        gguf_file::write(&mut out, &metadata, &tensors).unwrap();
        path
    });
    parts.collect()
}
