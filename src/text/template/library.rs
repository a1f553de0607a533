//! The filters, tests, functions and methods of templates, each of which pays for what it does. These are
//! the ones that chat templates use; what only multiplies or pads (`center`, `batch`, `pprint`) is absent.

use super::budget::{
    BoundedText, MAX_BYTES, VALUE, refused, size, spend, spend_on, text_len, too_large,
};
use crate::text::json::write_python_json;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions, tests};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};
use std::fmt::Write;

/// Widths of formats and of indents.
const MAX_WIDTH: usize = 100;

/// How an operation's time depends on its arguments.
#[derive(Clone, Copy)]
enum Cost {
    /// On the bytes of texts.
    Texts,
    /// On the number of items, too.
    Items,
    /// On everything in the arguments, so many times.
    All(usize),
}

/// Makes `environment` know all of them.
pub(super) fn register(environment: &mut Environment<'_>) {
    register_filters(environment);
    register_tests(environment);
    environment.set_unknown_method_callback(method);
    add_function(environment, "range", Value::from_function(functions::range));
    add_function(environment, "dict", Value::from_function(functions::dict));
    add_function(
        environment,
        "namespace",
        Value::from_function(functions::namespace),
    );
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.set_formatter(|out, state, value| {
        if let Some(text) = value.as_str() {
            spend(state, text.len())?;
            return Ok(out.write_str(text)?);
        }
        spend_on(state, value, 1)?;
        let mut text = BoundedText::default();
        write!(text, "{value}").map_err(|_| too_large())?;
        let text = text.into_string();
        spend(state, text.len())?;
        Ok(out.write_str(&text)?)
    });
}

fn register_filters(environment: &mut Environment<'_>) {
    use filters::*;
    let of = |name, cost, filter| (name, cost, filter);
    let table = [
        of("safe", Cost::Texts, Value::from_function(safe)),
        of("escape", Cost::All(8), Value::from_function(escape)),
        of("e", Cost::All(8), Value::from_function(escape)),
        of("lower", Cost::All(2), Value::from_function(lower)),
        of("upper", Cost::All(2), Value::from_function(upper)),
        of("title", Cost::All(2), Value::from_function(title)),
        of("capitalize", Cost::All(2), Value::from_function(capitalize)),
        of("replace", Cost::All(1), Value::from_function(replace)),
        of("length", Cost::Texts, Value::from_function(length)),
        of("count", Cost::Texts, Value::from_function(length)),
        of("dictsort", Cost::All(20), Value::from_function(dictsort)),
        of("items", Cost::Items, Value::from_function(items)),
        of("reverse", Cost::Items, Value::from_function(reverse)),
        of("trim", Cost::All(2), Value::from_function(trim)),
        of("join", Cost::All(2), Value::from_function(join)),
        of("split", Cost::All(1), Value::from_function(split)),
        of("lines", Cost::All(1), Value::from_function(lines)),
        of("default", Cost::Texts, Value::from_function(default)),
        of("d", Cost::Texts, Value::from_function(default)),
        of("round", Cost::Texts, Value::from_function(round)),
        of("abs", Cost::Texts, Value::from_function(abs)),
        of("int", Cost::Texts, Value::from_function(int)),
        of("float", Cost::Texts, Value::from_function(float)),
        of("attr", Cost::Texts, Value::from_function(attr)),
        of("first", Cost::Texts, Value::from_function(first)),
        of("last", Cost::Items, Value::from_function(last)),
        of("min", Cost::All(2), Value::from_function(min)),
        of("max", Cost::All(2), Value::from_function(max)),
        of("sort", Cost::All(20), Value::from_function(sort)),
        of("unique", Cost::All(20), Value::from_function(unique)),
        of("list", Cost::Items, Value::from_function(list)),
        of("string", Cost::All(8), Value::from_function(string)),
        of("bool", Cost::Texts, Value::from_function(filters::bool)),
        of("indent", Cost::All(1), Value::from_function(indent)),
        of("select", Cost::Items, Value::from_function(select)),
        of("reject", Cost::Items, Value::from_function(reject)),
        of("selectattr", Cost::All(1), Value::from_function(selectattr)),
        of("rejectattr", Cost::All(1), Value::from_function(rejectattr)),
        of("map", Cost::Items, Value::from_function(map)),
    ];
    for (name, cost, filter) in table {
        environment.add_filter(name, paid(name, cost, filter));
    }
}

