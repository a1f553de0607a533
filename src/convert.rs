//! `foretoken convert`: converts a folder of safetensors, with its tokenizer and chat template, to one
//! GGUF file under llama.cpp's names.

use crate::console::say;
use crate::error::{Error, Result};
use crate::kernels::quant::BlockType;
use crate::model::{
    HeadConfig, HeadKind, LoadFormat, ModelConfig, ModelSource, RopeSpec, names, safetensors_files,
};
use crate::text::Text;
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::Value as Json;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

/// The flags of `foretoken convert`.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct ConvertOptions {
    /// Model: a Hugging Face id, or a folder with config.json, safetensors and tokenizer.json.
    #[arg(long)]
    pub model: String,
    /// Branch, tag or commit of a Hugging Face model.
    #[arg(long)]
    pub revision: Option<String>,
    /// GGUF file to write.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Type of the matrices whose row length is a multiple of its block size; other matrices become
    /// q8_0 or f16, and norms stay f32.
    #[arg(long = "type", value_name = "TYPE", default_value = "q8_0", value_parser = one_of(KINDS.to_vec()))]
    pub kind: GgmlDType,
}

/// The matrix types of a GGUF file and their names on the command line.
const KINDS: [(&str, GgmlDType); 11] = [
    ("f32", GgmlDType::F32),
    ("f16", GgmlDType::F16),
    ("bf16", GgmlDType::BF16),
    ("q8_0", GgmlDType::Q8_0),
    ("q4_0", GgmlDType::Q4_0),
    ("q4_1", GgmlDType::Q4_1),
    ("q5_0", GgmlDType::Q5_0),
    ("q5_1", GgmlDType::Q5_1),
    ("q4_k", GgmlDType::Q4K),
    ("q5_k", GgmlDType::Q5K),
    ("q6_k", GgmlDType::Q6K),
];

/// A parser of the types of blocks.
pub fn block_kinds() -> impl TypedValueParser<Value = BlockType> {
    let kinds = KINDS.map(|(name, kind)| (name, BlockType::from(kind)));
    let blocks = kinds.into_iter().filter(|(_, kind)| kind.float().is_none());
    one_of(blocks.collect())
}

