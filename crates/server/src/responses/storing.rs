//! What is stored of a response: the items that it answers, and at its end those that it has added.

use super::input::{FIELD, not_stored};
use super::object::ResponseObject;
use crate::content::TextOr;
use crate::object::JsonObject;
use crate::reply::new_id;
use crate::stored::{Items, ResponseStore, StoredItem, StoredResponse};
use crate::wire::{self, required};
use foretoken_core::error::{Error, FieldPath, Result};
use serde::Deserialize;
use serde_json::value::to_raw_value;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Where a response is stored once it has finished.
pub(super) struct Storing {
    pub store: Arc<ResponseStore>,
    pub key: Option<String>,
    /// The conversation before the response.
    pub items: Items,
}

impl Storing {
    pub fn store(&self, response: &ResponseObject<'_>) {
        let output = response.output.iter().map(|item| {
            to_raw_value(item).map(|json| {
                let id = item.id.to_owned();
                Arc::new(StoredItem { id, json })
            })
        });
        let output: serde_json::Result<Items> = output.collect();
        let (Ok(output), Ok(object)) = (output, serde_json::to_vec(response)) else {
            tracing::warn!("the response {} could not be stored", response.id);
            return;
        };
        self.store.insert(StoredResponse {
            id: response.id.to_owned(),
            key: self.key.clone(),
            outputs: output.len(),
            items: self.items.iter().cloned().chain(output).collect(),
            object: object.into(),
        });
    }
}

/// The items of a body as they are stored, without references to others, which `stored` has.
///
/// # Errors
/// `Invalid`, naming the field.
pub(super) fn asked_items(
    body: &[u8],
    stored: impl Fn(&str) -> Option<Arc<StoredItem>>,
) -> Result<Items> {
    #[derive(Deserialize)]
    struct Asked {
        input: Option<TextOr<Map<String, Value>>>,
    }
    let body = JsonObject::parse(body, &[wire::names::<Asked>()])?;
    let items = match required(FIELD, body.fields::<Asked>()?.input)? {
        TextOr::Text(text) => {
            let mut message = Map::new();
            message.insert("role".to_owned(), "user".into());
            message.insert("content".to_owned(), text.into());
            vec![message]
        }
        TextOr::List(items) => items,
    };
    let item = |(i, item): (usize, Map<String, Value>)| {
        if item
            .get("type")
            .is_some_and(|kind| kind == "item_reference")
        {
            let id = item.get("id").and_then(Value::as_str);
            let found = id.and_then(&stored);
            return found.map_or_else(|| not_stored(&FieldPath::from(FIELD).index(i)), Ok);
        }
        listed(item).map(Arc::new)
    };
    items.into_iter().enumerate().map(item).collect()
}

/// An item in the form in which it is listed: with the keys that OpenAI's clients require, and a list of parts as content.
fn listed(mut item: Map<String, Value>) -> Result<StoredItem> {
    for (key, usual) in [("type", "message"), ("status", "completed")] {
        let value = item.entry(key).or_insert(Value::Null);
        if value.is_null() {
            *value = usual.into();
        }
    }
    let is = |key: &str, value: &str| item.get(key).is_some_and(|own| own == value);
    let (is_message, is_answer) = (is("type", "message"), is("role", "assistant"));
    let content = item.get_mut("content");
    if let Some(content) = content.filter(|content| is_message && content.is_string()) {
        let text = content.take();
        *content = if is_answer {
            json!([{"type": "output_text", "text": text, "annotations": []}])
        } else {
            json!([{"type": "input_text", "text": text}])
        };
    }
    let id = item.get("id").and_then(Value::as_str);
    let id = id.filter(|id| !id.is_empty());
    let new = || new_id(if is_message { "msg_" } else { "item_" });
    let id = id.map_or_else(new, str::to_owned);
    item.insert("id".to_owned(), id.clone().into());
    let json = to_raw_value(&item).map_err(|e| Error::internal(format!("an item: {e}")))?;
    Ok(StoredItem { id, json })
}
