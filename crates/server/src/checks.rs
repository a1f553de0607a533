//! Errors about fields of requests.

use foretoken_core::error::{Error, FieldPath, Result};
use std::fmt;

/// The error about `field`, with what it must be.
pub(super) fn wrong<T>(field: impl Into<FieldPath>, what: impl fmt::Display) -> Result<T> {
    Err(Error::field(field, format!(" {what}")))
}

/// The value of a field that cannot be left out.
///
/// # Errors
/// `Invalid`, naming it.
pub(super) fn required<T>(field: impl Into<FieldPath>, value: Option<T>) -> Result<T> {
    value.map_or_else(|| wrong(field, "is required"), Ok)
}
