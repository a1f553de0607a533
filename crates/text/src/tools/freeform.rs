//! The input of a custom tool: the one text in the arguments of the function that stands for the tool.

use serde_json::{Map, Value};

/// The parameter of a function that stands for a custom tool.
pub const FREEFORM_PARAMETER: &str = "input";

/// Reads the input of a custom tool from the JSON text of a call's arguments as it arrives. How the JSON is cut into
/// pieces does not change the input.
///
/// The input is the value of the parameter. If the arguments do not begin with it, they are held until they end: the
/// input is then this parameter's value, or else the only text in them, or else all of them as the model wrote them.
#[derive(Debug, Default)]
pub struct FreeformInput {
    state: InputState,
    /// JSON that is not read yet.
    unread: String,
}

#[derive(Debug, Default, Clone, Copy, PartialEq)]
enum InputState {
    /// Before the value of the parameter.
    #[default]
    Head,
    /// In the value, a string.
    Text,
    /// After the value.
    Ended,
    /// In arguments of another form.
    Other,
}

/// The beginning of arguments, as far as it is there.
enum Head {
    /// It has so many bytes.
    Whole(usize),
    Beginning,
    Other,
}

impl FreeformInput {
    /// Adds JSON; returns what is certain of the input.
    pub fn push(&mut self, json: &str) -> String {
        if self.state == InputState::Ended {
            return String::new();
        }
        self.unread.push_str(json);
        if self.state == InputState::Head {
            match head(&self.unread) {
                Head::Whole(read) => {
                    self.unread.drain(..read);
                    self.state = InputState::Text;
                }
                Head::Beginning => {}
                Head::Other => self.state = InputState::Other,
            }
        }
        if self.state == InputState::Text {
            self.text()
        } else {
            String::new()
        }
    }

    /// Ends the arguments; returns the rest of the input. What was cut off before or within a character is left out.
    pub fn finish(&mut self) -> String {
        let unread = std::mem::take(&mut self.unread);
        match std::mem::replace(&mut self.state, InputState::Ended) {
            InputState::Other => input_of(unread),
            InputState::Head | InputState::Text | InputState::Ended => String::new(),
        }
    }

    /// Reads the string as far as it is there.
    fn text(&mut self) -> String {
        let (mut out, mut read) = (String::new(), 0);
        while let Some(c) = self.unread[read..].chars().next() {
            let (c, len) = match c {
                '"' => {
                    self.state = InputState::Ended;
                    break;
                }
                '\\' => match escaped(&self.unread[read..]) {
                    Some(found) => found,
                    None => break,
                },
                c => (c, c.len_utf8()),
            };
            out.push(c);
            read += len;
        }
        self.unread.drain(..read);
        out
    }
}

/// Looks for `{"input": "` at the beginning of `json`.
fn head(json: &str) -> Head {
    let mut rest = json;
    for wanted in ["{", "\"input\"", ":", "\""] {
        rest = rest.trim_ascii_start();
        match rest.strip_prefix(wanted) {
            Some(after) => rest = after,
            None if wanted.starts_with(rest) => return Head::Beginning,
            None => return Head::Other,
        }
    }
    Head::Whole(json.len() - rest.len())
}

/// The character that the escape at the beginning of `json` stands for, and the number of its bytes; `None` if more
/// JSON must come first. A backslash before anything that JSON does not escape is itself.
fn escaped(json: &str) -> Option<(char, usize)> {
    const INVALID: (char, usize) = ('\\', 1);
    let simple = match json.chars().nth(1)? {
        c @ ('"' | '\\' | '/') => c,
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => {
            return match unit(json)? {
                None => Some(INVALID),
                Some(first @ 0xd800..=0xdbff) => pair(first, &json[6..]),
                // Half of a pair is no character.
                Some(unit) => Some((char_of(u32::from(unit)), 6)),
            };
        }
        _ => return Some(INVALID),
    };
    Some((simple, 2))
}

