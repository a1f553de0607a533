//! `tool_choice` of a chat: which tools the model may or must call.

use super::checks::{required, wrong};
use super::others::{NoOthers, OtherKey, given, refuse_inapplicable};
use foretoken_core::error::{FieldPath, Result, clipped};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a request says of calls. The other APIs bring theirs into this form.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(
    untagged,
    expecting = r#"expected "none", "auto", "required", {"type": "function", "function": {"name": ...}}, {"type": "custom", "custom": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}"#
)]
pub(super) enum ToolChoice {
    Mode(ToolMode),
    Tools(ChosenTools),
}

/// What a choice asks for.
pub(super) enum Wanted {
    Mode(ToolMode),
    /// Call the tool of this name.
    Named(String),
    /// Call none but these tools.
    Allowed {
        mode: AllowedMode,
        /// `None` = one that this server does not have.
        names: Vec<Option<String>>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ToolMode {
    None,
    Auto,
    Required,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "AllowedToolsMode")]
pub(super) enum AllowedMode {
    Auto,
    Required,
}

/// The type of a choice that allows some of the tools.
pub(super) const ALLOWED_TOOLS: &str = "allowed_tools";

/// A tool by its name, or several.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(super) struct ChosenTools {
    #[serde(rename = "type")]
    kind: String,
    function: Option<ToolName>,
    custom: Option<ToolName>,
    allowed_tools: Option<AllowedTools>,
    #[serde(flatten)]
    #[schemars(skip)]
    others: OtherKey,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ToolName {
    name: String,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct AllowedTools {
    mode: AllowedMode,
    tools: Vec<ChosenTools>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

impl ToolChoice {
    /// The choice of one tool.
    pub fn named(name: String) -> Self {
        Self::Tools(ChosenTools::named(Some(name)))
    }

    /// The choice among these tools; `None` = one that this server does not have.
    pub fn allowed(mode: AllowedMode, names: Vec<Option<String>>) -> Self {
        Self::Tools(ChosenTools {
            kind: ALLOWED_TOOLS.into(),
            allowed_tools: Some(AllowedTools {
                mode,
                tools: names.into_iter().map(ChosenTools::named).collect(),
                _others: NoOthers,
            }),
            ..ChosenTools::default()
        })
    }

    /// Checks the choice.
    ///
    /// # Errors
    /// `Invalid`, naming the key.
    pub fn wanted(self) -> Result<Wanted> {
        let chosen = match self {
            Self::Mode(mode) => return Ok(Wanted::Mode(mode)),
            Self::Tools(chosen) => chosen,
        };
        let at = FieldPath::from("tool_choice");
        chosen.check(&at)?;
        if chosen.kind == ALLOWED_TOOLS {
            let at = at.key(ALLOWED_TOOLS);
            let allowed = required(at.clone(), chosen.allowed_tools)?;
            let tools = allowed.tools.into_iter().enumerate();
            let names = tools.map(|(i, tool)| tool.name(&at.key("tools").index(i)));
            return Ok(Wanted::Allowed {
                mode: allowed.mode,
                names: names.collect::<Result<_>>()?,
            });
        }
        let kind = chosen.kind.clone();
        match chosen.name(&at)? {
            Some(name) => Ok(Wanted::Named(name)),
            None => hosted(&at, &kind),
        }
    }
}

impl ChosenTools {
    fn named(name: Option<String>) -> Self {
        let function = name.map(|name| ToolName {
            name,
            _others: NoOthers,
        });
        Self {
            kind: function.as_ref().map_or("", |_| "function").into(),
            function,
            ..Self::default()
        }
    }

    /// Refuses keys that an object of this type does not have. The types of tools that this server does not have may
    /// have any.
    fn check(&self, at: &FieldPath) -> Result<()> {
        let kind = self.kind.as_str();
        if !["function", "custom", ALLOWED_TOOLS].contains(&kind) {
            return Ok(());
        }
        if let Some(other) = &self.others.0 {
            return wrong(at.key(other), "is not supported: leave it out");
        }
        let keys = given!(self, function, custom, allowed_tools);
        refuse_inapplicable(at, kind, &[kind], &keys)
    }

    /// The tool's name; `None` for a tool that this server does not have.
    fn name(self, at: &FieldPath) -> Result<Option<String>> {
        self.check(at)?;
        let (key, name) = match self.kind.as_str() {
            "function" => ("function", self.function),
            "custom" => ("custom", self.custom),
            _ => return Ok(None),
        };
        required(at.key(key), name).map(|tool| Some(tool.name))
    }
}

/// Refuses to require a tool that this server does not have.
///
/// # Errors
/// `Invalid`, always.
pub(super) fn hosted<T>(at: &FieldPath, kind: &str) -> Result<T> {
    let kind = clipped(kind);
    wrong(
        at.key("type"),
        format!(
            "must not be {kind}, which is not available here: choose a tool that the client runs"
        ),
    )
}
