//! An answer that is nothing but JSON objects of calls, without the markers of the format: some models write it so,
//! also in a fence.

use super::object::{CallObject, Effect};
use super::signature::Signature;

const FENCE: &str = "```";
/// The longest line that begins a fence.
const MAX_FENCE_BYTES: usize = 32;

/// Reads such an answer, a character at a time. Only its end tells whether there is nothing else.
#[derive(Debug, Default)]
pub struct WholeAnswer {
    at: At,
    /// Names and arguments of the calls so far.
    calls: Vec<(String, String)>,
    /// Whether a fence is open.
    fenced: bool,
}

#[derive(Debug, Default)]
enum At {
    /// Before, between and after objects.
    #[default]
    Between,
    /// In the line of a fence.
    Fence(String),
    /// In an object, and the arguments that have begun in it.
    Object(Box<CallObject>, String),
}

impl WholeAnswer {
    /// Whether an answer that begins with `c` may be one.
    pub fn may_begin_with(c: char) -> bool {
        matches!(c, '{' | '[' | '`')
    }

    /// Adds a character. Returns whether the text may still be nothing but calls of `tools`.
    pub fn push(&mut self, c: char, tools: &[Signature]) -> bool {
        match &mut self.at {
            At::Between if c == '{' => {
                let mut object = CallObject::default();
                object.push(c);
                self.at = At::Object(Box::new(object), String::new());
                true
            }
            At::Between if c == '`' => {
                self.at = At::Fence(c.into());
                true
            }
            At::Between => c.is_ascii_whitespace() || "[,;]".contains(c),
            At::Fence(line) if c == '\n' => {
                let is_end = line.trim_end() == FENCE;
                let is_fence = line.starts_with(FENCE) && (is_end || !self.fenced);
                self.fenced = !self.fenced;
                self.at = At::Between;
                is_fence
            }
            At::Fence(line) => {
                line.push(c);
                let goes_on = FENCE.starts_with(&**line) || line.starts_with(FENCE);
                let fits = c.is_ascii_alphanumeric() || "`_- ".contains(c);
                goes_on && fits && line.len() <= MAX_FENCE_BYTES
            }
            At::Object(..) => self.in_object(c, tools),
        }
    }

    fn in_object(&mut self, c: char, tools: &[Signature]) -> bool {
        let At::Object(object, arguments) = &mut self.at else {
            return false;
        };
        let effect = object.push(c);
        let is_known = |name: &str| tools.iter().any(|tool| tool.name == name);
        if object.name().is_some_and(|name| !is_known(name)) || object.has_other_key() {
            return false;
        }
        match effect {
            Effect::Held => true,
            Effect::Begin | Effect::Argument => {
                arguments.push(c);
                true
            }
            Effect::End => {
                let begun = object.has_begun().then(|| std::mem::take(arguments));
                let call = object.name().map(str::to_owned);
                let call = call.zip(begun.or_else(|| object.arguments()));
                self.calls.extend(call.clone());
                self.at = At::Between;
                call.is_some()
            }
            Effect::Reject => false,
        }
    }

    /// The calls of an answer that ends here; none if it is something else.
    pub fn calls(self) -> Vec<(String, String)> {
        match self.at {
            At::Between => self.calls,
            At::Fence(line) if self.fenced && line.trim_end() == FENCE => self.calls,
            _ => Vec::new(),
        }
    }
}