fn register_tests(environment: &mut Environment<'_>) {
    use tests::*;
    let of = |name, cost, test| (name, cost, test);
    let table = [
        of("undefined", Cost::Texts, Value::from_function(is_undefined)),
        of("defined", Cost::Texts, Value::from_function(is_defined)),
        of("none", Cost::Texts, Value::from_function(is_none)),
        of("boolean", Cost::Texts, Value::from_function(is_boolean)),
        of("odd", Cost::Texts, Value::from_function(is_odd)),
        of("even", Cost::Texts, Value::from_function(is_even)),
        of(
            "divisibleby",
            Cost::Texts,
            Value::from_function(is_divisibleby),
        ),
        of("number", Cost::Texts, Value::from_function(is_number)),
        of("integer", Cost::Texts, Value::from_function(is_integer)),
        of("float", Cost::Texts, Value::from_function(is_float)),
        of("string", Cost::Texts, Value::from_function(is_string)),
        of("sequence", Cost::Texts, Value::from_function(is_sequence)),
        of("iterable", Cost::Texts, Value::from_function(is_iterable)),
        of("mapping", Cost::Texts, Value::from_function(is_mapping)),
        of(
            "startingwith",
            Cost::All(1),
            Value::from_function(is_startingwith),
        ),
        of(
            "endingwith",
            Cost::All(1),
            Value::from_function(is_endingwith),
        ),
        of("lower", Cost::All(1), Value::from_function(is_lower)),
        of("upper", Cost::All(1), Value::from_function(is_upper)),
        of("sameas", Cost::Texts, Value::from_function(is_sameas)),
        of("eq", Cost::All(1), Value::from_function(is_eq)),
        of("equalto", Cost::All(1), Value::from_function(is_eq)),
        of("==", Cost::All(1), Value::from_function(is_eq)),
        of("ne", Cost::All(1), Value::from_function(is_ne)),
        of("!=", Cost::All(1), Value::from_function(is_ne)),
        of("lt", Cost::All(1), Value::from_function(is_lt)),
        of("<", Cost::All(1), Value::from_function(is_lt)),
        of("le", Cost::All(1), Value::from_function(is_le)),
        of("<=", Cost::All(1), Value::from_function(is_le)),
        of("gt", Cost::All(1), Value::from_function(is_gt)),
        of(">", Cost::All(1), Value::from_function(is_gt)),
        of("ge", Cost::All(1), Value::from_function(is_ge)),
        of(">=", Cost::All(1), Value::from_function(is_ge)),
        of("in", Cost::All(8), Value::from_function(is_in)),
        of("true", Cost::Texts, Value::from_function(is_true)),
        of("false", Cost::Texts, Value::from_function(is_false)),
        of("filter", Cost::Texts, Value::from_function(is_filter)),
        of("test", Cost::Texts, Value::from_function(is_test)),
    ];
    for (name, cost, test) in table {
        environment.add_test(name, paid(name, cost, test));
    }
}

fn add_function(environment: &mut Environment<'_>, name: &'static str, function: Value) {
    environment.add_function(name, paid(name, Cost::All(1), function));
}

/// `operation`, which pays by `cost` for its arguments and for what it makes of them.
fn paid(
    name: &'static str,
    cost: Cost,
    operation: Value,
) -> impl Fn(&mut State, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, args| {
        let args = args.into_values();
        pay(state, cost, &args)?;
        spend(state, growth(name, &args)?)?;
        let result = operation.call(state, &args)?;
        match cost {
            // What it gives is a part of what it was given, or as large as a number.
            Cost::Texts => Ok(result),
            _ => made(state, result),
        }
    }
}

fn pay(state: &mut State, cost: Cost, args: &[Value]) -> Result<(), Error> {
    for value in args {
        match cost {
            Cost::All(times) => spend_on(state, value, times)?,
            Cost::Texts => spend(state, VALUE + text_len(value))?,
            Cost::Items => {
                let items = value.len().unwrap_or(0);
                spend(state, VALUE * (1 + items))?;
            }
        }
    }
    Ok(())
}

/// Pays for a new value. What is computed while it is read becomes a list, so that no chain of such
/// values can grow.
fn made(state: &mut State, value: Value) -> Result<Value, Error> {
    spend_on(state, &value, 1)?;
    if value.kind() == ValueKind::Iterable {
        return Ok(value.try_iter()?.collect::<Vec<_>>().into());
    }
    Ok(value)
}

