//! The identity of the target and the rows that results in a file belong to.

use serde::Serialize;

/// Identity of the target and the rows that the distributions in a file belong to. Another target, corpus or shape
/// needs different ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Identity {
    pub model: String,
    pub revision: Option<String>,
    pub vocab_size: usize,
    /// [`fingerprint`](super::corpus::fingerprint) of the rows.
    pub corpus: u64,
    pub rows: usize,
    pub seq_len: usize,
    /// Number of ids per position whose probabilities are stored separately.
    pub top_k: usize,
}

impl Identity {
    /// Bytes of a row of distributions.
    pub fn row_bytes(&self) -> usize {
        self.seq_len * (6 * self.top_k + 4)
    }
}
