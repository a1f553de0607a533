//! How a model judges whether a document answers a query.

use std::fmt;
use std::sync::Arc;

/// How a reranker judges whether a document answers a query, after a prompt that asks it.
#[derive(Debug, Clone, PartialEq)]
pub enum RerankerSpec {
    /// By the next token. The relevance of the document is the probability of `yes`, where the model can only say one of
    /// them.
    Answer {
        /// The token of an answer.
        yes: u32,
        /// The token of no answer.
        no: u32,
    },
    /// By a layer after the last hidden state.
    Classifier(Arc<Classifier>),
}

/// A layer for classification. The relevance of a document is the softmax of its outputs, of which the first counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Classifier {
    /// The weights of each output, as many as a hidden state has values. There are at least two outputs.
    pub weights: Vec<Vec<f32>>,
    /// What is added to each output; empty = nothing.
    pub bias: Vec<f32>,
}

impl Classifier {
    /// The probability of the first output after the hidden state `hidden`, which has as many values as the weights of an
    /// output.
    pub fn score(&self, hidden: &[f32]) -> f64 {
        let output = |(at, weights): (usize, &Vec<f32>)| {
            let products = weights.iter().zip(hidden);
            let sum: f64 = products.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            sum + self.bias.get(at).map_or(0.0, |bias| f64::from(*bias))
        };
        let outputs: Vec<f64> = self.weights.iter().enumerate().map(output).collect();
        let first = outputs.first().copied().unwrap_or_default();
        // The first output's share, of numbers that do not overflow to NaN.
        1.0 / outputs
            .iter()
            .map(|other| (other - first).exp())
            .sum::<f64>()
    }
}

impl fmt::Display for RerankerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answer { yes, no } => {
                write!(f, "the probability of token {yes} against token {no}")
            }
            Self::Classifier(classifier) => {
                let outputs = classifier.weights.len();
                write!(
                    f,
                    "the first of {outputs} outputs of a layer for classification"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_is_the_softmax_of_the_first_output() {
        let classifier = Classifier {
            weights: vec![vec![1.0, 0.5], vec![-1.0, 0.0]],
            bias: vec![0.25, 0.0],
        };
        let (yes, no) = (2_f64 + 2.0 + 0.25, -2_f64);
        let expected = yes.exp() / (yes.exp() + no.exp());
        assert!((classifier.score(&[2.0, 4.0]) - expected).abs() < 1e-12);
        let far = Classifier {
            weights: vec![vec![1.0], vec![2.0]],
            bias: Vec::new(),
        };
        assert!(far.score(&[1e30]).abs() < 1e-12);
        assert!((far.score(&[-1e30]) - 1.0).abs() < 1e-12);
    }
}
