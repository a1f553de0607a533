//! Finds tool calls in a model's text as it arrives.

use super::ToolFormat;
use super::braces::BracesArguments;
use super::object::{CallObject, Effect, Extent};
use super::python_call::{PythonCall, PythonEffect};
use super::signature::Signature;
use super::syntax::{Body, Syntax};
use super::whole::WholeAnswer;
use super::xml::{XmlCall, XmlEffect};
use crate::part::{Part, until_marker};
use std::sync::Arc;

/// The longest text between a marker and the arguments that follow a name.
const MAX_HEAD_BYTES: usize = 256;

/// Splits a model's text into content and tool calls. How the text is cut into pieces does not change
/// the parts, apart from where content and arguments are cut.
///
/// A call begins when its name, one of the tools', and the first character of its arguments are there.
/// From then on the arguments are passed on as the model writes them, and nothing is taken back. Until
/// then its text is held, and becomes content if it turns out to be no call. Space around calls is
/// dropped.
///
/// An answer that is nothing but JSON objects of calls has calls without markers. Such an answer is held until it
/// ends.
#[derive(Debug)]
pub struct ToolParser {
    syntax: &'static Syntax,
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
    /// In a call whose arguments have tags.
    Xml(Box<XmlCall>),
    /// In a call in Python.
    Python(Box<PythonCall>),
    /// In the text before the arguments, which names the function.
    Head(String),
    /// In the arguments that follow such a name.
    Arguments(Extent),
    /// In arguments between braces that follow such a name.
    Braces(Box<BracesArguments>),
    /// In an answer that may be nothing but calls without markers.
    Whole(Box<WholeAnswer>),
}

