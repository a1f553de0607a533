//! The parts that a model's text is split into, and the search for markers in it.

/// A piece of an assistant's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// The model's reasoning before it answers.
    Reasoning(String),
    /// Text of the answer itself.
    Content(String),
    /// A call of this function begins.
    CallStart(String),
    /// More of the JSON text of the arguments of the call that began last.
    Arguments(String),
}

/// Appends reasoning to `parts`: to the last part, if that is reasoning.
pub(super) fn push_reasoning(parts: &mut Vec<Part>, text: &str) {
    match parts.last_mut() {
        _ if text.is_empty() => {}
        Some(Part::Reasoning(before)) => before.push_str(text),
        _ => parts.push(Part::Reasoning(text.to_owned())),
    }
}

/// The first of `markers` in `text`, and the number of bytes before it. If there is none, the number of bytes that are
/// certain to come before any: an end of `text` may be the beginning of a marker.
pub(super) fn until_marker<'m>(text: &str, markers: &[&'m str]) -> (usize, Option<&'m str>) {
    let places = (markers.iter()).filter_map(|marker| Some((text.find(marker)?, Some(*marker))));
    places.min().unwrap_or_else(|| {
        let partial = markers.iter().map(|marker| partial_marker(text, marker));
        (text.len() - partial.max().unwrap_or(0), None)
    })
}

/// The length in bytes of the longest end of `text` that is the beginning of `marker`, but not all of it.
fn partial_marker(text: &str, marker: &str) -> usize {
    let mut beginnings = marker.char_indices().map(|(at, _)| at).rev();
    beginnings
        .find(|&at| text.ends_with(&marker[..at]))
        .unwrap_or(0)
}

/// `text` in pieces of these numbers of characters, which repeat.
#[cfg(test)]
pub(super) fn pieces<'t>(text: &'t str, sizes: &'t [usize]) -> impl Iterator<Item = String> + 't {
    let (mut rest, mut sizes) = (text.chars().peekable(), sizes.iter().cycle());
    std::iter::from_fn(move || {
        rest.peek()?;
        let size = *sizes.next()?;
        Some(rest.by_ref().take(size.max(1)).collect())
    })
}

/// Reasoning, content, and each call with its arguments.
#[cfg(test)]
pub(super) type Joined = (String, String, Vec<(String, String)>);

/// Joins `parts`.
#[cfg(test)]
pub(super) fn joined(parts: Vec<Part>) -> Joined {
    let (mut reasoning, mut content, mut calls) = Joined::default();
    for part in parts {
        match part {
            Part::Reasoning(text) => reasoning += &text,
            Part::Content(text) => content += &text,
            Part::CallStart(name) => calls.push((name, String::new())),
            Part::Arguments(text) => calls.last_mut().expect("a call").1 += &text,
        }
    }
    (reasoning, content, calls)
}
