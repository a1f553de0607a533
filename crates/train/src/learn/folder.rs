//! The folder in which a head that learns is kept: the published layout, and a note of whose texts it knows.

use super::source::HeadFile;
use crate::output::{WEIGHTS, save, write_json};
use crate::student::Student;
use candle_core::{DType, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::files;
use foretoken_core::sampling::mix;
use foretoken_model::{HeadTarget, ModelSource};
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

const NOTE: &str = "learn.json";
/// The bits of a hash of 32 that are not kept: 24 tell one key from another, and do not help to find one.
const KEY_SHIFT: u32 = 8;

/// A note about whose texts the head knows.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LearnNote {
    salt: u64,
    /// Salted hash of the API key; `None` = the server had none.
    api_key: Option<u32>,
}

impl LearnNote {
    fn new(salt: u64, api_key: Option<&str>) -> Self {
        let hash = |key: &str| key.bytes().fold(mix(salt), |h, b| mix(h ^ u64::from(b)));
        Self {
            salt,
            api_key: api_key.map(|key| hash(key) as u32 >> KEY_SHIFT),
        }
    }
}

/// A folder that this process alone writes to.
pub struct LearnFolder {
    path: PathBuf,
    /// Locked while the folder is open.
    _lock: File,
}

impl LearnFolder {
    /// Opens or creates the folder of a server whose API key is `api_key`.
    ///
    /// # Errors
    /// `Setup`, naming the file: it cannot be written, is broken, is in use, or belongs to another key.
    pub fn open(path: &Path, api_key: Option<&str>) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|e| Error::in_file(path, e))?;
        let note = path.join(NOTE);
        let wrong = |e: &dyn std::fmt::Display| Error::in_file(&note, e);
        let is_new = !note.exists();
        let refused = |what: &str| Err(Error::in_file(path, what));
        let mut known = ["config.json", WEIGHTS].into_iter();
        let other = known.find(|name| path.join(name).exists());
        if let Some(other) = other.filter(|_| is_new) {
            return refused(&format!(
                "it has {other}, but no {NOTE}: --learn needs a new folder, or one that it has written"
            ));
        }
        let mut options = File::options();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut lock = options.open(&note).map_err(|e| wrong(&e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return refused("another server learns in this folder (--learn)");
            }
            Err(TryLockError::Error(e)) => return Err(wrong(&e)),
        }
        let text = files::read_opened(&lock, &note)?;
        if text.is_empty() && other.is_none() {
            let json = serde_json::to_vec(&LearnNote::new(rand::random(), api_key));
            let json = json.map_err(|e| Error::internal(e.to_string()))?;
            (lock.write_all(&json).and_then(|()| lock.sync_all())).map_err(|e| wrong(&e))?;
        } else {
            let found: LearnNote = serde_json::from_str(&text).map_err(|e| wrong(&e))?;
            if found != LearnNote::new(found.salt, api_key) {
                return refused(
                    "its head has learned from requests with another API key (or with or without one): give --learn another folder",
                );
            }
        }
        Ok(Self {
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// The source from which the head in the folder is loaded.
    pub fn source(&self) -> ModelSource {
        ModelSource::Folder(self.path.clone())
    }

    /// The head in the folder, which must be able to take the place of `base`; `None` if there is none yet.
    ///
    /// # Errors
    /// `Setup`, naming the folder.
    pub fn read(&self, base: &HeadFile, target: &HeadTarget) -> Result<Option<HeadFile>> {
        if !self.path.join(WEIGHTS).exists() {
            return Ok(None);
        }
        let named = |e| Error::in_file(&self.path, e);
        let head = HeadFile::read(&self.source(), target).map_err(named)?;
        match base.difference(&head) {
            None => Ok(Some(head)),
            Some(what) => Err(Error::in_file(
                &self.path,
                format!(
                    "its head did not begin as that of --draft-model: {what}; give --learn another folder"
                ),
            )),
        }
    }

    /// Writes `head`, which has the shape of `base`. Who reads the folder meanwhile, or after a crash, finds the
    /// head before it or this one.
    ///
    /// # Errors
    /// `Setup`, naming the file, which then is unchanged.
    pub fn write(&self, base: &HeadFile, head: &dyn Student) -> Result<()> {
        write_json(&self.path.join("config.json"), &base.json()?)?;
        let stored = |(name, tensor): (String, Tensor)| -> Result<_> {
            Ok(match tensor.dtype() {
                DType::F32 => (name, tensor.to_dtype(base.dtype)?),
                _ => (name, tensor),
            })
        };
        let tensors = head.weights()?.into_iter().map(stored);
        save(&self.path.join(WEIGHTS), &tensors.collect::<Result<_>>()?)
    }

    /// Removes the head.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn clear(&self) -> Result<()> {
        let path = self.path.join(WEIGHTS);
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::in_file(&path, e)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &Path, key: Option<&str>) -> String {
        match LearnFolder::open(path, key) {
            Err(Error::Setup(line)) => {
                assert_eq!(line.lines().count(), 1, "{line}");
                line
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("opened"),
        }
    }

    #[test]
    fn a_folder_belongs_to_one_key_and_one_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("head");
        let open = LearnFolder::open(&path, Some("secret")).unwrap();
        let line = refusal(&path, Some("secret"));
        assert!(line.contains("another server"), "{line}");
        drop(open);
        for other in [Some("Secret"), Some("secret2"), None] {
            let line = refusal(&path, other);
            assert!(
                line.contains("another API key") && !line.contains("ecret"),
                "{line}"
            );
        }
        LearnFolder::open(&path, Some("secret")).unwrap();
        let note = std::fs::read_to_string(path.join(NOTE)).unwrap();
        assert!(!note.contains("secret"), "{note}");
    }

    #[test]
    fn a_folder_that_is_not_ours_is_not_written_to() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(WEIGHTS), "x").unwrap();
        let line = refusal(folder.path(), None);
        assert!(line.contains("no learn.json"), "{line}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        for (note, told) in [
            ("{", "EOF"),
            ("{\"salt\":1,\"key\":2}", "`key`"),
            ("", "EOF"),
        ] {
            std::fs::write(folder.path().join(NOTE), note).unwrap();
            let line = refusal(folder.path(), None);
            assert!(line.contains(NOTE) && line.contains(told), "{note}: {line}");
        }
    }
}
