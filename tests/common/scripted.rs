//! A server over a model that says what a test wants, and chats with tools.

#![allow(dead_code, reason = "each test file uses its part")]

use crate::common::hooked::edited;
use crate::common::server::{Server, text_over};
use crate::common::{chains, fixed_budget};
use foretoken::engine::{self, EngineHandle};
use foretoken::http::AppState;
use foretoken::model::Model;
use foretoken::model::toy::ToyModel;
use foretoken::spec::{Drafter, NgramDrafter};
use foretoken::text::{ReasoningFormat, Text};
use serde_json::{Value, json};
use std::sync::Arc;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// Special tokens after the 256 bytes.
pub const SPECIAL: [&str; 4] = ["<|im_end|>", "<|im_start|>", "[TOOL_CALLS]", "<think>"];
pub const EOS: u32 = 256;
pub const VOCAB: usize = 256 + SPECIAL.len();
pub const MAX_LEN: usize = 4096;

/// Knows tools and their calls, as Qwen's does.
pub const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Write <tool_call></tool_call>.<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

/// Knows no tools.
pub const PLAIN: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\\n' }}";

/// A tokenizer whose tokens are the bytes and the special ones.
pub fn text(template: &str) -> Text {
    text_of(template, &SPECIAL)
}

/// The same with other special tokens, of which the first is EOS.
pub fn text_of(template: &str, special_names: &[&str]) -> Text {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let names = alphabet.iter().map(char::to_string);
    let names = names.chain(special_names.iter().map(|name| (*name).to_owned()));
    let names: Vec<String> = names.collect();
    text_over(&names, special_names, EOS, Some(template))
}

/// A model that answers one prompt, the first one that it gets, with `script`.
pub fn scripted(toy: ToyModel, script: Vec<u32>) -> Box<dyn Model> {
    let mut prompt_len = None;
    edited(toy, move |batch, row, logits| {
        let next = batch.positions[row] as usize + 1;
        let prompt_len = *prompt_len.get_or_insert(next);
        let id = script.get(next - prompt_len).copied().unwrap_or(EOS);
        logits[id as usize] = 100.0;
    })
}

pub fn start(model: Box<dyn Model>, drafter: Option<Box<dyn Drafter>>) -> EngineHandle {
    let options = fixed_budget(chains(4));
    engine::spawn(model, drafter, 4096, 4, options).expect("starts")
}

pub async fn serve(
    engine: EngineHandle,
    template: &str,
    configure: impl FnOnce(AppState) -> AppState,
) -> Server {
    let names = vec!["toy".to_owned()];
    let state = AppState::new(engine.clone(), Arc::new(text(template)), names);
    Server::over(engine, |_| configure(state)).await
}

/// A server whose model says `says`, with drafts from the text so far.
pub async fn saying_as(
    says: &str,
    template: &str,
    configure: impl FnOnce(AppState) -> AppState,
) -> Server {
    let toy = ToyModel::new(VOCAB, MAX_LEN, 1, 0.0).with_eos(&[EOS]);
    let script = text(template).encode(says, false).expect("encodes");
    let drafter = Box::new(NgramDrafter::new(1, 3));
    let engine = start(scripted(toy, script), Some(drafter));
    serve(engine, template, configure).await
}

/// Reads reasoning between `<think>` and `</think>`.
pub fn thinking(state: AppState) -> AppState {
    state.with_reasoning_parser(Some(ReasoningFormat::Qwen3))
}

/// The reasoning of a stream.
pub fn thought(chunks: &[Value]) -> String {
    let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
    deltas
        .filter_map(|delta| delta["reasoning_content"].as_str())
        .collect()
}

pub async fn saying(says: &str) -> Server {
    saying_as(says, TEMPLATE, |state| state).await
}

pub fn tool(name: &str, properties: Value) -> Value {
    let required: Vec<String> = properties
        .as_object()
        .map(|properties| properties.keys().cloned().collect())
        .unwrap_or_default();
    let parameters = json!({"type": "object", "properties": properties, "required": required});
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}})
}

pub fn body() -> Value {
    json!({
        "messages": [{"role": "user", "content": "How is the weather in Zürich?"}],
        "tools": [
            tool("get_weather", json!({"city": {"type": "string"}})),
            tool("add", json!({"a": {"type": "integer"}, "b": {"type": "integer"}})),
        ],
        "temperature": 0,
    })
}

/// A text with calls of both tools of [`body`].
pub const TWO_CALLS: &str = "Let me look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": 2}}\n</tool_call>";

pub fn with(key: &str, value: Value) -> Value {
    let mut body = body();
    body[key] = value;
    body
}

pub const CHAT: &str = "/v1/chat/completions";

pub fn call<'a>(call: &'a Value) -> (&'a str, &'a str) {
    let text = |value: &'a Value| value.as_str().expect("a string");
    assert_eq!(call["type"], "function");
    let function = &call["function"];
    (text(&function["name"]), text(&function["arguments"]))
}
