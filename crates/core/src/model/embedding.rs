//! How the hidden states of a text become its embedding.

use crate::error::clipped;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Number of sums of a product that are added up side by side.
const LANES: usize = 16;

/// The kinds of a text that is searched for, and of one that is searched, by which clients and models call them.
const QUERY: &[&str] = &["query", "search_query"];
const DOCUMENT: &[&str] = &["document", "passage", "search_document", "corpus"];

/// Which hidden states make the embedding of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Pooling {
    /// The hidden state of the last token.
    Last,
    /// The mean of the hidden states of all tokens.
    Mean,
}

/// How texts become embeddings.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingSpec {
    /// The hidden states that make the embedding.
    pub pooling: Pooling,
    /// The layers that make an embedding of it, one after the other; mostly none.
    pub layers: Arc<[DenseLayer]>,
    /// Whether embeddings are divided by their Euclidean length.
    pub normalize: bool,
    /// The longest input in tokens, if it is shorter than the context.
    pub max_tokens: Option<usize>,
    /// The prompt that comes before each text, unless a request chooses one of `prompts`.
    pub prompt: Option<String>,
    /// The model's prompts by their names.
    pub prompts: BTreeMap<String, String>,
}

impl fmt::Display for EmbeddingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.pooling {
            Pooling::Last => "the last hidden state",
            Pooling::Mean => "the mean of the hidden states",
        })?;
        if let Some(last) = self.layers.last() {
            let (count, size) = (self.layers.len(), last.outputs());
            write!(f, ", {count} dense layers to {size} values")?;
        }
        f.write_str(if self.normalize { ", normalized" } else { "" })?;
        if let Some(max) = self.max_tokens {
            write!(f, ", of up to {max} tokens")?;
        }
        match &self.prompt {
            Some(prompt) => write!(f, ", after the prompt {:?}", clipped(prompt)),
            None => Ok(()),
        }
    }
}

impl EmbeddingSpec {
    /// A spec without a prompt and a limit.
    pub fn new(pooling: Pooling, normalize: bool) -> Self {
        Self {
            pooling,
            layers: Arc::default(),
            normalize,
            max_tokens: None,
            prompt: None,
            prompts: BTreeMap::new(),
        }
    }

    /// The prompt before texts of `kind`, which is the name of a prompt or another name of a query or a document. It is empty
    /// for documents that have none, and for all kinds if the model has no prompts. `None` = no prompt has such a name.
    pub fn prompt_of(&self, kind: &str) -> Option<&str> {
        let spelled = |name: &str| {
            let mut prompts = self.prompts.iter();
            prompts.find_map(|(known, prompt)| known.eq_ignore_ascii_case(name).then_some(prompt))
        };
        let alike = [QUERY, DOCUMENT].into_iter();
        let mut alike = alike.filter(|names| names.contains(&kind)).flatten();
        let found = self.prompts.get(kind).or_else(|| spelled(kind));
        let found = found.or_else(|| alike.find_map(|name| spelled(name)));
        let needs_none = self.prompts.is_empty() || DOCUMENT.contains(&kind);
        found.map(String::as_str).or(needs_none.then_some(""))
    }

    /// Number of values of an embedding, of a model with hidden states of `hidden_size` values.
    pub fn size(&self, hidden_size: usize) -> usize {
        self.layers.last().map_or(hidden_size, DenseLayer::outputs)
    }

    /// Checks that the layers fit one another and hidden states of `hidden_size` values.
    ///
    /// # Errors
    /// A message that says which one does not.
    pub fn check(&self, hidden_size: usize) -> Result<(), String> {
        let mut width = hidden_size;
        for (at, layer) in self.layers.iter().enumerate() {
            let inputs = layer.inputs;
            if inputs != width {
                return Err(format!(
                    "dense layer {at} (from 0) takes {inputs} values, and must take {width}"
                ));
            }
            width = layer.outputs();
        }
        Ok(())
    }

    /// The embedding that the layers make of what was pooled.
    pub fn project(&self, pooled: Vec<f32>) -> Vec<f32> {
        let layers = self.layers.iter();
        layers.fold(pooled, |values, layer| layer.forward(&values))
    }
}

/// A layer that makes an embedding of what was pooled.
#[derive(Debug, PartialEq)]
pub struct DenseLayer {
    /// `[outputs, inputs]`.
    weights: Vec<f32>,
    inputs: usize,
    /// What is added to each output; empty = nothing.
    bias: Vec<f32>,
    activation: DenseActivation,
}

/// What a [`DenseLayer`] does with its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseActivation {
    /// Nothing.
    Identity,
    /// The hyperbolic tangent.
    Tanh,
}

