//! The functions that the fuzzers call: everything that reads bytes of strangers. A target may refuse its input,
//! within a few seconds and with a bounded message; it must not panic.
//!
//! `fuzz/` has a program for each target, and a corpus that `cargo test` replays.

mod checkpoint;

use crate::error::{Error, Result, catching};
use crate::gguf;
pub use crate::http::fuzzing::{FuzzedApi, read};
use crate::model::{ModelConfig, TensorHeaders, pickle, safetensors_header};
use crate::text::{Chat, ChatTemplate, SpecialIds, Text, ToolFormat};
use candle_core::quantized::gguf_file::Value as GgufValue;
use checkpoint::fetched;
use clap::ValueEnum;
use serde_json::{Map, Value, json};
use std::io::Cursor;
use std::path::Path;
use std::sync::{Arc, LazyLock, Once};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// A function that a fuzzer calls.
type FuzzTarget = fn(&[u8]) -> Result<()>;

/// The targets by name, which is also that of their corpus.
pub const TARGETS: [(&str, FuzzTarget); 20] = [
    ("chat", |bytes| {
        read(&TEXT, bytes, FuzzedApi::Chat(ToolFormat::Hermes))
    }),
    ("completion", |bytes| {
        check(read(&TEXT, bytes, FuzzedApi::Infill));
        read(&TEXT, bytes, FuzzedApi::Completion)
    }),
    ("response", |bytes| read(&TEXT, bytes, FuzzedApi::Response)),
    ("message", |bytes| read(&TEXT, bytes, FuzzedApi::Message)),
    ("ollama", |bytes| {
        check(read(&TEXT, bytes, FuzzedApi::OllamaChat));
        read(&TEXT, bytes, FuzzedApi::OllamaGenerate)
    }),
    ("tokenize", |bytes| {
        check(read(&TEXT, bytes, FuzzedApi::Tokenize));
        read(&TEXT, bytes, FuzzedApi::Detokenize)
    }),
    ("embedding", |bytes| {
        check(read(&TEXT, bytes, FuzzedApi::Rerank));
        check(read(&TEXT, bytes, FuzzedApi::Score));
        read(&TEXT, bytes, FuzzedApi::Embedding)
    }),
    ("schema", schema),
    ("grammar", grammar),
    ("tools", |bytes| {
        for format in ToolFormat::value_variants() {
            check(tools(bytes, *format));
        }
        Ok(())
    }),
    ("template", template),
    ("config", config),
    ("tokenizer", tokenizer),
    ("gguf", gguf),
    ("gguf_header", gguf_header),
    ("gguf_tokenizer", gguf_tokenizer),
    ("safetensors_header", safetensors_header),
    ("pickle", pickled),
    ("gguf_files", checkpoint::gguf_files),
    ("folder", checkpoint::folder),
];

/// Runs the target `name` on `bytes`.
///
/// # Panics
/// If there is no such target, or it finds something.
pub fn run(name: &str, bytes: &[u8]) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        // A fuzzer ends the process on every panic, also on those of libraries that are caught.
        let outer = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !catching() {
                outer(panic);
            }
        }));
    });
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    let Some((_, target)) = found else {
        panic!("there is no target {name}");
    };
    check(target(bytes));
}

/// Errors are expected, but none of ours, and none that is long.
fn check(result: Result<()>) {
    match result {
        Err(Error::Internal(e)) => panic!("an internal error: {e}"),
        Err(e) => assert!(e.to_string().len() < 20_000, "a long error"),
        Ok(()) => {}
    }
}

