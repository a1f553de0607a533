//! How a model judges whether a document answers a query.

use std::fmt;

/// The tokens with which a reranker that generates says whether a document answers a query. The relevance of the document
/// is the probability of `yes`, where the model can only say one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RerankerSpec {
    /// The token of an answer.
    pub yes: u32,
    /// The token of no answer.
    pub no: u32,
}

impl fmt::Display for RerankerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { yes, no } = self;
        write!(f, "the probability of token {yes} against token {no}")
    }
}
