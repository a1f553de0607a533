//! The tools of this API: functions and custom tools, alone or in namespaces.

use crate::checks::{required, wrong};
use crate::custom_tool::{CustomTool, InputFormat};
use crate::tools::{Function, MAX_NAME_BYTES, MAX_TOOLS, Tool};
use foretoken_core::error::{FieldPath, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;

/// The text between a namespace and a name, where a model sees both as one name.
const SEPARATOR: &str = "__";

/// A tool: a function, a custom tool, or a namespace of them. One of any other type is left out.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub(super) struct ResponseTool {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    /// The JSON schema of an object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    parameters: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
    /// The form of a custom tool's input.
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<InputFormat>,
    /// The tools of a namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Vec<ResponseTool>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// A tool, and its place in the request.
#[derive(Debug)]
pub(super) struct PlacedTool {
    pub at: FieldPath,
    pub tool: ResponseTool,
    /// Whether a search has found it, perhaps again.
    pub is_found: bool,
}

/// The names of tools in namespaces, with those that a model sees.
#[derive(Debug, Default)]
pub(super) struct ToolNames(Vec<Namespaced>);

#[derive(Debug)]
struct Namespaced {
    shown: String,
    namespace: String,
    name: String,
}

impl ToolNames {
    /// The namespace and the name of the tool that a model calls `shown`.
    pub fn of<'a>(&'a self, shown: &'a str) -> (Option<&'a str>, &'a str) {
        match self.0.iter().find(|tool| tool.shown == shown) {
            Some(tool) => (Some(&tool.namespace), &tool.name),
            None => (None, shown),
        }
    }
}

/// The name by which a model calls a tool.
pub(super) fn shown_name(namespace: Option<&str>, name: String) -> String {
    match namespace {
        Some(namespace) => {
            let namespace = namespace.trim_end_matches('_');
            format!("{namespace}{SEPARATOR}{name}")
        }
        None => name,
    }
}

/// A chat's tools for `list`, and the names of those in namespaces.
///
/// # Errors
/// `Invalid`, naming the tool.
pub(super) fn tools(list: Vec<PlacedTool>) -> Result<(Vec<Tool>, ToolNames)> {
    let (mut tools, mut names) = (Vec::new(), ToolNames::default());
    let mut known = HashSet::new();
    for placed in list {
        let PlacedTool {
            at,
            mut tool,
            is_found,
        } = placed;
        let mut is_known = |name: Option<&String>| {
            let is_new = name.is_none_or(|name| known.insert(name.clone()));
            is_found && !is_new
        };
        if tool.kind != "namespace" {
            if !is_known(tool.name.as_ref()) {
                tools.push(tool.of_chat(at, None)?);
            }
            continue;
        }
        let namespace = required(at.key("name"), tool.name)?;
        // Each of its tools has a copy.
        if namespace.len() > MAX_NAME_BYTES {
            return wrong(
                at.key("name"),
                format!("must have at most {MAX_NAME_BYTES} bytes"),
            );
        }
        let mut about = tool.description;
        let at = at.key("tools");
        for (i, mut tool) in required(at.clone(), tool.tools.take())?
            .into_iter()
            .enumerate()
        {
            let at = at.index(i);
            if i == MAX_TOOLS {
                return wrong(at, format!("is one too many: {MAX_TOOLS} are possible"));
            }
            if tool.kind == "namespace" {
                return wrong(at.key("type"), "must be function or custom in a namespace");
            }
            if tool.is_ours() {
                let name = required(at.key("name"), tool.name.take())?;
                let shown = shown_name(Some(&namespace), name.clone());
                if is_known(Some(&shown)) {
                    continue;
                }
                tool.name = Some(shown.clone());
                names.0.push(Namespaced {
                    shown,
                    namespace: namespace.clone(),
                    name,
                });
            }
            // The first one also says what all are for.
            tools.push(tool.of_chat(at, about.take())?);
        }
    }
    Ok((tools, names))
}

impl ResponseTool {
    /// The names by which a model calls it, or the tools of the namespace.
    pub fn shown_names(&self) -> Vec<String> {
        let own = self.name.clone();
        match &self.tools {
            Some(tools) if self.kind == "namespace" => {
                let names = tools.iter().filter_map(|tool| tool.name.clone());
                names.map(|name| shown_name(own.as_deref(), name)).collect()
            }
            _ => own.into_iter().collect(),
        }
    }

    /// Whether the client runs it.
    fn is_ours(&self) -> bool {
        matches!(self.kind.as_str(), "function" | "custom")
    }

