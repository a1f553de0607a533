//! Finds tool calls in a model's text as it arrives.

use super::ToolFormat;
use super::object::{CallObject, Effect, Extent};
use super::signature::Signature;
use super::xml::{FUNCTION, XmlCall, XmlEffect};
use crate::part::{Part, until_marker};
use std::sync::Arc;

/// The longest text between Mistral's marker and the arguments that follow a name.
const MAX_HEAD_BYTES: usize = 256;

/// Splits a model's text into content and tool calls. How the text is cut into pieces does not change
/// the parts, apart from where content and arguments are cut.
///
/// A call begins when its name, one of the tools', and the first character of its arguments are there.
/// From then on the arguments are passed on as the model writes them, and nothing is taken back. Until
/// then its text is held, and becomes content if it turns out to be no call. Space around calls is
/// dropped.
#[derive(Debug)]
pub struct ToolParser {
    format: ToolFormat,
    /// The functions that may be called.
    tools: Arc<[Signature]>,
    /// Calls after which the text is complete.
    max_calls: usize,
    /// Calls that have begun.
    calls: usize,
    state: CallState,
    /// Text that may be the beginning of a marker.
    unread: String,
    /// The text that becomes content if no call begins: a marker and the text after it.
    held: String,
    /// Space at the end of the content so far.
    space: String,
    /// Whether anything but space was read.
    started: bool,
    /// Whether nothing but space came after a call.
    after_call: bool,
}

#[derive(Debug)]
enum CallState {
    Content,
    /// After a marker (`Between(false)`), or after a call that followed one.
    Between(bool),
    /// In the object of a call.
    Object(Box<CallObject>),
    /// In a call in XML.
    Xml(Box<XmlCall>),
    /// In the name of `[TOOL_CALLS]name[ARGS]{...}`.
    Head,
    /// In the arguments that follow such a name.
    Arguments(Extent),
}

impl ToolParser {
    /// Reads calls of `tools`; the text is complete after `max_calls` of them.
    pub fn new(format: ToolFormat, tools: Arc<[Signature]>, max_calls: usize) -> Self {
        Self {
            format,
            tools,
            max_calls,
            calls: 0,
            state: CallState::Content,
            unread: String::new(),
            held: String::new(),
            space: String::new(),
            started: false,
            after_call: false,
        }
    }

    /// Whether all calls that may be made are complete. What follows is not read.
    pub fn is_full(&self) -> bool {
        let between = matches!(self.state, CallState::Content | CallState::Between(_));
        self.calls >= self.max_calls && between
    }