impl DenseLayer {
    /// A layer with `weights` of the shape `[outputs, inputs]`, and a bias, which may be empty.
    ///
    /// # Errors
    /// A message, if the numbers of values do not match.
    pub fn new(
        weights: Vec<f32>,
        (outputs, inputs): (usize, usize),
        bias: Vec<f32>,
        activation: DenseActivation,
    ) -> Result<Self, String> {
        let is_matrix = outputs.checked_mul(inputs) == Some(weights.len()) && !weights.is_empty();
        if !is_matrix || ![0, outputs].contains(&bias.len()) {
            return Err(format!(
                "{} weights and a bias of {} values are no layer of {inputs} inputs and {outputs} outputs",
                weights.len(),
                bias.len()
            ));
        }
        Ok(Self {
            weights,
            inputs,
            bias,
            activation,
        })
    }

    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        self.weights.len() / self.inputs
    }

    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let rows = self.weights.chunks_exact(self.inputs).enumerate();
        let output = |(at, row)| {
            let sum = dot(row, x) + self.bias.get(at).copied().unwrap_or(0.0);
            match self.activation {
                DenseActivation::Identity => sum,
                DenseActivation::Tanh => sum.tanh(),
            }
        };
        rows.map(output).collect()
    }
}

/// The product of two vectors, with sums that a CPU adds up side by side.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    let rest: f32 = rest.map(|(a, b)| a * b).sum();
    for (a, b) in a.zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kind` of the embedding models' servers, and the prompt that it has with those of a model.
    #[test]
    fn kinds_and_names_choose_prompts() {
        let spec = |prompts: &[(&str, &str)]| EmbeddingSpec {
            prompts: (prompts.iter())
                .map(|(name, prompt)| (name.to_string(), prompt.to_string()))
                .collect(),
            ..EmbeddingSpec::new(Pooling::Last, true)
        };
        let e5 = spec(&[("query", "query: "), ("passage", "passage: ")]);
        let gemma = spec(&[("query", "Q: "), ("document", "D: "), ("Clustering", "C: ")]);
        let qwen = spec(&[("query", "Q: ")]);
        let tasks = spec(&[("web_search_query", "W: ")]);
        let none = spec(&[]);
        for (spec, kind, prompt) in [
            (&e5, "query", Some("query: ")),
            (&e5, "search_query", Some("query: ")),
            (&e5, "document", Some("passage: ")),
            (&e5, "search_document", Some("passage: ")),
            (&e5, "clustering", None),
            (&gemma, "passage", Some("D: ")),
            (&gemma, "clustering", Some("C: ")),
            (&qwen, "passage", Some("")),
            (&tasks, "query", None),
            (&tasks, "web_search_query", Some("W: ")),
            (&tasks, "document", Some("")),
            (&none, "query", Some("")),
            (&none, "classification", Some("")),
        ] {
            assert_eq!(spec.prompt_of(kind), prompt, "{kind} of {:?}", spec.prompts);
        }
    }

    fn layer(weights: Vec<f32>, shape: (usize, usize), bias: Vec<f32>) -> DenseLayer {
        DenseLayer::new(weights, shape, bias, DenseActivation::Identity).unwrap()
    }

    #[test]
    fn layers_follow_one_another() {
        // Rows longer than a run of sums.
        let ramp: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let first = layer(ramp, (2, 20), vec![0.5, -1.0]);
        let tanh = DenseLayer::new(vec![1e-3, 0.0], (1, 2), Vec::new(), DenseActivation::Tanh);
        let spec = EmbeddingSpec {
            layers: [first, tanh.unwrap()].into(),
            ..EmbeddingSpec::new(Pooling::Mean, true)
        };
        assert_eq!((spec.size(20), spec.check(20)), (1, Ok(())));
        let sum = (0..20).sum::<i32>() as f32 + 0.5;
        let made = spec.project(vec![1.0; 20]);
        // A compiler may compute a tangent of constants with other bits.
        assert!((made[0] - (1e-3 * sum).tanh()).abs() < 1e-6 && made.len() == 1);
        let error = spec.check(21).unwrap_err();
        assert!(
            error.contains("layer 0 (from 0) takes 20 values"),
            "{error}"
        );
        let plain = EmbeddingSpec::new(Pooling::Mean, true);
        assert_eq!((plain.size(7), plain.project(vec![2.0])), (7, vec![2.0]));
    }

    #[test]
    fn a_layer_of_other_sizes_is_refused() {
        for (count, shape, bias) in [
            (5, (2, 3), 0),
            (6, (2, 3), 3),
            (0, (0, 3), 0),
            (0, (3, 0), 0),
        ] {
            let bias = vec![0.0; bias];
            let made = DenseLayer::new(vec![0.0; count], shape, bias, DenseActivation::Identity);
            assert!(made.unwrap_err().contains("are no layer of"));
        }
    }
}
