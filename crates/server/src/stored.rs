//! Finished responses, which clients may ask for again, or continue. They are kept in memory, and only so many.

use axum::body::Bytes;
use serde_json::value::RawValue;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of responses, unless the operator chooses another, of their bytes together, and of the time for which each
/// is kept. The oldest go first.
const MAX_RESPONSES: usize = 1000;
const MAX_BYTES: usize = 64 << 20;
const MAX_AGE: Duration = Duration::from_secs(24 * 60 * 60);

/// Maximum bytes of a response with its conversation. Longer ones are not stored: each request that continues a
/// conversation reads it as a whole.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// What an item takes beside its text, in bytes: counts, pointers, its place among the uses, and what an allocator adds.
const ITEM_BYTES: usize = 128;

/// An item of a conversation.
pub(crate) struct StoredItem {
    pub id: String,
    /// The item as it is listed.
    pub json: Box<RawValue>,
}

/// The items of a conversation. A response shares them with those that continue it.
pub(crate) type Items = Vec<Arc<StoredItem>>;

/// The responses that are stored.
pub(crate) struct ResponseStore {
    max_responses: usize,
    stored: Mutex<Stored>,
}

#[derive(Default)]
struct Stored {
    /// The oldest first, each with the time at which it was stored.
    responses: VecDeque<(Instant, StoredResponse)>,
    /// How many times the responses have each item, by the item's address.
    uses: HashMap<usize, usize>,
    /// Bytes of the responses, and of each of their items once.
    bytes: usize,
}

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
    /// Bytes that no other response shares.
    fn own_bytes(&self) -> usize {
        self.object.len() + self.items.len() * size_of::<Arc<StoredItem>>()
    }

    /// Bytes with the conversation.
    fn bytes(&self) -> usize {
        let items = self.items.iter().map(|item| item.bytes());
        items.sum::<usize>() + self.own_bytes()
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

impl Stored {
    fn push(&mut self, now: Instant, response: StoredResponse) {
        self.bytes += response.own_bytes();
        for item in &response.items {
            let uses = self.uses.entry(Arc::as_ptr(item).addr()).or_default();
            *uses += 1;
            if *uses == 1 {
                self.bytes += item.bytes();
            }
        }
        self.responses.push_back((now, response));
    }

    fn remove(&mut self, index: usize) {
        let Some((_, response)) = self.responses.remove(index) else {
            return;
        };
        self.bytes -= response.own_bytes();
        for item in &response.items {
            let Entry::Occupied(mut uses) = self.uses.entry(Arc::as_ptr(item).addr()) else {
                continue;
            };
            *uses.get_mut() -= 1;
            if *uses.get() == 0 {
                uses.remove();
                self.bytes -= item.bytes();
            }
        }
    }
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self::new(MAX_RESPONSES)
    }
}

impl ResponseStore {
    /// One that has at most `max_responses` responses.
    pub fn new(max_responses: usize) -> Self {
        Self {
            max_responses,
            stored: Mutex::default(),
        }
    }

    /// Whether it stores any.
    pub fn is_on(&self) -> bool {
        self.max_responses > 0
    }

    /// Calls `f` with the responses that are not too old at `now`.
    fn with<T>(&self, now: Instant, f: impl FnOnce(&mut Stored) -> T) -> T {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |(at, _): &(Instant, _)| now.saturating_duration_since(*at) > MAX_AGE;
        while stored.responses.front().is_some_and(is_old) {
            stored.remove(0);
        }
        f(&mut stored)
    }

    pub fn insert(&self, response: StoredResponse) {
        if response.bytes() > MAX_RESPONSE_BYTES {
            tracing::debug!("the response {} is too long to be stored", response.id);
            return;
        }
        let now = Instant::now();
        self.with(now, |stored| {
            stored.push(now, response);
            while stored.responses.len() > self.max_responses || stored.bytes > MAX_BYTES {
                stored.remove(0);
            }
        });
    }

    /// What `part` makes of the newest response to a request with `key` of which it makes anything.
    fn find<T>(&self, key: Option<&str>, part: impl Fn(&StoredResponse) -> Option<T>) -> Option<T> {
        self.with(Instant::now(), |stored| {
            let own = stored.responses.iter().rev().map(|(_, one)| one);
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
        self.with(Instant::now(), |stored| {
            let is = |(_, one): &(_, StoredResponse)| one.id == id && one.key.as_deref() == key;
            let Some(at) = stored.responses.iter().position(is) else {
                return false;
            };
            stored.remove(at);
            true
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

        let count = |after: Duration| store.with(Instant::now() + after, |all| all.responses.len());
        assert_eq!(count(MAX_AGE / 2), 8);
        assert_eq!(count(MAX_AGE + Duration::from_secs(1)), 0);
        store.with(Instant::now(), |all| {
            assert_eq!((all.bytes, all.uses.len()), (0, 0));
        });
    }

    /// A long conversation does not push out others as if each of its responses had all of it.
    #[test]
    fn shared_items_are_counted_once() {
        let store = ResponseStore::default();
        store.insert(response(0, None, 1));
        let long = StoredItem {
            id: "long".to_owned(),
            json: to_raw_value(&"x".repeat(MAX_RESPONSE_BYTES / 2)).expect("JSON"),
        };
        let mut items = vec![Arc::new(long)];
        let turns = 2 * MAX_BYTES / (MAX_RESPONSE_BYTES / 2);
        for id in 1..=turns {
            let next = response(id, None, 1);
            items.extend(next.items.iter().cloned());
            store.insert(StoredResponse {
                items: items.clone(),
                ..next
            });
        }
        assert!(store.object(None, "resp_0").is_some());
        let bytes = || store.with(Instant::now(), |all| all.bytes);
        let all = bytes();
        assert!(all < MAX_RESPONSE_BYTES, "{all}");
        // The last one that has an item takes it along.
        for id in 0..turns {
            assert!(store.remove(None, &format!("resp_{id}")));
        }
        assert!(bytes() > MAX_RESPONSE_BYTES / 2);
        assert!(store.remove(None, &format!("resp_{turns}")));
        assert_eq!(bytes(), 0);
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
