//! Python's literals as JSON, as `ast.literal_eval` and `json.dumps` make it of them: some models write the values of
//! arguments so.

use serde_json::Value;

/// Lists and dictionaries within one another that are read, as many as serde_json reads.
const MAX_DEPTH: usize = 127;

/// The JSON text of a literal: `None`, `True`, `False`, a number, a string, a list, a tuple or a dictionary. `None` if
/// `text` is nothing else, or no JSON can be made of it.
pub fn to_json(text: &str) -> Option<String> {
    let mut literal = Literal {
        rest: text,
        json: String::new(),
    };
    literal.value(0)?;
    literal.space();
    literal.rest.is_empty().then_some(literal.json)
}

/// The literal of a JSON value. Texts are written as in JSON, which Python reads as well.
pub fn literal(value: &Value) -> String {
    let list = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(_) | Value::String(_) => value.to_string(),
        Value::Array(values) => format!("[{}]", list(values.iter().map(literal).collect())),
        Value::Object(map) => {
            let pair = |(key, value): (&String, &Value)| {
                format!("{}: {}", Value::from(key.as_str()), literal(value))
            };
            format!("{{{}}}", list(map.iter().map(pair).collect()))
        }
    }
}

/// A literal that is being read.
struct Literal<'a> {
    rest: &'a str,
    json: String,
}

/// A value that may be a key.
enum Read {
    /// JSON text that a key has between its quotes.
    Plain,
    String,
    Collection,
}

impl Literal<'_> {
    fn value(&mut self, depth: usize) -> Option<Read> {
        self.space();
        match self.rest.chars().next()? {
            '[' | '(' | '{' if depth >= MAX_DEPTH => None,
            '[' => self.collection(']', depth),
            '(' => self.collection(')', depth),
            '{' => self.collection('}', depth),
            '\'' | '"' => self.strings(),
            _ => self.word(),
        }
    }

    /// A list, a tuple or a dictionary, whose last character is `end`. A single value between parentheses is no tuple.
    fn collection(&mut self, end: char, depth: usize) -> Option<Read> {
        let begin = self.json.len();
        let brackets = if end == '}' { ['{', '}'] } else { ['[', ']'] };
        self.rest = &self.rest[1..];
        self.json.push(brackets[0]);
        let (mut first, mut comma) = (true, true);
        while !self.next_is(end) {
            if !comma {
                return None;
            }
            if !first {
                self.json.push_str(", ");
            }
            if end == '}' {
                self.key(depth)?;
            }
            let read = self.value(depth + 1)?;
            comma = self.next_is(',');
            if end == ')' && first && !comma && self.next_is(end) {
                self.json.remove(begin);
                return Some(read);
            }
            first = false;
        }
        self.json.push(brackets[1]);
        Some(Read::Collection)
    }

    /// A key of a dictionary, and the colon after it.
    fn key(&mut self, depth: usize) -> Option<()> {
        let begin = self.json.len();
        match self.value(depth + 1)? {
            Read::String => {}
            // `json.dumps` writes such a key as a string.
            Read::Plain => {
                self.json.insert(begin, '"');
                self.json.push('"');
            }
            Read::Collection => return None,
        }
        self.json.push_str(": ");
        self.next_is(':').then_some(())
    }

    /// Strings, which are one if they stand side by side.
    fn strings(&mut self) -> Option<Read> {
        let mut text = String::new();
        while self.rest.starts_with(['\'', '"']) {
            self.string(&mut text)?;
            self.space();
        }
        self.json.push_str(&Value::from(text).to_string());
        Some(Read::String)
    }

    fn string(&mut self, text: &mut String) -> Option<()> {
        let quote = &self.rest[..1];
        let triple = quote.repeat(3);
        let quote = if self.rest.starts_with(&triple) {
            &triple
        } else {
            quote
        };
        let mut rest = &self.rest[quote.len()..];
        loop {
            if let Some(after) = rest.strip_prefix(quote) {
                self.rest = after;
                return Some(());
            }
            let c = rest.chars().next()?;
            rest = &rest[c.len_utf8()..];
            match c {
                '\\' => rest = escaped(rest, text)?,
                '\n' if quote.len() == 1 => return None,
                c => text.push(c),
            }
        }
    }

    /// A name or a number.
    fn word(&mut self) -> Option<Read> {
        let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '+' | '-');
        let end = self.rest.find(|c| !in_word(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word {
            "None" => self.json.push_str("null"),
            "True" => self.json.push_str("true"),
            "False" => self.json.push_str("false"),
            _ => self.json.push_str(&number(word)?),
        }
        Some(Read::Plain)
    }

    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Reads `wanted`, if it comes next.
    fn next_is(&mut self, wanted: char) -> bool {
        self.space();
        let rest = self.rest.strip_prefix(wanted);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }
}

/// Reads what follows a backslash into `text`; returns the rest.
fn escaped<'a>(rest: &'a str, text: &mut String) -> Option<&'a str> {
    let c = rest.chars().next()?;
    let after = &rest[c.len_utf8()..];
    let digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    if digits > 0 {
        let (code, after) = after.split_at_checked(digits)?;
        // A sign is no digit.
        if !code.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        // Half of a surrogate pair is no character, and cannot be part of a JSON text.
        text.push(char::from_u32(u32::from_str_radix(code, 16).ok()?)?);
        return Some(after);
    }
    match c {
        '\n' => {}
        'n' => text.push('\n'),
        't' => text.push('\t'),
        'r' => text.push('\r'),
        'b' => text.push('\u{8}'),
        'f' => text.push('\u{c}'),
        'a' => text.push('\u{7}'),
        'v' => text.push('\u{b}'),
        '\\' | '\'' | '"' => text.push(c),
        '0'..='7' => {
            let is_octal = |c: char| ('0'..='7').contains(&c);
            let len = rest.chars().take(3).take_while(|&c| is_octal(c)).count();
            let (code, after) = rest.split_at(len);
            text.push(char::from_u32(u32::from_str_radix(code, 8).ok()?)?);
            return Some(after);
        }
        // An unknown escape stands for itself, with its backslash.
        c => text.extend(['\\', c]),
    }
    Some(after)
}