    /// The chat's tool, whose description begins with `about`.
    fn of_chat(self, at: FieldPath, about: Option<String>) -> Result<Tool> {
        if !self.is_ours() {
            return Ok(Tool::hosted(at, &self.kind, self.name));
        }
        let name = required(at.key("name"), self.name)?;
        let description: Vec<String> = about.into_iter().chain(self.description).collect();
        let description = (!description.is_empty()).then(|| description.join("\n\n"));
        if self.kind == "custom" {
            return Ok(Tool::custom(
                at,
                CustomTool::new(name, description, self.format),
            ));
        }
        let function = Function {
            name,
            description,
            parameters: self.parameters,
            strict: self.strict,
            others: self.others,
        };
        Ok(Tool::function(at, function))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::Tools;
    use serde_json::json;

    fn read(list: Value) -> Result<(Tools, ToolNames)> {
        let list: Vec<ResponseTool> = serde_json::from_value(list).expect("tools");
        let list = list.into_iter().enumerate();
        let list = list.map(|(i, tool)| PlacedTool {
            at: FieldPath::from("tools").index(i),
            tool,
            is_found: false,
        });
        let (tools, names) = tools(list.collect())?;
        Ok((Tools::only(Some(tools))?, names))
    }

    #[test]
    fn namespaces_become_functions_and_hosted_tools_are_left_out() {
        let schema = json!({"type": "object", "properties": {}});
        let (tools, names) = read(json!([
            {"type": "function", "name": "f", "parameters": schema, "defer_loading": true},
            {"type": "web_search", "external_web_access": true},
            {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [
                {"type": "function", "name": "spawn", "description": "Spawns.", "strict": false, "parameters": schema},
                {"type": "mcp\n", "server_label": "x"},
                {"type": "custom", "name": "patch"}]},
            {"type": "namespace", "name": "mcp__a__", "tools": [{"type": "function", "name": "b"}]},
        ]))
        .expect("tools");
        let function = |function: Value| json!({"type": "function", "function": function});
        assert_eq!(
            tools.list[0],
            function(json!({"name": "f", "parameters": schema}))
        );
        assert_eq!(
            tools.list[1],
            function(
                json!({"name": "agents__spawn", "description": "Agents.\n\nSpawns.", "parameters": schema,
                "strict": false})
            )
        );
        assert_eq!(tools.list[2]["function"]["name"], "agents__patch");
        assert_eq!(tools.list[3], function(json!({"name": "mcp__a__b"})));
        assert_eq!(tools.custom, ["agents__patch"]);
        assert_eq!(names.of("agents__spawn"), (Some("agents"), "spawn"));
        assert_eq!(names.of("mcp__a__b"), (Some("mcp__a__"), "b"));
        assert_eq!(names.of("f"), (None, "f"));
        let warnings = [
            "tools[1]: web_search is not available here and was left out",
            "tools[2].tools[1]: mcp? is not available here and was left out",
        ];
        assert_eq!(tools.warnings, warnings);
    }

    /// Lists of tools, and the field that an error names.
    const WRONG: &str = r#"
        [{"type": "function"}] | tools[0].name
        [{"type": "namespace", "tools": []}] | tools[0].name
        [{"type": "namespace", "name": "n"}] | tools[0].tools
        [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}] | tools[0].tools[0].type
        [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}] | tools[0].tools[0].name
        [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "a b"}]}] | tools[0].tools[0].function.name
        [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark"}}] | tools[0].custom.format
        [{"type": "custom", "name": "c", "format": {"type": "text", "definition": "x"}}] | tools[0].custom.format.type
    "#;

    #[test]
    fn wrong_tools_are_named() {
        for row in WRONG.trim().lines() {
            let (list, field) = row.trim().split_once(" | ").expect("two columns");
            let list: Value = serde_json::from_str(list).expect("JSON");
            let error = read(list.clone()).expect_err("refused");
            assert_eq!(error.param().as_deref(), Some(field), "{list}");
        }
    }

    /// As Codex has it.
    #[test]
    fn a_grammar_is_told_and_a_regular_expression_is_enforced() {
        let custom = |syntax: &str| {
            json!([{"type": "custom", "name": "apply_patch", "description": "Edits files.",
                "format": {"type": "grammar", "syntax": syntax, "definition": "start: /a+/"}}])
        };
        let (tools, _) = read(custom("lark")).expect("a tool");
        let function = &tools.list[0]["function"];
        let description =
            "Edits files.\n\nIts input follows this grammar in Lark's syntax:\nstart: /a+/";
        assert_eq!(function["description"], description);
        let input = json!({"type": "string"});
        assert_eq!(
            function["parameters"]["properties"],
            json!({"input": input})
        );
        let (tools, _) = read(custom("regex")).expect("a tool");
        let input = &tools.list[0]["function"]["parameters"]["properties"]["input"];
        assert_eq!(input["pattern"], "^(?:start: /a+/)$");
    }
}
