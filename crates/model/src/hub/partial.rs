//! A file of the Hub of which not all bytes may have arrived.

use super::error::HubError;
use super::remote::RemoteFile;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

/// The bytes that have arrived so far. They are on disk, so that another process can continue.
pub(super) struct Partial<'p> {
    path: &'p Path,
    file: File,
    len: u64,
    etag: &'p str,
    /// Of the bytes so far; one of them must become the etag. Empty = the etag is no hash.
    hashes: Vec<Context>,
    fresh: Vec<Context>,
}

impl<'p> Partial<'p> {
    /// Opens `path` and reads what an earlier download of `of` has left there.
    ///
    /// # Errors
    /// `Cache`, if the file cannot be read and written.
    pub fn open(path: &'p Path, of: &'p RemoteFile) -> Result<Self, HubError> {
        let in_cache = |e| HubError::in_cache(path, &e);
        let mut options = OpenOptions::new();
        let options = options.create(true).read(true).append(true);
        let fresh = hashes(of);
        let mut partial = Self {
            path,
            file: options.open(path).map_err(in_cache)?,
            len: 0,
            etag: of.etag.as_deref().unwrap_or_default(),
            hashes: fresh.clone(),
            fresh,
        };
        let found = partial.file.metadata().map_err(in_cache)?.len();
        if of.size.is_some_and(|size| size < found) {
            partial.clear()?;
        }
        partial.read_existing().map_err(in_cache)?;
        Ok(partial)
    }

    fn read_existing(&mut self) -> io::Result<()> {
        let found = self.file.metadata()?.len();
        if self.hashes.is_empty() {
            self.len = found;
            return Ok(());
        }
        let mut buffer = vec![0; 1 << 20];
        while self.len < found {
            let read = self.file.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            self.note(&buffer[..read]);
        }
        Ok(())
    }

    fn note(&mut self, bytes: &[u8]) {
        self.len += bytes.len() as u64;
        self.hashes.iter_mut().for_each(|hash| hash.update(bytes));
    }

    /// Number of bytes that have arrived.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether [`finish`](Partial::finish) can tell whether all bytes have arrived.
    pub fn has_hash(&self) -> bool {
        !self.hashes.is_empty()
    }

    /// Adds `bytes` at the end.
    ///
    /// # Errors
    /// `Cache`, for example if the disk is full.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        let written = self.file.write_all(bytes);
        written.map_err(|e| HubError::in_cache(self.path, &e))?;
        self.note(bytes);
        Ok(())
    }

    /// Forgets all bytes.
    ///
    /// # Errors
    /// `Cache`, if the file cannot be cut.
    pub fn clear(&mut self) -> Result<(), HubError> {
        let cut = self.file.set_len(0);
        cut.map_err(|e| HubError::in_cache(self.path, &e))?;
        self.len = 0;
        self.hashes.clone_from(&self.fresh);
        Ok(())
    }

    /// Removes the file, whose bytes are of no use.
    pub fn discard(self) {
        let _ = std::fs::remove_file(self.path);
    }

    /// Says that the last byte has arrived. The file is then on disk, and has the hash that the Hub names.
    ///
    /// # Errors
    /// `Changed`, if the hash is another one; the file is then removed. `Cache`, if the disk fails.
    pub fn finish(mut self) -> Result<(), HubError> {
        let found: Vec<_> = self.hashes.drain(..).map(hex).collect();
        if !found.is_empty() && !found.contains(&self.etag.to_ascii_lowercase()) {
            let (found, etag) = (&found[0], self.etag);
            let why = format!("its bytes have the hash {found}, but the Hub says {etag}");
            self.discard();
            return Err(HubError::Changed(why));
        }
        let synced = self.file.sync_data();
        synced.map_err(|e| HubError::in_cache(self.path, &e))
    }
}

/// The hashes of no bytes of `file` of which one is to become its etag. The Hub names large files (Git LFS) by their
/// SHA-256, and others as Git does. Some of its mirrors name files by their SHA-1. Other etags are no hashes.
fn hashes(file: &RemoteFile) -> Vec<Context> {
    let etag = file.etag.as_deref().unwrap_or_default();
    let is_hex = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
    match (etag.len(), file.size) {
        (64, _) if is_hex && file.is_linked => vec![Context::new(&SHA256)],
        (40, Some(size)) if is_hex => {
            let plain = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            let mut git = plain.clone();
            git.update(format!("blob {size}\0").as_bytes());
            vec![git, plain]
        }
        _ => Vec::new(),
    }
}

fn hex(hash: Context) -> String {
    let bytes = hash.finish();
    let digits = bytes.as_ref().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(etag: &str, is_linked: bool) -> RemoteFile {
        RemoteFile {
            etag: Some(etag.into()),
            size: Some(6),
            is_linked,
            ..RemoteFile::default()
        }
    }

    /// Whether a file with this etag may be `hello\n`, of which `arrived` was there before.
    fn holds(file: &RemoteFile, arrived: &str) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("part");
        std::fs::write(&path, arrived).unwrap();
        let mut partial = Partial::open(&path, file).unwrap();
        let rest = &b"hello\n"[usize::try_from(partial.len()).unwrap()..];
        partial.write(rest).unwrap();
        let is_whole = partial.finish().is_ok();
        assert_eq!(path.exists(), is_whole);
        is_whole
    }

    #[test]
    fn an_etag_that_is_a_hash_is_checked() {
        // `sha256sum`, `git hash-object` and `sha1sum` of the bytes.
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let sha1 = "f572d396fae9206628714fb2ce00f72e94f2258f";
        for (etag, is_linked) in [(sha256, true), (git, false), (sha1, false)] {
            for arrived in ["", "hel", "hello\n", "longer than the file"] {
                assert!(holds(&described(etag, is_linked), arrived), "{etag}");
            }
            assert!(!holds(&described(etag, is_linked), "hex"), "{etag}");
            let other = etag.replace('0', "1");
            assert!(!holds(&described(&other, is_linked), ""), "{etag}");
        }
        // What names something else than the bytes.
        for etag in [sha256, "6-model.safetensors", "W/x", ""] {
            assert!(holds(&described(etag, false), "hex"), "{etag}");
        }
    }
}
