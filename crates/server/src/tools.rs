//! The tools of a chat, and which of them the model may or must call.

use super::checks::wrong;
use super::conversation::FunctionKind;
use super::others::NoOthers;
use foretoken_core::error::{Error, FieldPath, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, to_value};

/// OpenAI's limit of tools, and Anthropic's of names, which is twice OpenAI's.
const MAX_TOOLS: usize = 128;
const MAX_NAME_BYTES: usize = 128;

/// Maximum bytes of the JSON of all tools.
const MAX_TOOLS_BYTES: usize = 256 * 1024;

/// A tool of a chat.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub(super) struct Tool {
    #[serde(rename = "type")]
    kind: FunctionKind,
    function: Function,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// What a model is told of a function.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "FunctionDefinition")]
pub(super) struct Function {
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]{1,128}$"))]
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    /// The JSON schema of an object.
    #[serde(alias = "input_schema", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    pub parameters: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// A tool of the other APIs, whose function is no object of its own. `K` is what its type may be.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub(super) struct FlatTool<K> {
    #[serde(rename = "type")]
    pub kind: K,
    #[serde(flatten)]
    pub function: Function,
}

impl<K> From<FlatTool<K>> for Tool {
    fn from(tool: FlatTool<K>) -> Self {
        Self {
            kind: FunctionKind::Function,
            function: tool.function,
            others: Map::new(),
        }
    }
}

/// `tool_choice` of a chat.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = r#"expected "none", "auto", "required" or {"type": "function", "function": {"name": ...}}"#
)]
pub(super) enum ToolChoice {
    Mode(ToolMode),
    Named(NamedTool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ToolMode {
    None,
    Auto,
    Required,
}

#[derive(Debug, Deserialize, JsonSchema)]
pub(super) struct NamedTool {
    #[serde(rename = "type")]
    _kind: FunctionKind,
    function: ToolName,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ToolName {
    name: String,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

impl ToolChoice {
    /// The choice of one tool.
    pub fn named(name: String) -> Self {
        Self::Named(NamedTool {
            _kind: FunctionKind::Function,
            function: ToolName {
                name,
                _others: NoOthers,
            },
            _others: NoOthers,
        })
    }
}

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The tools, in the form in which chat templates read them.
    pub list: Vec<Value>,
    pub calls: CallMode,
}

/// The tool calls that the answer may or must contain.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) enum CallMode {
    /// Answer with a text.
    #[default]
    None,
    /// Answer with a text, calls, or both.
    Auto,
    /// Call one or more tools.
    Required,
    /// Call the tool with this index once.
    Named(usize),
}

impl Tools {
    /// Checks `tools` and `tool_choice`.
    ///
    /// # Errors
    /// `Invalid`, naming the field.
    pub fn read(tools: Option<Vec<Tool>>, choice: Option<ToolChoice>) -> Result<Self> {
        let list = Self::only(tools)?;
        let calls = match choice.unwrap_or(ToolChoice::Mode(ToolMode::Auto)) {
            ToolChoice::Mode(ToolMode::Required) | ToolChoice::Named(_) if list.is_empty() => {
                return wrong("tool_choice", "needs tools: give them, or leave it out");
            }
            ToolChoice::Mode(_) if list.is_empty() => CallMode::None,
            ToolChoice::Mode(ToolMode::None) => CallMode::None,
            ToolChoice::Mode(ToolMode::Auto) => CallMode::Auto,
            ToolChoice::Mode(ToolMode::Required) => CallMode::Required,
            ToolChoice::Named(tool) => CallMode::Named(index(&list, &tool.function.name)?),
        };
        Ok(Self { list, calls })
    }

    /// Checks only `tools`.
    ///
    /// # Errors
    /// The errors of [`Tools::read`] about `tools`.
    pub fn only(tools: Option<Vec<Tool>>) -> Result<Vec<Value>> {
        let tools = tools.unwrap_or_default();
        if tools.len() > MAX_TOOLS {
            let what = format!("may have at most {MAX_TOOLS} entries, not {}", tools.len());
            return wrong("tools", what);
        }
        for (i, tool) in tools.iter().enumerate() {
            let at = FieldPath::from("tools").index(i).key("function");
            tool.function.check(&at)?;
            let is_same = |other: &Tool| other.function.name == tool.function.name;
            if tools[..i].iter().any(is_same) {
                return wrong(at.key("name"), "must not be that of another tool");
            }
        }
        let list: serde_json::Result<Vec<Value>> = tools.iter().map(to_value).collect();
        let list = list.map_err(|e| Error::internal(format!("tools: {e}")))?;
        let bytes: usize = list.iter().map(|tool| tool.to_string().len()).sum();
        if bytes > MAX_TOOLS_BYTES {
            let what = format!("may have at most {MAX_TOOLS_BYTES} bytes, not {bytes}");
            return wrong("tools", what);
        }
        Ok(list)
    }

    /// The tools that the model may call.
    pub fn callable(&self) -> &[Value] {
        match self.calls {
            CallMode::None => &[],
            CallMode::Auto | CallMode::Required => &self.list,
            CallMode::Named(index) => &self.list[index..=index],
        }
    }
}

/// The name of a tool that was checked.
pub(super) fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

/// The index of the tool `wanted`.
fn index(list: &[Value], wanted: &str) -> Result<usize> {
    let found = list.iter().position(|tool| name(tool) == wanted);
    found.ok_or_else(|| {
        let names: Vec<&str> = list.iter().map(name).collect();
        let what = format!(" must be one of the tools: {}", names.join(", "));
        Error::field("tool_choice.function.name", what)
    })
}

impl Function {
    fn check(&self, at: &FieldPath) -> Result<()> {
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        let fits = (1..=MAX_NAME_BYTES).contains(&self.name.len());
        if !fits || !self.name.bytes().all(is_plain) {
            let what = format!("must have 1 to {MAX_NAME_BYTES} letters, digits, _ and -");
            return wrong(at.key("name"), what);
        }
        let is_object = |schema: &Value| {
            schema.is_object() && schema.get("type").is_none_or(|kind| kind == "object")
        };
        if !self.parameters.as_ref().is_none_or(is_object) {
            return wrong(at.key("parameters"), "must be the JSON schema of an object");
        }
        Ok(())
    }
}
