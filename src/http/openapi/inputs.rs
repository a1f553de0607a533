//! The shapes of what requests bring as any JSON, because it is checked by hand.

#![allow(dead_code, reason = "only their shapes are used")]

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// A message of a chat.
#[derive(JsonSchema)]
pub struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant`, `tool`, or another one that the template knows.
    role: String,
    content: Option<Content>,
    reasoning_content: Option<String>,
    /// The calls of an earlier turn of the assistant.
    tool_calls: Option<Vec<CallOfTurn>>,
    /// The call that a message of `tool` answers.
    tool_call_id: Option<String>,
}

#[derive(JsonSchema)]
#[schemars(untagged)]
enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "lowercase")]
enum ContentPart {
    Text { text: String },
    Refusal { refusal: String },
}

#[derive(JsonSchema)]
struct CallOfTurn {
    id: String,
    #[schemars(rename = "type")]
    kind: Option<Function>,
    function: CalledFunction,
}

#[derive(JsonSchema)]
struct CalledFunction {
    name: String,
    /// JSON text, or an object.
    arguments: Option<Value>,
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
enum Function {
    Function,
}

/// A tool of a chat.
#[derive(JsonSchema)]
pub struct Tool {
    #[schemars(rename = "type")]
    kind: Function,
    function: FunctionDefinition,
}

#[derive(JsonSchema)]
struct FunctionDefinition {
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]{1,64}$"))]
    name: String,
    description: Option<String>,
    /// The JSON schema of an object.
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum ToolChoice {
    Mode(ToolMode),
    Named(NamedTool),
}

#[derive(JsonSchema)]
#[schemars(rename_all = "lowercase")]
pub enum ToolMode {
    None,
    Auto,
    Required,
}

#[derive(JsonSchema)]
pub struct NamedTool {
    #[schemars(rename = "type")]
    kind: Function,
    function: ToolName,
}

#[derive(JsonSchema)]
struct ToolName {
    name: String,
}

/// What the answer must be.
#[derive(JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case")]
pub enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(JsonSchema)]
pub struct NamedSchema {
    name: String,
    description: Option<String>,
    schema: Option<Map<String, Value>>,
    strict: Option<bool>,
}

/// The input of a response: a text, or messages, calls and their results.
#[derive(JsonSchema)]
#[schemars(untagged)]
pub enum ResponseInput {
    Text(String),
    Items(Vec<Map<String, Value>>),
}
