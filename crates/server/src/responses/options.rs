//! Fields of a request that its response repeats.

use super::tools::{ResponseTool, shown_name};
use crate::checks::{required, wrong};
use crate::others::NoOthers;
use crate::structured::FlatFormat;
use crate::tool_choice::{ALLOWED_TOOLS, AllowedMode, ToolChoice, ToolMode, hosted};
use foretoken_core::error::{FieldPath, Result, clipped};
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Debug, Default, Clone, Serialize, Deserialize, JsonSchema)]
pub(super) struct TextOptions {
    pub format: Option<FlatFormat>,
    /// A hint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verbosity: Option<String>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Default, Clone, Serialize, Deserialize, JsonSchema)]
pub(super) struct ReasoningOptions {
    /// A hint.
    pub effort: Option<String>,
    pub summary: Option<String>,
    #[serde(skip_serializing)]
    pub generate_summary: Option<String>,
    /// Whether several answers are made of which the best is shown (`pro`), which this server does not do.
    #[serde(skip_serializing)]
    pub mode: Option<String>,
    /// Which earlier thoughts the model is to see: those that the chat template shows.
    #[serde(rename = "context", skip_serializing)]
    #[schemars(skip)]
    _context: Option<IgnoredAny>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    _others: NoOthers,
}

/// `tool_choice` of this API, and of clients of Ollama's.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = r#"expected "none", "auto", "required", {"type": "function", "name": ...}, {"type": "custom", "name": ...} or {"type": "allowed_tools", "mode": ..., "tools": [...]}"#
)]
pub(crate) enum FlatChoice {
    Mode(ToolMode),
    Tools(FlatChosen),
}

/// A tool by its name, or several.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub(crate) struct FlatChosen {
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mode: Option<AllowedMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Vec<FlatChosen>>,
    #[serde(flatten)]
    #[schemars(skip)]
    others: Map<String, Value>,
}

impl FlatChoice {
    /// The choice as a chat has it.
    ///
    /// # Errors
    /// `Invalid`, naming the key.
    pub fn of_chat(self) -> Result<ToolChoice> {
        let chosen = match self {
            Self::Mode(mode) => return Ok(ToolChoice::Mode(mode)),
            Self::Tools(chosen) => chosen,
        };
        let at = FieldPath::from("tool_choice");
        if chosen.kind == ALLOWED_TOOLS {
            let mode = required(at.key("mode"), chosen.mode)?;
            let at = at.key("tools");
            let tools = required(at.clone(), chosen.tools)?.into_iter().enumerate();
            let names = tools.map(|(i, tool)| tool.name(&at.index(i)));
            return Ok(ToolChoice::allowed(mode, names.collect::<Result<_>>()?));
        }
        let kind = chosen.kind.clone();
        match chosen.name(&at)? {
            Some(name) => Ok(ToolChoice::named(name)),
            None => hosted(&at, &kind),
        }
    }
}

impl FlatChosen {
    /// The name by which the model calls the tool; `None` for a tool that this server does not have.
    fn name(self, at: &FieldPath) -> Result<Option<String>> {
        if self.kind == "namespace" {
            return wrong(at.key("type"), "must be function or custom: name the tools");
        }
        if !matches!(self.kind.as_str(), "function" | "custom") {
            return Ok(None);
        }
        if let Some((key, _)) = self.others.iter().find(|(_, value)| !value.is_null()) {
            return wrong(at.key(clipped(key)), "is not supported: leave it out");
        }
        let name = required(at.key("name"), self.name)?;
        Ok(Some(shown_name(self.namespace.as_deref(), name)))
    }
}

/// What is to happen to a prompt that is too long. It is refused, whatever a client prefers.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Truncation {
    Auto,
    Disabled,
}

/// What a response repeats of its request, and of what this server does not do. The specification of Open Responses requires
/// all of it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(super) struct RequestEcho {
    pub background: bool,
    pub frequency_penalty: f64,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<usize>,
    pub max_tool_calls: Option<usize>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub presence_penalty: f64,
    pub previous_response_id: Option<String>,
    pub prompt_cache_key: Option<String>,
    pub reasoning: ReasoningOptions,
    pub safety_identifier: Option<String>,
    /// There is one, whatever a request asks for.
    #[schemars(extend("const" = "default"))]
    pub service_tier: &'static str,
    pub store: bool,
    pub temperature: f64,
    pub text: TextOptions,
    pub tool_choice: FlatChoice,
    pub tools: Vec<ResponseTool>,
    pub top_logprobs: usize,
    pub top_p: f64,
    #[schemars(extend("const" = "disabled"))]
    pub truncation: &'static str,
    pub user: Option<String>,
}