/// The bytes that an operation makes of `args`, if these can be many more than it is given.
fn growth(name: &str, args: &[Value]) -> Result<usize, Error> {
    let text = |at: usize| args.get(at).and_then(Value::as_str);
    let bytes = match (name, text(0)) {
        ("replace", Some(whole)) => {
            let (old, new) = (text(1).unwrap_or_default(), text(2).unwrap_or_default());
            let times = match old {
                "" => whole.len() + 1,
                old => whole.matches(old).count(),
            };
            whole.len() + times.saturating_mul(new.len())
        }
        ("split" | "splitlines" | "lines", Some(whole)) => match text(1) {
            Some("") => VALUE * whole.len(),
            Some(separator) => VALUE * whole.matches(separator).count(),
            None => VALUE * whole.split_ascii_whitespace().count(),
        },
        // The method of the separator.
        (".join", Some(separator)) => joined(separator, &args[1..]),
        ("join", _) => joined(text(1).unwrap_or_default(), args),
        ("indent", Some(whole)) => {
            let width = args.get(1).and_then(Value::as_usize).unwrap_or(MAX_WIDTH);
            if width > MAX_WIDTH {
                return Err(refused(format!("indents have at most {MAX_WIDTH} spaces")));
            }
            whole.len() + width * (1 + whole.lines().count())
        }
        (_, Some(whole)) => whole.len(),
        _ => 0,
    };
    match bytes > MAX_BYTES {
        true => Err(too_large()),
        false => Ok(bytes),
    }
}

fn joined(separator: &str, args: &[Value]) -> usize {
    let list = args.first();
    let items = list
        .and_then(|list| list.len().or(Some(text_len(list))))
        .unwrap_or(0);
    separator.len().saturating_mul(items)
}

/// Python's methods of texts, lists and maps.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let cost = match (value.kind(), name) {
        (ValueKind::Map, "get") => Cost::Texts,
        (ValueKind::Map, _) => Cost::Items,
        _ => Cost::All(2),
    };
    pay(state, cost, std::slice::from_ref(value))?;
    pay(state, cost, args)?;
    let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
    let name_of_growth = if name == "join" { ".join" } else { name };
    spend(state, growth(name_of_growth, &all)?)?;
    if name == "format" {
        check_format(value.as_str().unwrap_or_default())?;
    }
    let result = pycompat::unknown_method_callback(state, value, name, args)?;
    match cost {
        Cost::Texts => Ok(result),
        _ => made(state, result),
    }
}

/// Refuses widths that are large or come from arguments, as in `{:100000}` or `{:{}}`.
fn check_format(format: &str) -> Result<(), Error> {
    let fields = format.replace("{{", "").replace("}}", "");
    let nested = fields.split('}').any(|part| part.matches('{').count() > 1);
    let wide = fields
        .split(|c: char| !c.is_ascii_digit())
        .any(|digits| digits.len() > 3 || digits.parse().is_ok_and(|n: usize| n > MAX_WIDTH));
    match nested || (wide && fields.contains('{')) {
        true => Err(refused(format!(
            "formats have widths of at most {MAX_WIDTH}"
        ))),
        false => Ok(()),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(state: &mut State, format: &str) -> Result<String, Error> {
    spend(state, format.len().saturating_mul(VALUE))?;
    let mut out = BoundedText::default();
    // chrono reports an unknown directive only when formatting.
    write!(out, "{}", chrono::Local::now().format(format)).map_err(|_| {
        let format: String = format.chars().take(MAX_WIDTH).collect();
        refused(format!("strftime_now: unknown format {format:?}"))
    })?;
    Ok(out.into_string())
}

/// The filter `tojson`, like `json.dumps(x, ensure_ascii=False)`. Jinja's own filter escapes HTML, which
/// models were not trained on.
fn to_json(state: &mut State, value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted because templates pass it, but without effect: we never escape.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    spend(state, size(value)?)?;
    let mut out = BoundedText::default();
    let written = match indent {
        Some(width) if width > MAX_WIDTH => {
            return Err(refused(format!("indents have at most {MAX_WIDTH} spaces")));
        }
        Some(width) => {
            let indent = vec![b' '; width];
            let formatter = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        }
        None => write_python_json(value, &mut out),
    };
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let text = out.into_string();
    spend(state, text.len())?;
    Ok(Value::from_safe_string(text))
}
