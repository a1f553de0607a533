//! A map of bounded size that drops the entry that was not used for the longest time.

use std::hash::{BuildHasher, Hash, RandomState};

/// No entry.
const NONE: u32 = u32::MAX;

/// A hash table with chained buckets whose entries are also a list in the order of their last use.
/// It takes address space for its whole capacity at once and memory as entries come, and never
/// rehashes, so no insertion is slow.
#[derive(Debug)]
pub struct Lru<K, V> {
    /// First entry of each bucket; as many as a power of two.
    buckets: Vec<u32>,
    entries: Vec<LruEntry<K, V>>,
    newest: u32,
    oldest: u32,
    capacity: usize,
    hasher: RandomState,
}

#[derive(Debug)]
struct LruEntry<K, V> {
    key: K,
    value: V,
    /// Next in the same bucket.
    next: u32,
    newer: u32,
    older: u32,
}

impl<K: Hash + Eq + Copy, V: Default> Lru<K, V> {
    /// A map that takes at most `bytes`; possibly too few for any entry.
    pub fn new(bytes: usize) -> Self {
        // At most two buckets an entry, after rounding up to a power of two.
        let entry_bytes = size_of::<LruEntry<K, V>>() + 2 * size_of::<u32>();
        let capacity = (bytes / entry_bytes).min(NONE as usize);
        Self {
            buckets: vec![NONE; capacity.next_power_of_two()],
            entries: Vec::with_capacity(capacity),
            newest: NONE,
            oldest: NONE,
            capacity,
            hasher: RandomState::new(),
        }
    }

    /// Memory of the entries it holds, with their share of the buckets, in bytes.
    pub fn bytes(&self) -> usize {
        self.entries.len() * size_of::<LruEntry<K, V>>() + self.buckets.len() * size_of::<u32>()
    }

    /// The value of `key`, which becomes the latest used.
    pub fn get(&mut self, key: &K) -> Option<&V> {
        let index = self.find(key)?;
        self.touch(index);
        Some(&self.entries[index as usize].value)
    }

    /// Changes the value of `key`, the default if it has none, and makes it the latest used.
    pub fn update(&mut self, key: K, change: impl FnOnce(&mut V)) {
        if self.capacity == 0 {
            return;
        }
        let index = match self.find(&key) {
            Some(index) => {
                self.touch(index);
                index
            }
            None => self.insert(key),
        };
        change(&mut self.entries[index as usize].value);
    }

    fn bucket(&self, key: &K) -> usize {
        self.hasher.hash_one(key) as usize & (self.buckets.len() - 1)
    }

    fn find(&self, key: &K) -> Option<u32> {
        let mut index = self.buckets[self.bucket(key)];
        while index != NONE {
            let entry = &self.entries[index as usize];
            if entry.key == *key {
                return Some(index);
            }
            index = entry.next;
        }
        None
    }

    /// Adds `key`, which is not there, in place of the oldest entry if all places are taken.
    fn insert(&mut self, key: K) -> u32 {
        let mut entry = LruEntry {
            key,
            value: V::default(),
            next: NONE,
            newer: NONE,
            older: NONE,
        };
        let index = if self.entries.len() < self.capacity {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        } else {
            let index = self.oldest;
            self.leave_bucket(index);
            self.leave_order(index);
            std::mem::swap(&mut self.entries[index as usize], &mut entry);
            index
        };
        let bucket = self.bucket(&key);
        self.entries[index as usize].next = self.buckets[bucket];
        self.buckets[bucket] = index;
        self.enter_order(index);
        index
    }

    fn leave_bucket(&mut self, index: u32) {
        let LruEntry { key, next, .. } = self.entries[index as usize];
        let bucket = self.bucket(&key);
        if self.buckets[bucket] == index {
            self.buckets[bucket] = next;
            return;
        }
        let mut before = self.buckets[bucket];
        while self.entries[before as usize].next != index {
            before = self.entries[before as usize].next;
        }
        self.entries[before as usize].next = next;
    }

    fn touch(&mut self, index: u32) {
        if index != self.newest {
            self.leave_order(index);
            self.enter_order(index);
        }
    }

    fn leave_order(&mut self, index: u32) {
        let LruEntry { newer, older, .. } = self.entries[index as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
    }

    fn enter_order(&mut self, index: u32) {
        let older = self.newest;
        self.entries[index as usize].newer = NONE;
        self.entries[index as usize].older = older;
        match older {
            NONE => self.oldest = index,
            older => self.entries[older as usize].newer = index,
        }
        self.newest = index;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(map: &Lru<u32, u32>) -> Vec<u32> {
        let mut keys = Vec::new();
        let mut index = map.newest;
        while index != NONE {
            keys.push(map.entries[index as usize].key);
            index = map.entries[index as usize].older;
        }
        keys
    }

    #[test]
    fn drops_what_was_not_used_for_the_longest_time() {
        let bytes = 3 * (size_of::<LruEntry<u32, u32>>() + 8);
        let mut map: Lru<u32, u32> = Lru::new(bytes);
        for key in [1, 2, 3] {
            map.update(key, |value| *value = 10 * key);
        }
        assert_eq!(map.get(&1), Some(&10), "and 1 is the latest used");
        map.update(4, |value| *value += 40);
        assert_eq!(keys(&map), [4, 1, 3]);
        assert_eq!(map.get(&2), None);
        map.update(3, |value| *value += 1);
        map.update(2, |value| {
            assert_eq!(*value, 0, "what was dropped is forgotten")
        });
        assert_eq!(keys(&map), [2, 3, 4]);
        assert_eq!(map.get(&3), Some(&31));
        assert!(map.bytes() <= bytes);
    }

    #[test]
    fn a_map_without_room_keeps_nothing() {
        let mut map: Lru<u32, u32> = Lru::new(7);
        map.update(1, |_| panic!("there is no room"));
        assert_eq!(map.get(&1), None);
    }

    #[test]
    fn agrees_with_a_list_on_random_operations() {
        let entry = size_of::<LruEntry<u32, u32>>() + 8;
        for capacity in [1, 2, 5, 64] {
            let mut map: Lru<u32, u32> = Lru::new(capacity * entry);
            let mut list: Vec<(u32, u32)> = Vec::new();
            let mut state = 7u64;
            for step in 0..20_000u32 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                let key = (state >> 40) as u32 % (2 * capacity as u32 + 1);
                let found = list.iter().position(|entry| entry.0 == key);
                if state >> 39 & 1 == 0 {
                    assert_eq!(map.get(&key).copied(), found.map(|at| list[at].1));
                    if let Some(at) = found {
                        list[..=at].rotate_right(1);
                    }
                    continue;
                }
                map.update(key, |value| *value = step);
                if let Some(at) = found {
                    list.remove(at);
                }
                list.insert(0, (key, step));
                list.truncate(capacity);
            }
            let expected: Vec<u32> = list.iter().map(|entry| entry.0).collect();
            assert_eq!(keys(&map), expected);
            assert_eq!(map.entries.len(), capacity);
            assert!(map.bytes() <= capacity * entry);
        }
    }
}
