//! Keys that several ways to pack matrices have.

use crate::config::keys::Keys;

/// The largest group, in inputs: as many as a matrix may have.
const MAX_GROUP: f64 = (1u32 << 23) as f64;

/// Takes the inputs of a group; `None` = a group has all.
///
/// # Errors
/// If it is neither -1 nor a size.
pub fn group_size(keys: &mut Keys) -> Result<Option<usize>, String> {
    let key = "group_size";
    let value = keys.peek(key);
    match keys.number(key)? {
        None | Some(-1.) => Ok(None),
        Some(size) if size.fract() == 0. && (1. ..=MAX_GROUP).contains(&size) => {
            Ok(Some(size as usize))
        }
        Some(_) => Err(keys.refused(key, &value, "it must be -1 or a number of inputs")),
    }
}
