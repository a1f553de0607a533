//! Request bodies as JSON objects: what nobody reads is checked, but not kept.
//!
//! A tree of values takes many times the bytes of its text. So the fields of a body stay text until they are
//! read, lists are read into what they become, and only as many values as a request can use become a tree.

use super::unsupported::{self, Treatment};
use super::wire::{self, whole};
use foretoken_core::error::{Error, FieldPath, RequestErrorKind, Result, json_words};
use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{
    DeserializeOwned, Deserializer, Error as _, IgnoredAny, IntoDeserializer, MapAccess, Visitor,
};
use serde::forward_to_deserialize_any;
use serde_json::value::RawValue;
use serde_json::{Error as JsonError, Value};
use std::borrow::Cow;
use std::fmt;

/// Maximum number of values in a field that becomes a tree: messages, tools, schemas.
const MAX_VALUES: usize = 64 * 1024;

/// Lists of plain values, which become no tree.
const LISTS: [&str; 4] = ["prompt", "tokens", "stop_token_ids", "allowed_token_ids"];

/// Maximum number of unknown names that are kept, and maximum characters of each.
const MAX_UNKNOWN: usize = 16;
const MAX_UNKNOWN_CHARS: usize = 64;

/// The fields of a JSON object.
#[derive(Debug, Default)]
pub(super) struct JsonObject<'a> {
    known: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// Fields with a known prefix, of which there may be many; every occurrence counts.
    prefixed: Vec<(Cow<'a, str>, &'a RawValue)>,
    /// The beginnings of the first names that nobody knows.
    unknown: Vec<String>,
    unknown_count: usize,
}

impl<'a> JsonObject<'a> {
    /// Parses a body, of which the names in `read` are read. Of a name that comes twice, the last counts.
    ///
    /// # Errors
    /// `Invalid`, if the body is not JSON or not an object.
    pub fn parse(body: &'a [u8], read: &[&[&str]]) -> Result<Self> {
        let malformed = |message: String| Error::request(RequestErrorKind::Invalid, None, message);
        let invalid = |e: &dyn fmt::Display| malformed(format!("the body is not valid JSON: {e}"));
        let text = std::str::from_utf8(body).map_err(|e| invalid(&e))?;
        let mut json = serde_json::Deserializer::from_str(text);
        if !text.trim_start().starts_with('{') {
            IgnoredAny::deserialize(&mut json).map_err(|e| invalid(&e))?;
            return Err(malformed("the body must be a JSON object".into()));
        }
        let object = json
            .deserialize_map(Fields { read })
            .map_err(|e| invalid(&e))?;
        json.end().map_err(|e| invalid(&e))?;
        Ok(object)
    }

    /// Checks the fields that are not in `read`. Unknown names are ignored, with one debug line.
    ///
    /// # Errors
    /// `Invalid`, naming the first field that asks for something the server does not do.
    pub fn check_others(&self, read: &[&[&str]]) -> Result<()> {
        for (name, value) in self.known.iter().chain(&self.prefixed) {
            if !is_in(read, name) {
                unsupported::check(name, value.get())?;
            }
        }
        if self.unknown_count > 0 {
            tracing::debug!("{}", self.ignored());
        }
        Ok(())
    }

    fn ignored(&self) -> String {
        let listed = &self.unknown;
        let more = match self.unknown_count - listed.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!("unknown fields are ignored: {listed:?}{more}")
    }

    /// Reads the fields of `T`. Integers in them and their lists may be written as 4.0.
    ///
    /// # Errors
    /// `Invalid`, naming the field and what it accepts.
    pub fn fields<T: DeserializeOwned>(&self) -> Result<T> {
        self.fields_with_lists(&LISTS)
    }

    /// As [`JsonObject::fields`], but `lists` names the fields that become no tree. Their number of values is not
    /// limited.
    ///
    /// # Errors
    /// The errors of [`JsonObject::fields`].
    pub fn fields_with_lists<T: DeserializeOwned>(&self, lists: &[&str]) -> Result<T> {
        let names = wire::names::<T>();
        let of_t = self
            .known
            .iter()
            .filter(|(name, _)| names.contains(&name.as_ref()));
        let fields = of_t.map(|(name, value)| {
            let may_be_tree = !lists.contains(&name.as_ref());
            (name.as_ref(), Field { value, may_be_tree })
        });
        let map = MapDeserializer::<_, JsonError>::new(fields);
        serde_path_to_error::deserialize(map)
            .map_err(|e| wrong_value(FieldPath::from(e.path()), e.inner()))
    }
}

