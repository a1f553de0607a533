//! Reads an assistant's message from a model's text.

use super::harmony::HarmonyParser;
use super::part::Part;
use super::reasoning::ReasoningParser;
use super::thought::ThoughtParser;
use super::tools::ToolParser;

/// Splits a model's text into reasoning, content and tool calls as it arrives. Without parsers, all text
/// is content.
#[derive(Debug, Default)]
pub struct MessageParser {
    /// Separates reasoning from the answer.
    pub reasoning: Option<ReasoningParser>,
    /// Separates tool calls from content.
    pub tools: Option<ToolParser>,
    /// Looks for calls in a thought that does not end.
    pub thought: Option<ThoughtParser>,
    /// Reads all of it in place of the others.
    pub harmony: Option<HarmonyParser>,
}

impl MessageParser {
    /// Adds text; returns what is certain.
    pub fn push(&mut self, text: String) -> Vec<Part> {
        let mut parts = Vec::new();
        if let Some(harmony) = &mut self.harmony {
            harmony.push(&text, &mut parts);
            return parts;
        }
        let content = match &mut self.reasoning {
            Some(reasoning) => {
                let content = reasoning.push(&text, &mut parts);
                if let Some(thought) = &mut self.thought {
                    thought.push(&mut parts);
                    if !reasoning.is_reasoning() {
                        thought.close(&mut parts);
                    }
                }
                content
            }
            None => text,
        };
        self.content(content, &mut parts);
        parts
    }

    /// Ends the text; returns the rest.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if let Some(harmony) = &mut self.harmony {
            harmony.finish(&mut parts);
        }
        if let Some(reasoning) = &mut self.reasoning {
            let content = reasoning.finish(&mut parts);
            if let Some(thought) = &mut self.thought {
                thought.push(&mut parts);
                thought.finish(&mut parts);
            }
            self.content(content, &mut parts);
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut parts);
        }
        parts
    }

    /// Whether the message is complete, whatever else the model writes.
    pub fn is_complete(&self) -> bool {
        let harmony = self.harmony.as_ref();
        self.tools.as_ref().is_some_and(ToolParser::is_full)
            || harmony.is_some_and(HarmonyParser::is_full)
    }

    /// Whether the model thinks.
    pub fn is_reasoning(&self) -> bool {
        let (reasoning, harmony) = (self.reasoning.as_ref(), self.harmony.as_ref());
        reasoning.is_some_and(ReasoningParser::is_reasoning)
            || harmony.is_some_and(HarmonyParser::is_reasoning)
    }

    fn content(&mut self, text: String, parts: &mut Vec<Part>) {
        match &mut self.tools {
            _ if text.is_empty() => {}
            Some(tools) => tools.push(&text, parts),
            None => parts.push(Part::Content(text)),
        }
    }
}
