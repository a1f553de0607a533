//! The file in which what speculation has learned on a machine is kept over restarts.

use crate::spec::Learned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Maximum bytes of the file.
const MAX_BYTES: u64 = 4 << 20;
/// Most drafters of an engine that are kept.
const MAX_DRAFTERS: usize = 64;
/// Time between two writes of a server that goes on.
const WRITE_EVERY: Duration = Duration::from_secs(300);
/// With fewer steps since the last write nothing worth writing was learned.
const MIN_STEPS: u64 = 64;
/// What the file begins with. A file of another format is not read.
const FORMAT: &str = "foretoken-costs-2";

/// Where to keep what an engine learns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostCache {
    /// Folder of the file. It is created when the file is first written.
    pub folder: PathBuf,
    /// All that decides the costs: program, models, drafters and machine. What was learned with another key is not used.
    pub key: String,
}

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: String,
    /// SHA-256 of the key, in hexadecimal: names and paths of models are not kept.
    key: String,
    /// Of each drafter, in order.
    learned: Vec<Learned>,
}

impl CostCache {
    /// The file.
    pub fn file(&self) -> PathBuf {
        let hash = &self.hash()[..16];
        self.folder.join(format!("costs-{hash}.json"))
    }

    /// SHA-256 of the key, in hexadecimal.
    fn hash(&self) -> String {
        format!("{:x}", Sha256::digest(self.key.as_bytes()))
    }

    /// What was learned of so many drafters; nothing if there is no file, or none of this key. A file that is damaged is
    /// left out, and the log says so.
    pub fn read(&self, drafters: usize) -> Vec<Learned> {
        let file = self.file();
        match self.content(&file) {
            Ok(learned) if learned.len() == drafters => learned,
            Ok(_) => Vec::new(),
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                let file = file.display();
                tracing::warn!("{file} is not used, costs are learned anew: {error}");
                Vec::new()
            }
        }
    }

    fn content(&self, file: &Path) -> Result<Vec<Learned>> {
        let mut text = String::new();
        let mut read = File::open(file)?.take(MAX_BYTES + 1);
        read.read_to_string(&mut text)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(Error::other(format!("it has more than {MAX_BYTES} bytes")));
        }
        let content: Content = serde_json::from_str(&text)?;
        if content.format != FORMAT || content.key != self.hash() {
            return Err(ErrorKind::NotFound.into());
        }
        check(&content.learned)?;
        Ok(content.learned)
    }

    /// Replaces the file. Who reads it meanwhile finds the former one.
    ///
    /// # Errors
    /// If it cannot be written, or would not be read again; the former one is kept.
    pub fn write(&self, learned: Vec<Learned>) -> Result<()> {
        check(&learned)?;
        let content = Content {
            format: FORMAT.into(),
            key: self.hash(),
            learned,
        };
        let json = serde_json::to_vec(&content)?;
        std::fs::create_dir_all(&self.folder)?;
        let file = self.file();
        // Each process writes a file of its own.
        let part = file.with_extension(format!("{}.part", std::process::id()));
        let written = std::fs::write(&part, json).and_then(|()| std::fs::rename(&part, &file));
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written
    }
}

/// Checks what a file has, or is to have.
fn check(learned: &[Learned]) -> Result<()> {
    if learned.len() <= MAX_DRAFTERS && learned.iter().all(Learned::is_valid) {
        return Ok(());
    }
    Err(Error::other("it has values that are not possible"))
}

/// When to write.
#[derive(Debug)]
pub struct CostWriter {
    cache: CostCache,
    written: Instant,
    /// Steps since then.
    steps: u64,
}

impl CostWriter {
    /// Writes to `cache`, first after a while.
    pub fn new(cache: CostCache) -> Self {
        Self {
            cache,
            written: Instant::now(),
            steps: 0,
        }
    }

    /// Notes a step.
    pub fn note_step(&mut self) {
        self.steps += 1;
    }

    /// Whether to write now: while the engine is idle, or as it ends.
    pub fn is_due(&self, ends: bool) -> bool {
        self.steps >= MIN_STEPS && (ends || self.written.elapsed() >= WRITE_EVERY)
    }

