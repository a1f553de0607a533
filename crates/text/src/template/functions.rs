//! The filters, tests and functions of chat templates that the library lacks, and those in which the library differs
//! from Jinja.

use super::arguments::{arguments, indent_text, is_set, refused};
use super::output::{BoundedOutput, too_long};
use super::source::PERCENT;
use super::{methods, texts};
use crate::json::{JsonStyle, write_python_json};
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, tests};

/// Makes `environment` know all of them, and Python's methods of texts, lists and maps.
pub(super) fn register(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(methods::call);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("first", first);
    environment.add_filter("last", last);
    environment.add_filter("items", items);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("truncate", texts::truncate);
    environment.add_filter("striptags", texts::strip_tags);
    environment.add_filter("indent", texts::indent);
    environment.add_filter("format", texts::format);
    environment.add_filter(PERCENT, texts::percent);
    environment.add_test("callable", is_callable);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
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

/// Jinja's test `iterable`, as in Python, where none is not iterable: Qwen3-Coder's template asks so whether there
/// are tools.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Jinja's test `sequence`, as in Python, where texts and maps have a length and entries, too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Map) || tests::is_sequence(value)
}

/// Jinja's test `callable`: functions and macros; in Jinja also what is undefined.
fn is_callable(value: &Value) -> bool {
    let is_macro = || (value.as_object()).is_some_and(|o| o.type_name().ends_with("::Macro"));
    matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined) || is_macro()
}

// An undefined value is empty for all filters, as in Jinja.

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

fn first(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::UNDEFINED);
    }
    filters::first(value)
}

fn last(value: Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::UNDEFINED);
    }
    filters::last(value)
}

fn items(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return Ok(Value::from(Vec::<Value>::new()));
    }
    filters::items(value)
}

/// The filter `default(value, default_value='', boolean=False)`.
fn default(value: &Value, given: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [other, falsy] = arguments(&given.into_values(), ["default_value", "boolean"])?;
    let replaced = value.is_undefined() || is_set(falsy) && !value.is_true();
    Ok(if replaced {
        other.unwrap_or_else(|| "".into())
    } else {
        value.clone()
    })
}

/// The filter `int(value, default=0, base=10)`: what is no number is the default.
fn int(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    by_name: Kwargs,
) -> Result<Value, Error> {
    let default = default.or_else(|| (!by_name.has("default")).then(|| 0.into()));
    filters::int(state, value, default, base, by_name)
}

/// The filter `float(value, default=0.0)`.
fn float(
    state: &State,
    value: &Value,
    default: Option<Value>,
    by_name: Kwargs,
) -> Result<Value, Error> {
    let default = default.or_else(|| (!by_name.has("default")).then(|| 0.0.into()));
    filters::float(state, value, default, by_name)
}

/// The filter `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, which is
/// `json.dumps` in transformers. Jinja's own filter escapes HTML, which models were not trained on.
fn to_json(value: &Value, given: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sorted] = arguments(&given.into_values(), NAMES)?;
    let given = |value: &Value| !value.is_none();
    let (indent, separators) = (indent.filter(given), separators.filter(given));
    let mut style = JsonStyle {
        ascii: is_set(ascii),
        indent: indent.map(indent_text).transpose()?,
        ..JsonStyle::default()
    };
    if let Some(separators) = separators {
        [style.item_separator, style.key_separator] = two_texts(&separators)?;
    } else if style.indent.is_some() {
        style.item_separator = ",".into();
    }
    let mut out = BoundedOutput::default();
    let written = if is_set(sorted) {
        serde_json::to_value(value).and_then(|mut value| {
            value.sort_all_objects();
            write_python_json(&value, &style, &mut out)
        })
    } else {
        write_python_json(value, &style, &mut out)
    };
    written.map_err(|e| {
        if e.is_io() {
            return refused(too_long());
        }
        Error::new(ErrorKind::BadSerialization, e.to_string())
    })?;
    Ok(Value::from_safe_string(out.into_string()))
}

fn two_texts(pair: &Value) -> Result<[String; 2], Error> {
    let texts = if pair.kind() == ValueKind::Seq {
        let texts = pair.try_iter()?;
        let texts = texts.map(|text| text.as_str().map(str::to_owned)).take(3);
        texts.collect::<Option<Vec<_>>>()
    } else {
        None
    };
    let texts = texts.and_then(|texts| texts.try_into().ok());
    texts.ok_or_else(|| refused("tojson: separators must be two texts"))
}
