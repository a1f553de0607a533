//! Tool calls as text: how models write them, how they are read back, and how a grammar makes a model
//! write them. Knows neither HTTP nor the engine.

mod fallback;
mod grammar;
mod grammar_parts;
mod object;
mod parser;
mod python;
mod signature;
#[cfg(test)]
mod tests;
mod xml;
mod xml_grammar;

pub use fallback::without_tools;
pub use grammar::{Answer, answer_grammar};
pub use grammar_parts::Calls;
pub use parser::ToolParser;
pub use signature::Signature;

use crate::harmony;
use serde_json::{Value, json};

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    feature = "clap",
    derive(clap::ValueEnum),
    value(rename_all = "snake_case")
)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3.
    Hermes,
    /// `<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`, as Qwen3-Coder and
    /// Qwen 3.5.
    #[cfg_attr(feature = "clap", value(name = "qwen3_coder"))]
    Qwen3Coder,
    /// `{"name": ..., "parameters": {...}}` and nothing else, as Llama 3.1 and 3.2.
    #[cfg_attr(feature = "clap", value(name = "llama3_json"))]
    Llama3Json,
    /// `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, as Mistral; `[TOOL_CALLS]name[ARGS]{...}`, as
    /// its newer models write it, is read as well.
    Mistral,
    /// Messages to `functions.NAME`, as gpt-oss: reasoning, too.
    #[cfg_attr(feature = "clap", value(name = "openai"))]
    Harmony,
}

/// A tool call of an earlier turn, or an example.
struct WrittenCall<'a> {
    name: &'a str,
    /// JSON text.
    arguments: &'a str,
}

impl ToolFormat {
    /// The format that a chat template which knows tools teaches; `None` if it is none of ours.
    pub fn of_template(source: &str) -> Option<Self> {
        if harmony::is_template(source) {
            Some(Self::Harmony)
        } else if source.contains("<tool_call>") {
            // Both formats have these markers.
            let is_xml = source.contains(xml::FUNCTION);
            Some(if is_xml {
                Self::Qwen3Coder
            } else {
                Self::Hermes
            })
        } else if source.contains("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else {
            let llama = source.contains("<|python_tag|>") || source.contains("ipython");
            llama.then_some(Self::Llama3Json)
        }
    }

    /// The names that can be given for a format.
    pub const NAMES: [&str; 5] = ["hermes", "qwen3_coder", "llama3_json", "mistral", "openai"];

    /// The texts that have a meaning in this format. Those that are special tokens must be part of the
    /// text that a [`ToolParser`] reads.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::Qwen3Coder => &["<tool_call>", "</tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
            Self::Harmony => harmony::MARKERS,
        }
    }

    /// The text before the calls.
    fn start(self) -> &'static str {
        self.markers()[0]
    }

    /// The text after a call, or a list of them.
    fn end(self) -> Option<&'static str> {
        match self {
            Self::Hermes | Self::Qwen3Coder => Some(self.markers()[1]),
            Self::Llama3Json | Self::Mistral | Self::Harmony => None,
        }
    }

    /// The key of a call's arguments, where it is an object.
    fn arguments_key(self) -> &'static str {
        if self == Self::Llama3Json {
            "parameters"
        } else {
            "arguments"
        }
    }

    /// Returns the text that a model writes to make `calls`, which must not be empty.
    fn write(self, calls: &[WrittenCall<'_>]) -> String {
        let key = self.arguments_key();
        let object = |call: &WrittenCall<'_>| {
            let (name, arguments) = (json!(call.name), call.arguments);
            format!(r#"{{"name": {name}, "{key}": {arguments}}}"#)
        };
        let objects: Vec<String> = calls.iter().map(object).collect();
        match self {
            Self::Hermes => between_markers(&objects),
            Self::Qwen3Coder => {
                let calls: Vec<String> = calls.iter().map(xml::write).collect();
                between_markers(&calls)
            }
            Self::Llama3Json => objects.join("; "),
            Self::Mistral => format!("[TOOL_CALLS] [{}]", objects.join(", ")),
            Self::Harmony => {
                let call = |call: &WrittenCall<'_>| {
                    harmony::call_header(call.name).concat() + call.arguments + "<|call|>"
                };
                calls.iter().map(call).collect()
            }
        }
    }
}

/// Each of `calls` between Hermes' markers.
fn between_markers(calls: &[String]) -> String {
    let call = |call: &String| format!("<tool_call>\n{call}\n</tool_call>");
    calls.iter().map(call).collect::<Vec<_>>().join("\n")
}

/// The function that an entry of `tools` describes.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}
