//! What one rendering may cost. Templates come from model repositories, their variables from requests:
//! every operation whose time or memory depends on its values pays here before or as it runs.

use minijinja::value::ObjectRepr;
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt;
use std::io;

/// Instructions of one rendering. A chat of 1,000 messages takes tens of thousands.
pub(super) const FUEL: u64 = 5_000_000;
/// Bytes read and written by one rendering, a value counting as [`VALUE`].
const WORK: u64 = 256 << 20;
/// Largest text, and largest size of a list or a map with everything in it, in bytes.
pub(super) const MAX_BYTES: usize = 16 << 20;
/// Lists and maps in each other. JSON bodies have up to 128, in the list of messages.
const MAX_NESTING: usize = 160;
/// What a value counts beside its text, in bytes: about what it takes in memory.
pub(super) const VALUE: usize = 64;

/// What is left of a rendering's work.
struct Budget(u64);

pub(super) fn refused(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

pub(super) fn too_large() -> Error {
    refused(format!(
        "it makes a value of more than {} MiB",
        MAX_BYTES >> 20
    ))
}

/// Takes `bytes` from what is left.
///
/// # Errors
/// If it is less.
pub(super) fn spend(state: &mut State, bytes: usize) -> Result<(), Error> {
    let Budget(left) = state.get_or_insert_extension_with(|| Budget(WORK));
    *left = left
        .checked_sub(bytes as u64)
        .ok_or_else(|| refused(format!("it does more than {} MiB of work", WORK >> 20)))?;
    Ok(())
}

/// Pays for reading the whole of `value`, `times` times.
///
/// # Errors
/// If it is too large, nested too deeply, or more than what is left.
pub(super) fn spend_on(state: &mut State, value: &Value, times: usize) -> Result<(), Error> {
    let bytes = size(value)?;
    spend(state, bytes.saturating_mul(times))
}

/// The size of `value` and of all that is in it, each time that it is in it.
///
/// # Errors
/// If it is over [`MAX_BYTES`], nested too deeply, or contains a namespace, which could contain itself.
pub(super) fn size(value: &Value) -> Result<usize, Error> {
    let mut left = MAX_BYTES;
    // A namespace may be printed or passed on; only values must not contain one.
    if is_namespace(value) {
        take(&mut left, VALUE)?;
        for (_, value) in value
            .as_object()
            .and_then(|o| o.try_iter_pairs())
            .into_iter()
            .flatten()
        {
            measure(&value, MAX_NESTING, &mut left)?;
        }
    } else {
        measure(value, MAX_NESTING, &mut left)?;
    }
    Ok(MAX_BYTES - left)
}

/// [`size`] of what becomes a part of another value.
pub(super) fn size_as_part(value: &Value) -> Result<usize, Error> {
    let mut left = MAX_BYTES;
    measure(value, MAX_NESTING, &mut left)?;
    Ok(MAX_BYTES - left)
}

fn take(left: &mut usize, bytes: usize) -> Result<(), Error> {
    *left = left.checked_sub(bytes).ok_or_else(too_large)?;
    Ok(())
}

fn measure(value: &Value, nesting: usize, left: &mut usize) -> Result<(), Error> {
    take(left, VALUE + text_len(value))?;
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    if nesting == 0 {
        return Err(refused(format!(
            "it nests values more than {MAX_NESTING} deep"
        )));
    }
    if is_namespace(value) {
        return Err(refused("a namespace cannot be a part of another value"));
    }
    match object.repr() {
        ObjectRepr::Map => {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                measure(&key, nesting - 1, left)?;
                measure(&value, nesting - 1, left)?;
            }
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            for item in object.try_iter().into_iter().flatten() {
                measure(&item, nesting - 1, left)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// The bytes of a text.
pub(super) fn text_len(value: &Value) -> usize {
    value.as_bytes().map_or(0, <[u8]>::len)
}

/// The one object whose contents can change.
fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| {
        object.repr() == ObjectRepr::Map && object.type_name().ends_with("::Namespace")
    })
}

/// A text of at most [`MAX_BYTES`] that is being written.
#[derive(Default)]
pub(super) struct BoundedText(Vec<u8>);

impl BoundedText {
    pub(super) fn into_string(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    fn push(&mut self, bytes: &[u8]) -> bool {
        let fits = self.0.len() + bytes.len() <= MAX_BYTES;
        if fits {
            self.0.extend_from_slice(bytes);
        }
        fits
    }
}

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes()).then_some(()).ok_or(fmt::Error)
    }
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.push(bytes) {
            true => Ok(bytes.len()),
            false => Err(io::Error::other(too_large().to_string())),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
