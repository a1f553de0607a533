//! Checkpoints that the tests write: safetensors in shards, GGUF of every block type, noise; and
//! what is said about broken ones.

mod common;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen2, qwen3};
use common::rig::*;
use foretoken::model::{LoadFormat, LoadOptions, Model, ModelSource, load};
use serde_json::{Value as Json, json};
use std::collections::HashMap;
use std::path::Path;

const VOCAB: usize = 67;
const HIDDEN: usize = 64;
const MLP: usize = 96;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

type Tensors = HashMap<String, Tensor>;

/// A Llama with Llama 3's rope scaling, at lengths where the scaling shows.
fn llama_config(head_dim: usize) -> Json {
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

/// Random tensors under Hugging Face's names.
fn tensors(head_dim: usize, dtype: DType) -> Tensors {
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

/// The same for the same name: small for a matrix or a bias, around 1 for a norm.
fn noise(name: &str, dims: &[usize]) -> Tensor {
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

fn write_config(folder: &Path, config: &Json) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Writes `tensors` in two shards with an index.
fn write_shards(folder: &Path, tensors: &Tensors) {
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

fn open(path: &Path) -> Result<Box<dyn Model>, foretoken::error::Error> {
    let spec = path.to_str().unwrap();
    let source = ModelSource::resolve(spec, None, LoadFormat::Auto)?;
    load(&source, &LoadOptions::default())
}

/// Logits of `tokens` in one forward.
fn logits(model: Box<dyn Model>, tokens: &[u32]) -> Vec<Vec<f32>> {
    Rig::new(model, 32, 4).feed(&mut Seq::default(), tokens)
}

fn short_prompt(len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| (i * 29 + 5) % VOCAB as u32)
        .collect()
}

/// Last row's logits by candle's own Llama, in f32.
fn candles_logits(config: &Json, tensors: &Tensors, tokens: &[u32]) -> Vec<f32> {
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

#[test]
fn sharded_safetensors_agree_with_candles_llama() {
    for dtype in [DType::F32, DType::BF16] {
        let folder = tempfile::tempdir().unwrap();
        let (config, tensors) = (llama_config(16), tensors(16, dtype));
        write_config(folder.path(), &config);
        write_shards(folder.path(), &tensors);
        let tokens = short_prompt(80);
        let ours = logits(open(folder.path()).unwrap(), &tokens);
        let theirs = candles_logits(&config, &tensors, &tokens);
        let far = distance(&ours[79], &theirs);
        assert!(far < 1e-4, "{dtype:?}: logits differ by {far}");
    }
}

#[test]
fn the_special_ids_come_from_both_files() {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &llama_config(16));
    let generation = json!({ "eos_token_id": [3, 9] }).to_string();
    std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
    let config = foretoken::model::ModelConfig::from_json(folder.path()).unwrap();
    assert_eq!(config.eos_token_ids, [2, 3, 9]);
    assert_eq!(config.bos_token_id, Some(1));
}

/// A head wider than `hidden / heads`, as some models have it.
#[test]
fn head_dim_may_be_given() {
    let folder = tempfile::tempdir().unwrap();
    let (mut config, tensors) = (llama_config(32), tensors(32, DType::F32));
    write_config(folder.path(), &config);
    write_shards(folder.path(), &tensors);
    let wide = open(folder.path()).unwrap();
    assert_eq!(wide.config().head_dim, 32);
    assert_eq!(wide.kv_bytes_per_token(), 2 * 2 * KV_HEADS * 32 * 4);
    let tokens = short_prompt(20);
    let got = logits(wide, &tokens);
    assert!(got.iter().flatten().all(|x| x.is_finite()));
    // As the width follows from the hidden size where it is not given, these tensors do not fit.
    config.as_object_mut().unwrap().remove("head_dim");
    write_config(folder.path(), &config);
    let error = open(folder.path()).err().unwrap().to_string();
    assert!(
        error.contains("q_proj.weight has shape [128, 64]"),
        "{error}"
    );
}

fn f32_vars(tensors: &Tensors) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu)
}

fn ids(tokens: &[u32]) -> Tensor {
    Tensor::new(tokens, &Device::Cpu)
        .unwrap()
        .unsqueeze(0)
        .unwrap()
}

fn last_row(logits: Tensor) -> Vec<f32> {
    logits.flatten_all().unwrap().to_vec1::<f32>().unwrap()
}

/// Biases of q, k and v.
#[test]
fn qwen2_agrees_with_candles() {
    let folder = tempfile::tempdir().unwrap();
    let (mut config, mut tensors) = (llama_config(16), tensors(16, DType::F32));
    config["architectures"] = json!(["Qwen2ForCausalLM"]);
    config["rope_scaling"] = Json::Null;
    config["sliding_window"] = json!(256);
    config["max_window_layers"] = json!(2);
    config["use_sliding_window"] = json!(false);
    for i in 0..2 {
        for (part, heads) in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)] {
            let name = format!("model.layers.{i}.self_attn.{part}_proj.bias");
            tensors.insert(name.clone(), noise(&name, &[heads * 16]));
        }
    }
    write_config(folder.path(), &config);
    write_shards(folder.path(), &tensors);
    let tokens = short_prompt(40);
    let ours = logits(open(folder.path()).unwrap(), &tokens);
    let config = serde_json::from_value(config).unwrap();
    let mut theirs = qwen2::ModelForCausalLM::new(&config, f32_vars(&tensors)).unwrap();
    let theirs = last_row(theirs.forward(&ids(&tokens), 0).unwrap());
    let far = distance(&ours[39], &theirs);
    assert!(far < 1e-4, "logits differ by {far}");
}