    /// Adds text; appends what is certain to `parts`.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        let text = std::mem::take(&mut self.unread) + text;
        let mut rest = text.as_str();
        while !rest.is_empty()
            && !self.is_full()
            && let Some(read) = self.step(rest, parts)
        {
            rest = &rest[read..];
        }
        self.unread.push_str(rest);
    }

    /// Ends the text: what is held becomes content.
    pub fn finish(&mut self, parts: &mut Vec<Part>) {
        let rest = std::mem::take(&mut self.held) + &std::mem::take(&mut self.unread);
        // After a call, at most brackets, space and part of a marker are left; in a call, part of a marker.
        let in_call = match &self.state {
            CallState::Between(any) => *any,
            CallState::Xml(call) => call.has_begun(),
            _ => false,
        };
        if !self.is_full() && !in_call {
            self.content(&rest, parts);
        }
        if !self.after_call && !self.space.is_empty() {
            parts.push(Part::Content(std::mem::take(&mut self.space)));
        }
    }

    /// Reads from the beginning of `rest`, which is not empty. Returns the number of bytes that were read,
    /// or `None` if more text must come first.
    fn step(&mut self, rest: &str, parts: &mut Vec<Part>) -> Option<usize> {
        let c = rest.chars().next()?;
        match &mut self.state {
            CallState::Content => return self.in_content(rest, parts),
            CallState::Between(any) => {
                let any = *any;
                return self.between(any, rest, c, parts);
            }
            CallState::Object(object) => match object.push(c) {
                // The text after the arguments does not matter.
                Effect::Held if object.has_begun() => {}
                Effect::Held => self.held.push(c),
                Effect::Argument => argument(c, parts),
                Effect::Begin => {
                    let name = object.name().unwrap_or_default().to_owned();
                    if !self.begin_call(&name, parts) {
                        return self.give_back(parts);
                    }
                    argument(c, parts);
                }
                Effect::End if object.has_begun() => self.state = CallState::Between(true),
                Effect::End => {
                    let call = object.name().map(str::to_owned).zip(object.arguments());
                    self.held.push(c);
                    match call {
                        Some((name, arguments)) if self.begin_call(&name, parts) => {
                            parts.push(Part::Arguments(arguments));
                            self.state = CallState::Between(true);
                        }
                        _ => {
                            self.give_back(parts);
                        }
                    }
                }
                // The call stands, whatever follows its arguments.
                Effect::Reject => return self.give_back(parts),
            },
            CallState::Xml(call) => {
                let (bytes, effect) = call.read(rest, &self.tools)?;
                match effect {
                    XmlEffect::Begin(name) => {
                        self.begin_call(&name, parts);
                        parts.push(Part::Arguments("{".into()));
                    }
                    XmlEffect::Reject => return self.give_back(parts),
                    XmlEffect::Arguments(json) if json.is_empty() => {}
                    XmlEffect::Arguments(json) => parts.push(Part::Arguments(json)),
                    XmlEffect::End => {
                        parts.push(Part::Arguments("}".into()));
                        self.state = CallState::Between(true);
                    }
                }
                return Some(bytes);
            }
            CallState::Head if c == '{' => {
                let head = self.held.trim_start_matches(self.format.start());
                let name = head.split('[').next().unwrap_or_default().trim().to_owned();
                if !self.begin_call(&name, parts) {
                    return self.give_back(parts);
                }
                argument(c, parts);
                self.state = CallState::Arguments(Extent::begin(c));
            }
            CallState::Head if self.held.len() >= MAX_HEAD_BYTES => return self.give_back(parts),
            CallState::Head => self.held.push(c),
            CallState::Arguments(extent) => {
                argument(c, parts);
                if extent.push(c) {
                    self.state = CallState::Between(true);
                }
            }
        }
        Some(c.len_utf8())
    }

    fn in_content(&mut self, rest: &str, parts: &mut Vec<Part>) -> Option<usize> {
        if !self.started {
            let text = rest.trim_start();
            if text.is_empty() {
                return None;
            }
            self.started = true;
            if self.format == ToolFormat::Llama3Json && text.starts_with('{') {
                let space = rest.len() - text.len();
                self.held.push_str(&rest[..space]);
                self.state = CallState::Between(false);
                return Some(space);
            }
        }
        // Qwen3-Coder leaves out the first marker at times.
        let markers = [self.format.start(), FUNCTION];
        let markers = &markers[..if self.is_xml() { 2 } else { 1 }];
        let (end, found) = until_marker(rest, markers);
        self.content(&rest[..end], parts);
        let Some(found) = found else {
            return (end > 0).then_some(end);
        };
        self.held.push_str(found);
        self.state = if found == FUNCTION {
            CallState::Xml(Box::default())
        } else {
            CallState::Between(false)
        };
        Some(end + found.len())
    }

    /// Reads what stands before, between and after the objects of calls. `any` says whether a call came after the last
    /// marker. `c` is the first character of `rest`.
    fn between(&mut self, any: bool, rest: &str, c: char, parts: &mut Vec<Part>) -> Option<usize> {
        let (start, end) = (self.format.start(), self.format.end());
        let begins = |marker: &str| rest.len() < marker.len() && marker.starts_with(rest);
        if begins(start) || end.is_some_and(begins) || self.is_xml() && begins(FUNCTION) {
            return None;
        }
        if rest.starts_with(start) {
            if !any {
                self.give_back(parts);
            }
            self.held = start.to_owned();
            self.state = CallState::Between(false);
            return Some(start.len());
        }
        if let Some(end) = end.filter(|end| any && rest.starts_with(end)) {
            self.held.clear();
            self.state = CallState::Content;
            return Some(end.len());
        }
        if self.is_xml() && rest.starts_with(FUNCTION) {
            self.held.push_str(FUNCTION);
            self.state = CallState::Xml(Box::default());
            return Some(FUNCTION.len());
        }
        if c == '{' && !self.is_xml() {
            self.state = CallState::Object(Box::default());
            return Some(0);
        }
        if c.is_ascii_whitespace() || self.separates(c) {
            self.held.push(c);
            return Some(c.len_utf8());
        }
        if self.format == ToolFormat::Mistral && !any {
            self.state = CallState::Head;
            return Some(0);
        }
        if any {
            self.held.clear();
        }
        self.give_back(parts)
    }

    /// Whether calls are XML.
    fn is_xml(&self) -> bool {
        self.format == ToolFormat::Qwen3Coder
    }

    /// Whether `c` may stand around the objects of calls.
    fn separates(&self, c: char) -> bool {
        match self.format {
            // Some models write a list between Hermes' markers.
            ToolFormat::Hermes | ToolFormat::Mistral | ToolFormat::Harmony => "[,]".contains(c),
            ToolFormat::Llama3Json => ";,".contains(c),
            ToolFormat::Qwen3Coder => false,
        }
    }

    /// Begins a call, if `name` is that of a tool.
    fn begin_call(&mut self, name: &str, parts: &mut Vec<Part>) -> bool {
        if !self.tools.iter().any(|known| known.name == name) {
            return false;
        }
        parts.push(Part::CallStart(name.to_owned()));
        self.calls += 1;
        self.held.clear();
        self.space.clear();
        self.after_call = true;
        true
    }

    /// Makes content of what is held, and goes on with content. Reads nothing.
    fn give_back(&mut self, parts: &mut Vec<Part>) -> Option<usize> {
        let held = std::mem::take(&mut self.held);
        self.content(&held, parts);
        self.state = CallState::Content;
        Some(0)
    }

    /// Shows content. Space is held until something other than a call follows it.
    fn content(&mut self, text: &str, parts: &mut Vec<Part>) {
        let text = if self.after_call {
            text.trim_start()
        } else {
            text
        };
        let shown = text.trim_end();
        if !shown.is_empty() {
            self.after_call = false;
            let space = std::mem::take(&mut self.space);
            parts.push(Part::Content(space + shown));
        }
        self.space.push_str(&text[shown.len()..]);
    }
}

fn argument(c: char, parts: &mut Vec<Part>) {
    match parts.last_mut() {
        Some(Part::Arguments(text)) => text.push(c),
        _ => parts.push(Part::Arguments(c.into())),
    }
}
