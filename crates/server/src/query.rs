//! The query of an address.

use axum::http::Uri;

/// The names and values, without their escapes.
pub(super) fn pairs(uri: &Uri) -> impl Iterator<Item = (String, String)> {
    let pairs = uri.query().unwrap_or_default().split('&');
    pairs.map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    })
}

/// The first value of this name.
pub(super) fn value(uri: &Uri, name: &str) -> Option<String> {
    let mut pairs = pairs(uri);
    pairs.find_map(|(other, value)| (other == name).then_some(value))
}

/// A part of a query without its escapes.
fn decoded(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let [first, after @ ..] = rest {
        let escaped = match (first, after) {
            (b'%', [high, low, after @ ..]) => hex(*high)
                .zip(hex(*low))
                .map(|(h, l)| ((h << 4) | l, after)),
            _ => None,
        };
        let plain = if *first == b'+' { b' ' } else { *first };
        let (byte, after) = escaped.unwrap_or((plain, after));
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    let value = char::from(digit).to_digit(16)?;
    u8::try_from(value).ok()
}
