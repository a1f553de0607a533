//! Some bytes of a file that is elsewhere, such as its header.

use crate::error::clipped;
use std::collections::BTreeMap;
use std::io::{Error, Read, Result, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;

/// A file of which only some bytes are on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excerpt {
    /// Name of the file, for messages. It also tells the parts of a model apart.
    pub name: PathBuf,
    /// Size of the whole file, in bytes.
    size: u64,
    /// The bytes that are here, by the place of the first byte of each piece.
    pieces: BTreeMap<u64, Arc<[u8]>>,
}

impl Excerpt {
    /// An excerpt of a file of `size` bytes, of which nothing is here yet.
    pub fn new(name: impl Into<PathBuf>, size: u64) -> Self {
        Self {
            name: name.into(),
            size,
            pieces: BTreeMap::new(),
        }
    }

    /// A reader of the bytes that are here; others are an error.
    pub fn reader(&self) -> ExcerptReader<impl FnMut(u64, u64) -> Result<Vec<u8>> + use<>> {
        ExcerptReader::new(self.clone(), u64::MAX, |_, _| {
            Err(Error::other("only its header is on this machine"))
        })
    }

    /// The bytes from `place` on that are here.
    fn at(&self, place: u64) -> Option<&[u8]> {
        let (start, piece) = self.pieces.range(..=place).next_back()?;
        let inside = usize::try_from(place - start).ok()?;
        piece.get(inside..).filter(|rest| !rest.is_empty())
    }
}

/// The fewest and the most bytes that are fetched at once while a file is read from its start.
const MIN_STEP: u64 = 64 << 10;
const MAX_STEP: u64 = 4 << 20;

/// Reads a file, and fetches what it does not have.
///
/// From the start of the file on, a step is as long as all steps before it, from `MIN_STEP` to `MAX_STEP`. So what
/// is fetched is less than `MIN_STEP` and twice what is read. Elsewhere, exactly what is read is fetched.
pub struct ExcerptReader<F> {
    excerpt: Excerpt,
    at: u64,
    /// Bytes from the start of the file that are here.
    prefix: u64,
    /// Bytes that may still be fetched.
    left: u64,
    fetch: F,
}

impl<F: FnMut(u64, u64) -> Result<Vec<u8>>> ExcerptReader<F> {
    /// Reads `excerpt`. `fetch(from, len)` gets what is missing, at most `limit` bytes in all.
    pub fn new(excerpt: Excerpt, limit: u64, fetch: F) -> Self {
        Self {
            excerpt,
            at: 0,
            prefix: 0,
            left: limit,
            fetch,
        }
    }

    /// The excerpt so far, and the number of bytes that might still have been fetched.
    pub fn finish(self) -> (Excerpt, u64) {
        (self.excerpt, self.left)
    }

    /// Fetches the bytes at the place of the reader, of which `wanted` are to be read.
    fn fetch(&mut self, wanted: u64) -> Result<()> {
        let is_next = self.at == self.prefix;
        let step = if is_next {
            self.prefix.clamp(MIN_STEP, MAX_STEP)
        } else {
            wanted
        };
        let len = step.min(self.excerpt.size - self.at).min(self.left);
        if len == 0 {
            return Err(Error::other("its header is over the limit"));
        }
        let bytes = (self.fetch)(self.at, len)?;
        if bytes.len() as u64 != len {
            let name = self.excerpt.name.to_string_lossy();
            let what = format!("{}: {} of {len} bytes came", clipped(&name), bytes.len());
            return Err(Error::other(what));
        }
        self.left -= len;
        if is_next {
            self.prefix += len;
        }
        self.excerpt.pieces.insert(self.at, bytes.into());
        Ok(())
    }
}

impl<F: FnMut(u64, u64) -> Result<Vec<u8>>> Read for ExcerptReader<F> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if buffer.is_empty() || self.at >= self.excerpt.size {
            return Ok(0);
        }
        if self.excerpt.at(self.at).is_none() {
            self.fetch(buffer.len() as u64)?;
        }
        let bytes = self.excerpt.at(self.at).unwrap_or_default();
        let count = bytes.len().min(buffer.len());
        buffer[..count].copy_from_slice(&bytes[..count]);
        self.at += count as u64;
        Ok(count)
    }
}

