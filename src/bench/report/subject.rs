//! What was measured, with what, and where.

use crate::bench::{BenchOptions, ReportNames};
use crate::error::{Error, Result};
use crate::model::{ModelSource, safetensors_files};
use chrono::{SecondsFormat, Utc};
use ring::digest::{Context, SHA256};
use serde::Serialize;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use sysinfo::{CpuRefreshKind, RefreshKind, System};

/// Bytes of a file that are hashed at a time.
const PART: usize = 1 << 20;

/// The measured models, the options of the run, and the hardware.
#[derive(Debug, Clone, Serialize)]
pub struct Subject {
    /// The version of foretoken.
    pub version: &'static str,
    /// The commit that foretoken was built of; `None` in development builds, or if the sources had none.
    pub commit: Option<&'static str>,
    /// When the measurement began, in RFC 3339.
    pub date: String,
    /// The flags of the command line; the values of `--api-key` are left out.
    pub flags: Vec<String>,
    pub model: String,
    /// The files of the target, only in a report that is written to a file; none of random weights.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileDigest>,
    /// Names of the drafters, by their index in the modes.
    pub drafters: Vec<String>,
    /// The largest measured K.
    pub spec_length: usize,
    /// Whether the tables knew answers before.
    pub warm: bool,
    pub max_tokens: usize,
    pub repeat: usize,
    pub device: String,
    /// Arithmetic operations of a token over those of the target's, by the drafters' index.
    pub draft_operations: Vec<f64>,
    pub cpu: String,
    pub threads: usize,
}

/// A file and its hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileDigest {
    pub name: String,
    pub bytes: u64,
    /// SHA-256, in hexadecimal digits.
    pub sha256: String,
}

impl Subject {
    /// Describes the run that begins, and this machine. The target's files are hashed if the report is written.
    ///
    /// # Errors
    /// `Setup`: a file of the target cannot be read.
    pub fn new(names: &ReportNames, options: &BenchOptions) -> Result<Self> {
        let cpus = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
        let system = System::new_with_specifics(cpus);
        let files = match (&options.json, &names.source) {
            (Some(_), Some(source)) => FileDigest::of_model(source)?,
            _ => Vec::new(),
        };
        Ok(Self {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("FORETOKEN_COMMIT"),
            date: Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true),
            flags: without_keys(&options.flags),
            model: names.model.clone(),
            files,
            drafters: names.drafters.clone(),
            spec_length: options.spec_lengths.iter().copied().max().unwrap_or(0),
            warm: options.warm.is_some(),
            max_tokens: options.max_tokens,
            repeat: options.repeat,
            device: names.device.clone(),
            draft_operations: names.draft_operations.clone(),
            cpu: system
                .cpus()
                .first()
                .map_or_else(|| "unknown CPU".into(), |cpu| cpu.brand().trim().to_owned()),
            threads: crate::kernels::threads(),
        })
    }
}

impl FileDigest {
    /// The files of a model.
    ///
    /// # Errors
    /// `Setup`, naming the file that cannot be read.
    fn of_model(source: &ModelSource) -> Result<Vec<Self>> {
        let files: Vec<PathBuf> = match source {
            ModelSource::Gguf(file) => match file.embedded_bytes() {
                Some(bytes) => {
                    let name = file.path().display().to_string();
                    let digest = Self::of(name, bytes);
                    return Ok(vec![digest.map_err(|e| Error::internal(e.to_string()))?]);
                }
                None => file.files()?,
            },
            ModelSource::Folder(folder) => {
                let mut files = safetensors_files(folder)?;
                files.push(folder.join("config.json"));
                files
            }
        };
        files.iter().map(|path| Self::of_file(path)).collect()
    }

    fn of_file(path: &Path) -> Result<Self> {
        let name = path.file_name().unwrap_or(path.as_os_str());
        let file = File::open(path).map_err(|e| Error::in_file(path, e))?;
        let reader = BufReader::with_capacity(PART, file);
        Self::of(name.to_string_lossy().into_owned(), reader).map_err(|e| Error::in_file(path, e))
    }

    fn of(name: String, mut reader: impl BufRead) -> std::io::Result<Self> {
        let (mut hash, mut bytes) = (Context::new(&SHA256), 0);
        loop {
            let part = reader.fill_buf()?;
            if part.is_empty() {
                break;
            }
            hash.update(part);
            let length = part.len();
            bytes += length as u64;
            reader.consume(length);
        }
        let digest = hash.finish();
        let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
        Ok(Self {
            name,
            bytes,
            sha256: digits.collect(),
        })
    }
}

/// The flags, without the values of API keys.
fn without_keys(flags: &[String]) -> Vec<String> {
    const KEY: &str = "--api-key";
    let mut kept = Vec::with_capacity(flags.len());
    let mut is_key = false;
    for flag in flags {
        let is_value = std::mem::replace(&mut is_key, flag == KEY);
        let has_value = flag
            .strip_prefix(KEY)
            .is_some_and(|rest| rest.starts_with('='));
        kept.push(match (is_value, has_value) {
            (true, _) => "...".to_owned(),
            (_, true) => format!("{KEY}=..."),
            _ => flag.clone(),
        });
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_that_of_sha256sum() {
        let digest = FileDigest::of("abc".into(), &b"abc"[..]).unwrap();
        let wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!((digest.bytes, digest.sha256.as_str()), (3, wanted));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        std::fs::write(&path, vec![b'a'; 3 * PART + 1]).unwrap();
        let file = FileDigest::of_file(&path).unwrap();
        assert_eq!(file.name.as_str(), "a.gguf");
        assert_eq!(file.bytes, 3 * PART as u64 + 1);
    }

    #[test]
    fn keys_are_left_out() {
        let flags = ["--api-key", "secret", "-m", "m", "--api-key=secret"].map(String::from);
        let kept = without_keys(&flags);
        assert_eq!(kept, ["--api-key", "...", "-m", "m", "--api-key=..."]);
    }
}
