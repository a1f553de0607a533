//! Why a file of the Hub is not there.

use foretoken_core::error::clipped;
use std::fmt;
use std::io;
use std::path::Path;

/// Why the Hub did not deliver a file.
#[derive(Debug)]
pub enum HubError {
    /// The Hub requires a token, or a different one.
    Denied,
    /// The Hub has no such file, revision or model.
    NotFound,
    /// No answer, or one that asks to try again later.
    Unreachable(String),
    /// What arrives is not the file that was described before.
    Changed(String),
    /// The cache cannot be written.
    Cache {
        /// What cannot be written, and why.
        why: String,
        /// Whether there is no space left.
        is_full: bool,
    },
    /// Any other error, as text.
    Other(String),
}

impl HubError {
    /// The error of writing to `path` in the cache.
    pub fn in_cache(path: &Path, error: &io::Error) -> Self {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        let path = clipped(&path.to_string_lossy());
        Self::Cache {
            why: format!("{path}: {error}"),
            is_full: matches!(error.kind(), StorageFull | QuotaExceeded),
        }
    }
}

impl fmt::Display for HubError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied => f.write_str("access denied"),
            Self::NotFound => f.write_str("not found"),
            Self::Unreachable(why)
            | Self::Changed(why)
            | Self::Cache { why, .. }
            | Self::Other(why) => {
                f.write_str(&why.split_whitespace().collect::<Vec<_>>().join(" "))
            }
        }
    }
}