/// A parser of the names of `values`.
fn one_of<T>(values: Vec<(&'static str, T)>) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
    PossibleValuesParser::new(names).try_map(move |name| {
        let value = values.iter().find(|(known, _)| *known == name);
        value.map(|(_, value)| *value).ok_or("no such type")
    })
}

/// Converts, and checks that the file's tokenizer encodes texts as the folder's does.
///
/// # Errors
/// `Setup`: the model is missing or not supported, or the file cannot be written. Then no new file
/// remains and an existing one is unchanged.
pub fn run(options: &ConvertOptions) -> Result<()> {
    let out = &options.out;
    if out.is_dir() {
        let what = "it is a folder: --out is the GGUF file to write";
        return Err(Error::in_file(out, what));
    }
    // Before a model is downloaded and read for a file that cannot be written.
    let unfinished = out.with_extension("gguf.part");
    let file = File::create(&unfinished).map_err(|e| Error::in_file(out, e))?;
    let converted = convert(options, file, &unfinished);
    if converted.is_err() {
        // Report the error of the conversion, not of the removal.
        let _ = std::fs::remove_file(&unfinished);
    }
    converted
}

/// Writes to `file`, at the path `unfinished`, and renames it.
fn convert(options: &ConvertOptions, file: File, unfinished: &Path) -> Result<()> {
    let (model, revision) = (&options.model, options.revision.as_deref());
    let ModelSource::Folder(folder) = ModelSource::resolve(model, revision, LoadFormat::Auto)?
    else {
        return Err(Error::setup(format!("{model} is already a GGUF file")));
    };
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let (config, mut metadata, text) = match HeadKind::of(&ModelSource::Folder(folder.clone()))? {
        None => {
            let mut config = ModelConfig::from_json(&folder)?;
            if config.packed.is_some() {
                return Err(Error::setup(format!(
                    "{model}: a model with a quantization_config cannot be converted"
                )));
            }
            config.architecture = match &*config.architecture {
                known @ ("llama" | "qwen2" | "qwen3") => known.to_owned(),
                // llama.cpp has no name for those without windows and scaled queries.
                "mistral" | "ministral" | "ministral3" => "llama".to_owned(),
                other => {
                    return Err(Error::setup(format!(
                        "{model}: a model of architecture {other} cannot be converted: only llama, mistral, qwen2 and qwen3 can"
                    )));
                }
            };
            let text = Text::from_folder(&folder)?;
            let metadata = tokenizer_metadata(&text, config.vocab_size)?;
            (config, metadata, Some(text))
        }
        Some(kind) => {
            let architecture = kind.gguf_architecture().ok_or_else(|| {
                Error::setup(format!(
                    "{model}: a head of kind {kind:?} cannot be converted: only EAGLE-3 and DFlash can"
                ))
            })?;
            let head = HeadConfig::from_json(&folder, kind)?;
            let config = ModelConfig {
                architecture: architecture.into(),
                ..head.shape.clone()
            };
            // A head has no tokenizer of its own.
            let metadata = head.gguf_metadata();
            let metadata = metadata.map_err(|e| Error::in_file(&folder, e))?;
            (config, metadata, None)
        }
    };
    let rope = config
        .plain_rope()
        .map_err(|e| Error::in_file(&folder, e))?;
    metadata.extend(model_metadata(&config, rope, &name));
    let tensors = tensors(&folder, &config, rope, options.kind)?;

    write(file, unfinished, &metadata, &tensors)?;
    if let Some(text) = text {
        check_tokenizer(&text, unfinished)?;
    }
    std::fs::rename(unfinished, &options.out).map_err(|e| Error::in_file(&options.out, e))?;
    let bytes = std::fs::metadata(&options.out).map_or(0, |file| file.len());
    say(format_args!(
        "{}: {} tensors, {:.1} MB",
        options.out.display(),
        tensors.len(),
        bytes as f64 / 1e6
    ));
    Ok(())
}

type Metadata = Vec<(String, Value)>;

fn write(
    file: File,
    path: &Path,
    metadata: &Metadata,
    tensors: &[(String, QTensor)],
) -> Result<()> {
    let mut out = BufWriter::new(file);
    let metadata: Vec<_> = metadata.iter().map(|(key, v)| (key.as_str(), v)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t)).collect();
    gguf_file::write(&mut out, &metadata, &tensors).map_err(|e| Error::in_file(path, e))?;
    let out = out
        .into_inner()
        .map_err(|e| Error::in_file(path, e.error()))?;
    out.sync_all().map_err(|e| Error::in_file(path, e))
}

/// The metadata of a model's shape, as llama.cpp's `convert_hf_to_gguf.py` writes it.
fn model_metadata(config: &ModelConfig, rope: &RopeSpec, name: &str) -> Metadata {
    let architecture = &config.architecture;
    let size = |key: &str, size: usize| (format!("{architecture}.{key}"), Value::U32(size as u32));
    let float = |key: &str, x: f32| (format!("{architecture}.{key}"), Value::F32(x));
    let string = |key: &str, text: &str| (key.to_owned(), Value::String(text.to_owned()));
    vec![
        string("general.architecture", architecture),
        string("general.name", name),
        size("block_count", config.num_layers()),
        size("context_length", config.max_position_embeddings),
        size("embedding_length", config.hidden_size),
        size("feed_forward_length", config.intermediate_size),
        size("attention.head_count", config.num_heads),
        size("attention.head_count_kv", config.num_kv_heads),
        size("attention.key_length", config.head_dim),
        size("attention.value_length", config.head_dim),
        size("rope.dimension_count", config.head_dim),
        size("vocab_size", config.vocab_size),
        float(
            "attention.layer_norm_rms_epsilon",
            config.rms_norm_eps as f32,
        ),
        float("rope.freq_base", rope.theta),
    ]
}

