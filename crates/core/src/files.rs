//! Untrusted files of models: checks that names stay in their folder, and limits the size of texts.

use crate::error::{Error, Result};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path};

/// Maximum bytes of the files of settings, and of chat templates.
const MAX_CONFIG_BYTES: u64 = 4 << 20;
/// Maximum bytes of a tokenizer, or of the index of a checkpoint's files.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Maximum bytes of the text file `name` of a model's folder.
pub fn max_bytes(name: &str) -> u64 {
    match name.rsplit('/').next().unwrap_or(name) {
        "config.json"
        | "adapter_config.json"
        | "generation_config.json"
        | "modules.json"
        | "sentence_bert_config.json"
        | "config_sentence_transformers.json"
        | "chat_template.json"
        | "chat_template.jinja"
        | "tool_use.jinja" => MAX_CONFIG_BYTES,
        _ => MAX_TEXT_BYTES,
    }
}

/// Checks, before a long load, that files or folders exist.
///
/// # Errors
/// A setup error that names one.
pub fn check_exist<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>) -> Result<()> {
    for path in paths {
        let path = path.as_ref();
        path.metadata().map_err(|e| Error::in_file(path, e))?;
    }
    Ok(())
}

/// Reads a text file of a model.
///
/// # Errors
/// A setup error that names the file, if it cannot be read, is not UTF-8, or is over [`max_bytes`].
pub fn read_text(file: &Path) -> Result<String> {
    let opened = File::open(file).map_err(|e| Error::in_file(file, e))?;
    read_opened(opened, file)
}

/// Like [`read_text`], of a file that is open already: on Windows, what is locked can be read only there.
///
/// # Errors
/// Returns the errors of [`read_text`].
pub fn read_opened(opened: impl Read, file: &Path) -> Result<String> {
    let limit = max_bytes(&file.file_name().unwrap_or_default().to_string_lossy());
    let mut text = String::new();
    (opened.take(limit + 1))
        .read_to_string(&mut text)
        .map_err(|e| Error::in_file(file, e))?;
    if text.len() as u64 > limit {
        let what = format!("it is over the limit of {limit} bytes");
        Err(Error::in_file(file, what))
    } else {
        Ok(text)
    }
}

/// Like [`read_text`], but `None` if the file does not exist.
///
/// # Errors
/// Returns the errors of [`read_text`].
pub fn read_text_if_any(file: &Path) -> Result<Option<String>> {
    if file.exists() {
        read_text(file).map(Some)
    } else {
        Ok(None)
    }
}

/// Whether `name` is a relative path of normal components, so that it stays inside any folder that it is
/// joined to.
pub fn is_inside(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    !name.is_empty()
        && !name.contains(['\\', '\0'])
        && parts.all(|part| matches!(part, Component::Normal(_)))
        && (cfg!(not(windows)) || name.split('/').all(is_name_on_windows))
}

/// Whether Windows takes `part` as the name of a file of its folder: some names are devices in every folder, a colon names
/// a stream of a file, and dots and spaces at the end do not count.
fn is_name_on_windows(part: &str) -> bool {
    const DEVICES: [&str; 6] = ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"];
    let stem = part.split('.').next().unwrap_or(part).trim_end();
    let stem = stem.to_ascii_uppercase();
    let port = (stem.strip_prefix("COM")).or_else(|| stem.strip_prefix("LPT"));
    let is_port = port.is_some_and(|number| {
        let mut digits = number.chars();
        let is_digit = |c: char| c.is_ascii_digit() || "¹²³".contains(c);
        digits.next().is_some_and(is_digit) && digits.next().is_none()
    });
    !part.contains([':', '<', '>', '"', '|', '?', '*'])
        && !part.ends_with(['.', ' '])
        && !DEVICES.contains(&stem.as_str())
        && !is_port
}

/// Whether `name` can be the name of a single file or folder.
pub fn is_name(name: &str) -> bool {
    is_inside(name) && !name.contains('/') && name.len() <= 200
}

/// `path` if it is a folder, or the folder of the file `path`.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|_| path.is_file()).unwrap_or(path)
}

