//! Positions by a hash of what comes before them, in a table of fixed size.

/// Entries of a bucket. Together they are as long as a line of a CPU's cache: nearly each call waits for one.
const WAYS: usize = 4;

/// A value that stands for no position.
pub const NOWHERE: u32 = 0;

/// A map from hashes to two positions each. A hash belongs into one bucket, in which the entry that was not
/// used for the longest time makes room for others. It never grows, so no call is slow, and it takes memory
/// as entries come.
#[derive(Debug)]
pub struct PositionTable {
    /// Buckets of entries. An entry has a part of the hash, the time of its last use (0 = there is no entry),
    /// and the positions.
    buckets: Vec<[[u32; 4]; WAYS]>,
    /// Number of calls so far, without 0.
    now: u32,
}

impl PositionTable {
    /// A table of at most `bytes`; possibly too few for any entry.
    pub fn new(bytes: usize) -> Self {
        Self {
            buckets: vec![[[0; 4]; WAYS]; bytes / size_of::<[[u32; 4]; WAYS]>()],
            now: 0,
        }
    }

    /// Its size with room for all entries, in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// The positions of `hash`, which becomes the latest used. A hash that is not there has those of another
    /// once in 2^30 times.
    pub fn get(&mut self, hash: u64) -> Option<[u32; 2]> {
        let (bucket, now) = self.bucket(hash)?;
        let entry = bucket.iter_mut().find(|entry| is_of(entry, hash))?;
        entry[1] = now;
        Some([entry[2], entry[3]])
    }

    /// Changes the positions of `hash`, [`NOWHERE`] if it is not there, and makes it the latest used.
    pub fn update(&mut self, hash: u64, change: impl FnOnce(&mut [u32; 2])) {
        let Some((bucket, now)) = self.bucket(hash) else {
            return;
        };
        let place = bucket.iter().position(|entry| is_of(entry, hash));
        let unused = |way: &usize| match bucket[*way][1] {
            0 => u32::MAX,
            used => now.wrapping_sub(used),
        };
        let place = place.or_else(|| (0..WAYS).max_by_key(unused)).unwrap_or(0);
        let mut positions = if is_of(&bucket[place], hash) {
            [bucket[place][2], bucket[place][3]]
        } else {
            [NOWHERE; 2]
        };
        change(&mut positions);
        bucket[place] = [hash as u32, now, positions[0], positions[1]];
    }

    /// Reads the buckets of all `hashes` at once, before they are asked for one after the other: most are only
    /// in the memory, for which a CPU waits once for all of them.
    pub fn fetch(&self, hashes: &[u64]) {
        let buckets = hashes
            .iter()
            .map(|&hash| self.buckets.get(self.place(hash)));
        let read = buckets.fold(0, |read, bucket| read ^ bucket.map_or(0, |b| b[0][0]));
        std::hint::black_box(read);
    }

    /// The bucket of `hash`, and the time of this call.
    fn bucket(&mut self, hash: u64) -> Option<(&mut [[u32; 4]; WAYS], u32)> {
        self.now = self.now.checked_add(1).unwrap_or(1);
        let place = self.place(hash);
        Some((self.buckets.get_mut(place)?, self.now))
    }

    fn place(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }
}

#[cfg(test)]
impl PositionTable {
    /// Number of entries.
    pub fn len(&self) -> usize {
        let entries = self.buckets.iter().flatten();
        entries.filter(|entry| entry[1] > 0).count()
    }

    /// Number of calls so far.
    pub fn calls(&self) -> usize {
        self.now as usize
    }
}

/// Whether an entry is that of `hash`.
fn is_of(entry: &[u32; 4], hash: u64) -> bool {
    entry[0] == hash as u32 && entry[1] > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUCKET: usize = 64;

    fn table(buckets: usize) -> PositionTable {
        let table = PositionTable::new(buckets * BUCKET + BUCKET - 1);
        assert_eq!(table.bytes(), buckets * BUCKET);
        table
    }

    #[test]
    fn the_entry_that_was_not_used_for_the_longest_time_makes_room() {
        let mut table = table(1);
        for hash in 1..=4 {
            table.update(hash, |positions| *positions = [10 * hash as u32, NOWHERE]);
        }
        assert_eq!(table.get(1), Some([10, NOWHERE]));
        table.update(2, |[latest, other]| (*latest, *other) = (21, *latest));
        table.update(5, |positions| {
            assert_eq!(*positions, [NOWHERE; 2], "what was dropped is forgotten");
            *positions = [50, 51];
        });
        assert_eq!(table.get(3), None);
        assert_eq!(table.get(2), Some([21, 20]));
        assert_eq!(
            (table.get(1), table.get(5)),
            (Some([10, NOWHERE]), Some([50, 51]))
        );
        assert_eq!(table.len(), 4);
    }

    /// The time of use begins again after 2^32 calls.
    #[test]
    fn the_clock_may_pass_its_end() {
        let mut table = table(1);
        table.now = u32::MAX - 2;
        for hash in 1..=4 {
            table.update(hash, |positions| positions[0] = 1);
        }
        assert!(table.now < 4, "{}", table.now);
        table.update(5, |positions| positions[0] = 1);
        let found = [1, 2, 3, 4, 5].map(|hash| table.get(hash).is_some());
        assert_eq!(found, [false, true, true, true, true]);
    }

    #[test]
    fn a_table_without_room_keeps_nothing() {
        let mut table = table(0);
        table.update(1, |_| panic!("there is no room"));
        assert_eq!(table.get(1), None);
    }

    /// With half of its room taken a table has nearly all; with more than its room it is full.
    #[test]
    fn hashes_are_spread_over_the_buckets() {
        for (entries, least, kept) in [(2_000, 1_900, 0.95), (100_000, 3_990, 0.03)] {
            let mut table = table(1_000);
            let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for i in 1..=entries {
                table.update(hash(i), |positions| *positions = [i as u32, NOWHERE]);
            }
            assert!(table.len() >= least, "{}", table.len());
            let found = (1..=entries).filter(|&i| table.get(hash(i)) == Some([i as u32, NOWHERE]));
            let found = found.count() as f64;
            assert!(found >= kept * entries as f64, "{found} of {entries}");
        }
    }
}
