//! The tools of a chat, and which of them the model may or must call.

use super::checks::{required, wrong};
use super::conversation::CallKind;
use super::custom_tool::CustomTool;
use super::others::{given, refuse_inapplicable};
use super::tool_choice::{AllowedMode, ToolChoice, ToolMode, Wanted};
use foretoken_core::error::{Error, FieldPath, Result, clipped};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, to_value};

/// Maximum number of tools. OpenAI has 128 and Anthropic none: an agent with many MCP servers sends hundreds. Each is compared
/// with all others, with those that are allowed, and with the name of each call.
pub(super) const MAX_TOOLS: usize = 512;
/// Anthropic's limit of names, which is twice OpenAI's.
pub(super) const MAX_NAME_BYTES: usize = 128;

/// Maximum bytes of the JSON of all tools. It is copied and read several times, and the context has no room for much more.
const MAX_TOOLS_BYTES: usize = 1 << 20;

/// Maximum number of grammars in Lark, of which each may take seconds to compile.
const MAX_INPUT_GRAMMARS: usize = 8;

/// Maximum characters of a type in a warning.
const MAX_TYPE_CHARS: usize = 64;

/// Keys that tell how a tool is cached, searched for and streamed: all are in the prompt, and arguments are streamed as they
/// come.
const HINTS: [&str; 4] = [
    "cache_control",
    "defer_loading",
    "eager_input_streaming",
    "allowed_callers",
];

/// A tool of a chat. Its type is `function` or `custom`; one of any other type is left out.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct Tool {
    #[serde(rename = "type")]
    kind: String,
    /// Required where the type is `function`.
    function: Option<Function>,
    /// Required where the type is `custom`.
    custom: Option<CustomTool>,
    #[serde(flatten)]
    others: Map<String, Value>,
    /// Its place in the request of another API.
    #[serde(skip)]
    at: Option<FieldPath>,
}

/// What a model is told of a function.
#[derive(Debug, Default, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "FunctionDefinition")]
pub(super) struct Function {
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]{1,128}$"))]
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// The JSON schema of an object.
    #[serde(alias = "input_schema", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    pub parameters: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// A function, as chat templates read it.
#[derive(Serialize)]
struct ShownTool<'a> {
    #[serde(rename = "type")]
    kind: CallKind,
    function: &'a Function,
    #[serde(flatten)]
    others: &'a Map<String, Value>,
}

impl Tool {
    /// A function, which the client runs.
    pub fn function(at: FieldPath, mut function: Function) -> Self {
        for hint in HINTS {
            function.others.remove(hint);
        }
        Self {
            kind: "function".into(),
            function: Some(function),
            at: Some(at),
            ..Self::default()
        }
    }

    /// A tool whose input is a text.
    pub fn custom(at: FieldPath, custom: CustomTool) -> Self {
        Self {
            kind: "custom".into(),
            custom: Some(custom),
            at: Some(at),
            ..Self::default()
        }
    }

    /// Whether its input is a text.
    pub fn is_custom(&self) -> bool {
        self.kind == "custom"
    }

