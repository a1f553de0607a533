//! The operators of templates whose results can be larger than their operands, with bounds.

use super::budget::{
    BoundedText, MAX_BYTES, VALUE, refused, size, size_as_part, spend, spend_on, text_len,
    too_large,
};
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};
use std::fmt::Write;

/// Names that templates cannot write, under which [`super::guard`] calls the operators.
pub(super) const ADD: &str = "+";
pub(super) const CONCAT: &str = "~";
pub(super) const MULTIPLY: &str = "*";
pub(super) const ITEM: &str = "[]";
pub(super) const SLICE: &str = "[:]";
pub(super) const IN: &str = "in()";
/// Pays for a comparison with the value.
pub(super) const COMPARED: &str = "==";
/// Checks a list, a tuple or a map that was just built.
pub(super) const BUILT: &str = "[...]";
/// Checks what is assigned to a namespace.
pub(super) const STORED: &str = "=";
/// Pays for iterating.
pub(super) const ITERATED: &str = "for()";

/// Makes the operators known to `environment`.
pub(super) fn register(environment: &mut Environment<'_>) {
    environment.add_filter(ADD, add);
    environment.add_filter(CONCAT, concat);
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(ITEM, item);
    environment.add_filter(SLICE, slice);
    environment.add_filter(IN, is_in);
    environment.add_filter(COMPARED, |state: &mut State, value: Value| {
        spend_on(state, &value, 1)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(BUILT, part);
    environment.add_filter(STORED, part);
    environment.add_filter(ITERATED, |state: &mut State, value: ValueOrKwargs| {
        let value = value.into_value();
        spend(state, VALUE + text_len(&value))?;
        Ok::<_, Error>(value)
    });
}

/// What may be kept in another value.
fn part(state: &mut State, value: Value) -> Result<Value, Error> {
    spend(state, size_as_part(&value)?)?;
    Ok(value)
}

enum Number {
    Int(i128),
    Float(f64),
}

fn number(value: &Value) -> Option<Number> {
    match value.kind() {
        ValueKind::Bool => Some(Number::Int(value.is_true().into())),
        ValueKind::Number if value.is_integer() => {
            i128::try_from(value.clone()).ok().map(Number::Int)
        }
        ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
        _ => None,
    }
}

fn arithmetic(
    (a, b): (&Value, &Value),
    sign: &str,
    ints: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let (Some(x), Some(y)) = (number(a), number(b)) else {
        let (a, b) = (a.kind(), b.kind());
        return Err(refused(format!("{sign} cannot be applied to {a} and {b}")));
    };
    Ok(match (x, y) {
        (Number::Int(x), Number::Int(y)) => {
            let result = ints(x, y).ok_or_else(|| refused(format!("{x} {sign} {y} overflows")))?;
            i64::try_from(result).map_or_else(|_| result.into(), Value::from)
        }
        (Number::Float(x), Number::Float(y)) => floats(x, y).into(),
        (Number::Int(x), Number::Float(y)) => floats(x as f64, y).into(),
        (Number::Float(x), Number::Int(y)) => floats(x, y as f64).into(),
    })
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(state: &mut State, a: Value, b: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        if a.len() + b.len() > MAX_BYTES {
            return Err(too_large());
        }
        spend(state, a.len() + b.len())?;
        return Ok([a, b].concat().into());
    }
    if is_list(&a) && is_list(&b) {
        let bytes = size_as_part(&a)? + size_as_part(&b)?;
        if bytes > MAX_BYTES {
            return Err(too_large());
        }
        spend(state, bytes)?;
        return Ok(a
            .try_iter()?
            .chain(b.try_iter()?)
            .collect::<Vec<_>>()
            .into());
    }
    arithmetic((&a, &b), "+", i128::checked_add, |a, b| a + b)
}

fn concat(state: &mut State, a: Value, b: Value) -> Result<Value, Error> {
    spend(state, size(&a)? + size(&b)?)?;
    let mut text = BoundedText::default();
    write!(text, "{a}{b}").map_err(|_| too_large())?;
    Ok(text.into_string().into())
}

fn multiply(state: &mut State, a: Value, b: Value) -> Result<Value, Error> {
    let repeated = |value: &Value| value.as_str().is_some() || is_list(value);
    let (many, times) = match (repeated(&a), repeated(&b)) {
        (false, false) => {
            return arithmetic((&a, &b), "*", i128::checked_mul, |a, b| a * b);
        }
        (true, _) => (&a, &b),
        _ => (&b, &a),
    };
    let times = times
        .as_i64()
        .ok_or_else(|| refused("a text or a list can only be multiplied with an integer"))?;
    let times = usize::try_from(times).unwrap_or(0);
    let bytes = size_as_part(many)?.saturating_mul(times);
    if bytes > MAX_BYTES {
        return Err(too_large());
    }
    spend(state, bytes)?;
    if let Some(text) = many.as_str() {
        return Ok(text.repeat(times).into());
    }
    let items: Vec<Value> = many.try_iter()?.collect();
    let repeated = (0..times).flat_map(|_| items.iter().cloned());
    Ok(repeated.collect::<Vec<_>>().into())
}

fn item(state: &mut State, container: Value, key: Value) -> Result<Value, Error> {
    spend(state, VALUE + text_len(&container) + text_len(&key))?;
    if !matches!(key.kind(), ValueKind::String | ValueKind::Number) {
        spend_on(state, &key, 1)?;
    }
    container.get_item(&key)
}

fn is_in(state: &mut State, value: Value, container: Value) -> Result<bool, Error> {
    match container.kind() {
        ValueKind::Undefined => return Ok(false),
        ValueKind::Map => spend(state, VALUE)?,
        _ => spend_on(state, &container, 1)?,
    }
    spend_on(state, &value, 1)?;
    let found = match container.kind() {
        ValueKind::String | ValueKind::Map | ValueKind::Seq | ValueKind::Iterable => {
            minijinja::tests::is_in(state, &value, &container)?
        }
        kind => return Err(refused(format!("`in` cannot be applied to {kind}"))),
    };
    Ok(found)
}

/// Python's slices.
fn slice(state: &mut State, args: Rest<Value>) -> Result<Value, Error> {
    let [value, start, stop, step] = args.as_slice() else {
        return Err(refused("a slice has three parts"));
    };
    let bound = |value: &Value| match value.is_none() {
        true => Ok(None),
        false => i64::try_from(value.clone()).map(Some),
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(refused("cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        spend(state, text.len().saturating_mul(4))?;
        let chars: Vec<char> = text.chars().collect();
        let indices = indices(chars.len(), start, stop, step);
        return Ok(indices.map(|i| chars[i]).collect::<String>().into());
    }
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => Ok(Vec::<Value>::new().into()),
        ValueKind::Seq | ValueKind::Iterable => {
            spend(state, VALUE * (1 + value.len().unwrap_or(0)))?;
            let items: Vec<Value> = value.try_iter()?.collect();
            let indices = indices(items.len(), start, stop, step);
            Ok(indices.map(|i| items[i].clone()).collect::<Vec<_>>().into())
        }
        kind => Err(refused(format!("value of type {kind} cannot be sliced"))),
    }
}

/// The indices of `[start:stop:step]` in a sequence of `len`.
fn indices(
    len: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let len = len as i64;
    let (lower, upper) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamped = |bound: i64| {
        let bound = if bound < 0 {
            bound.saturating_add(len)
        } else {
            bound
        };
        bound.clamp(lower, upper)
    };
    let (first, last) = if step > 0 {
        (lower, upper)
    } else {
        (upper, lower)
    };
    let start = start.map_or(first, clamped);
    let stop = stop.map_or(last, clamped);
    std::iter::successors(Some(start), move |i| i.checked_add(step))
        .take_while(move |&i| if step > 0 { i < stop } else { i > stop })
        .map(|i| i as usize)
}