impl ToolParser {
    /// Reads calls of `tools`; the text is complete after `max_calls` of them.
    pub fn new(format: ToolFormat, tools: Arc<[Signature]>, max_calls: usize) -> Self {
        Self {
            syntax: format.syntax(),
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

    /// Reads a text that goes on with the content of a message. Where calls are the whole message, it has none.
    pub fn within_content(mut self) -> Self {
        self.started = true;
        self
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
        if let CallState::Whole(answer) = &mut self.state {
            let calls = std::mem::take(&mut **answer).calls();
            self.state = CallState::Content;
            for (name, arguments) in calls.into_iter().take(self.max_calls) {
                self.begin_call(&name, parts);
                parts.push(Part::Arguments(arguments));
            }
        }
        let rest = std::mem::take(&mut self.held) + &std::mem::take(&mut self.unread);
        // After a call, at most brackets, space and part of a marker are left; in a call, part of a marker.
        let in_call = match &self.state {
            CallState::Between(any) => *any,
            CallState::Xml(call) => call.has_begun(),
            CallState::Braces(_) => true,
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
            CallState::Object(_) => return self.in_object(c, parts),
            CallState::Xml(_) => return self.in_xml(rest, parts),
            CallState::Python(_) => return self.in_python(c, parts),
            CallState::Head(_) => return self.in_head(c, parts),
            CallState::Braces(arguments) => {
                let (bytes, json) = arguments.read(rest)?;
                if !json.is_empty() {
                    parts.push(Part::Arguments(json));
                }
                if arguments.is_complete() {
                    self.state = CallState::Between(true);
                }
                return Some(bytes);
            }
            CallState::Arguments(extent) => {
                argument(c, parts);
                if extent.push(c) {
                    self.state = CallState::Between(true);
                }
            }
            CallState::Whole(answer) => {
                if !answer.push(c, &self.tools) {
                    return self.give_back(parts);
                }
                self.held.push(c);
            }
        }
        Some(c.len_utf8())
    }

    fn in_object(&mut self, c: char, parts: &mut Vec<Part>) -> Option<usize> {
        let CallState::Object(object) = &mut self.state else {
            return None;
        };
        match object.push(c) {
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
        }
        Some(c.len_utf8())
    }

    fn in_xml(&mut self, rest: &str, parts: &mut Vec<Part>) -> Option<usize> {
        let CallState::Xml(call) = &mut self.state else {
            return None;
        };
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
        Some(bytes)
    }

    fn in_python(&mut self, c: char, parts: &mut Vec<Part>) -> Option<usize> {
        let CallState::Python(call) = &mut self.state else {
            return None;
        };
        let had_begun = call.has_begun();
        match call.push(c, &self.tools) {
            PythonEffect::Held if had_begun => {}
            PythonEffect::Held => self.held.push(c),
            PythonEffect::Reject => return self.give_back(parts),
            PythonEffect::Arguments(json) if json.is_empty() => {}
            PythonEffect::Arguments(json) => parts.push(Part::Arguments(json)),
            PythonEffect::Begin(json) => {
                let name = call.name().to_owned();
                self.begin_call(&name, parts);
                parts.push(Part::Arguments(json.into()));
                // The character is part of the first value, too.
                return Some(0);
            }
            PythonEffect::End(json) => {
                let name = call.name().to_owned();
                if !had_begun {
                    self.begin_call(&name, parts);
                }
                parts.push(Part::Arguments(json));
                self.state = CallState::Between(true);
            }
        }
        Some(c.len_utf8())
    }

    fn in_head(&mut self, c: char, parts: &mut Vec<Part>) -> Option<usize> {
        let CallState::Head(text) = &mut self.state else {
            return None;
        };
        if c == '{' {
            let head = self.syntax.head.as_ref();
            let name = head.map_or("", |head| head.name(text)).to_owned();
            if !self.begin_call(&name, parts) {
                return self.give_back(parts);
            }
            argument(c, parts);
            self.state = match self.syntax.body {
                Body::Braces(quote) => {
                    CallState::Braces(Box::new(BracesArguments::new(quote, self.syntax.end)))
                }
                _ => CallState::Arguments(Extent::begin(c)),
            };
        } else if text.len() >= MAX_HEAD_BYTES {
            return self.give_back(parts);
        } else {
            text.push(c);
            self.held.push(c);
        }
        Some(c.len_utf8())
    }

    fn in_content(&mut self, rest: &str, parts: &mut Vec<Part>) -> Option<usize> {
        let syntax = self.syntax;
        let starts = syntax.begin.iter().chain([&syntax.call]);
        let starts: Vec<&str> = starts.copied().filter(|start| !start.is_empty()).collect();
        if !self.started {
            let text = rest.trim_start();
            if syntax.is_named_first {
                let space = rest.len() - text.len();
                if let Some(read) = self.name_before_arguments(text)? {
                    self.held.push_str(&rest[..space]);
                    self.begin_named(&text[..read]);
                    self.started = true;
                    return Some(space + read);
                }
            }
            if starts
                .iter()
                .any(|start| start.len() > text.len() && start.starts_with(text))
            {
                return None;
            }
            self.started = true;
            let space = rest.len() - text.len();
            let is_marker = starts.iter().any(|start| text.starts_with(start));
            let first = text.chars().next().filter(|_| !is_marker);
            if first.is_some() && first == syntax.bare {
                self.held.push_str(&rest[..space]);
                self.state = CallState::Between(false);
                return Some(space);
            }
            if syntax.bare.is_none() && first.is_some_and(WholeAnswer::may_begin_with) {
                self.held.push_str(&rest[..space]);
                self.state = CallState::Whole(Box::default());
                return Some(space);
            }
        }
        let (end, found) = until_marker(rest, &starts);
        self.content(&rest[..end], parts);
        let Some(found) = found else {
            return (end > 0).then_some(end);
        };
        self.held.push_str(found);
        self.state = if found == syntax.call {
            self.call_state()
        } else {
            CallState::Between(false)
        };
        Some(end + found.len())
    }

    /// Reads what stands before, between and after calls. `any` says whether a call came after the last
    /// marker. `c` is the first character of `rest`.
    fn between(&mut self, any: bool, rest: &str, c: char, parts: &mut Vec<Part>) -> Option<usize> {
        let syntax = self.syntax;
        let begins = |marker: &&str| rest.len() < marker.len() && marker.starts_with(rest);
        let markers = syntax.begin.iter().chain(syntax.skipped);
        if markers.chain([&syntax.end, &syntax.call]).any(begins) {
            return None;
        }
        let comes = |marker: &&&'static str| !marker.is_empty() && rest.starts_with(**marker);
        if let Some(start) = syntax.begin.iter().find(comes) {
            if !any {
                self.give_back(parts);
            }
            self.held = (*start).to_owned();
            self.state = CallState::Between(false);
            return Some(start.len());
        }
        if any {
            if comes(&&syntax.end) {
                self.held.clear();
                self.state = CallState::Content;
                return Some(syntax.end.len());
            }
            if let Some(skipped) = syntax.skipped.iter().find(comes) {
                return Some(skipped.len());
            }
        }
        if comes(&&syntax.call) {
            self.begin_body(any, self.call_state());
            self.held.push_str(syntax.call);
            return Some(syntax.call.len());
        }
        if syntax.is_named_first
            && !c.is_ascii_whitespace()
            && let Some(read) = self.name_before_arguments(rest)?
        {
            self.held.clear();
            self.begin_named(&rest[..read]);
            return Some(read);
        }
        // Models close an object once too often at times.
        let is_object = matches!(syntax.body, Body::Object(_)) && !syntax.end.is_empty();
        let is_surplus = any && is_object && c == '}';
        if is_surplus || c.is_ascii_whitespace() || syntax.around.contains(c) {
            self.held.push(c);
            return Some(c.len_utf8());
        }
        let of_text = !any || !syntax.end.is_empty();
        let state = match &syntax.body {
            Body::Object(_) | Body::Python if c == '{' => CallState::Object(Box::default()),
            // Where a name comes first, an object has it within.
            Body::Named(_) if c == '{' && syntax.call.is_empty() => {
                CallState::Object(Box::default())
            }
            Body::Python => CallState::Python(Box::default()),
            // Text after Mistral's calls is content.
            _ if syntax.call.is_empty() && of_text => self.call_state(),
            _ => CallState::Content,
        };
        if matches!(state, CallState::Content) {
            if any {
                self.held.clear();
            }
            return self.give_back(parts);
        }
        self.begin_body(any, state);
        Some(0)
    }

    /// Number of bytes before the brace in a text that begins with the name of a tool, a line break and a brace;
    /// `Some(None)` = it does not, `None` = more text must come first.
    fn name_before_arguments(&self, text: &str) -> Option<Option<usize>> {
        let mut may_follow = text.is_empty();
        for tool in self.tools.iter() {
            let name = tool.name.as_str();
            if let Some(after) = text.strip_prefix(name) {
                let arguments = after.trim_start();
                let is_line = after.starts_with('\n');
                if is_line && arguments.starts_with('{') {
                    return Some(Some(text.len() - arguments.len()));
                }
                may_follow |= after.is_empty() || is_line && arguments.is_empty();
            } else {
                may_follow |= name.starts_with(text);
            }
        }
        (!may_follow).then_some(None)
    }

    /// Goes on with the arguments after `head`, the name of a function and a line break.
    fn begin_named(&mut self, head: &str) {
        self.held.push_str(head);
        self.state = CallState::Head(head.to_owned());
    }

    /// Goes on with a call. What stands between calls is dropped.
    fn begin_body(&mut self, any: bool, state: CallState) {
        if any {
            self.held.clear();
        }
        self.state = state;
    }

    /// The state at the beginning of a call that is no object; content if the format has none.
    fn call_state(&self) -> CallState {
        match &self.syntax.body {
            Body::Tags(tags) => CallState::Xml(Box::new(XmlCall::new(tags, self.syntax.end))),
            _ if self.syntax.head.is_some() => CallState::Head(String::new()),
            _ => CallState::Content,
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
