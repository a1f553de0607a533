//! Tiny Llamas that the tests write, and the logits that candle's own Llama computes for them.

use super::rig::{Rig, Seq};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama;
use foretoken::convert::ConvertOptions;
use foretoken::model::LoadedModel;
use foretoken::model::{LoadFormat, LoadOptions, Model, ModelSource, load};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub const VOCAB: usize = 67;
/// K-quants have blocks of 256.
pub const HIDDEN: usize = 256;
pub const MLP: usize = 512;
pub const HEADS: usize = 16;
pub const KV_HEADS: usize = 4;

pub type Tensors = HashMap<String, Tensor>;

/// A Llama with Llama 3's RoPE scaling, at lengths where the scaling has an effect.
pub fn llama_config(head_dim: usize) -> Json {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 256, "tie_word_embeddings": true,
        "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32
        }
    })
}

/// Random tensors with Hugging Face's names.
pub fn tensors(head_dim: usize, dtype: DType) -> Tensors {
    let mut all = Tensors::new();
    let mut add = |name: String, dims: &[usize]| {
        let noise = noise(&name, dims).to_dtype(dtype).unwrap();
        all.insert(name, noise);
    };
    add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN]);
    add("model.norm.weight".into(), &[HIDDEN]);
    for i in 0..2 {
        let at = |part: &str| format!("model.layers.{i}.{part}.weight");
        add(at("input_layernorm"), &[HIDDEN]);
        add(at("post_attention_layernorm"), &[HIDDEN]);
        add(at("self_attn.q_proj"), &[HEADS * head_dim, HIDDEN]);
        add(at("self_attn.k_proj"), &[KV_HEADS * head_dim, HIDDEN]);
        add(at("self_attn.v_proj"), &[KV_HEADS * head_dim, HIDDEN]);
        add(at("self_attn.o_proj"), &[HIDDEN, HEADS * head_dim]);
        add(at("mlp.gate_proj"), &[MLP, HIDDEN]);
        add(at("mlp.up_proj"), &[MLP, HIDDEN]);
        add(at("mlp.down_proj"), &[HIDDEN, MLP]);
    }
    all
}

/// Random values that depend only on the name: small for a matrix or a bias, around 1 for a norm.
pub fn noise(name: &str, dims: &[usize]) -> Tensor {
    let mut state = name
        .bytes()
        .fold(17u32, |h, b| h.wrapping_mul(31) ^ u32::from(b))
        | 1;
    let (middle, width) = match dims {
        [_] if !name.ends_with("bias") => (1., 0.2),
        _ => (0., 0.5),
    };
    let values = (0..dims.iter().product()).map(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        middle + width * (state as f32 / u32::MAX as f32 * 2. - 1.)
    });
    Tensor::from_vec(values.collect::<Vec<f32>>(), dims, &Device::Cpu).unwrap()
}

pub fn write_config(folder: &Path, config: &Json) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Writes `tensors` in two shards with an index.
pub fn write_shards(folder: &Path, tensors: &Tensors) {
    let (mut shards, mut map) = ([Tensors::new(), Tensors::new()], serde_json::Map::new());
    let mut names: Vec<_> = tensors.keys().collect();
    names.sort();
    for (i, name) in names.into_iter().enumerate() {
        shards[i % 2].insert(name.clone(), tensors[name].clone());
        map.insert(name.clone(), format!("model-{}.safetensors", i % 2).into());
    }
    for (i, shard) in shards.iter().enumerate() {
        let file = folder.join(format!("model-{i}.safetensors"));
        candle_core::safetensors::save(shard, file).unwrap();
    }
    let index = json!({ "weight_map": map });
    let file = folder.join("model.safetensors.index.json");
    std::fs::write(file, index.to_string()).unwrap();
}

/// Opens a model with everything in f32, to compare it with candle.
pub fn open(path: &Path) -> Result<Box<dyn LoadedModel>, foretoken::error::Error> {
    open_as(path, Some(DType::F32))
}

/// Opens a model with weights and KV cache in `dtype`; `None` = the server's defaults.
pub fn open_as(
    path: &Path,
    dtype: Option<DType>,
) -> Result<Box<dyn LoadedModel>, foretoken::error::Error> {
    let spec = path.to_str().unwrap();
    let source = ModelSource::resolve(spec, None, LoadFormat::Auto)?;
    let options = LoadOptions {
        dtype,
        ..LoadOptions::default()
    };
    load(&source, &options)
}

/// Loads random weights.
pub fn dummy() -> LoadOptions {
    LoadOptions {
        format: LoadFormat::Dummy,
        ..LoadOptions::default()
    }
}

/// Writes the model or head in `folder` to the GGUF file `out`, whose path it returns.
pub fn convert(
    folder: &Path,
    out: PathBuf,
    kind: GgmlDType,
) -> Result<PathBuf, foretoken::error::Error> {
    foretoken::convert::run(&ConvertOptions {
        model: folder.display().to_string(),
        revision: None,
        out: out.clone(),
        kind,
    })?;
    Ok(out)
}

/// The logits of `tokens` in one forward.
pub fn logits(model: Box<dyn Model>, tokens: &[u32]) -> Vec<Vec<f32>> {
    Rig::new(model, 32, 4).feed(&mut Seq::default(), tokens)
}

pub fn short_prompt(len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (i * 29 + 5) % VOCAB as u32)
        .collect()
}

/// The last row's logits from candle's own Llama, in f32.
pub fn candles_logits(config: &Json, tensors: &Tensors, tokens: &[u32]) -> Vec<f32> {
    let config: llama::LlamaConfig = serde_json::from_value(config.clone()).unwrap();
    let config = config.into_config(false);
    let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
    let tensors = tensors
        .iter()
        .map(|(name, t)| (name.clone(), wide(t)))
        .collect();
    let vars = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let model = llama::Llama::load(vars, &config).unwrap();
    let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
    let input = Tensor::new(tokens, &Device::Cpu)
        .unwrap()
        .unsqueeze(0)
        .unwrap();
    let logits = model.forward(&input, 0, &mut cache).unwrap();
    logits.squeeze(0).unwrap().to_vec1::<f32>().unwrap()
}
