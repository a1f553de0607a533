//! Custom tools, whose input is one text: a model sees a function with one parameter in their place.

use super::checks::wrong;
use super::others::NoOthers;
use foretoken_core::error::{FieldPath, Result};
use foretoken_text::FREEFORM_PARAMETER;
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A tool whose input is a text.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "CustomToolDefinition")]
pub(super) struct CustomTool {
    pub name: String,
    pub description: Option<String>,
    pub format: Option<InputFormat>,
    /// All tools are in the prompt.
    #[serde(rename = "defer_loading")]
    #[schemars(skip)]
    _defer_loading: Option<IgnoredAny>,
    #[serde(flatten)]
    #[schemars(skip)]
    _others: NoOthers,
}

/// The form of a custom tool's input: any text, or one that follows a grammar.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CustomToolFormat")]
pub(super) struct InputFormat {
    #[serde(rename = "type")]
    kind: InputFormatKind,
    /// Where the grammar is in chats.
    #[serde(skip_serializing_if = "Option::is_none")]
    grammar: Option<InputGrammar>,
    #[serde(skip_serializing_if = "Option::is_none")]
    syntax: Option<GrammarSyntax>,
    #[serde(skip_serializing_if = "Option::is_none")]
    definition: Option<String>,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "CustomToolFormatType")]
enum InputFormatKind {
    Text,
    Grammar,
}

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CustomToolGrammar")]
struct InputGrammar {
    syntax: GrammarSyntax,
    definition: String,
    #[serde(flatten, skip_serializing)]
    #[schemars(skip)]
    _others: NoOthers,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "CustomToolSyntax")]
enum GrammarSyntax {
    Lark,
    Regex,
}

impl CustomTool {
    pub fn new(name: String, description: Option<String>, format: Option<InputFormat>) -> Self {
        Self {
            name,
            description,
            format,
            _defer_loading: None,
            _others: NoOthers,
        }
    }

    /// The description and the parameters of the function that a model sees, and the grammar in Lark that its input
    /// follows, if there is one. The model is told of a grammar. A regular expression is a part of the parameters.
    ///
    /// # Errors
    /// `Invalid`, naming the key of the tool `at`.
    pub fn shown(&self, at: &FieldPath) -> Result<ShownInput> {
        let at = at.key("format");
        let grammar = match &self.format {
            Some(format) => format.grammar(&at)?,
            None => None,
        };
        let mut lark = None;
        let mut input = Map::from_iter([("type".into(), "string".into())]);
        let mut description = self.description.clone();
        if let Some((at, syntax, definition)) = grammar {
            let form = match syntax {
                GrammarSyntax::Lark => "follows this grammar in Lark's syntax",
                GrammarSyntax::Regex => "matches this regular expression",
            };
            let before = description.map_or_else(String::new, |text| text + "\n\n");
            description = Some(format!("{before}Its input {form}:\n{definition}"));
            match syntax {
                GrammarSyntax::Lark => lark = Some((at, definition.to_owned())),
                GrammarSyntax::Regex => {
                    input.insert("pattern".into(), format!("^(?:{definition})$").into());
                }
            }
        }
        let parameters = json!({
            "type": "object",
            "properties": {FREEFORM_PARAMETER: input},
            "required": [FREEFORM_PARAMETER],
            "additionalProperties": false,
        });
        Ok(ShownInput {
            description,
            parameters,
            lark,
        })
    }
}

/// The function that stands for a custom tool.
pub(super) struct ShownInput {
    pub description: Option<String>,
    pub parameters: Value,
    /// The grammar in Lark that the input follows, and its place in the request.
    pub lark: Option<(FieldPath, String)>,
}

impl InputFormat {
    /// The grammar, and the place of its definition.
    fn grammar(&self, at: &FieldPath) -> Result<Option<(FieldPath, GrammarSyntax, &str)>> {
        let flat = self.syntax.zip(self.definition.as_deref());
        let flat = flat.map(|(syntax, definition)| (at.key("definition"), syntax, definition));
        let nested = self.grammar.as_ref().map(|grammar| {
            let at = at.key("grammar").key("definition");
            (at, grammar.syntax, &*grammar.definition)
        });
        let is_given = self.syntax.is_some() || self.definition.is_some() || nested.is_some();
        match (self.kind, nested.or(flat)) {
            (InputFormatKind::Text, _) if is_given => {
                wrong(at.key("type"), "must be grammar where there is one")
            }
            (InputFormatKind::Text, _) => Ok(None),
            (InputFormatKind::Grammar, None) => {
                wrong(at, "needs syntax (lark or regex) and definition")
            }
            (InputFormatKind::Grammar, grammar) => Ok(grammar),
        }
    }
}

/// The arguments of an earlier call of a custom tool, as a model writes them.
pub(super) fn arguments(input: String) -> Value {
    json!({FREEFORM_PARAMETER: input})
}
