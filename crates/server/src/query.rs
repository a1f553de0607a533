//! The query of an address.

use axum::http::Uri;

/// The names and values, without their escapes.
pub(super) fn pairs(uri: &Uri) -> impl Iterator<Item = (String, String)> {
    form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned()
}

/// The first value of this name.
pub(super) fn value(uri: &Uri, name: &str) -> Option<String> {
    let mut pairs = pairs(uri);
    pairs.find_map(|(other, value)| (other == name).then_some(value))
}
