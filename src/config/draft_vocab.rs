//! The value of `--draft-vocab`.

use std::path::PathBuf;
use std::str::FromStr;

/// The ids that a draft may predict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftVocab {
    /// So many ids, which the tables' corpus has most often.
    MostFrequent(usize),
    /// The ids that a file lists.
    File(PathBuf),
}

impl FromStr for DraftVocab {
    type Err = String;

    fn from_str(value: &str) -> Result<Self, String> {
        if !is_number(value) {
            return Ok(Self::File(value.into()));
        }
        match value.parse() {
            Ok(count) if count > 0 => Ok(Self::MostFrequent(count)),
            _ => Err("expected a file of ids, or a number of at least 1".into()),
        }
    }
}

/// Whether the value of `--draft-vocab` is a number, and no file.
pub fn is_number(value: &str) -> bool {
    !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit())
}