/// The `config.json` in the folder `path`, or `path` itself if it is not a folder.
pub fn config_of(path: &Path) -> std::path::PathBuf {
    if path.is_dir() {
        path.join("config.json")
    } else {
        path.to_owned()
    }
}

/// Reads the text of a JSON file. Python also writes `Infinity`, which JSON does not have: it becomes what transformers 5
/// writes, `{"__float__": "Infinity"}`.
///
/// # Errors
/// If it is no JSON.
pub fn parse_json(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|e| {
        let tagged = with_tagged_floats(text);
        tagged
            .and_then(|text| serde_json::from_str(&text).ok())
            .ok_or(e)
    })
}

/// The text without numbers that JSON does not have; `None` if there are none.
fn with_tagged_floats(text: &str) -> Option<String> {
    const NAME: &str = "Infinity";
    let mut out = String::new();
    let (mut in_string, mut rest) = (false, text);
    while let Some(at) = rest.find(['"', '\\', 'I']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let taken = match rest.as_bytes()[0] {
            // With what it escapes, which may be another quote.
            b'\\' => rest.chars().take(2).map(char::len_utf8).sum(),
            b'I' if !in_string && rest.starts_with(NAME) => {
                let sign = if out.ends_with('-') { "-" } else { "" };
                out.truncate(out.len() - sign.len());
                out.push_str(&format!("{{\"__float__\": \"{sign}{NAME}\"}}"));
                rest = &rest[NAME.len()..];
                continue;
            }
            b'"' => {
                in_string = !in_string;
                1
            }
            _ => 1,
        };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out.push_str(rest);
    (out != text).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn infinite_numbers_of_python_are_read() {
        let text = r#"{"a": [0.0, Infinity, -Infinity], "\\Infinity\"": "Infinity"}"#;
        let tag = |name: &str| json!({ "__float__": name });
        let want =
            json!({"a": [0.0, tag("Infinity"), tag("-Infinity")], "\\Infinity\"": "Infinity"});
        assert_eq!(parse_json(text).unwrap(), want);
        for wrong in ["{", "[Infinit]", "[\"Infinity]", "Infinity\\"] {
            let plain = serde_json::from_str::<Value>(wrong).unwrap_err();
            assert_eq!(
                parse_json(wrong).unwrap_err().to_string(),
                plain.to_string()
            );
        }
    }

    #[test]
    fn names_that_leave_the_folder_are_detected() {
        for name in ["a", "a.safetensors", "part/a.b", "..a", "a..b"] {
            assert!(is_inside(name), "{name}");
        }
        for name in [
            "",
            "/",
            "/a",
            "..",
            "../a",
            "a/../../b",
            "a/..",
            ".",
            "./a",
            "a\0",
            "..\\a",
        ] {
            assert!(!is_inside(name), "{name}");
        }
        assert!(is_name("0123ab") && !is_name("a/b") && !is_name(&"a".repeat(300)));
    }

    #[test]
    fn names_that_windows_reads_otherwise_are_detected() {
        for name in "a config.json com com10.json lpta null a.nul .b".split(' ') {
            assert!(is_name_on_windows(name), "{name}");
        }
        for name in [
            "nul", "NUL.json", "con .a.b", "COM1", "lpt9.bin", "com²", "a:b", "C:", "a.", ".. ",
            "a?",
        ] {
            assert!(!is_name_on_windows(name), "{name}");
        }
    }

    #[test]
    fn a_text_over_the_limit_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.json");
        std::fs::write(&file, "x".repeat(MAX_CONFIG_BYTES as usize)).unwrap();
        assert_eq!(read_text(&file).unwrap().len() as u64, MAX_CONFIG_BYTES);
        std::fs::write(&file, "x".repeat(MAX_CONFIG_BYTES as usize + 1)).unwrap();
        let error = read_text(&file).unwrap_err().to_string();
        assert!(error.contains("over the limit of 4194304 bytes"), "{error}");
        let none = read_text_if_any(&folder.path().join("none.json"));
        assert_eq!(none.unwrap(), None);
    }
}