    /// A tool that another server runs itself.
    pub fn hosted(at: FieldPath, kind: &str, name: Option<String>) -> Self {
        let name = name.map(|name| ("name".into(), name.into()));
        Self {
            kind: kind.into(),
            others: name.into_iter().collect(),
            at: Some(at),
            ..Self::default()
        }
    }
}

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The tools, in the form in which chat templates read them.
    pub list: Vec<Value>,
    /// The places of their schemas in the request.
    pub schemas: Vec<FieldPath>,
    /// The names of those whose input is a text.
    pub custom: Vec<String>,
    /// The grammars in Lark that such inputs follow: the name of the tool, the place in the request, and the grammar.
    pub inputs: Vec<(String, FieldPath, String)>,
    pub calls: CallMode,
    /// The tools that may be called, if these are not all.
    allowed: Option<Vec<Value>>,
    /// The types and names of those that are left out.
    left_out: Vec<(String, Option<String>)>,
    /// What the client is told of those.
    pub warnings: Vec<String>,
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
        let mut tools = Self::only(tools)?;
        let choice = choice
            .unwrap_or(ToolChoice::Mode(ToolMode::Auto))
            .wanted()?;
        let is_empty = tools.list.is_empty();
        tools.calls = match choice {
            Wanted::Mode(ToolMode::Required) if is_empty => return tools.none_to_call(),
            Wanted::Mode(_) if is_empty => CallMode::None,
            Wanted::Mode(ToolMode::None) => CallMode::None,
            Wanted::Mode(ToolMode::Auto) => CallMode::Auto,
            Wanted::Mode(ToolMode::Required) => CallMode::Required,
            Wanted::Named(name) => {
                let at = FieldPath::from("tool_choice.function.name");
                CallMode::Named(tools.index(&at, &name)?)
            }
            Wanted::Allowed { mode, names } => tools.allow(mode, &names)?,
        };
        Ok(tools)
    }

    /// Checks only `tools`.
    ///
    /// # Errors
    /// The errors of [`Tools::read`] about `tools`.
    pub fn only(tools: Option<Vec<Tool>>) -> Result<Self> {
        let given = tools.unwrap_or_default();
        if given.len() > MAX_TOOLS {
            let what = format!("may have at most {MAX_TOOLS} entries, not {}", given.len());
            return wrong("tools", what);
        }
        let mut tools = Self::default();
        for (i, tool) in given.into_iter().enumerate() {
            let at = tool.at.clone();
            tools.add(
                &at.unwrap_or_else(|| FieldPath::from("tools").index(i)),
                tool,
            )?;
        }
        let grammars = tools.inputs.len();
        if grammars > MAX_INPUT_GRAMMARS {
            let what =
                format!("may have at most {MAX_INPUT_GRAMMARS} grammars in Lark, not {grammars}");
            return wrong("tools", what);
        }
        let bytes: usize = tools.list.iter().map(|tool| tool.to_string().len()).sum();
        if bytes > MAX_TOOLS_BYTES {
            let what = format!("may have at most {MAX_TOOLS_BYTES} bytes, not {bytes}");
            return wrong("tools", what);
        }
        Ok(tools)
    }

    fn add(&mut self, at: &FieldPath, tool: Tool) -> Result<()> {
        let kind = tool.kind.as_str();
        let given = given! { tool, function, custom };
        refuse_inapplicable(at, &clipped(kind), &[kind], &given)?;
        let (at, schema, function) = match kind {
            "function" => {
                let at = at.key("function");
                let function = required(at.clone(), tool.function)?;
                let schema = at.key("parameters");
                (at, schema, function)
            }
            "custom" => {
                let at = at.key("custom");
                let custom = required(at.clone(), tool.custom)?;
                let shown = custom.shown(&at)?;
                self.custom.push(custom.name.clone());
                let lark = shown.lark.into_iter();
                self.inputs
                    .extend(lark.map(|(at, lark)| (custom.name.clone(), at, lark)));
                let function = Function {
                    name: custom.name,
                    description: shown.description,
                    parameters: Some(shown.parameters),
                    ..Function::default()
                };
                let schema = at.key("format");
                (at, schema, function)
            }
            kind => {
                self.leave_out(at, kind, &tool.others);
                return Ok(());
            }
        };
        function.check(&at)?;
        if self.list.iter().any(|other| name(other) == function.name) {
            return wrong(at.key("name"), "must not be that of another tool");
        }
        let shown = to_value(ShownTool {
            kind: CallKind::Function,
            function: &function,
            others: &tool.others,
        });
        let shown = shown.map_err(|e| Error::internal(format!("tools: {e}")))?;
        self.list.push(shown);
        self.schemas.push(schema);
        Ok(())
    }

    /// The model can answer without a tool that this server does not have; the client is told.
    fn leave_out(&mut self, at: &FieldPath, kind: &str, keys: &Map<String, Value>) {
        let kind = kind.chars().take(MAX_TYPE_CHARS);
        let kind: String = kind
            .map(|c| if c.is_ascii_graphic() { c } else { '?' })
            .collect();
        self.warnings.push(format!(
            "{at}: {kind} is not available here and was left out"
        ));
        let name = keys.get("name").and_then(Value::as_str);
        self.left_out.push((kind, name.map(str::to_owned)));
    }

    /// The tools that the model may call.
    pub fn callable(&self) -> &[Value] {
        match self.calls {
            CallMode::None => &[],
            CallMode::Auto | CallMode::Required => self.allowed.as_deref().unwrap_or(&self.list),
            CallMode::Named(index) => &self.list[index..=index],
        }
    }

    /// Restricts calls to the tools `names`. All stay in the prompt, which is so the same as that of requests that allow
    /// others.
    fn allow(&mut self, mode: AllowedMode, names: &[Option<String>]) -> Result<CallMode> {
        let at = FieldPath::from("tool_choice.allowed_tools");
        if names.len() > MAX_TOOLS {
            let what = format!("may have at most {MAX_TOOLS} entries, not {}", names.len());
            return wrong(at.key("tools"), what);
        }
        let mut indices = Vec::new();
        for (i, name) in names.iter().enumerate() {
            if let Some(name) = name {
                let at = at.key("tools").index(i).key("function").key("name");
                indices.push(self.index(&at, name)?);
            }
        }
        // In the order of the prompt, each once.
        indices.sort_unstable();
        indices.dedup();
        let allowed = indices.iter().map(|&index| self.list[index].clone());
        self.allowed = Some(allowed.collect());
        match mode {
            AllowedMode::Required if indices.is_empty() => {
                wrong(at.key("tools"), "needs a tool that is available here")
            }
            AllowedMode::Required => Ok(CallMode::Required),
            AllowedMode::Auto if indices.is_empty() => Ok(CallMode::None),
            AllowedMode::Auto => Ok(CallMode::Auto),
        }
    }

    /// The index of the tool `wanted`, which the field `at` names.
    fn index(&self, at: &FieldPath, wanted: &str) -> Result<usize> {
        if self.list.is_empty() {
            return self.none_to_call();
        }
        let found = self.list.iter().position(|tool| name(tool) == wanted);
        found.ok_or_else(|| {
            let of_name = |(_, name): &&(String, Option<String>)| name.as_deref() == Some(wanted);
            let what = match self.left_out.iter().find(of_name) {
                Some((kind, _)) => {
                    format!(" must not be that of {kind}, which is not available here")
                }
                None => {
                    let names: Vec<&str> = self.list.iter().map(name).collect();
                    format!(" must be one of the tools: {}", names.join(", "))
                }
            };
            Error::field(at, what)
        })
    }

    /// The error where a tool is to be called and there is none.
    fn none_to_call<T>(&self) -> Result<T> {
        let kinds: Vec<&str> = self
            .left_out
            .iter()
            .map(|(kind, _)| kind.as_str())
            .collect();
        let but = match &kinds[..] {
            [] => String::new(),
            kinds => format!(" that are available here, unlike {}", kinds.join(", ")),
        };
        wrong(
            "tool_choice",
            format!("needs tools{but}: give them, or leave it out"),
        )
    }
}

/// The name of a tool that was checked.
pub(super) fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
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
