//! Fields of a request that its response repeats.

use crate::conversation::FunctionKind;
use crate::others::NoOthers;
use crate::structured::FlatFormat;
use crate::tools::{FlatTool, ToolChoice, ToolMode};
use schemars::JsonSchema;
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
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    _others: NoOthers,
}

/// `tool_choice` of this API.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = r#"expected "none", "auto", "required" or {"type": "function", "name": ...}"#
)]
pub(super) enum FlatChoice {
    Mode(ToolMode),
    Named {
        #[serde(rename = "type")]
        kind: FunctionKind,
        name: String,
    },
}

impl From<FlatChoice> for ToolChoice {
    fn from(choice: FlatChoice) -> Self {
        match choice {
            FlatChoice::Mode(mode) => Self::Mode(mode),
            FlatChoice::Named { name, .. } => Self::named(name),
        }
    }
}

/// What a response repeats of its request, and of what this server does not do.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(inline)]
pub(super) struct RequestEcho {
    pub background: bool,
    pub instructions: Option<String>,
    pub max_output_tokens: Option<usize>,
    pub max_tool_calls: Option<usize>,
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    pub previous_response_id: Option<String>,
    pub reasoning: ReasoningOptions,
    pub store: bool,
    pub temperature: f64,
    pub text: TextOptions,
    pub tool_choice: FlatChoice,
    pub tools: Vec<FlatTool<FunctionKind>>,
    pub top_p: f64,
    #[schemars(extend("const" = "disabled"))]
    pub truncation: &'static str,
}
