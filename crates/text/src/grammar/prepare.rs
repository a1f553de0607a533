//! Makes sure that llguidance keeps the schemas of a source.

use super::copies::Taken;
use super::{names, numbers, patterns};
use llguidance::api::TopLevelGrammar;
use serde_json::{Deserializer, Value};

/// The beginning of a schema in a grammar in text form.
const MARKER: &str = "%json";

/// Checks the schemas of `source`, also those within a grammar in text form, and writes what llguidance reads wrongly or
/// not at all in another way.
///
/// # Errors
/// A text that names what would not be kept, in words that follow the name of the field.
pub fn prepare(source: &mut TopLevelGrammar) -> Result<(), String> {
    let mut taken = Taken::default();
    for grammar in &mut source.grammars {
        if let Some(schema) = &mut grammar.json_schema {
            names::rewrite(schema);
            check(schema, &mut taken)?;
            patterns::rewrite(schema);
        }
        if let Some(text) = &mut grammar.lark_grammar {
            prepare_text(text, &mut taken)?;
        }
    }
    Ok(())
}

fn check(schema: &Value, taken: &mut Taken) -> Result<(), String> {
    numbers::check(schema)?;
    taken.add(schema)
}

/// Whatever follows the marker may be a schema, also in strings and comments: a grammar has no other use for it.
fn prepare_text(text: &mut String, taken: &mut Taken) -> Result<(), String> {
    let mut changed = Vec::new();
    for (at, _) in text.match_indices(MARKER) {
        let start = at + MARKER.len();
        let mut values = Deserializer::from_str(&text[start..]).into_iter::<Value>();
        let Some(Ok(mut schema)) = values.next() else {
            continue;
        };
        let has_names = names::rewrite(&mut schema);
        check(&schema, taken).map_err(|what| format!("has a schema that {what}"))?;
        if patterns::rewrite(&mut schema) || has_names {
            changed.push((start..start + values.byte_offset(), schema));
        }
    }
    for (place, schema) in changed.into_iter().rev() {
        text.replace_range(place, &format!(" {schema}"));
    }
    Ok(())
}