/// A norm on every head of q and k.
#[test]
fn qwen3_agrees_with_candles() {
    let folder = tempfile::tempdir().unwrap();
    let (mut config, mut tensors) = (llama_config(16), tensors(16, DType::F32));
    config["architectures"] = json!(["Qwen3ForCausalLM"]);
    config["rope_scaling"] = Json::Null;
    config["attention_bias"] = json!(false);
    config["max_window_layers"] = json!(2);
    config["use_sliding_window"] = json!(false);
    write_config(folder.path(), &config);
    write_shards(folder.path(), &tensors);
    let error = open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("self_attn.q_norm.weight"), "{error}");
    for i in 0..2 {
        for part in ["q", "k"] {
            let name = format!("model.layers.{i}.self_attn.{part}_norm.weight");
            tensors.insert(name.clone(), noise(&name, &[16]));
        }
    }
    write_shards(folder.path(), &tensors);
    let tokens = short_prompt(40);
    let ours = logits(open(folder.path()).unwrap(), &tokens);
    let config = serde_json::from_value(config).unwrap();
    let mut theirs = qwen3::ModelForCausalLM::new(&config, f32_vars(&tensors)).unwrap();
    let theirs = last_row(theirs.forward(&ids(&tokens), 0).unwrap());
    let far = distance(&ours[39], &theirs);
    assert!(far < 1e-4, "logits differ by {far}");
}

/// Llama's GGUF order of q and k rows: the halves of each head interleaved.
fn interleaved(tensor: &Tensor, heads: usize) -> Tensor {
    let (rows, inputs) = tensor.dims2().unwrap();
    let half = rows / heads / 2;
    let split = tensor.reshape((heads, 2, half, inputs)).unwrap();
    let swapped = split.transpose(1, 2).unwrap().contiguous().unwrap();
    swapped.reshape((rows, inputs)).unwrap()
}