/// A byte-level tokenizer of the 256 bytes, with a template.
static TEXT: LazyLock<Arc<Text>> = LazyLock::new(|| {
    let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    bytes.sort_unstable();
    let vocabulary: Map<String, Value> = (bytes.into_iter().zip(0u32..))
        .map(|(c, id)| (c.into(), id.into()))
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    let json = json!({
        "version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    });
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let tokenizer = Tokenizer::from_bytes(json.to_string());
    let mut tokenizer = tokenizer.expect("the tokenizer of the fuzzers is valid");
    let end = tokenizer.add_special_tokens([AddedToken::from("</s>", true)]);
    assert!(end.is_ok_and(|added| added == 1));
    let special = SpecialIds {
        bos: None,
        eos: vec![256],
    };
    let text = Text::new(tokenizer, special, Some(template));
    Arc::new(text.expect("the tokenizer of the fuzzers is byte-level"))
});

fn utf8(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|e| Error::setup(e.to_string()))
}

fn chat_with(fields: Value, format: ToolFormat) -> Result<()> {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let pairs = fields.as_object().cloned().unwrap_or_default();
    body.as_object_mut()
        .into_iter()
        .for_each(|body| body.extend(pairs.clone()));
    read(&TEXT, body.to_string().as_bytes(), FuzzedApi::Chat(format))
}

/// A JSON schema.
fn schema(bytes: &[u8]) -> Result<()> {
    let schema: Value = serde_json::from_slice(bytes).map_err(|e| Error::setup(e.to_string()))?;
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    chat_with(json!({"response_format": format}), ToolFormat::Hermes)
}

/// Tools of which one must be called.
fn tools(bytes: &[u8], format: ToolFormat) -> Result<()> {
    let tools: Value = serde_json::from_slice(bytes).map_err(|e| Error::setup(e.to_string()))?;
    chat_with(json!({"tools": tools, "tool_choice": "required"}), format)
}

/// A grammar, or after the byte `/` a regular expression.
fn grammar(bytes: &[u8]) -> Result<()> {
    let text = utf8(bytes)?;
    match text.strip_prefix('/') {
        Some(regex) => chat_with(json!({"guided_regex": regex}), ToolFormat::Hermes),
        None => chat_with(json!({"guided_grammar": text}), ToolFormat::Hermes),
    }
}

/// A chat template and, after the first NUL, messages.
fn template(bytes: &[u8]) -> Result<()> {
    let (source, messages) = utf8(bytes)?.split_once('\0').unwrap_or((utf8(bytes)?, ""));
    let messages: Vec<Value> = serde_json::from_str(messages)
        .unwrap_or_else(|_| vec![json!({"role": "user", "content": "Hi"})]);
    let template = ChatTemplate::new(source, Some("<s>"), Some("</s>"))?;
    let chat = Chat::of(&messages);
    template.render(&chat).map(drop)
}

/// A `config.json`.
fn config(bytes: &[u8]) -> Result<()> {
    let config = ModelConfig::parse(utf8(bytes)?);
    let config = config.map_err(|e| Error::in_file(Path::new("config.json"), e))?;
    for rope in config.ropes() {
        rope.frequencies();
    }
    Ok(())
}

/// A `tokenizer.json`.
fn tokenizer(bytes: &[u8]) -> Result<()> {
    speak(&Text::from_json(utf8(bytes)?)?)
}

/// The header of a GGUF file, which is the same if it is fetched in steps.
fn gguf_header(bytes: &[u8]) -> Result<()> {
    let whole = gguf::header(&mut Cursor::new(bytes)).map(drop);
    let stepwise = gguf::read_inspected(&mut fetched(bytes));
    assert_eq!(whole.is_ok(), stepwise.is_ok(), "{whole:?}, {stepwise:?}");
    whole
}

/// The header of a safetensors file, as it is fetched from the Hub.
fn safetensors_header(bytes: &[u8]) -> Result<()> {
    safetensors_header::read(&mut fetched(bytes), &mut TensorHeaders::new())
}

/// The pickle of a `pytorch_model.bin`.
fn pickled(bytes: &[u8]) -> Result<()> {
    pickle::names_in(bytes).map(drop).map_err(Error::setup)
}

/// A GGUF file, in which the data of the tensors need not be.
fn gguf(bytes: &[u8]) -> Result<()> {
    let header = gguf::header(&mut Cursor::new(bytes))?;
    let config = ModelConfig::from_gguf(&header, Path::new("model.gguf"));
    let text = Text::from_gguf_header(header);
    config.and(text.as_ref().map(drop).map_err(Clone::clone))?;
    text.and_then(|text| speak(&text))
}

/// The tokenizer in the metadata of a GGUF file, which is an object of JSON here: keys after `tokenizer.ggml.`.
fn gguf_tokenizer(bytes: &[u8]) -> Result<()> {
    let keys: Map<String, Value> =
        serde_json::from_slice(bytes).map_err(|e| Error::setup(e.to_string()))?;
    let metadata = keys.into_iter().filter_map(|(key, value)| {
        let value = gguf_value(value)?;
        Some((format!("tokenizer.ggml.{key}"), value))
    });
    let header = gguf::Header {
        metadata: metadata.collect(),
        ..gguf::Header::default()
    };
    speak(&Text::from_gguf_header(header)?)
}

/// `None` of what no GGUF file can hold.
fn gguf_value(json: Value) -> Option<GgufValue> {
    Some(match json {
        Value::Bool(flag) => GgufValue::Bool(flag),
        Value::String(text) => GgufValue::String(text),
        Value::Array(list) => {
            GgufValue::Array(list.into_iter().map(gguf_value).collect::<Option<_>>()?)
        }
        Value::Number(number) => match number.as_i64() {
            Some(whole) => GgufValue::I32(whole.try_into().ok()?),
            None => GgufValue::F32(number.as_f64()? as f32),
        },
        Value::Null | Value::Object(_) => return None,
    })
}

fn speak(text: &Text) -> Result<()> {
    // A tokenizer may lack an unknown token, which is told as an internal error.
    let ids = text.encode("Hello, 42 wörlds\n", true).unwrap_or_default();
    text.decode(&ids, true);
    Ok(())
}