/// All tensors under llama.cpp's names, sorted by their safetensors names.
fn tensors(
    folder: &Path,
    config: &ModelConfig,
    rope: &RopeSpec,
    kind: GgmlDType,
) -> Result<Vec<(String, QTensor)>> {
    let files = safetensors_files(folder)?;
    // SAFETY: the files are only read; changing them during the conversion changes the output.
    let stored =
        unsafe { MmapedSafetensors::multi(&files) }.map_err(|e| Error::in_file(folder, e))?;
    let mut names: Vec<String> = stored.tensors().into_iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    let mut tensors = Vec::with_capacity(names.len() + 1);
    for name in names {
        let tied = config.tie_word_embeddings && name == "lm_head.weight";
        // `t2d` follows from `d2t`.
        if tied || name.ends_with("rotary_emb.inv_freq") || name == "t2d" {
            continue;
        }
        let Some(gguf) = names::gguf(&name) else {
            return Err(Error::in_file(folder, format!("unknown tensor {name}")));
        };
        let tensor = stored.load(&name, &Device::Cpu)?.to_dtype(DType::F32)?;
        let tensor = match gguf.split('.').nth(2) {
            Some("attn_q") if config.architecture == "llama" => pairs(&tensor, config.num_heads)?,
            Some("attn_k") if config.architecture == "llama" => {
                pairs(&tensor, config.num_kv_heads)?
            }
            _ => tensor,
        };
        let kind = fitting(kind, tensor.dims());
        tensors.push((gguf, QTensor::quantize(&tensor, kind)?));
    }
    if rope.scaling.is_some() {
        let plain = RopeSpec {
            scaling: None,
            ..rope.clone()
        };
        let factors = plain.frequencies().into_iter().zip(rope.frequencies());
        let factors: Vec<f32> = factors.map(|(plain, scaled)| plain / scaled).collect();
        let factors = Tensor::new(factors, &Device::Cpu)?;
        let factors = QTensor::quantize(&factors, GgmlDType::F32)?;
        tensors.push(("rope_freqs.weight".into(), factors));
    }
    Ok(tensors)
}

/// The type in which a tensor of shape `dims` is stored if `kind` is requested.
fn fitting(kind: GgmlDType, dims: &[usize]) -> GgmlDType {
    let &[_, inputs] = dims else {
        return GgmlDType::F32;
    };
    let kinds = [kind, GgmlDType::Q8_0];
    let fits = |kind: &GgmlDType| inputs.is_multiple_of(kind.block_size());
    kinds.into_iter().find(fits).unwrap_or(GgmlDType::F16)
}

/// The rows of q or k, or their biases, in llama.cpp's order, which interleaves the two halves of each head for RoPE.
fn pairs(tensor: &Tensor, heads: usize) -> Result<Tensor> {
    let (rows, dims) = (tensor.dim(0)?, tensor.dims());
    let halves = tensor.reshape((heads, 2, rows / heads / 2, ()))?;
    Ok(halves.transpose(1, 2)?.contiguous()?.reshape(dims)?)
}

/// llama.cpp's token types.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// The pre-tokenizer patterns of Llama 3 and Qwen2.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The metadata of a byte-level BPE tokenizer, padded to `vocab_size` tokens.
fn tokenizer_metadata(text: &Text, vocab_size: usize) -> Result<Metadata> {
    let json: Json = serde_json::from_str(&text.tokenizer_json()?)
        .map_err(|e| Error::internal(format!("the tokenizer's JSON: {e}")))?;
    let model = &json["model"];
    let pre = pre_tokenizer(&json["pre_tokenizer"]);
    let (Some("BPE"), Some(pre)) = (model["type"].as_str(), pre) else {
        return Err(Error::setup(
            "this tokenizer cannot be written into a GGUF file: only byte-level BPE as in GPT-2, SmolLM, Llama 3 or Qwen2 can",
        ));
    };
    let len = text.vocab_size().max(vocab_size);
    let mut tokens: Vec<String> = (0..len).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![UNUSED; len];
    for (name, id) in model["vocab"].as_object().into_iter().flatten() {
        let id = id.as_u64().unwrap_or_default() as usize;
        (tokens[id], types[id]) = (name.clone(), NORMAL);
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let id = added["id"].as_u64().unwrap_or_default() as usize;
        let special = added["special"].as_bool().unwrap_or_default();
        tokens[id] = added["content"].as_str().unwrap_or_default().to_owned();
        types[id] = if special { CONTROL } else { USER_DEFINED };
    }
    let merges = model["merges"].as_array().into_iter().flatten();
    let merges = merges.map(|merge| {
        let parts = merge.as_array().into_iter().flatten();
        let parts: Vec<_> = parts.filter_map(Json::as_str).collect();
        parts.join(" ")
    });

    let key = |key: &str| format!("tokenizer.ggml.{key}");
    let strings = |list: Vec<String>| Value::Array(list.into_iter().map(Value::String).collect());
    let types = Value::Array(types.into_iter().map(Value::I32).collect());
    let bos = text.special_ids().bos;
    let starts_with_bos = bos.is_some() && text.encode("a", true)?.first() == bos.as_ref();
    let mut metadata = vec![
        (key("model"), Value::String("gpt2".into())),
        (key("pre"), Value::String(pre.into())),
        (key("tokens"), strings(tokens)),
        (key("token_type"), types),
        (key("merges"), strings(merges.collect())),
        (key("add_bos_token"), Value::Bool(starts_with_bos)),
    ];
    if model["ignore_merges"] == true {
        metadata.push((key("ignore_merges"), Value::Bool(true)));
    }
    let mut all_eos = text.special_ids().eos.iter().copied();
    let other_eos = all_eos.find(|&id| Some(id) != text.eos());
    for (name, id) in [("bos", bos), ("eos", text.eos()), ("eot", other_eos)] {
        if let Some(id) = id {
            metadata.push((key(&format!("{name}_token_id")), Value::U32(id)));
        }
    }
    for (name, template) in [
        ("", text.chat_template()),
        (".tool_use", text.tool_template()),
    ] {
        if let Some(template) = template {
            let template = Value::String(template.to_owned());
            metadata.push((format!("tokenizer.chat_template{name}"), template));
        }
    }
    Ok(metadata)
}

