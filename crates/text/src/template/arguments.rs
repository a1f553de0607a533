//! The arguments of filters and methods, and how they are read.

use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

/// Characters of an indent, which a request may choose.
const MAX_INDENT: usize = 100;

pub(super) fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The arguments with these names, each by position or by name, as far as they are given.
pub(super) fn arguments<const N: usize>(
    given: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (by_position, by_name): (&[Value], Kwargs) = from_args(given)?;
    if by_position.len() > N {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut found = [const { None }; N];
    for (i, name) in names.into_iter().enumerate() {
        found[i] = match by_position.get(i) {
            None if by_name.has(name) => Some(by_name.get(name)?),
            value => value.cloned(),
        };
    }
    by_name.assert_all_used()?;
    Ok(found)
}

/// Whether a flag is given and set.
pub(super) fn is_set(flag: Option<Value>) -> bool {
    flag.is_some_and(|flag| flag.is_true())
}

/// An indent that is a number of spaces, or a text.
pub(super) fn indent_text(indent: Value) -> Result<String, Error> {
    let too_wide = || refused(format!("indents have at most {MAX_INDENT} spaces"));
    if let Some(text) = indent.as_str() {
        let fits = text.chars().count() <= MAX_INDENT;
        return fits.then(|| text.to_owned()).ok_or_else(too_wide);
    }
    let width = i64::try_from(indent)?;
    let width = usize::try_from(width.max(0)).map_err(|_| too_wide())?;
    if width > MAX_INDENT {
        return Err(too_wide());
    }
    Ok(" ".repeat(width))
}
