//! What chat templates call beyond the library's own filters, tests and functions.

use super::output::{BoundedOutput, too_long};
use crate::text::json::write_python_json;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};

/// Spaces of an indent, which a request may choose.
const MAX_INDENT: usize = 100;

/// Makes `environment` know all of them, and Python's methods of texts, lists and maps.
pub(super) fn register(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_test("iterable", is_iterable);
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(refused(message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    use std::fmt::Write;
    let mut out = String::new();
    // chrono reports an unknown directive only when formatting.
    write!(out, "{}", chrono::Local::now().format(format))
        .map_err(|_| refused(format!("strftime_now: unknown format {format:?}")))?;
    Ok(out)
}

/// As in Python, where none is not: Qwen3-Coder's template asks so whether there are tools.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// The filter `tojson`, like `json.dumps(x, ensure_ascii=False)`. Jinja's own filter escapes HTML, which
/// models were not trained on.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates pass it, but without effect: we never escape.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = BoundedOutput::default();
    let written = match indent {
        Some(width) if width > MAX_INDENT => {
            return Err(refused(format!("indents have at most {MAX_INDENT} spaces")));
        }
        Some(width) => {
            let indent = vec![b' '; width];
            let formatter = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        }
        None => write_python_json(value, &mut out),
    };
    written.map_err(|e| {
        if e.is_io() {
            return refused(too_long());
        }
        Error::new(ErrorKind::BadSerialization, e.to_string())
    })?;
    Ok(Value::from_safe_string(out.into_string()))
}