/// The JSON of a number: Python allows a plus sign, underscores between digits, and a point without digits beside it.
fn number(word: &str) -> Option<String> {
    let digit_beside = |at: usize| {
        let is_digit = |c: Option<&u8>| c.is_some_and(u8::is_ascii_digit);
        let bytes = word.as_bytes();
        at > 0 && is_digit(bytes.get(at - 1)) && is_digit(bytes.get(at + 1))
    };
    if !word.match_indices('_').all(|(at, _)| digit_beside(at)) {
        return None;
    }
    let plain = word.replace('_', "");
    let (sign, digits) = match plain.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", plain.strip_prefix('+').unwrap_or(&plain)),
    };
    let after_digits = |text: &str| text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (whole, rest) = digits.split_at(digits.len() - after_digits(digits));
    let json = match rest.strip_prefix('.') {
        Some(rest) => {
            let (fraction, power) = rest.split_at(rest.len() - after_digits(rest));
            if whole.is_empty() && fraction.is_empty() {
                return None;
            }
            let or_zero = |digits: &str| if digits.is_empty() { "0" } else { digits }.to_owned();
            format!("{sign}{}.{}{power}", or_zero(whole), or_zero(fraction))
        }
        None => format!("{sign}{whole}{rest}"),
    };
    // A word that JSON does not accept is no number: hexadecimal digits, leading zeros, values beyond f64.
    serde_json::from_str::<serde_json::Number>(&json).ok()?;
    Some(json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Literals, and their JSON.
    const LITERALS: &str = r#"
None -> null
True -> true
['a', 'b'] -> ["a", "b"]
{'a': None} -> {"a": null}
[] -> []
() -> []
{} -> {}
(1,) -> [1]
(1, 'a') -> [1, "a"]
('a') -> "a"
((1)) -> 1
([1], ) -> [[1]]
[1, -2, +3, 4.5, .5, 5., 1e3, 1_000] -> [1, -2, 3, 4.5, 0.5, 5.0, 1e3, 1000]
123456789012345678901234567890 -> 123456789012345678901234567890
{1: 'a', True: 2, None: [3,],} -> {"1": "a", "true": 2, "null": [3]}
["it's", 'say "hi"', "\"", '\''] -> ["it's", "say \"hi\"", "\"", "'"]
'a\n\t\\\x41\u00e9\U0001F600\101\q' -> "a\n\t\\Aé😀A\\q"
'a' "b" -> "ab"
'' -> ""
{'a': {'b': [True, ('c',)]}} -> {"a": {"b": [true, ["c"]]}}
"#;

    #[test]
    fn literals_become_what_python_makes_of_them() {
        let rows = LITERALS.trim().lines();
        let rows = rows.map(|row| row.split_once(" -> ").expect("two columns"));
        let lines = [(" False\n", "false"), ("'''a\n'b'''", r#""a\n'b""#)];
        for (literal, json) in rows.chain(lines) {
            assert_eq!(to_json(literal).as_deref(), Some(json), "{literal}");
            assert!(serde_json::from_str::<Value>(json).is_ok(), "{json}");
        }
    }

    #[test]
    fn literals_are_as_deep_as_json() {
        for (depth, is_read) in [(127, true), (128, false)] {
            let text = "[".repeat(depth) + "1" + &"]".repeat(depth);
            assert_eq!(to_json(&text).is_some(), is_read);
            assert_eq!(serde_json::from_str::<Value>(&text).is_ok(), is_read);
        }
    }

    const TEXTS: &str = r"
[ | ] | [1 | [1,,2] | [,] | [1 2] | (,) | {'a'} | {'a': 1, 2} | {1, 2} | {[1]: 2} | {'a' 1} | None None | nil | true | 'a
'\x4' | '\x+1' | '\u+0e9' | '\ud800' | 0x10 | 012 | 1__0 | 1_ | --1 | . | 1j | nan | f('a') | ['a'] + ['b'] | a | ['a', b]
";

    #[test]
    fn whatever_else_there_is_stays_a_text() {
        let deep = "[".repeat(200) + &"]".repeat(200);
        let rows = TEXTS.trim().lines();
        let texts = rows.flat_map(|row| row.split(" | "));
        for text in texts.chain(["", "'a\nb'", &deep]) {
            assert_eq!(to_json(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_json(parts in prop::collection::vec(prop::sample::select(vec![
            "[", "]", "(", ")", "{", "}", ",", ":", "'", "\"", "'''", "a", "1", ".", "-", "_", "e5", " ", "\n", "\\", "\\x41",
            "None", "True", "'a'", "é", "\\u00e9", "\\8", "\\777",
        ]), 0..16)) {
            if let Some(json) = to_json(&parts.concat()) {
                prop_assert!(serde_json::from_str::<Value>(&json).is_ok(), "{json}");
            }
        }
    }
}
