//! What is trained, and the shapes of its weights.

use super::{Method, Products};
use foretoken_core::model::MaskedBlock;
use foretoken_model::{ModelConfig, names};
use serde_json::Value;

/// The layer of an EAGLE-3 head.
pub const EAGLE_LAYER: &str = "midlayer";
/// The weights of a parallel head's Markov head: of the token before, and to the outputs.
pub const MARKOV: [&str; 2] = ["markov_head.markov_w1", "markov_head.markov_w2"];

/// The student to train.
#[derive(Debug, Clone)]
pub struct TrainSpec {
    pub method: Method,
    pub config: ModelConfig,
    /// The student's `config.json`.
    pub json: Value,
    /// The layers of the target whose hidden states a head reads.
    pub taps: Vec<usize>,
    /// How an EAGLE-3 head is unrolled.
    pub unrolling: Unrolling,
    /// The blocks of a parallel head. Its mask token is [chosen](TrainSpec::choose_mask) when the corpus is known.
    pub block: MaskedBlock,
    /// Rank of a parallel head's Markov head; 0 = it has none.
    pub markov_rank: usize,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Seed of the first weights.
    pub seed: u64,
    /// The precision of the factors in products with a head's weights.
    pub products: Products,
}

/// How a head is unrolled in training.
#[derive(Debug, Clone, Copy)]
pub struct Unrolling {
    /// Number of passes.
    pub passes: usize,
    /// In training, the passes after the first begin at one of every `stride` positions.
    pub stride: usize,
}

impl TrainSpec {
    /// The name and shape of every weight.
    pub fn shapes(&self) -> Vec<(String, Vec<usize>)> {
        shapes(self.method, &self.config, self.taps.len(), self.markov_rank)
    }

    /// Positions to which a head may rotate: a draft goes on after the end of a row.
    pub fn positions(&self) -> usize {
        let drafted = match self.method {
            Method::Draft => 0,
            Method::Eagle3 => self.unrolling.passes,
            Method::Parallel => self.block.size,
        };
        self.seq_len + drafted
    }
}

/// The name and shape of every weight of a student of `method` and shape `config`: of a head, one that reads `taps`
/// layers, and has a Markov head of rank `markov_rank` if that is not 0.
pub fn shapes(
    method: Method,
    config: &ModelConfig,
    taps: usize,
    markov_rank: usize,
) -> Vec<(String, Vec<usize>)> {
    let (hidden, vocab, outputs) = (config.hidden_size, config.vocab_size, config.output_size());
    let (vector, fc) = (vec![hidden], vec![hidden, taps * hidden]);
    let mut all = match method {
        Method::Draft => vec![
            (names::EMBEDDING, vec![vocab, hidden]),
            (names::NORM, vector),
        ],
        Method::Eagle3 => vec![
            ("fc", fc),
            ("midlayer.hidden_norm", vector.clone()),
            ("norm", vector),
        ],
        Method::Parallel => vec![
            ("fc", fc),
            ("hidden_norm", vector.clone()),
            ("norm", vector),
        ],
    };
    // The output layer of a head is its own.
    if method != Method::Draft || !config.tie_word_embeddings {
        all.push((names::HEAD, vec![outputs, hidden]));
    }
    if markov_rank > 0 {
        let dims = [vec![vocab, markov_rank], vec![outputs, markov_rank]];
        all.extend(MARKOV.into_iter().zip(dims));
    }
    let own = all.into_iter().map(|(name, dims)| (name.to_owned(), dims));
    let layers = (0..config.num_layers()).flat_map(|layer| match method {
        Method::Draft => layer_shapes(config, hidden, format!("model.layers.{layer}")),
        // The layer reads the embedding beside the hidden state.
        Method::Eagle3 => layer_shapes(config, 2 * hidden, EAGLE_LAYER.to_owned()),
        Method::Parallel => layer_shapes(config, hidden, format!("layers.{layer}")),
    });
    own.chain(layers)
        .map(|(name, dims)| (format!("{name}.weight"), dims))
        .collect()
}

/// The name and shape of each weight of a layer whose attention has `inputs` inputs.
fn layer_shapes(config: &ModelConfig, inputs: usize, layer: String) -> [(String, Vec<usize>); 9] {
    let (hidden, mlp, d) = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
    );
    let (q, kv) = (config.num_heads * d, config.num_kv_heads * d);
    [
        ("input_layernorm", vec![hidden]),
        ("post_attention_layernorm", vec![hidden]),
        ("self_attn.q_proj", vec![q, inputs]),
        ("self_attn.k_proj", vec![kv, inputs]),
        ("self_attn.v_proj", vec![kv, inputs]),
        ("self_attn.o_proj", vec![hidden, q]),
        ("mlp.gate_proj", vec![mlp, hidden]),
        ("mlp.up_proj", vec![mlp, hidden]),
        ("mlp.down_proj", vec![hidden, mlp]),
    ]
    .map(|(part, dims)| (format!("{layer}.{part}"), dims))
}
