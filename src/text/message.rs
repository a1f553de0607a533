//! Reads an assistant's message from a model's text.

use super::part::Part;
use super::reasoning::ReasoningParser;
use super::tools::ToolParser;

/// Splits a model's text into reasoning, content and tool calls as it arrives. Without parsers, all text
/// is content.
#[derive(Debug, Default)]
pub struct MessageParser {
    pub reasoning: Option<ReasoningParser>,
    pub tools: Option<ToolParser>,
}

impl MessageParser {
    /// Adds text; returns what is certain.
    pub fn push(&mut self, text: String) -> Vec<Part> {
        let mut parts = Vec::new();
        let content = match &mut self.reasoning {
            Some(reasoning) => reasoning.push(&text, &mut parts),
            None => text,
        };
        self.content(content, &mut parts);
        parts
    }

    /// Ends the text; returns the rest.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if let Some(reasoning) = &mut self.reasoning {
            let content = reasoning.finish(&mut parts);
            self.content(content, &mut parts);
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(&mut parts);
        }
        parts
    }

    /// Whether the message is complete, whatever else the model writes.
    pub fn is_complete(&self) -> bool {
        self.tools.as_ref().is_some_and(ToolParser::is_full)
    }

    /// Whether the model thinks.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning
            .as_ref()
            .is_some_and(ReasoningParser::is_reasoning)
    }

    fn content(&mut self, text: String, parts: &mut Vec<Part>) {
        match &mut self.tools {
            _ if text.is_empty() => {}
            Some(tools) => tools.push(&text, parts),
            None => parts.push(Part::Content(text)),
        }
    }
}