/// Writes `tensors` as a llama.cpp GGUF with matrices of `kind`, and the scaling as `rope_freqs`.
fn write_gguf(file: &Path, tensors: &Tensors, kind: GgmlDType, factors: &[f32]) {
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

/// What Llama 3's scaling divides each frequency of `config` by.
fn llama3_factors(config: &Json) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let read = |config: &Json| {
        write_config(folder.path(), config);
        let config = foretoken::model::ModelConfig::from_json(folder.path()).unwrap();
        config.inverse_frequencies()
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
    for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0] {
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

#[test]
fn dummy_weights_need_only_a_config_and_a_seed() {
    let folder = tempfile::tempdir().unwrap();
    write_config(folder.path(), &llama_config(16));
    let file = folder.path().join("config.json");
    let dummy = |path: &Path, seed| {
        let spec = path.to_str().unwrap();
        let source = ModelSource::resolve(spec, None, LoadFormat::Dummy).unwrap();
        let format = LoadFormat::Dummy;
        let options = LoadOptions {
            format,
            seed,
            ..LoadOptions::default()
        };
        logits(load(&source, &options).unwrap(), &short_prompt(10))
    };
    let one = dummy(folder.path(), 1);
    assert!(
        one.iter()
            .flatten()
            .all(|x| x.is_finite() && x.abs() < 100.)
    );
    assert!(
        distance(&one[3], &vec![0.; VOCAB]) > 0.1,
        "the noise reaches the logits"
    );
    assert_eq!(one, dummy(&file, 1));
    assert_ne!(one, dummy(&file, 2));
    let error = open(folder.path()).err().unwrap().to_string();
    assert!(error.contains("model.safetensors is missing"), "{error}");
}

#[test]
fn the_ready_shapes_are_those_of_llama_3_2() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    for (name, millions) in [("llama-3.2-1b", 1236), ("llama-3.2-3b", 3213)] {
        let c = foretoken::model::ModelConfig::from_json(&root.join(name)).unwrap();
        let attention = 2 * c.hidden_size * (c.num_heads + c.num_kv_heads) * c.head_dim;
        let layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size;
        let all = c.num_layers * layer + c.vocab_size * c.hidden_size + c.hidden_size;
        assert_eq!(
            all.div_ceil(1_000_000),
            millions,
            "{name}: {all} parameters"
        );
        assert_eq!(c.eos_token_ids, [128_001, 128_008, 128_009]);
        assert!(c.rope_scaling.is_some() && c.tie_word_embeddings);
    }
}

#[test]
fn what_is_wrong_with_a_config_is_said_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        (
            json!({ "architectures": ["MambaForCausalLM"] }),
            "LlamaForCausalLM, Qwen2ForCausalLM",
        ),
        (
            json!({ "num_key_value_heads": 3 }),
            "4 attention heads are not divisible by 3",
        ),
        (
            json!({ "num_attention_heads": 0 }),
            "num_attention_heads is 0",
        ),
        (json!({ "attention_bias": true }), "attention_bias"),
        (json!({ "hidden_act": "gelu" }), "only silu"),
        (
            json!({ "rope_scaling": { "type": "yarn", "factor": 2.0 } }),
            "'yarn' is not supported",
        ),
        (
            json!({ "rope_scaling": { "rope_type": "llama3" } }),
            "lacks factor",
        ),
        (json!({ "vocab_size": "many" }), "invalid type"),
    ];
    for (change, want) in cases {
        let mut config = llama_config(16);
        for (key, value) in change.as_object().unwrap() {
            config[key] = value.clone();
        }
        write_config(folder.path(), &config);
        let error = open(folder.path()).err().unwrap();
        assert!(matches!(error, foretoken::error::Error::Setup(_)));
        let text = error.to_string();
        assert!(
            text.contains(want) && text.contains("config.json"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

#[test]
fn broken_files_are_named_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = folder.path().join("broken.gguf");
    std::fs::write(&gguf, b"no gguf at all").unwrap();
    let text = open(&gguf).err().unwrap().to_string();
    assert!(
        text.contains("broken.gguf") && text.lines().count() == 1,
        "{text}"
    );

    write_config(folder.path(), &llama_config(16));
    std::fs::write(folder.path().join("model.safetensors"), b"short").unwrap();
    let text = open(folder.path()).err().unwrap().to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    let mut incomplete = tensors(16, DType::F32);
    incomplete.remove("model.layers.1.mlp.up_proj.weight");
    write_shards(folder.path(), &incomplete);
    let text = open(folder.path()).err().unwrap().to_string();
    assert!(text.contains("model.layers.1.mlp.up_proj.weight"), "{text}");
    std::fs::remove_file(folder.path().join("model-1.safetensors")).unwrap();
    let text = open(folder.path()).err().unwrap().to_string();
    assert!(text.contains("model-1.safetensors is missing"), "{text}");
}