/// The number in the `\uXXXX` at the beginning of `json`: `None` if it is cut off, `Some(None)` if it has none.
fn unit(json: &str) -> Option<Option<u16>> {
    let digits = json.get(2..).unwrap_or_default();
    let hex = |byte: &u8| byte.is_ascii_hexdigit();
    match digits.bytes().take(4).take_while(hex).count() {
        4 => Some(u16::from_str_radix(&digits[..4], 16).ok()),
        read if read == digits.len() => None,
        _ => Some(None),
    }
}

/// The character of a pair of escapes whose first half is read; `rest` follows.
fn pair(first: u16, rest: &str) -> Option<(char, usize)> {
    const ALONE: (char, usize) = (char::REPLACEMENT_CHARACTER, 6);
    if !rest.starts_with("\\u") {
        return if "\\u".starts_with(rest) {
            None
        } else {
            Some(ALONE)
        };
    }
    match unit(rest)? {
        Some(second @ 0xdc00..=0xdfff) => {
            let (high, low) = (u32::from(first & 0x3ff), u32::from(second & 0x3ff));
            Some((char_of(0x1_0000 + (high << 10 | low)), 12))
        }
        _ => Some(ALONE),
    }
}

fn char_of(code: u32) -> char {
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The input in whole arguments of another form.
fn input_of(arguments: String) -> String {
    let Ok(Value::Object(object)) = serde_json::from_str(&arguments) else {
        return arguments;
    };
    only_text(object).unwrap_or(arguments)
}

/// The parameter's value, or else the only text in `object`.
fn only_text(mut object: Map<String, Value>) -> Option<String> {
    if let Some(Value::String(input)) = object.get_mut(FREEFORM_PARAMETER) {
        return Some(std::mem::take(input));
    }
    let mut texts = object.into_iter().filter_map(|(_, value)| match value {
        Value::String(text) => Some(text),
        _ => None,
    });
    let first = texts.next()?;
    texts.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::pieces;

    fn read<'a>(pieces: impl IntoIterator<Item = &'a str>) -> String {
        let mut input = FreeformInput::default();
        let mut text: String = pieces.into_iter().map(|json| input.push(json)).collect();
        text += &input.finish();
        text
    }

    #[test]
    fn the_input_does_not_depend_on_the_cuts() {
        for (arguments, expected) in [
            (
                r#"{"input": "*** Begin Patch\n+a \"b\"\\n\t/\/"}"#,
                "*** Begin Patch\n+a \"b\"\\n\t//",
            ),
            ("{ \"input\" :\n\"\"}", ""),
            (r#"{"input":"\u00e4\uD83D\uDE00é","more":1}"#, "ä😀é"),
            // What no JSON has, but models write.
            (
                "{\"input\": \"a\nb \\d \\u12 \\uzz\"}",
                "a\nb \\d \\u12 \\uzz",
            ),
            (
                r#"{"input": "\ud83d!\ud83d\u0041\udc00"}"#,
                "\u{fffd}!\u{fffd}A\u{fffd}",
            ),
            // Other forms.
            (r#"{"patch": "x\ny"}"#, "x\ny"),
            (r#"{"dry": true, "input": "x"}"#, "x"),
            (r#"{"a": "x", "b": "y"}"#, r#"{"a": "x", "b": "y"}"#),
            (r#"{"input": 7}"#, r#"{"input": 7}"#),
            ("[1]", "[1]"),
            ("{}", "{}"),
            // Cut off.
            (r#"{"inp"#, ""),
            (r#"{"input": "ab\"#, "ab"),
            (r#"{"input": "ab\u00"#, "ab"),
            (r#"{"input": "ab\ud83d"#, "ab"),
            ("", ""),
        ] {
            assert_eq!(read([arguments]), expected, "{arguments}");
            for sizes in [&[1][..], &[2], &[3, 1], &[7]] {
                let cut: Vec<String> = pieces(arguments, sizes).collect();
                let cut = cut.iter().map(String::as_str);
                assert_eq!(read(cut), expected, "{arguments} {sizes:?}");
            }
        }
    }
}
