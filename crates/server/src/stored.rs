//! Finished responses, which clients may ask for again, or continue. They are kept in memory, and only so many.

use axum::body::Bytes;
use serde_json::value::RawValue;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of responses, of their bytes together, and of the time for which each is kept. The oldest go first.
const MAX_RESPONSES: usize = 1000;
const MAX_BYTES: usize = 64 << 20;
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum bytes of a response with its conversation. Longer ones are not stored: each request that continues a
/// conversation reads it as a whole.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// What an item takes beside its text, in bytes: counts, pointers, and what an allocator adds.
const ITEM_BYTES: usize = 64;

/// An item of a conversation.
pub(crate) struct StoredItem {
    pub id: String,
    /// The item as it is listed.
    pub json: Box<RawValue>,
}

/// The items of a conversation. A response shares them with those that continue it.
pub(crate) type Items = Vec<Arc<StoredItem>>;

/// The responses, the oldest first, each with the time at which it was stored.
#[derive(Default)]
pub(crate) struct ResponseStore(Mutex<VecDeque<(Instant, StoredResponse)>>);

/// A response that has finished.
pub(crate) struct StoredResponse {
    pub id: String,
    /// The API key of the request. Those with another do not find the response.
    pub key: Option<String>,
    /// The conversation up to the end of the response.
    pub items: Items,
    /// Number of the last of the items, which the response has added.
    pub outputs: usize,
    /// The response object.
    pub object: Bytes,
}

impl StoredItem {
    fn bytes(&self) -> usize {
        self.id.len() + self.json.get().len() + ITEM_BYTES
    }
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let items = self.items.iter().map(|item| item.bytes());
        items.sum::<usize>() + self.object.len()
    }

    /// The items that the response answers, and those that it has added.
    fn parts(&self) -> (&[Arc<StoredItem>], &[Arc<StoredItem>]) {
        self.items.split_at(self.items.len() - self.outputs)
    }

    /// The item with this id that the response has added.
    fn output(&self, id: &str) -> Option<Arc<StoredItem>> {
        let (_, outputs) = self.parts();
        outputs.iter().find(|item| item.id == id).cloned()
    }
}

impl ResponseStore {
    /// Calls `f` with the responses that are not too old at `now`.
    fn with<T>(
        &self,
        now: Instant,
        f: impl FnOnce(&mut VecDeque<(Instant, StoredResponse)>) -> T,
    ) -> T {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |(at, _): &(Instant, _)| now.saturating_duration_since(*at) > MAX_AGE;
        while all.front().is_some_and(is_old) {
            all.pop_front();
        }
        f(&mut all)
    }

    pub fn insert(&self, response: StoredResponse) {
        if response.bytes() > MAX_RESPONSE_BYTES {
            tracing::debug!("the response {} is too long to be stored", response.id);
            return;
        }
        let now = Instant::now();
        self.with(now, |all| {
            all.push_back((now, response));
            let mut bytes: usize = all.iter().map(|(_, one)| one.bytes()).sum();
            while all.len() > MAX_RESPONSES || bytes > MAX_BYTES {
                let Some((_, oldest)) = all.pop_front() else {
                    break;
                };
                bytes -= oldest.bytes();
            }
        });
    }

    /// What `part` makes of the newest response to a request with `key` of which it makes anything.
    fn find<T>(&self, key: Option<&str>, part: impl Fn(&StoredResponse) -> Option<T>) -> Option<T> {
        self.with(Instant::now(), |all| {
            let own = all.iter().rev().map(|(_, one)| one);
            let mut own = own.filter(|one| one.key.as_deref() == key);
            own.find_map(part)
        })
    }

    /// The conversation up to the end of the response `id`.
    pub fn items(&self, key: Option<&str>, id: &str) -> Option<Items> {
        self.find(key, |one| (one.id == id).then(|| one.items.clone()))
    }

    /// The items that the response `id` answers, those of earlier responses included.
    pub fn inputs(&self, key: Option<&str>, id: &str) -> Option<Items> {
        self.find(key, |one| (one.id == id).then(|| one.parts().0.to_vec()))
    }

    /// The item `id` that a response has added.
    pub fn item(&self, key: Option<&str>, id: &str) -> Option<Arc<StoredItem>> {
        self.find(key, |one| one.output(id))
    }

    /// The response object `id`.
    pub fn object(&self, key: Option<&str>, id: &str) -> Option<Bytes> {
        self.find(key, |one| (one.id == id).then(|| one.object.clone()))
    }

    /// Forgets the response `id`, and says whether there was one. Those that continue it keep its items.
    pub fn remove(&self, key: Option<&str>, id: &str) -> bool {
        self.with(Instant::now(), |all| {
            let count = all.len();
            all.retain(|(_, one)| one.id != id || one.key.as_deref() != key);
            all.len() < count
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use serde_json::value::to_raw_value;

    /// A response of `bytes` bytes and an item.
    fn response(id: usize, key: Option<&str>, bytes: usize) -> StoredResponse {
        let item = StoredItem {
            id: format!("msg_{id}"),
            json: to_raw_value(&json!({"id": format!("msg_{id}")})).expect("JSON"),
        };
        StoredResponse {
            id: format!("resp_{id}"),
            key: key.map(str::to_owned),
            items: vec![item.into()],
            outputs: 1,
            object: vec![b' '; bytes].into(),
        }
    }

    #[test]
    fn the_oldest_responses_are_forgotten() {
        let store = ResponseStore::default();
        for id in 0..=MAX_RESPONSES {
            store.insert(response(id, None, 1));
        }
        assert!(store.object(None, "resp_0").is_none());
        assert!(store.object(None, "resp_1").is_some());
        // As many as there is room for, and the next one.
        let large = MAX_RESPONSE_BYTES - 1000;
        for id in 5000..5008 {
            store.insert(response(id, None, large));
        }
        assert!(store.object(None, "resp_1").is_none());
        assert!(store.object(None, "resp_5000").is_some());
        store.insert(response(5008, None, 100_000));
        assert!(store.object(None, "resp_5000").is_none());
        assert!(store.object(None, "resp_5001").is_some());
        // One that is too long costs the others nothing.
        store.insert(response(5009, None, MAX_RESPONSE_BYTES));
        assert!(store.object(None, "resp_5009").is_none());

        let count = |after: Duration| store.with(Instant::now() + after, |all| all.len());
        assert_eq!(count(MAX_AGE / 2), 8);
        assert_eq!(count(MAX_AGE + Duration::from_secs(1)), 0);
    }

    #[test]
    fn a_response_is_found_with_its_key_alone() {
        let store = ResponseStore::default();
        store.insert(response(1, Some("a"), 1));
        for key in [None, Some("b")] {
            assert!(store.object(key, "resp_1").is_none());
            assert!(store.items(key, "resp_1").is_none());
            assert!(store.inputs(key, "resp_1").is_none());
            assert!(store.item(key, "msg_1").is_none());
            assert!(!store.remove(key, "resp_1"));
        }
        let item = store.item(Some("a"), "msg_1").expect("stored");
        assert_eq!(item.json.get(), r#"{"id":"msg_1"}"#);
        let count = |items: Option<Items>| items.map(|items| items.len());
        assert_eq!(count(store.items(Some("a"), "resp_1")), Some(1));
        assert_eq!(count(store.inputs(Some("a"), "resp_1")), Some(0));
        assert!(store.remove(Some("a"), "resp_1") && !store.remove(Some("a"), "resp_1"));
    }
}
