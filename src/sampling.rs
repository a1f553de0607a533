//! From logits to a distribution, and random numbers addressed by position.
//!
//! Order of the pipeline: repetition penalty, presence and frequency penalties, logit_bias,
//! min_tokens (stop ids forbidden), temperature, min-p, top-k, top-p.

/// How tokens are chosen. The defaults sample the model's own distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 = greedy.
    pub temperature: f32,
    /// Smallest set of most probable tokens whose mass reaches this, in (0, 1]; 1 = off.
    pub top_p: f32,
    /// Number of most probable tokens kept; 0 = all.
    pub top_k: usize,
    /// Tokens below `min_p * max probability` are dropped, in [0, 1]; 0 = off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token in prompt or output; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of every token in the output.
    pub presence_penalty: f32,
    /// Subtracted for each occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to logits, by token id.
    pub logit_bias: Vec<(u32, f32)>,
    /// Root of all random numbers of the request.
    pub seed: u64,
    /// Stop ids are not sampled before so many tokens are out.
    pub min_tokens: usize,
    /// EOS does not end the text.
    pub ignore_eos: bool,
    /// Ids that end the text, besides EOS.
    pub stop_token_ids: Vec<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
        }
    }
}
