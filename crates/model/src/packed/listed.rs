//! Groups whose inputs are listed, because they were quantized in the order of their activations.

use super::integers::Groups;
use super::parts::{Part, Parts, WORDS};
use foretoken_core::error::Result;

/// The part with the group of each of `inputs` inputs, if there is one.
///
/// # Errors
/// A setup error that names it if it has another shape or dtype.
pub fn listed_groups<'a>(
    parts: &mut Parts<'a>,
    end: &str,
    inputs: usize,
) -> Result<Option<Part<'a>>> {
    let has = parts.has(end);
    has.then(|| parts.get(end, &[inputs], WORDS)).transpose()
}

/// The groups that a part lists, of `count`; `even` if it lists those, or nothing.
///
/// # Errors
/// A setup error that names the part if it names another group.
pub fn groups_of(part: Option<&Part<'_>>, even: Groups, count: usize) -> Result<Groups> {
    let Some(part) = part else {
        return Ok(even);
    };
    let words = part.words()?;
    let listed: Vec<u32> = (0..part.dims[0]).map(|input| words.word(input)).collect();
    // compressed-tensors lists -1 where there is no order.
    if listed.iter().all(|&group| group == u32::MAX) {
        return Ok(even);
    }
    if let Some(group) = listed.iter().find(|&&group| group as usize >= count) {
        let what = format!("names group {} of {count}", group.cast_signed());
        return Err(part.error(&what));
    }
    let inputs = listed.iter().enumerate();
    if inputs
        .clone()
        .all(|(input, &group)| even.of(input) == group as usize)
    {
        return Ok(even);
    }
    Ok(Groups::Listed(listed))
}
