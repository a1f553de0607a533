//! What the answer to a chat may contain, and what it must be.

use super::checks::wrong;
use super::choice_rules::{MessageRules, ToolRules};
use super::context::Context;
use super::structured::Structured;
use super::tools::{CallMode, Tools};
use foretoken_core::error::{Error, FieldPath, Result};
use foretoken_core::sampling::Grammar;
use foretoken_text::grammar::{GrammarSource, MAX_SOURCE_BYTES};
use foretoken_text::{
    Answer, Calls, Continued, HarmonyParser, InputGrammar, ReasoningFormat, RenderedChat,
    Signature, ToolFormat, answer_grammar,
};
use serde_json::Value;
use std::time::{Duration, Instant};

impl Context<'_> {
    /// Returns the rules for what the answer to `chat` may contain besides content.
    ///
    /// # Errors
    /// `Invalid`, if the format in which the model writes calls is unknown.
    pub fn message_rules(
        &self,
        chat: &RenderedChat,
        tools: &Tools,
        parallel: bool,
    ) -> Result<MessageRules> {
        let tools = match tools.calls {
            CallMode::None => None,
            _ => Some(self.tool_rules(tools, parallel)?),
        };
        let format = self.reasoning_format;
        let tool_format = tools.as_ref().map(|tools| tools.format);
        let is_harmony =
            format == Some(ReasoningFormat::Harmony) || tool_format == Some(ToolFormat::Harmony);
        // Its channels have the reasoning, too.
        let (format, tool_format) = if is_harmony {
            (None, Some(ToolFormat::Harmony))
        } else {
            (format, tool_format)
        };
        let of_reasoning = format.map_or(&[][..], ReasoningFormat::markers);
        let of_tools = tool_format.map_or(&[][..], ToolFormat::markers);
        let markers = of_reasoning.iter().chain(of_tools);
        let prompt = &chat.prompt;
        Ok(MessageRules {
            reasoning: match chat.continued {
                None => format.map(|format| (format, format.begins_with_reasoning(prompt))),
                Some(Continued::Thought) => format.map(|format| (format, true)),
                Some(Continued::Content) => None,
            },
            continued: chat.continued,
            harmony: is_harmony.then(|| HarmonyParser::beginning(prompt).into()),
            markers: markers
                .filter_map(|name| self.text.special_id(name))
                .collect(),
            tools,
            ..MessageRules::default()
        })
    }

    fn tool_rules(&self, tools: &Tools, parallel: bool) -> Result<ToolRules> {
        let format = self.tool_format.ok_or_else(|| {
            let known = ToolFormat::ALL.map(ToolFormat::name).join(", ");
            let what = format!(
                ": the chat template does not show how this model writes calls; start the server with --tool-call-parser ({known})"
            );
            Error::field("tools", what)
        })?;
        let callable = tools.callable().iter().map(Signature::of);
        let named = matches!(tools.calls, CallMode::Named(_));
        // A model that has not learned to call tools does not know when to stop, either.
        let parallel = parallel && !named && !format.is_single() && self.text.knows_tools();
        Ok(ToolRules {
            format,
            callable: callable.collect(),
            custom: tools.custom.clone(),
            max_calls: if parallel { usize::MAX } else { 1 },
            forced: named || tools.calls == CallMode::Required,
            named,
        })
    }

    /// The grammar of the answer: calls where they are required, the content that `structured` asks for
    /// where calls are not possible, and one or the other where they are. Reasoning may come first.
    ///
    /// # Errors
    /// `Invalid`, naming the field, and the place in a schema, if a grammar is not possible, also one that only the input
    /// of a tool follows.
    pub fn answer_grammar(
        &self,
        structured: &Structured,
        tools: &Tools,
        rules: &MessageRules,
    ) -> Result<Option<Grammar>> {
        self.check_inputs(tools)?;
        let asked = structured.asked()?;
        let forced = rules.tools.as_ref().is_some_and(|rules| rules.forced);
        match &asked {
            None if !forced => return Ok(None),
            _ if !rules.begins_answer() => {
                let field = asked.as_ref().filter(|_| !forced);
                return wrong(
                    field.map_or("tool_choice".into(), |(field, _)| field.clone()),
                    "is not possible where the answer continues the last message: leave it out",
                );
            }
            Some((field, source)) if !rules.has_structure() => {
                return self.compile(field, source).map(Some);
            }
            _ => {}
        }
        let content = match &asked {
            Some((field, source)) if !forced => {
                Some(source.rule().ok_or_else(|| stands_alone(field))?)
            }
            _ => None,
        };
        let inputs = tools
            .inputs
            .iter()
            .map(|(tool, _, definition)| InputGrammar {
                tool: tool.clone(),
                definition: definition.clone(),
            });
        let inputs: Vec<InputGrammar> = inputs.collect();
        let calls = rules.tools.as_ref().map(|rules| Calls {
            format: rules.format,
            tools: tools.callable(),
            parallel: rules.max_calls > 1,
            inputs: &inputs,
        });
        let answer = Answer {
            reasoning: rules.reasoning,
            is_harmony: rules.harmony.is_some(),
            calls,
            content: content.as_deref(),
        };
        let source = answer_grammar(answer, |marker| self.text.special_id(marker));
        let source = source.ok_or_else(|| {
            let what = format!(
                " need a grammar of more than {MAX_SOURCE_BYTES} bytes: give fewer tools, or parameters with smaller schemas"
            );
            Error::field("tools", what)
        })?;
        let field = asked.as_ref().filter(|_| !forced);
        let field = field.map_or("tools".into(), |(field, _)| field.clone());
        let compiled = self.compile(field, &GrammarSource::Lark(source));
        compiled.map(Some).map_err(|error| {
            // Each part alone tells where the error is.
            let schema = |(tool, field): (&Value, &FieldPath)| {
                let schema = tool["function"]["parameters"].as_object()?;
                let schema = GrammarSource::JsonSchema(schema.clone().into());
                Some((field.clone(), schema))
            };
            let schemas = tools.list.iter().zip(&tools.schemas).filter_map(schema);
            let started = Instant::now();
            let mut parts = schemas
                .chain(asked.filter(|_| !forced))
                .take_while(|_| started.elapsed() < MAX_SEARCH);
            parts
                .find_map(|(field, source)| self.compile(field, &source).err())
                .unwrap_or(error)
        })
    }

    /// Compiles the grammars that inputs of tools follow, if tools may be called.
    ///
    /// # Errors
    /// `Invalid`, naming the grammar's field, or `tools` if they take too long together.
    fn check_inputs(&self, tools: &Tools) -> Result<()> {
        if tools.calls == CallMode::None {
            return Ok(());
        }
        let started = Instant::now();
        for (_, at, definition) in &tools.inputs {
            if started.elapsed() > MAX_INPUTS {
                let seconds = MAX_INPUTS.as_secs();
                let what = format!(
                    " have grammars that take more than {seconds} seconds to compile: give fewer"
                );
                return Err(Error::field("tools", what));
            }
            self.compile(at.clone(), &GrammarSource::Lark(definition.clone()))?;
        }
        Ok(())
    }
}

/// Time after which no further grammar of a tool's input is compiled, which is that of one source.
const MAX_INPUTS: Duration = Duration::from_secs(10);

/// Time after which no further part of an answer's grammar is compiled to find out where an error is.
const MAX_SEARCH: Duration = Duration::from_millis(500);

/// The error for a grammar in text form where the answer may be something else, too.
fn stands_alone(field: &FieldPath) -> Error {
    Error::field(
        field,
        " is not possible together with tools or --reasoning-parser: leave it out, or set tool_choice to none",
    )
}
