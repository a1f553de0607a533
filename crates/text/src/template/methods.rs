//! Python's methods of texts, lists and maps.

use super::arguments::{arguments, refused};
use super::texts::{check_len, check_widths};
use minijinja::formatting::FormatStyle;
use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat;

/// Calls the method `name` of `value`: ours, or one of the library.
pub(super) fn call(
    state: &mut State,
    value: &Value,
    name: &str,
    given: &[Value],
) -> Result<Value, Error> {
    let ours = match (value.as_str(), value.kind()) {
        (Some(text), _) => of_text(text, name, given)?,
        (None, ValueKind::Seq) if name == "index" => Some(index_of(value, given)?),
        (None, ValueKind::Map) if name == "copy" => {
            let () = from_args(given)?;
            Some(value.clone())
        }
        _ => None,
    };
    match ours {
        Some(result) => Ok(result),
        // The library does not accept arguments by name here.
        None if name == "split" && value.as_str().is_some() => {
            let (separator, most) = split_arguments(given)?;
            let arguments = [separator.into(), most.into()];
            pycompat::unknown_method_callback(state, value, name, &arguments)
        }
        None => pycompat::unknown_method_callback(state, value, name, given),
    }
}

fn of_text(text: &str, name: &str, given: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "rsplit" => {
            let (separator, most) = split_arguments(given)?;
            let parts = right_split(text, separator, usize::try_from(most).ok());
            parts.into_iter().map(Value::from).collect()
        }
        "partition" => {
            let found = text.split_once(separator(given)?);
            in_three(found, given, [text, "", ""])
        }
        "rpartition" => {
            let found = text.rsplit_once(separator(given)?);
            in_three(found, given, ["", "", text])
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(given)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(given)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "index" | "rindex" => {
            let (part,): (&str,) = from_args(given)?;
            let found = if name == "index" {
                text.find(part)
            } else {
                text.rfind(part)
            };
            let at = found.ok_or_else(|| refused("substring not found"))?;
            text[..at].chars().count().into()
        }
        "ljust" | "rjust" | "center" => justified(text, name, given)?.into(),
        "zfill" => {
            let (width,): (usize,) = from_args(given)?;
            let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
            let zeros = "0".repeat(missing(text, width)?);
            format!("{}{zeros}{digits}", &text[..text.len() - digits.len()]).into()
        }
        "swapcase" => {
            let () = from_args(given)?;
            let swapped = text.chars().map(|c| {
                if c.is_uppercase() {
                    c.to_lowercase().to_string()
                } else {
                    c.to_uppercase().to_string()
                }
            });
            swapped.collect::<String>().into()
        }
        "casefold" => {
            let () = from_args(given)?;
            text.to_lowercase().replace('ß', "ss").into()
        }
        "format" => {
            check_widths(FormatStyle::StrFormat, text)?;
            return Ok(None);
        }
        _ => return Ok(None),
    }))
}

/// `sep` and `maxsplit`, by position or by name.
fn split_arguments(given: &[Value]) -> Result<(Option<String>, i64), Error> {
    let [separator, most] = arguments(given, ["sep", "maxsplit"])?;
    let separator = match separator {
        Some(text) if !text.is_none() => match text.as_str() {
            Some("") => return Err(refused("empty separator")),
            Some(text) => Some(text.to_owned()),
            None => return Err(refused("a separator must be a text")),
        },
        _ => None,
    };
    Ok((separator, most.map_or(Ok(-1), i64::try_from)?))
}

/// The parts of `text`, split at most `most` times from its end; without a separator, at white space.
fn right_split(text: &str, separator: Option<String>, most: Option<usize>) -> Vec<&str> {
    let most = most.unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    match separator {
        Some(separator) => parts.extend(text.rsplitn(most.saturating_add(1), &*separator)),
        None => {
            let mut rest = text.trim_end();
            while !rest.is_empty() {
                let word = match rest.rfind(char::is_whitespace) {
                    Some(at) if parts.len() < most => {
                        let space = rest[at..].chars().next().map_or(0, char::len_utf8);
                        at + space
                    }
                    _ => 0,
                };
                parts.push(&rest[word..]);
                rest = rest[..word].trim_end();
            }
        }
    }
    parts.reverse();
    parts
}

fn separator(given: &[Value]) -> Result<&str, Error> {
    let (separator,): (&str,) = from_args(given)?;
    if separator.is_empty() {
        return Err(refused("empty separator"));
    }
    Ok(separator)
}

/// Returns the text before the separator, the separator, and the text after it, or `whole` if it was not found.
fn in_three(found: Option<(&str, &str)>, separator: &[Value], whole: [&str; 3]) -> Value {
    let parts = match found {
        Some((before, after)) => vec![before.into(), separator[0].clone(), after.into()],
        None => whole.map(Value::from).to_vec(),
    };
    Value::from(Tuple::from(parts))
}

fn justified(text: &str, name: &str, given: &[Value]) -> Result<String, Error> {
    let (width, with): (usize, Option<&str>) = from_args(given)?;
    let with = with.unwrap_or(" ");
    if with.chars().count() != 1 {
        return Err(refused(
            "the fill character must be exactly one character long",
        ));
    }
    let missing = missing(text, width)?;
    // CPython rounds in this way.
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        _ => missing / 2 + (missing & width & 1),
    };
    let (left, right) = (with.repeat(left), with.repeat(missing - left));
    Ok(format!("{left}{text}{right}"))
}

/// The number of characters by which `text` is shorter than `width`.
///
/// # Errors
/// If it would be longer than an output may be.
fn missing(text: &str, width: usize) -> Result<usize, Error> {
    let missing = width.saturating_sub(text.chars().count());
    // A character has at most four bytes.
    check_len(missing.saturating_mul(4).saturating_add(text.len()))?;
    Ok(missing)
}

/// The index of a value in a list.
fn index_of(list: &Value, given: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(given)?;
    let at = list.try_iter()?.position(|value| value == *wanted);
    let at = at.ok_or_else(|| refused(format!("{wanted} is not in the list")))?;
    Ok(at.into())
}
