//! Calls within reasoning. Some models call a tool and do not end their thought before: such a call ends it. A
//! thought that is ended by its mark has no calls, and neither has one that goes on after the last of them: what looks
//! like one was only mentioned.

use super::part::{Part, push_reasoning};
use super::tools::{Signature, ToolFormat, ToolParser};
use std::sync::Arc;

/// Looks for calls in a thought. From the first one on nothing is certain, and held, until the thought or the text
/// ends.
#[derive(Debug)]
pub struct ThoughtParser {
    /// Reads all calls: what follows the last one that may be made matters.
    parser: ToolParser,
    max_calls: usize,
    /// The text that was not passed on: the thought's text after its last certain part.
    held: String,
    /// The first call, and what follows it.
    calls: Vec<Part>,
}

impl ThoughtParser {
    /// Finds calls of `tools`, of which the first `max_calls` are made.
    pub fn new(format: ToolFormat, tools: Arc<[Signature]>, max_calls: usize) -> Self {
        Self {
            parser: ToolParser::new(format, tools, usize::MAX),
            max_calls,
            held: String::new(),
            calls: Vec::new(),
        }
    }

    /// Takes the reasoning of `parts`, and leaves what is certain of it.
    pub(super) fn push(&mut self, parts: &mut Vec<Part>) {
        for part in std::mem::take(parts) {
            match part {
                Part::Reasoning(text) => {
                    self.held.push_str(&text);
                    let mut found = Vec::new();
                    self.parser.push(&text, &mut found);
                    self.sort(found, parts);
                }
                part => parts.push(part),
            }
        }
    }

    /// Ends the thought with its mark.
    pub(super) fn close(&mut self, parts: &mut Vec<Part>) {
        self.calls.clear();
        push_reasoning(parts, &std::mem::take(&mut self.held));
    }

    /// Ends the text. After a thought that was closed there is nothing left.
    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) {
        if self.held.is_empty() {
            return;
        }
        let mut found = Vec::new();
        self.parser.finish(&mut found);
        self.sort(found, parts);
        // Space after a call is dropped: other text goes on with the thought.
        if matches!(self.calls.last(), None | Some(Part::Content(_))) {
            return self.close(parts);
        }
        let mut calls = 0;
        for part in self.calls.drain(..) {
            calls += usize::from(matches!(part, Part::CallStart(_)));
            match part {
                _ if calls > self.max_calls => break,
                Part::Content(text) => push_reasoning(parts, &text),
                part => parts.push(part),
            }
        }
    }

    /// Content before any call is reasoning: a part of the held text, from its beginning.
    fn sort(&mut self, found: Vec<Part>, parts: &mut Vec<Part>) {
        for part in found {
            match part {
                Part::Content(text) if self.calls.is_empty() => {
                    self.held.drain(..text.len());
                    push_reasoning(parts, &text);
                }
                part => self.calls.push(part),
            }
        }
    }
}

#[cfg(test)]
mod tests;
