//! What all choices of a request have in common: what ends their texts, and what these may contain.

use super::lines::LineRules;
use super::stop::Stops;
use foretoken_text::{
    Continued, Detokenizer, ReasoningFormat, ReasoningParser, Signature, ThoughtParser, ToolFormat,
    ToolParser,
};
use std::sync::Arc;

/// The rules that all choices of a request share.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// Strings that end the text.
    pub stops: Stops,
    /// Ids that end the text and are reported as its stop reason, unlike EOS.
    pub stop_token_ids: Vec<u32>,
    /// Stop strings do not end the text before it has this many tokens.
    pub min_tokens: usize,
    /// Whether log-probabilities were requested.
    pub logprobs: bool,
    /// Whether the ids of the tokens were requested.
    pub token_ids: bool,
    /// Whether special tokens are shown by name.
    pub show_special: bool,
    /// What ends the text at a line.
    pub lines: LineRules,
    pub message: MessageRules,
}

impl Rules {
    /// Shows the special tokens that have a meaning in the text, or are a part of it.
    pub fn detokenizer(&self) -> Detokenizer {
        let markers = &self.message.markers;
        if self.show_special {
            return Detokenizer::with_special();
        }
        let stops = self.stops.ids().filter(|_| self.stops.are_shown());
        Detokenizer::showing(markers.iter().copied().chain(stops).collect())
    }
}

/// The parts that a model's text may contain besides content.
#[derive(Debug, Default)]
pub(super) struct MessageRules {
    /// How reasoning is marked, and whether the text begins with it without saying so; `None` = reasoning is not looked
    /// for.
    pub reasoning: Option<(ReasoningFormat, bool)>,
    /// The part of a message that the text goes on with; `None` = it is a message of its own.
    pub continued: Option<Continued>,
    /// The end of the prompt, which begins the answer, if answers are messages in Harmony's channels.
    pub harmony: Option<Box<str>>,
    /// Whether reasoning is left out of the reply.
    pub hide_reasoning: bool,
    /// Whether a grammar rules what follows the reasoning, so that a call within it is none.
    pub has_grammar: bool,
    /// `None` = calls are not looked for.
    pub tools: Option<ToolRules>,
    /// The special tokens that have a meaning in a message.
    pub markers: Arc<[u32]>,
}

impl MessageRules {
    /// Whether there may be anything but content.
    pub fn has_structure(&self) -> bool {
        self.tools.is_some() || self.reasoning.is_some() || self.harmony.is_some()
    }

    /// Whether all of the answer is still to come, after the rest of a thought perhaps.
    pub fn begins_answer(&self) -> bool {
        match self.continued {
            None => true,
            Some(Continued::Thought) => self.reasoning.is_some(),
            Some(Continued::Content) => false,
        }
    }

    /// Reads what the model thinks.
    pub fn reasoning_parser(&self) -> Option<ReasoningParser> {
        let (format, reasons) = self.reasoning?;
        Some(match self.continued {
            Some(Continued::Thought) => ReasoningParser::within_reasoning(format),
            _ => ReasoningParser::new(format, reasons),
        })
    }

    /// Reads calls.
    pub fn tool_parser(&self) -> Option<ToolParser> {
        let parser = self.tools.as_ref()?.parser();
        Some(match self.continued {
            Some(Continued::Content) => parser.within_content(),
            _ => parser,
        })
    }
}

/// The tools that may be called.
#[derive(Debug)]
pub(super) struct ToolRules {
    pub format: ToolFormat,
    pub callable: Arc<[Signature]>,
    /// The names of those whose input is a text.
    pub custom: Vec<String>,
    /// The text is complete after so many calls.
    pub max_calls: usize,
    /// Whether there is nothing but calls. What is cut off before it is one is not shown.
    pub forced: bool,
    /// Whether the request names the tool. Its reply then ends with `stop`.
    pub named: bool,
}

impl ToolRules {
    /// Reads calls.
    pub fn parser(&self) -> ToolParser {
        ToolParser::new(self.format, self.callable.clone(), self.max_calls)
    }

    /// Finds calls in a thought.
    pub fn thought_parser(&self) -> ThoughtParser {
        ThoughtParser::new(self.format, self.callable.clone(), self.max_calls)
    }

    /// The names of the tools.
    pub fn names(&self) -> Arc<[String]> {
        self.callable.iter().map(|tool| tool.name.clone()).collect()
    }
}