impl<F> Seek for ExcerptReader<F> {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        let place = match to {
            SeekFrom::Start(place) => Some(place),
            SeekFrom::End(offset) => self.excerpt.size.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.at.checked_add_signed(offset),
        };
        self.at = place.ok_or_else(|| Error::other("there is no such place in the file"))?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `read` bytes of a file of `size`; what was fetched, and whether all came.
    fn fetched(size: u64, limit: u64, read: u64) -> (Vec<(u64, u64)>, bool) {
        let mut asked = Vec::new();
        let fetch = |from: u64, len: u64| {
            asked.push((from, len));
            Ok((from..from + len).map(|place| place as u8).collect())
        };
        let mut reader = ExcerptReader::new(Excerpt::new("m", size), limit, fetch);
        let mut bytes = Vec::new();
        let result = (&mut reader).take(read).read_to_end(&mut bytes);
        assert!(bytes.iter().zip(0u64..).all(|(&byte, at)| byte == at as u8));
        let (excerpt, left) = reader.finish();
        assert_eq!(left, limit - asked.iter().map(|(_, len)| len).sum::<u64>());
        let mut again = Vec::new();
        let same = excerpt.reader().take(read).read_to_end(&mut again);
        assert_eq!((same.is_ok(), again), (result.is_ok(), bytes));
        (asked, result.is_ok())
    }

    #[test]
    fn a_file_is_fetched_as_far_as_it_is_read() {
        let kib = 1 << 10;
        assert_eq!(fetched(10, 100, 10), (vec![(0, 10)], true));
        assert_eq!(fetched(0, 100, 10), (vec![], true));
        let step = 64 * kib;
        assert_eq!(fetched(u64::MAX, step, 5), (vec![(0, step)], true));
        let (asked, done) = fetched(u64::MAX, 20_000 * kib, 300 * kib);
        let steps = [
            (0, step),
            (step, step),
            (2 * step, 2 * step),
            (4 * step, 4 * step),
        ];
        assert_eq!((asked.as_slice(), done), (&steps[..], true));
        let (asked, done) = fetched(u64::MAX, 20_000 * kib, 17_000 * kib);
        assert!(
            done && asked.iter().all(|(_, len)| *len <= MAX_STEP),
            "{asked:?}"
        );
        // What is over the limit is not fetched.
        assert_eq!(fetched(u64::MAX, 10, 11), (vec![(0, 10)], false));
    }

    #[test]
    fn elsewhere_only_what_is_read_is_fetched() {
        let mut asked = Vec::new();
        let fetch = |from: u64, len: u64| {
            asked.push((from, len));
            Ok(vec![7; len as usize])
        };
        let mut reader = ExcerptReader::new(Excerpt::new("m", 1 << 40), 1 << 20, fetch);
        reader.read_exact(&mut [0; 3]).unwrap();
        reader.seek(SeekFrom::Start(1 << 30)).unwrap();
        reader.read_exact(&mut [0; 40]).unwrap();
        let mut kept = reader.finish().0.reader();
        assert_eq!(asked, [(0, MIN_STEP), (1 << 30, 40)]);
        kept.seek(SeekFrom::Start((1 << 30) + 39)).unwrap();
        kept.read_exact(&mut [0; 1]).unwrap();
        let error = kept.read_exact(&mut [0; 1]).unwrap_err().to_string();
        assert_eq!(error, "only its header is on this machine");
        // The end of the file, and places that are none.
        assert_eq!(kept.seek(SeekFrom::End(0)).unwrap(), 1 << 40);
        assert_eq!(kept.read(&mut [0; 1]).unwrap(), 0);
        assert!(kept.seek(SeekFrom::Current(i64::MIN)).is_err());
    }
}
