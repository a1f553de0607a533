//! Files of JSON lines to which a command appends, so that it can go on where it stopped.

use crate::error::{Error, Result};
use serde::Serialize;
use std::collections::HashSet;
use std::fs::File;
use std::hash::Hash;
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A file to which lines are appended.
pub(super) struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    /// Opens or creates the file and removes an incomplete last line, which an interruption has left. Returns the keys of
    /// its lines, too: `key` reads that of a line, if it has one. `what` is the kind of line.
    ///
    /// # Errors
    /// `Setup`, if the file cannot be read, or has other lines.
    pub fn open<K: Eq + Hash>(
        path: &Path,
        what: &str,
        key: impl Fn(&[u8]) -> serde_json::Result<Option<K>>,
    ) -> Result<(Self, HashSet<K>)> {
        let unreadable = |e| Error::in_file(path, e);
        if path.exists() && !path.is_file() {
            return Err(Error::in_file(path, "is no file that can hold lines"));
        }
        let mut file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(unreadable)?;
        let mut reader = BufReader::new(&file);
        let (mut line, mut complete_len, mut number) = (Vec::new(), 0, 0);
        let mut done = HashSet::new();
        while reader.read_until(b'\n', &mut line).map_err(unreadable)? > 0 {
            number += 1;
            let is_whole = line.ends_with(b"\n");
            match key(&line) {
                Ok(key) if is_whole => done.extend(key),
                Ok(_) => break,
                // The beginning of a line of this kind ends too early. Anything else is a file of somebody.
                Err(e) if !is_whole && ends_early(&e, &line) => break,
                Err(e) => {
                    let what = format!("line {number} is no {what}, choose another --out: {e}");
                    return Err(Error::in_file(path, what));
                }
            }
            complete_len += line.len() as u64;
            line.clear();
        }
        file.set_len(complete_len)
            .and_then(|()| file.seek(SeekFrom::End(0)))
            .map_err(unreadable)?;
        let path = path.to_owned();
        Ok((Self { path, file }, done))
    }

    /// Appends one line with a single write.
    ///
    /// # Errors
    /// `Setup`, naming the file, if it cannot be written.
    pub fn add(&mut self, line: &impl Serialize) -> Result<()> {
        let mut json =
            serde_json::to_string(line).map_err(|e| Error::internal(format!("a line: {e}")))?;
        json.push('\n');
        self.file
            .write_all(json.as_bytes())
            .map_err(|e| Error::in_file(&self.path, e))
    }
}

/// Whether `error` is that `line` ends too early. If it ends within a number that is skipped, serde_json calls that number
/// wrong.
fn ends_early(error: &serde_json::Error, line: &[u8]) -> bool {
    error.is_eof() || error.is_syntax() && error.column() == line.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::IgnoredAny;

    fn open(path: &Path) -> Result<(Output, HashSet<u32>)> {
        Output::open(path, "number", |line| serde_json::from_slice(line))
    }

    /// A full disk is an error that names the file.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_line_that_cannot_be_written_is_an_error() {
        let mut output = Output {
            path: "corpus.jsonl".into(),
            file: File::options().write(true).open("/dev/full").unwrap(),
        };
        let error = output.add(&"text").unwrap_err().to_string();
        assert!(error.starts_with("corpus.jsonl: No space left"), "{error}");
        let error = open(Path::new("/dev/full")).err().unwrap();
        assert!(error.to_string().contains("is no file"), "{error}");
    }

    #[test]
    fn an_incomplete_line_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lines");
        std::fs::write(&path, "1\nnull\n22").unwrap();
        let (mut output, done) = open(&path).unwrap();
        assert_eq!(done, HashSet::from([1]));
        output.add(&3).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\nnull\n3\n");
        std::fs::write(&path, "1\nx\n").unwrap();
        let error = open(&path).err().unwrap().to_string();
        assert!(
            error.contains("line 2 is no number, choose another --out"),
            "{error}"
        );
    }

    /// A file of a single line need not end with a line break: it was emptied.
    #[test]
    fn a_file_of_another_kind_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.jsonl");
        for text in [
            "{\"prompt\": \"Hello\"}",
            "1\n{\"prompt\": \"",
            "words",
            "\0\0",
        ] {
            std::fs::write(&path, text).unwrap();
            let error = open(&path).err().unwrap().to_string();
            assert!(error.contains("is no number"), "{text}: {error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        // What an interruption leaves of a line.
        let open = |path: &Path| {
            Output::open(path, "list", |line| {
                serde_json::from_slice::<Vec<String>>(line).map(Some)
            })
        };
        for rest in ["[", "[\"a", "[\"a\\u00", "[\"a\"", "[\"a\"]"] {
            std::fs::write(&path, format!("[]\n{rest}")).unwrap();
            assert!(open(&path).is_ok(), "{rest}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "[]\n", "{rest}");
        }
        for rest in ["[-", "[1.", "[1e", "[1e-"] {
            std::fs::write(&path, format!("[]\n{rest}")).unwrap();
            let skipped = |line: &[u8]| serde_json::from_slice(line).map(|IgnoredAny| None::<u32>);
            assert!(Output::open(&path, "list", skipped).is_ok(), "{rest}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "[]\n", "{rest}");
        }
    }
}
