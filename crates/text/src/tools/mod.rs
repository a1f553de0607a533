//! Tool calls as text: how models write them, how they are read back, and how a grammar makes a model
//! write them. Knows neither HTTP nor the engine.

mod arguments_grammar;
mod braces;
mod deepseek;
mod fallback;
mod formats;
mod freeform;
mod grammar;
mod grammar_parts;
mod object;
mod parser;
mod python;
mod python_call;
mod signature;
mod syntax;
#[cfg(test)]
pub(crate) mod tests;
mod text_schema;
mod whole;
mod xml;

pub use fallback::without_tools;
pub use freeform::{FREEFORM_PARAMETER, FreeformInput};
pub use grammar::{Answer, answer_grammar};
pub use grammar_parts::{Calls, InputGrammar, close_object};
pub use parser::ToolParser;
pub use signature::Signature;

use crate::harmony;
use crate::named_formats::named_formats;
use formats::FORMATS;
use serde_json::{Value, json};
use syntax::{Body, Syntax};

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// Messages to `functions.NAME`, as gpt-oss: reasoning, too.
    Harmony,
    /// Names and JSON in fences between markers, as DeepSeek V3 and R1.
    DeepseekV3,
    /// Names and JSON between markers, as DeepSeek V3.1.
    DeepseekV31,
    /// `<｜DSML｜function_calls><｜DSML｜invoke name="..."><｜DSML｜parameter name="..." string="true">`, as DeepSeek V3.2.
    DeepseekV32,
    /// `<｜DSML｜tool_calls>`, and the tags of V3.2, as DeepSeek V4.
    DeepseekV4,
    /// `functions.NAME:0` and JSON between markers, as Kimi K2.
    KimiK2,
    /// `<minimax:tool_call><invoke name="..."><parameter name="...">`, as MiniMax M2.
    MinimaxM2,
    /// `<|tool_call>call:NAME{...}<tool_call|>`, as Gemma 4.
    Gemma4,
    /// `<start_function_call>call:NAME{...}<end_function_call>`, as FunctionGemma.
    FunctionGemma,
    /// `<seed:tool_call><function=...><parameter=...>`, as Seed-OSS.
    SeedOss,
    /// A list of calls in Python between markers, as LFM2.
    Lfm2,
    /// `<function_calls>` and a call in Python on each line, as OLMo 3.
    Olmo3,
    /// `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>`, as Cohere's Command A and R7B.
    Command,
    /// `Action:` and a list of objects in a fence, as Cohere's Command R and R+.
    CommandR,
    /// `<|tools_prefix|>[{"NAME": {...}}]<|tools_suffix|>`, as Apertus.
    Apertus,
    /// `<|function_call|>{"name": ..., "arguments": {...}}`, as GigaChat 3.1. The form of GigaChat 3 is read as well.
    Gigachat31,
    /// A message `function call` with `{"name": ..., "arguments": {...}}`, as GigaChat 3. That of 3.1 is read as well.
    Gigachat3,
    /// `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, as Phi-4-mini.
    Phi4Mini,
    /// `<|tool_call|>[{"name": ..., "arguments": {...}}]`, as Granite 3.
    Granite,
    /// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`, as Nemotron.
    Nemotron,
    /// `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`, as Hunyuan.
    Hunyuan,
    /// `<tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`, as GLM-4.5 to 4.7.
    Glm45,
    /// `NAME`, a line break and `{...}`, and nothing else, as GLM-4.
    Glm4,
    /// `<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`, as Qwen3-Coder and
    /// Qwen 3.5.
    Qwen3Coder,
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3. A JSON object
    /// that is the whole answer is read as well.
    Hermes,
    /// `<function=NAME>{...}</function>`, as Functionary 3.1.
    Functionary31,
    /// `[TOOL_CALLS]name[ARGS]{...}`, as Mistral's models since the middle of 2025. A list of objects is read as well.
    MistralArgs,
    /// `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, as Mistral's older models. A name before its arguments is read
    /// as well.
    Mistral,
    /// `[{"name": ..., "arguments": {...}}]` and nothing else, as xLAM.
    Xlam,
    /// A list of calls in Python and nothing else, as Llama 4 and 3.2.
    Pythonic,
    /// `{"name": ..., "parameters": {...}}` and nothing else, as Llama 3.1 and 3.2.
    Llama3Json,
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
        let taught = |syntax: &&Syntax| (syntax.is_taught)(source);
        FORMATS.iter().find(taught).map(|syntax| syntax.format)
    }

    /// The format that is meant where this one is named and the chat template is `source`: the models of Mistral and
    /// GigaChat write calls in two ways, which have one name in other servers.
    pub fn in_template(self, source: &str) -> Self {
        match (self, Self::of_template(source)) {
            (Self::Mistral, Some(other @ Self::MistralArgs))
            | (Self::Gigachat3, Some(other @ Self::Gigachat31)) => other,
            _ => self,
        }
    }

    /// The format in which a chat template that knows no tools writes the calls of earlier turns; `None` if it writes
    /// none.
    pub fn of_history(source: &str) -> Option<Self> {
        let is_named = |syntax: &&Syntax| matches!(syntax.body, Body::Named(_));
        let mut named = FORMATS.iter().filter(is_named);
        named
            .find(|syntax| (syntax.is_taught)(source))
            .map(|syntax| syntax.format)
    }

    /// The texts that have a meaning in this format. Those that are special tokens must be part of the
    /// text that a [`ToolParser`] reads.
    pub fn markers(self) -> &'static [&'static str] {
        self.syntax().markers
    }

    /// Number of letters and digits of which templates expect that ids of calls consist, if they expect it.
    pub fn id_len(self) -> Option<usize> {
        self.syntax().id_len
    }

    /// Whether a turn has one call: templates refuse more, or drop them.
    pub fn is_single(self) -> bool {
        self.syntax().single
    }

    /// How calls are written.
    fn syntax(self) -> &'static Syntax {
        &FORMATS[self as usize]
    }

    /// Whether arguments are written one by one, not as one JSON object.
    fn has_single_arguments(self) -> bool {
        matches!(
            self.syntax().body,
            Body::Tags(_) | Body::Python | Body::Braces(_)
        )
    }

    /// Returns the text that a model writes to make `calls`, which must not be empty.
    fn write(self, calls: &[WrittenCall<'_>]) -> String {
        let syntax = self.syntax();
        let [before, after] = syntax.written;
        let call = |(i, call): (usize, &WrittenCall<'_>)| {
            let call = syntax.body.write(call, i);
            if syntax.each {
                format!("{before}{call}{after}")
            } else {
                call
            }
        };
        let calls: Vec<String> = calls.iter().enumerate().map(call).collect();
        let calls = calls.join(syntax.separator);
        if syntax.each {
            calls
        } else {
            format!("{before}{calls}{after}")
        }
    }
}

impl Body {
    /// Returns the text of a call, the `number`th of its turn.
    fn write(&self, call: &WrittenCall<'_>, number: usize) -> String {
        let (name, arguments) = (call.name, call.arguments);
        match self {
            Self::Object(keys) => {
                let number = keys.number.map(|key| format!("\"{key}\": \"{number}\", "));
                let (number, name) = (number.unwrap_or_default(), json!(name));
                let (key, of_arguments) = (keys.name, keys.arguments);
                format!("{{{number}\"{key}\": {name}, \"{of_arguments}\": {arguments}}}")
            }
            Self::Named(named) => {
                let number = if named.numbered {
                    format!(":{number}")
                } else {
                    String::new()
                };
                let (before, between, after) = (named.before, named.between, named.after);
                format!("{before}{name}{number}{between}{arguments}{after}")
            }
            Self::Tags(tags) => xml::write(tags, call),
            Self::Python => python_call::write(call),
            Self::Braces(quote) => braces::write(quote, call),
            Self::Harmony => harmony::call_header(name).concat() + arguments + "<|call|>",
        }
    }
}

named_formats!(
    /// All formats, in the order in which a template's is looked for.
    ToolFormat, 31 from Hermes by syntax
);

/// The function that an entry of `tools` describes.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}
