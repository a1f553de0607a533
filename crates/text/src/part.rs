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

/// The length in bytes of the longest end of `text` that is the beginning of `marker`, but not all of it.
pub(super) fn partial_marker(text: &str, marker: &str) -> usize {
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
