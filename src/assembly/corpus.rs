//! Reads the texts that the tables know from the start.

use crate::error::{Error, Result};
use crate::text::Text;
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// A line of a .jsonl file; other fields are ignored.
#[derive(Deserialize)]
struct CorpusLine {
    text: String,
}

/// Calls `add` with the tokens of each document of `file`: JSON lines (.jsonl, .ndjson) with "text",
/// otherwise plain text with blank lines between documents. Reads at most `max_bytes`, and no document
/// that goes beyond them. Returns the number of documents, and whether some were left out.
///
/// # Errors
/// `Setup`, naming the file and the line.
pub fn read(
    file: &Path,
    text: &Text,
    max_bytes: u64,
    mut add: impl FnMut(&[u32]),
) -> Result<(usize, bool)> {
    let wrong = |e: std::io::Error| Error::in_file(file, e);
    let extension = file.extension().and_then(|e| e.to_str());
    let is_json = matches!(extension, Some("jsonl" | "ndjson"));
    // One byte more tells whether the file has more.
    let mut reader = BufReader::new(File::open(file).map_err(wrong)?.take(max_bytes + 1));
    let (mut line, mut document) = (String::new(), String::new());
    let (mut documents, mut bytes) = (0, 0);
    let mut add = |document: &str| -> Result<()> {
        if !document.trim().is_empty() {
            documents += 1;
            add(&text.encode(document, false)?);
        }
        Ok(())
    };
    for number in 1.. {
        line.clear();
        let read = reader.read_line(&mut line).map_err(wrong)?;
        bytes += read as u64;
        if bytes > max_bytes {
            return Ok((documents, true));
        }
        if is_json && !line.trim().is_empty() {
            let line: CorpusLine = serde_json::from_str(&line)
                .map_err(|e| Error::in_file(file, format!("line {number}: {e}")))?;
            add(&line.text)?;
        } else if read == 0 || line.trim().is_empty() {
            add(&document)?;
            document.clear();
        } else {
            document.push_str(&line);
        }
        if read == 0 {
            break;
        }
    }
    Ok((documents, false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::SpecialIds;
    use serde_json::json;

    /// A tokenizer of letters, space and line break.
    fn text() -> Text {
        let names = ('a'..='z').chain(['Ġ', 'Ċ']).map(String::from);
        let vocab: serde_json::Map<_, _> = names.zip((0..28).map(Into::into)).collect();
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        let tokenizer = json!({
            "version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}
        });
        let special = SpecialIds {
            bos: None,
            eos: Vec::new(),
        };
        Text::new(tokenizer.to_string().parse().unwrap(), special, None).unwrap()
    }

    /// The documents of a file called `name` of at most `max_bytes`, and whether some were left out.
    fn read_all(name: &str, content: &str, max_bytes: u64) -> Result<(Vec<String>, bool)> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(name);
        std::fs::write(&file, content).unwrap();
        let text = text();
        let mut documents = Vec::new();
        let (count, cut) = read(&file, &text, max_bytes, |ids| {
            documents.push(text.decode(ids, false).trim().to_owned());
        })?;
        assert_eq!(count, documents.len());
        Ok((documents, cut))
    }

    #[test]
    fn documents_end_at_blank_lines() {
        let content = "one\ntwo\n\n  \n\nthree\n";
        let documents = || read_all("a.txt", content, 1000).unwrap();
        assert_eq!(
            documents(),
            (vec!["one\ntwo".into(), "three".into()], false)
        );
    }

    #[test]
    fn json_lines_have_a_text() {
        let content = "{\"text\": \"one\\ntwo\", \"id\": 3}\n\n{\"text\": \"three\"}";
        let documents = read_all("a.jsonl", content, 1000).unwrap();
        assert_eq!(documents, (vec!["one\ntwo".into(), "three".into()], false));
        let error = read_all("a.jsonl", "{\"text\": \"a\"}\n{\"prompt\": 1}", 1000).unwrap_err();
        assert!(
            error.to_string().contains("line 2: missing field `text`"),
            "{error}"
        );
    }

    #[test]
    fn no_more_than_the_limit_is_read() {
        let content = "one\n\ntwo\n\nthree";
        let (documents, cut) = read_all("a.txt", content, content.len() as u64 - 1).unwrap();
        assert_eq!((documents.len(), cut), (2, true));
        let (documents, cut) = read_all("a.txt", content, content.len() as u64).unwrap();
        assert_eq!((documents.len(), cut), (3, false));
        let endless = "x".repeat(5000);
        assert_eq!(read_all("a.txt", &endless, 100).unwrap(), (vec![], true));
    }
}
