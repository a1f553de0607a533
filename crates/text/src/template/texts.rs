//! Filters of texts as Jinja has them, with bounds of what they write.

use super::arguments::{arguments, indent_text, is_set, refused};
use super::output::{MAX_OUTPUT, too_long};
use minijinja::formatting::{FormatStyle, format as format_text};
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Error, State, Value, filters};
use minijinja_contrib::filters::striptags;

/// # Errors
/// If a text of so many bytes is longer than an output may be.
pub(super) fn check_len(len: usize) -> Result<(), Error> {
    if len > MAX_OUTPUT {
        return Err(refused(too_long()));
    }
    Ok(())
}

/// The filter `truncate(text, length=255, killwords=False, end='...', leeway=5)`.
pub(super) fn truncate(text: String, given: Rest<ValueOrKwargs>) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["length", "killwords", "end", "leeway"];
    let [length, killwords, end, leeway] = arguments(&given.into_values(), NAMES)?;
    let count = |value: Option<Value>, default| match value {
        Some(value) if !value.is_none() => usize::try_from(value),
        _ => Ok(default),
    };
    let (length, leeway) = (count(length, 255)?, count(leeway, 5)?);
    let end = end.map_or("...".into(), |end| end.to_string());
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        let least = end.chars().count();
        return Err(refused(format!("truncate: length must be {least} or more")));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let cut = text
        .char_indices()
        .nth(kept)
        .map_or(text.len(), |(at, _)| at);
    let mut kept = &text[..cut];
    if !is_set(killwords)
        && let Some(space) = kept.rfind(' ')
    {
        kept = &kept[..space];
    }
    Ok(kept.to_owned() + &end)
}

/// The filter `striptags`: without comments and tags, with single spaces, and entities as their characters.
pub(super) fn strip_tags(text: String) -> String {
    let text = without(&without(&text, "<!--", "-->"), "<", ">");
    let words: Vec<&str> = text.split_whitespace().collect();
    let text = words.join(" ");
    let mut plain = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(at) = rest.find('&') {
        plain.push_str(&rest[..at]);
        let name = rest[at + 1..].find(|c: char| !c.is_ascii_alphanumeric() && c != '#');
        let end = name.map_or(rest.len(), |len| at + 1 + len);
        let end = end + usize::from(rest[end..].starts_with(';'));
        plain.push_str(&striptags(rest[at..end].to_owned()));
        rest = &rest[end..];
    }
    plain + rest
}

/// `text` without what stands between `open` and the next `close`.
fn without(text: &str, open: &str, close: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(open) {
        let Some(len) = rest[at..].find(close) else {
            break;
        };
        out.push_str(&rest[..at]);
        rest = &rest[at + len + close.len()..];
    }
    out + rest
}

/// The filter `indent(text, width=4, first=False, blank=False)`; the width may be a text.
pub(super) fn indent(text: String, given: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let [width, first, blank] = arguments(&given.into_values(), ["width", "first", "blank"])?;
    let (first, blank) = (is_set(first), is_set(blank));
    let width = width.unwrap_or_else(|| 4.into());
    let indent = indent_text(width)?;
    let lines = text.split('\n').count();
    check_len(
        text.len()
            .saturating_add(lines.saturating_mul(indent.len())),
    )?;
    let mut out = String::with_capacity(text.len());
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            out.push('\n');
        }
        let indented = if i == 0 {
            first
        } else {
            blank || !line.is_empty()
        };
        if indented {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// The filter `format`: as the operator `%`, but with arguments.
pub(super) fn format(
    state: &mut State,
    format: &Value,
    arguments: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    if let Some(text) = format.as_str() {
        check_widths(FormatStyle::Printf, text)?;
    }
    filters::format(state, format, arguments)
}

/// The operator `%`: of a text, Python's format with a tuple, a map or one value; of numbers, the remainder,
/// which has the sign of `right`.
pub(super) fn percent(left: &Value, right: Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        check_widths(FormatStyle::Printf, text)?;
        let arguments = match right.downcast_object_ref::<Tuple>() {
            Some(tuple) => tuple.clone().into_vec(),
            None => vec![right],
        };
        return Ok(format_text(FormatStyle::Printf, text, &arguments)?.into());
    }
    let number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let impossible = || {
        let (left, right) = (left.kind(), right.kind());
        refused(format!("{left} % {right} is not possible"))
    };
    if !(number(left) && number(&right)) {
        return Err(impossible());
    }
    let integers = (i128::try_from(left.clone()), i128::try_from(right.clone()));
    if let (Ok(a), Ok(b)) = integers
        && !is_float(left)
        && !is_float(&right)
    {
        let rest = a.checked_rem(b).ok_or_else(impossible)?;
        let other_sign = rest != 0 && (rest < 0) != (b < 0);
        return Ok(Value::from(if other_sign { rest + b } else { rest }));
    }
    let (a, b) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    if b == 0.0 {
        return Err(impossible());
    }
    let rest = a % b;
    let other_sign = rest != 0.0 && (rest < 0.0) != (b < 0.0);
    Ok(Value::from(if other_sign { rest + b } else { rest }))
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

/// # Errors
/// If the widths and precisions in a format are longer than an output may be: the library fills them up.
pub(super) fn check_widths(style: FormatStyle, format: &str) -> Result<(), Error> {
    let is_printf = style == FormatStyle::Printf;
    let (mut total, mut rest) = (format.len(), format);
    while let Some(at) = rest.find(if is_printf { '%' } else { '{' }) {
        rest = &rest[at + 1..];
        if is_printf && rest.starts_with('(') {
            rest = rest.split_once(')').map_or("", |(_, rest)| rest);
        }
        let ends = |c: char| {
            if is_printf {
                !"#0- +.123456789".contains(c)
            } else {
                c == '}'
            }
        };
        let (field, after) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
        let numbers = field.split(|c: char| !c.is_ascii_digit());
        for number in numbers.filter(|number| !number.is_empty()) {
            total = total.saturating_add(number.parse().unwrap_or(usize::MAX));
        }
        rest = after;
    }
    check_len(total)
}
