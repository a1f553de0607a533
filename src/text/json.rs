//! JSON as Python writes it, which is what models were trained on.

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io;

/// `value` on one line, as `json.dumps(value, ensure_ascii=False)` writes it.
///
/// # Errors
/// If a map's key is no string.
pub(super) fn python_json(value: &impl Serialize) -> serde_json::Result<String> {
    let mut out = Vec::new();
    write_python_json(value, &mut out)?;
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// As [`python_json`], into `out`.
///
/// # Errors
/// As there, or if it cannot be written.
pub(super) fn write_python_json(
    value: &impl Serialize,
    out: &mut impl io::Write,
) -> serde_json::Result<()> {
    value.serialize(&mut Serializer::with_formatter(out, PythonFormatter))
}

/// Writes one line, with spaces after `,` and `:`.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}
