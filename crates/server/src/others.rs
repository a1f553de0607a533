//! Keys of the objects in a request that ask for something nobody does.

use super::checks::wrong;
use foretoken_core::error::{FieldPath, Result, clipped};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::fmt;

/// The keys of an object that its other fields do not read: there may be none but null. It is flattened into what it
/// guards; keys that ask for nothing are fields of that.
#[derive(Debug, Default, Clone)]
pub(super) struct NoOthers;

impl<'de> Deserialize<'de> for NoOthers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match OtherKey::deserialize(deserializer)?.0 {
            Some(key) => Err(D::Error::unknown_field(&key, &[])),
            None => Ok(Self),
        }
    }
}

/// The first of such keys, where it depends on the object's type whether there may be any.
#[derive(Debug, Default)]
pub(super) struct OtherKey(pub Option<String>);

impl<'de> Deserialize<'de> for OtherKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;

        impl<'de> Visitor<'de> for Keys {
            type Value = OtherKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OtherKey, A::Error> {
                let mut first = None;
                while let Some((key, value)) = map.next_entry::<String, Option<IgnoredAny>>()? {
                    if value.is_some() && first.is_none() {
                        first = Some(clipped(&key));
                    }
                }
                Ok(OtherKey(first))
            }
        }

        deserializer.deserialize_map(Keys)
    }
}

/// The keys of an object, each with whether it has a value.
macro_rules! given {
    ($object:expr, $($key:ident),+) => {
        [$((stringify!($key), $object.$key.is_some())),+]
    };
}
pub(super) use given;

/// Refuses the first of the keys `given`, each with whether it has a value, that an object of this kind does not have.
///
/// # Errors
/// `Invalid`, naming the key of the object `at`.
pub(super) fn refuse_inapplicable(
    at: &FieldPath,
    kind: &str,
    has: &[&str],
    given: &[(&str, bool)],
) -> Result<()> {
    let inapplicable = |(key, is_given): &&(&str, bool)| *is_given && !has.contains(key);
    match given.iter().find(inapplicable) {
        Some((key, _)) => wrong(
            at.key(*key),
            format!("is not possible where the type is {kind}: leave it out"),
        ),
        None => Ok(()),
    }
}