    /// Writes. If that fails nothing is lost but what was learned.
    pub fn write(&mut self, learned: Vec<Learned>) {
        (self.written, self.steps) = (Instant::now(), 0);
        match self.cache.write(learned) {
            Ok(()) => tracing::debug!("costs are kept in {}", self.cache.file().display()),
            Err(error) => {
                let file = self.cache.file();
                tracing::info!("costs cannot be kept in {}: {error}", file.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::LearnedDrafts;

    fn cache(folder: &Path, key: &str) -> CostCache {
        CostCache {
            folder: folder.join("foretoken"),
            key: key.into(),
        }
    }

    fn learned() -> Learned {
        let json = r#"{
            "target": [{"rows": 1, "cost": 1.0, "seen": 50}, {"rows": 4, "cost": 1.4, "seen": 9}],
            "attention": [0.0001, 0.0002],
            "draft": [{"rows": 1, "cost": 1.0, "seen": 50}],
            "displacement": {"mean": 0.07, "seen": 12},
            "drafts": {
                "nodes": [{"features": [0, 3], "hits": 3.0, "n": 7.0}],
                "levels": [{"features": [1], "hits": 0.0, "n": 7.0}],
                "tables": []
            }
        }"#;
        serde_json::from_str(json).unwrap()
    }

    /// What would not be read again does not replace what can be.
    #[test]
    fn what_is_not_possible_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), "model drafter machine");
        cache.write(vec![learned()]).unwrap();
        let mut wrong = learned();
        wrong.attention[0] = f64::NAN;
        cache.write(vec![wrong]).unwrap_err();
        assert_eq!(cache.read(1), [learned()]);
    }

    #[test]
    fn what_was_learned_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), "model drafter machine");
        assert_eq!(cache.read(1), []);
        cache.write(vec![learned()]).unwrap();
        cache.write(vec![learned(), Learned::default()]).unwrap();
        assert_eq!(cache.read(2), [learned(), Learned::default()]);
        assert_eq!(cache.read(1), [], "other drafters");
        let files = std::fs::read_dir(&cache.folder).unwrap().count();
        assert_eq!(files, 1, "no unfinished file is left");
        let text = std::fs::read_to_string(cache.file()).unwrap();
        assert!(!text.contains("model drafter"), "{text}");
    }

    #[test]
    fn what_is_of_something_else_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (cache(folder.path(), "one"), cache(folder.path(), "other"));
        one.write(vec![learned()]).unwrap();
        assert_ne!(one.file(), other.file());
        assert_eq!(other.read(1), []);
        // Copied by hand, and of another version.
        std::fs::copy(one.file(), other.file()).unwrap();
        assert_eq!(other.read(1), []);
        let text = std::fs::read_to_string(one.file()).unwrap();
        std::fs::write(one.file(), text.replace(FORMAT, "foretoken-costs-9")).unwrap();
        assert_eq!(one.read(1), []);
    }

    #[test]
    fn a_damaged_file_is_left_out_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), "one");
        cache.write(vec![learned()]).unwrap();
        let text = std::fs::read_to_string(cache.file()).unwrap();
        let long = "x".repeat(MAX_BYTES as usize + 1);
        for wrong in [
            "",
            "{}",
            &text[..text.len() / 2],
            &text.replace("\"n\":7.0", "\"n\":-7.0"),
            &text.replace("\"cost\":1.4", "\"cost\":1e300"),
            &text.replace("\"rows\":4", "\"rows\":0"),
            &text.replace("0.0002", "7.0"),
            &text.replace("\"hits\":3.0", "\"hits\":8.0"),
            &text.replace("\"tables\":", "\"others\":"),
            &long,
        ] {
            assert_ne!(wrong, text);
            std::fs::write(cache.file(), wrong).unwrap();
            assert_eq!(cache.read(1), [], "{}", &wrong[..wrong.len().min(400)]);
        }
        std::fs::write(cache.file(), [0xff, 0xfe]).unwrap();
        assert_eq!(cache.read(1), []);
        cache.write(vec![learned()]).unwrap();
        assert_eq!(cache.read(1), [learned()]);
    }

    #[test]
    fn a_folder_that_cannot_be_written_fails_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = cache(folder.path(), "one");
        // A file in the place of the folder: nobody can write into it.
        std::fs::write(&cache.folder, "").unwrap();
        assert_eq!(cache.read(1), []);
        assert!(cache.write(vec![learned()]).is_err());
        let mut writer = CostWriter::new(cache);
        assert!(!writer.is_due(true), "nothing was learned");
        (0..MIN_STEPS).for_each(|_| writer.note_step());
        assert!(writer.is_due(true) && !writer.is_due(false), "rarely");
        writer.write(vec![learned()]);
        assert!(!writer.is_due(true));
    }

    #[test]
    fn what_is_learned_is_valid() {
        let drafts = LearnedDrafts::default();
        let mut known = Learned {
            drafts,
            ..learned()
        };
        assert!(known.is_valid());
        known.target[0].cost = f64::NAN;
        assert!(!known.is_valid());
    }
}