/// Reads a body as the fields of `T`, and checks its other fields.
///
/// # Errors
/// `Invalid`, naming the field.
pub(super) fn read_body<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let read = [wire::names::<T>()];
    let body = JsonObject::parse(body, &read)?;
    body.check_others(&read)?;
    body.fields()
}

/// Reads the value of the field `at`.
///
/// # Errors
/// The errors of [`JsonObject::fields`].
pub(super) fn read<T: DeserializeOwned>(at: &FieldPath, value: Value) -> Result<T> {
    serde_path_to_error::deserialize(value)
        .map_err(|e| wrong_value(at.join(FieldPath::from(e.path())), e.inner()))
}

/// A 400 about `param`, or about the field that is missing in it, or that it must not have.
fn wrong_value(param: FieldPath, e: &JsonError) -> Error {
    let message = without_place(e);
    let quoted = |start: &str| message.strip_prefix(start)?.split_once('`');
    if let Some((name, "")) = quoted("missing field `") {
        return Error::field(param.key(name), " is required");
    }
    if let Some((name, _)) = quoted("unknown field `") {
        let name: String = name.chars().take(MAX_UNKNOWN_CHARS).collect();
        return Error::field(param.key(&*name), " is not supported: leave it out");
    }
    Error::field(param, format!(": {}", json_words(&message)))
}

fn is_in(lists: &[&[&str]], name: &str) -> bool {
    lists.iter().any(|names| names.contains(&name))
}

/// Visits a body.
struct Fields<'r> {
    read: &'r [&'r [&'r str]],
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = JsonObject<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut object = JsonObject::default();
        while let Some(Name(name)) = map.next_key()? {
            let treatment = if is_in(self.read, &name) {
                Treatment::Checked
            } else {
                unsupported::treatment(&name)
            };
            match treatment {
                Treatment::Checked => {
                    let value = map.next_value()?;
                    match object.known.iter_mut().find(|(known, _)| *known == name) {
                        Some((_, known)) => *known = value,
                        None => object.known.push((name, value)),
                    }
                }
                Treatment::CheckedByPrefix => object.prefixed.push((name, map.next_value()?)),
                Treatment::Accepted => drop(map.next_value::<IgnoredAny>()?),
                Treatment::Unknown => {
                    map.next_value::<IgnoredAny>()?;
                    object.unknown_count += 1;
                    if object.unknown.len() < MAX_UNKNOWN {
                        let start = name.chars().take(MAX_UNKNOWN_CHARS).collect();
                        object.unknown.push(start);
                    }
                }
            }
        }
        Ok(object)
    }
}

/// A name, borrowed from the body where it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// The text of a field's value.
struct Field<'a> {
    value: &'a RawValue,
    may_be_tree: bool,
}

impl<'a> Field<'a> {
    fn is_list(&self) -> bool {
        self.value.get().starts_with('[')
    }

    /// The value as a tree. Objects keep their numbers as they are: messages and a template's variables
    /// are rendered unchanged.
    fn tree(&self) -> Result<Value, JsonError> {
        let mut value: Value = serde_json::from_str(self.value.get())?;
        if let Value::Number(number) = &value
            && number.is_f64()
            && let Some(n) = number.as_f64().and_then(whole)
        {
            value = n.into();
        }
        Ok(value)
    }

    /// Checks that the value does not take much more memory than its text.
    fn check_size(&self) -> Result<(), JsonError> {
        if self.may_be_tree && count_values(self.value.get()) > MAX_VALUES {
            let message = format!("may have at most {MAX_VALUES} values");
            return Err(JsonError::custom(message));
        }
        Ok(())
    }
}

impl<'de> Deserializer<'de> for Field<'de> {
    type Error = JsonError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        self.check_size()?;
        if self.is_list() {
            let mut list = serde_json::Deserializer::from_str(self.value.get());
            return list.deserialize_any(visitor);
        }
        self.tree()?.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, JsonError> {
        match self.value.get() {
            "null" => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, JsonError> {
        self.check_size()?;
        self.tree()?.deserialize_enum(name, variants, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, JsonError> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, JsonError> for Field<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The number of values, and names, in a JSON text.
fn count_values(json: &str) -> usize {
    let (mut count, mut in_string, mut escaped) = (1, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b',' | b':' | b'[' | b'{' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

/// The message without the place in the text of the field, which is not the place in the body.
fn without_place(error: &JsonError) -> String {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    message
        .strip_suffix(&place)
        .map_or(message.clone(), str::to_owned)
}

#[cfg(test)]
mod tests;
