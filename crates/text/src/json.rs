//! JSON as Python writes it, which is what models were trained on, and the contents of messages.

use super::literal::MARK;
use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};
use std::io;

/// The layout of a value in `json.dumps`. The default is one line with `, ` and `: `, all characters as they are.
#[derive(Debug)]
pub(super) struct JsonStyle {
    /// The indent of a value for each level that it is in, on a line of its own; `None` = one line.
    pub indent: Option<String>,
    pub item_separator: String,
    pub key_separator: String,
    /// Whether characters that are not ASCII are escaped.
    pub ascii: bool,
}

impl Default for JsonStyle {
    fn default() -> Self {
        Self {
            indent: None,
            item_separator: ", ".into(),
            key_separator: ": ".into(),
            ascii: false,
        }
    }
}

/// `value` on one line, as `json.dumps(value, ensure_ascii=False)` writes it.
///
/// # Errors
/// An error if a map's key is no string.
pub(super) fn python_json(value: &impl Serialize) -> serde_json::Result<String> {
    let mut out = Vec::new();
    write_python_json(value, &JsonStyle::default(), &mut out)?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// `value` in `style`, into `out`.
///
/// # Errors
/// The errors of [`python_json`], or an error if `out` cannot be written.
pub(super) fn write_python_json(
    value: &impl Serialize,
    style: &JsonStyle,
    out: &mut impl io::Write,
) -> serde_json::Result<()> {
    let formatter = PythonFormatter {
        style,
        depth: 0,
        is_empty: true,
    };
    value.serialize(&mut Serializer::with_formatter(out, formatter))
}

/// `text` as a part of a JSON text between its quotes.
pub(super) fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Adds `text` to the content of a chat's `message`, after `separator` if there is content before it.
pub(super) fn append_content(message: &mut Value, separator: &str, text: &str) {
    match &mut message["content"] {
        Value::String(before) => *before += &format!("{separator}{text}"),
        content => *content = text.into(),
    }
}

struct PythonFormatter<'a> {
    style: &'a JsonStyle,
    /// Lists and objects around the current place.
    depth: usize,
    /// Whether the innermost one has no value yet.
    is_empty: bool,
}

impl PythonFormatter<'_> {
    fn begin<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn end<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !std::mem::take(&mut self.is_empty) {
            self.new_line(out)?;
        }
        out.write_all(bracket)
    }

    fn item<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            out.write_all(self.style.item_separator.as_bytes())?;
        }
        self.new_line(out)
    }

    fn new_line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        let Some(indent) = &self.style.indent else {
            return Ok(());
        };
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(indent.as_bytes()))
    }
}

impl Formatter for PythonFormatter<'_> {
    fn write_f64<W: ?Sized + io::Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.style.ascii {
            return out.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            // A tokenizer must find the marks of literal texts.
            if matches!(c, ' '..='~' | MARK) {
                out.write_all(c.encode_utf8(&mut [0; 4]).as_bytes())?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.style.key_separator.as_bytes())
    }
}

/// A finite number as `repr` writes it: with an exponent below 1e-4 and from 1e16 on.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) => match exponent.parse::<i32>() {
            Ok(exponent) if value != 0.0 && !(-4..16).contains(&exponent) => {
                let sign = if exponent < 0 { '-' } else { '+' };
                format!("{digits}e{sign}{:02}", exponent.abs())
            }
            _ => format!("{value:?}"),
        },
        None => scientific,
    }
}