/// llama.cpp's name for a pre-tokenizer; `None` if it has none.
fn pre_tokenizer(json: &Json) -> Option<&'static str> {
    let parts = match json["pretokenizers"].as_array() {
        Some(parts) => parts.iter().collect(),
        None => vec![json],
    };
    let byte_level = |part: &Json, use_regex: bool| {
        part["type"] == "ByteLevel"
            && part["add_prefix_space"] == false
            && part["use_regex"].as_bool().unwrap_or(true) == use_regex
    };
    match parts.as_slice() {
        [bytes] if byte_level(bytes, true) => Some("gpt-2"),
        [digits, bytes] if byte_level(bytes, true) => {
            let individual = digits["type"] == "Digits" && digits["individual_digits"] == true;
            individual.then_some("smollm")
        }
        [split, bytes] if byte_level(bytes, false) => match split["pattern"]["Regex"].as_str()? {
            LLAMA3 => Some("llama-bpe"),
            QWEN2 => Some("qwen2"),
            _ => None,
        },
        _ => None,
    }
}

/// Text that pre-tokenizers treat differently: spaces, digits, contractions, other scripts, code.
const PROBE: &str = "Hello  world, it's 12345.67!\n\n  We'LL see\u{e9}\u{4f60}\u{597d} \u{1f600}\tfn f(x: &[u8]) -> i32 { x_1 += 2; }\r\n\n 3 4";

/// Reads the file's tokenizer back and compares it with `text`, its source.
fn check_tokenizer(text: &Text, file: &Path) -> Result<()> {
    let read = Text::from_gguf(file)?;
    for id in 0..text.vocab_size() as u32 {
        let same = read.token_bytes(id) == text.token_bytes(id);
        if !same || read.is_special(id) != text.is_special(id) {
            return Err(Error::setup(format!(
                "token {id} would change in a GGUF file: this tokenizer cannot be converted"
            )));
        }
    }
    let mut probes = vec![PROBE.to_owned()];
    if text.has_chat_template() {
        let messages = [serde_json::json!({"role": "user", "content": PROBE})];
        let nothing = serde_json::Map::new();
        let rendered = text.render_chat(&messages, true, &nothing)?;
        if read.render_chat(&messages, true, &nothing)? != rendered {
            return Err(Error::setup(
                "the chat template would change in a GGUF file",
            ));
        }
        probes.push(rendered);
    }
    for probe in probes {
        for special in [true, false] {
            if read.encode(&probe, special)? != text.encode(&probe, special)? {
                return Err(Error::setup(
                    "a GGUF file would split texts differently: this tokenizer cannot be converted",
                ));
            }
        }
    }
    Ok(())
}
