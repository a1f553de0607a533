//! Anthropic's tools that clients run. Its own models know them by their types; another one must be told of them.

use crate::checks::wrong;
use crate::tools::Function;
use foretoken_core::error::{FieldPath, Result};
use serde_json::{Value, json};

const SHELL: &str = "bash_";
const EDITOR: &str = "text_editor_";

/// The beginnings of the types of tools whose input is not described here.
const NOT_DESCRIBED: [&str; 2] = ["memory_", "computer_"];

/// The editors that can undo.
const WITH_UNDO: [&str; 2] = ["text_editor_20241022", "text_editor_20250124"];

/// A setting of the client's own: how much of a file it shows.
const MAX_CHARACTERS: &str = "max_characters";

/// Adds to the tool `function` of the type `kind` what a model must be told of it; false if Anthropic runs it.
///
/// # Errors
/// `Invalid`, naming the type of the tool `at`, if the client runs it and it is not described here.
pub(super) fn describe(at: &FieldPath, kind: &str, function: &mut Function) -> Result<bool> {
    if NOT_DESCRIBED.iter().any(|start| kind.starts_with(start)) {
        let what = "must be custom, with a description and an input_schema, or that of a shell (bash_20250124) or an editor (text_editor_20250728): other tools that clients run are known to Anthropic's models only";
        return wrong(at.key("type"), what);
    }
    let (description, parameters) = if kind.starts_with(SHELL) {
        shell()
    } else if kind.starts_with(EDITOR) {
        editor(WITH_UNDO.contains(&kind))
    } else {
        return Ok(false);
    };
    function.description.get_or_insert(description.into());
    function.parameters.get_or_insert(parameters);
    function.others.remove(MAX_CHARACTERS);
    Ok(true)
}

fn shell() -> (&'static str, Value) {
    let parameters = json!({
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command. Required unless restart is true."},
            "restart": {"type": "boolean", "description": "Whether to start a new shell instead."},
        },
    });
    let description = "Runs a command in a shell, which stays open from one call to the next, and returns its output.";
    (description, parameters)
}

fn editor(has_undo: bool) -> (&'static str, Value) {
    let mut commands = vec!["view", "create", "str_replace", "insert"];
    if has_undo {
        commands.push("undo_edit");
    }
    let parameters = json!({
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": commands},
            "path": {"type": "string", "description": "The file, or the folder to view."},
            "file_text": {"type": "string", "description": "For create: the content of the new file."},
            "old_str": {"type": "string", "description": "For str_replace: the text to replace, which the file has once."},
            "new_str": {"type": "string", "description": "For str_replace and insert: the new text."},
            "insert_line": {"type": "integer", "description": "For insert: the line after which the text comes; 0 is the beginning."},
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For view: the first and the last line, from 1; -1 is the end.",
            },
        },
        "required": ["command", "path"],
    });
    ("Shows, creates and changes text files.", parameters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_described_by_their_types() {
        let at = FieldPath::from("tools").index(0);
        let of = |kind: &str| {
            let mut function = Function {
                name: "x".into(),
                ..Function::default()
            };
            let others = &mut function.others;
            others.insert(MAX_CHARACTERS.into(), 10_000.into());
            others.insert("a".into(), 1.into());
            describe(&at, kind, &mut function).map(|is_described| (is_described, function))
        };
        for (kind, property, is_required) in [
            ("bash_20241022", "restart", false),
            ("bash_20250124", "command", false),
            ("text_editor_20250728", "command", true),
        ] {
            let (_, function) = of(kind).expect("fine");
            assert_eq!(function.name, "x");
            assert!(function.description.is_some(), "{kind}");
            assert_eq!(function.others.keys().collect::<Vec<_>>(), ["a"]);
            let schema = function.parameters.expect("a schema");
            assert!(schema["properties"][property].is_object(), "{kind}");
            assert_eq!(schema["required"].is_array(), is_required, "{kind}");
        }
        let commands = |kind: &str| {
            let (_, function) = of(kind).expect("fine");
            let schema = function.parameters.expect("a schema");
            schema["properties"]["command"]["enum"].clone()
        };
        let all = json!(["view", "create", "str_replace", "insert", "undo_edit"]);
        assert_eq!(commands("text_editor_20250124"), all);
        let new = json!(["view", "create", "str_replace", "insert"]);
        assert_eq!(commands("text_editor_20250728"), new);
        for kind in ["memory_20250818", "computer_20250124"] {
            let error = of(kind).expect_err("refused");
            assert_eq!(error.param().as_deref(), Some("tools[0].type"));
        }
        for kind in ["web_search_20250305", "code_execution_20250825", "bash"] {
            assert!(!of(kind).expect("fine").0, "{kind}");
        }
    }
}
