//! How a response is stored at its end.

use super::object::ResponseObject;
use crate::stored::{Items, ResponseStore, StoredResponse};
use serde_json::value::{RawValue, to_raw_value};
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
        let output: Result<Vec<_>, _> = response.output.iter().map(to_raw_value).collect();
        let (Ok(output), Ok(object)) = (output, serde_json::to_vec(response)) else {
            tracing::warn!("the response {} could not be stored", response.id);
            return;
        };
        let output = output.into_iter().map(Arc::<RawValue>::from);
        self.store.insert(StoredResponse {
            id: response.id.to_owned(),
            key: self.key.clone(),
            items: self.items.iter().cloned().chain(output).collect(),
            output_ids: (response.output.iter())
                .map(|item| item.id.to_owned())
                .collect(),
            object: object.into(),
        });
    }
}
