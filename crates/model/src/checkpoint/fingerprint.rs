//! A number that tells checkpoints apart, without reading all of them.

use crate::source::ModelSource;
use foretoken_core::gguf::GgufSource;
use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Number of samples of a file, and bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 4096;

/// The 64-bit FNV-1a hash, which is the same for every build of the program.
#[derive(Debug, Clone, Copy)]
struct Fnv(u64);

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// A hash of `how`, and of names, sizes and samples of a checkpoint's config and weights. What cannot be read
/// counts as nothing.
pub fn fingerprint(source: &ModelSource, how: &str) -> u64 {
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    hash.add(how.as_bytes());
    match source {
        ModelSource::Gguf(source @ GgufSource::Embedded(_)) => {
            if let Some(bytes) = source.embedded_bytes() {
                add(&mut Cursor::new(bytes), &mut hash);
            }
        }
        ModelSource::Gguf(source) => {
            for file in source.files().unwrap_or_default() {
                add_file(&file, &mut hash);
            }
        }
        ModelSource::Folder(path) => {
            for file in files(path) {
                hash.add(file.file_name().unwrap_or_default().as_encoded_bytes());
                add_file(&file, &mut hash);
            }
        }
    }
    hash.0
}

/// A hash of the sizes and the times of modification of a checkpoint's files, which differs once they are replaced.
pub fn version(source: &ModelSource) -> u64 {
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    let files = match source {
        ModelSource::Gguf(source) => source.files().unwrap_or_default(),
        ModelSource::Folder(path) => files(path),
    };
    for found in files.iter().filter_map(|file| file.metadata().ok()) {
        hash.add(&found.len().to_le_bytes());
        let since = found.modified().ok();
        let since = since.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let since = since.unwrap_or_default();
        hash.add(&since.as_nanos().to_le_bytes());
    }
    hash.0
}

/// The config and the weights of a folder, in the order of their names.
fn files(path: &Path) -> Vec<PathBuf> {
    let folder = foretoken_core::files::folder_of(path);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|file| {
            let weights = file.extension();
            let weights = weights.is_some_and(|e| e == "safetensors" || e == "bin");
            weights || file.file_name().is_some_and(|name| name == "config.json")
        })
        .collect();
    files.sort();
    files
}

fn add_file(file: &Path, hash: &mut Fnv) {
    if let Ok(mut file) = File::open(file) {
        add(&mut file, hash);
    }
}

/// Adds the size of a file and samples of it, from its first bytes to its last.
fn add(file: &mut (impl Read + Seek), hash: &mut Fnv) {
    let Ok(len) = file.seek(SeekFrom::End(0)) else {
        return;
    };
    hash.add(&len.to_le_bytes());
    let last = len.saturating_sub(SAMPLE_BYTES);
    let mut sample = Vec::new();
    for i in 0..SAMPLES {
        // In 128 bits, because a size is anything.
        let at = u128::from(last) * u128::from(i) / u128::from(SAMPLES - 1);
        sample.clear();
        if file.seek(SeekFrom::Start(at as u64)).is_ok() {
            let _ = file.take(SAMPLE_BYTES).read_to_end(&mut sample);
        }
        hash.add(&sample);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_replaced_in_place_is_another_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, [7; 100]).unwrap();
        let source = ModelSource::Folder(folder.path().to_owned());
        let (same, first) = (fingerprint(&source, ""), version(&source));
        assert_eq!(version(&source), first);
        let file = File::options().append(true).open(&path).unwrap();
        let time = UNIX_EPOCH + std::time::Duration::from_nanos(1_000_000_100);
        file.set_modified(time).unwrap();
        assert_ne!(version(&source), first);
        assert_eq!(fingerprint(&source, ""), same);
    }

    #[test]
    fn it_differs_where_files_or_flags_do() {
        let folder = tempfile::tempdir().unwrap();
        let source = ModelSource::Folder(folder.path().to_owned());
        let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes);
        write("config.json", b"{}").unwrap();
        write("model.safetensors", &vec![7; 100_000]).unwrap();
        let first = fingerprint(&source, "a");
        assert_eq!(fingerprint(&source, "a"), first);
        assert_ne!(fingerprint(&source, "b"), first);
        write("README.md", b"hello").unwrap();
        assert_eq!(fingerprint(&source, "a"), first);
        let mut other = vec![7; 100_000];
        other[99_999] = 8;
        write("model.safetensors", &other).unwrap();
        let second = fingerprint(&source, "a");
        assert_ne!(second, first);
        write("config.json", b"{ }").unwrap();
        assert_ne!(fingerprint(&source, "a"), second);
        let gguf = ModelSource::Gguf(folder.path().join("model.safetensors").into());
        assert_ne!(fingerprint(&gguf, "a"), second);
    }
}
