//! What a parallel head computes along a path of its block, token by token: a Markov head, which adds to the
//! logits of a row what the token before it makes of them, and a confidence head (DSpark, arXiv 2607.05147), what a
//! GRU makes of all tokens before it (Domino), or a selector among the most probable tokens (DFlash 2).

use super::candidates::{found_by_gpu, most_probable};
use super::config::{
    ConfidenceInput, HeadConfig, MarkovConfig, MarkovKind, PathConfig, SelectorConfig,
};
use super::domino::Domino;
use super::lilicorr::LiLiCorr;
use crate::config::ModelConfig;
use crate::layers::linear::{Embedding, Linear};
use crate::layers::output::OutputLayer;
use crate::weights::Weights;
use candle_core::{D, DType, Device, Tensor};
use candle_nn::ops::sigmoid;
use foretoken_core::error::Result;
use foretoken_core::model::{PathOutput, PathRows};

/// The part of a parallel head that goes along paths.
pub struct PathHead {
    markov: Option<Markov>,
    domino: Option<Domino>,
    confidence: Option<(Linear, ConfidenceInput)>,
    selector: Option<Selector>,
    lilicorr: Option<LiLiCorr>,
    device: Device,
}

/// A selector among the most probable tokens.
struct Selector {
    /// The embedding of the token before, `[vocab_size, rank]`.
    before: Tensor,
    /// The embedding of the token, `[vocab_size, rank]`.
    after: Tensor,
    /// Projects a hidden state to `rank` values.
    projection: Linear,
    top_k: usize,
}

struct Markov {
    /// The embedding of the token before.
    embedding: Embedding,
    /// Projects the embedding, or what the mixer makes of it, to the outputs.
    output: Linear,
    mixer: Mixer,
}

/// How the embedding of a token becomes the input of the product `output`.
enum Mixer {
    Vanilla,
    /// Projects hidden state and embedding to a gate.
    Gated(Linear),
    /// Projects state, embedding and hidden state to a gate, a candidate for the state, and the output's input.
    Recurrent(Linear),
}

impl PathHead {
    /// Reads the parts that `head`, whose layers are like `config` and whose blocks consist of rows of `embedding`,
    /// has; `None` = it has none. The output layer has so many `outputs`, and the largest block predicts `slots` tokens.
    ///
    /// # Errors
    /// A setup error that names a tensor that is missing or has a wrong shape.
    pub(crate) fn load(
        head: PathConfig,
        config: &ModelConfig,
        weights: &mut Weights,
        (outputs, slots): (usize, usize),
        embedding: &Embedding,
    ) -> Result<Option<Self>> {
        let rank = head.markov.map_or(0, |markov| markov.rank);
        let markov = (head.markov).map(|of| Markov::load(of, config, weights, outputs));
        let markov = markov.transpose()?;
        let domino = (head.domino).map(|of| Domino::load(of, config, weights, outputs, embedding));
        let domino = domino.transpose()?;
        let confidence = head.confidence.map(|input| -> Result<_> {
            let width = match input {
                ConfidenceInput::Hidden => config.hidden_size,
                ConfidenceInput::HiddenAndToken => config.hidden_size + rank,
            };
            let linear = weights.linear("confidence_head.proj", (1, width), true)?;
            Ok((linear, input))
        });
        let confidence = confidence.transpose()?;
        let selector = (head.selector).map(|of| Selector::load(of, config, weights));
        let selector = selector.transpose()?;
        let lilicorr = (head.lilicorr).map(|of| LiLiCorr::load(of, config, slots, weights));
        let lilicorr = lilicorr.transpose()?;
        let corrects =
            markov.is_some() || domino.is_some() || selector.is_some() || lilicorr.is_some();
        Ok((corrects || confidence.is_some()).then(|| Self {
            markov,
            domino,
            confidence,
            selector,
            lilicorr,
            device: weights.device().clone(),
        }))
    }

    /// What it makes of all rows of a block at once, if it does.
    pub(crate) fn lilicorr(&self) -> Option<&LiLiCorr> {
        self.lilicorr.as_ref()
    }

    /// The logits of `rows` after their tokens, over the ids of `output`.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn step(&self, rows: &PathRows<'_>, output: &OutputLayer) -> Result<PathOutput> {
        if let Some(selector) = &self.selector {
            return Ok(PathOutput {
                logits: selector.select(rows)?,
                states: None,
                confidence: None,
            });
        }
        if let Some(lilicorr) = &self.lilicorr {
            let logits = lilicorr.after(rows.tokens, rows.hidden, rows.logits.dim(1)?)?;
            return Ok(PathOutput {
                logits: logits.to_device(&self.device)?,
                states: None,
                confidence: None,
            });
        }
        let tokens = Tensor::new(rows.tokens, &self.device)?;
        if let Some(domino) = &self.domino {
            let states = domino.next_states(&tokens, rows.states)?;
            let logits = if domino.corrects(rows.level) {
                output.add_bias(rows.logits, &domino.bias(rows.hidden, &states)?)?
            } else {
                rows.logits.clone()
            };
            return Ok(PathOutput {
                logits,
                states: Some(states),
                confidence: None,
            });
        }
        let embedded = (self.markov.as_ref()).map(|markov| markov.embedding.forward(&tokens));
        let embedded = embedded.transpose()?;
        let confidence = match (&self.confidence, &embedded) {
            (Some((linear, ConfidenceInput::HiddenAndToken)), Some(embedded)) => {
                Some(linear.forward(&Tensor::cat(&[rows.hidden, embedded], 1)?)?)
            }
            (Some((linear, _)), _) => Some(linear.forward(rows.hidden)?),
            (None, _) => None,
        };
        let confidence = confidence.map(|logits| -> Result<Vec<f32>> {
            let logits = logits.to_dtype(DType::F32)?.flatten_all()?;
            Ok(sigmoid(&logits)?.to_vec1()?)
        });
        let (logits, states) = match (&self.markov, &embedded) {
            (Some(markov), Some(embedded)) => {
                let (bias, states) = markov.bias(embedded, rows)?;
                (output.add_bias(rows.logits, &bias)?, states)
            }
            _ => (rows.logits.clone(), None),
        };
        Ok(PathOutput {
            logits,
            states,
            confidence: confidence.transpose()?,
        })
    }
}

impl Markov {
    /// Reads the weights of one of a head whose layers are like `config`.
    fn load(
        MarkovConfig { rank, kind }: MarkovConfig,
        config: &ModelConfig,
        weights: &mut Weights,
        outputs: usize,
    ) -> Result<Self> {
        let (hidden, vocab_size) = (config.hidden_size, config.vocab_size);
        let at = |part: &str| format!("markov_head.{part}");
        Ok(Self {
            embedding: weights.embedding(&at("markov_w1"), (vocab_size, rank))?,
            output: weights.linear(&at("markov_w2"), (outputs, rank), false)?,
            mixer: match kind {
                MarkovKind::Vanilla => Mixer::Vanilla,
                MarkovKind::Gated => {
                    let shape = (rank, hidden + rank);
                    Mixer::Gated(weights.linear(&at("gate_proj"), shape, true)?)
                }
                MarkovKind::Recurrent => {
                    let shape = (3 * rank, 2 * rank + hidden);
                    Mixer::Recurrent(weights.linear(&at("joint_proj"), shape, true)?)
                }
            },
        })
    }

    /// What is added to the logits, `[rows, outputs]`, and the states after the rows.
    fn bias(&self, embedded: &Tensor, rows: &PathRows<'_>) -> Result<(Tensor, Option<Tensor>)> {
        Ok(match &self.mixer {
            Mixer::Vanilla => (self.output.forward(embedded)?, None),
            Mixer::Gated(gate) => {
                let gate = gate.forward(&Tensor::cat(&[rows.hidden, embedded], 1)?)?;
                let gated = (sigmoid(&gate)? * embedded)?;
                (self.output.forward(&gated)?, None)
            }
            Mixer::Recurrent(joint) => {
                let state = match rows.states {
                    Some(state) => state.clone(),
                    None => embedded.zeros_like()?,
                };
                let joint = joint.forward(&Tensor::cat(&[&state, embedded, rows.hidden], 1)?)?;
                let parts = joint.chunk(3, D::Minus1)?;
                let gate = sigmoid(&parts[0].contiguous()?)?;
                let candidate = parts[1].tanh()?;
                // gate * state + (1 - gate) * candidate
                let state = (&candidate + (gate * (state - &candidate)?)?)?;
                let bias = self.output.forward(&parts[2].tanh()?.contiguous()?)?;
                (bias, Some(state))
            }
        })
    }
}

impl Selector {
    fn load(of: SelectorConfig, config: &ModelConfig, weights: &mut Weights) -> Result<Self> {
        let at = |part: &str| format!("candidate_selector.{part}");
        let codebook = [config.vocab_size, of.rank];
        let shape = (of.rank, config.hidden_size);
        Ok(Self {
            before: weights.tensor(&at("predecessor_codebook"), &codebook)?,
            after: weights.tensor(&at("successor_codebook"), &codebook)?,
            projection: weights.linear(&at("hidden_projection"), shape, false)?,
            top_k: of.top_k,
        })
    }

    /// The logits of the most probable tokens of each row, with what the token before makes of them; minus
    /// infinity for the others.
    fn select(&self, rows: &PathRows<'_>) -> Result<Tensor> {
        let (count, vocab_size) = rows.logits.dims2()?;
        let (device, dtype) = (rows.logits.device(), rows.hidden.dtype());
        let best: Vec<u32> = match found_by_gpu(rows.logits, self.top_k)? {
            Some(found) => found.into_iter().flat_map(|row| row.ids).collect(),
            None => (rows.logits.to_vec2::<f32>()?.iter())
                .flat_map(|row| most_probable(row, self.top_k))
                .collect(),
        };
        let best = Tensor::from_vec(best, (count, self.top_k), device)?;
        let before = (self.before).index_select(&Tensor::new(rows.tokens, device)?, 0)?;
        let context = (before.to_dtype(dtype)? * self.projection.forward(rows.hidden)?)?;
        let after = self.after.index_select(&best.flatten_all()?, 0)?;
        let after = after.to_dtype(dtype)?.reshape((count, self.top_k, ()))?;
        let scores = after.broadcast_mul(&context.unsqueeze(1)?)?.sum(2)?;
        let scores = (rows.logits.gather(&best, 1)? + scores.to_dtype(DType::F32)?)?;
        let never = Tensor::full(f32::NEG_INFINITY, (count, vocab_size), device)?;
        Ok(never.scatter(&best, &scores, 1)?)
    }
}

/// Refuses what no code of the authors defines for such a head.
///
/// # Errors
/// A message that names what is not supported.
pub(crate) fn check(head: &HeadConfig) -> Result<(), String> {
    let PathConfig {
        markov,
        domino,
        confidence,
        selector,
        lilicorr,
    } = head.path;
    let is_reduced = head.shape.output_size() != head.shape.vocab_size;
    let is_recurrent = markov.is_some_and(|markov| markov.kind == MarkovKind::Recurrent);
    let from_anchor = head.block.is_some_and(|block| block.from_anchor);
    let is_dspark = markov.is_some() || confidence.is_some();
    let odd = if lilicorr.is_some() && is_dspark {
        "markov_rank and enable_confidence_head are not supported in LiLiCorr's layout"
    } else if lilicorr.is_some() && is_reduced {
        "a draft_vocab_size below vocab_size is not supported in LiLiCorr's layout"
    } else if lilicorr.is_some() && from_anchor {
        "sample_from_anchor true is not supported in LiLiCorr's layout"
    } else if selector.is_some() && is_dspark {
        "markov_rank and enable_confidence_head are not supported with a selector"
    } else if domino.is_some() && is_dspark {
        "markov_rank and enable_confidence_head are not supported in Domino's layout"
    } else if selector.is_some() && is_reduced {
        "a draft_vocab_size below vocab_size is not supported with a selector"
    } else if is_recurrent && !from_anchor {
        "markov_head_type rnn is not supported with sample_from_anchor false: only vanilla and gated are"
    } else {
        return Ok(());
    };
    Err(odd.into())
}

/// The names of tensors in the checkpoint `weights`, if they are not ours: of a GRU, of parts that early checkpoints of
/// SpecForge, or those of the speculators library, have in a container, and of what Muse Glimmer's assistant reads first.
pub(crate) fn names_in(weights: &Weights) -> &'static [(&'static str, &'static str)] {
    let has_part = |container: &str| {
        let parts = ["prefix_gru.weight_ih_l0", "markov_head.markov_w1.weight"];
        (parts.iter()).any(|part| weights.has(&format!("{container}{part}")))
    };
    if has_part("") {
        &[
            ("prefix_gru.ih.weight", "prefix_gru.weight_ih_l0"),
            ("prefix_gru.hh.weight", "prefix_gru.weight_hh_l0"),
        ]
    } else if has_part("logits_correction.") {
        &[
            (
                "prefix_gru.ih.weight",
                "logits_correction.prefix_gru.weight_ih_l0",
            ),
            (
                "prefix_gru.hh.weight",
                "logits_correction.prefix_gru.weight_hh_l0",
            ),
            ("embed_proj.", "logits_correction.embed_proj."),
        ]
    } else if has_part("logit_head.") {
        &[
            ("prefix_gru.ih.weight", "logit_head.prefix_gru.weight_ih_l0"),
            ("prefix_gru.hh.weight", "logit_head.prefix_gru.weight_hh_l0"),
            ("embed_proj.", "logit_head.embed_proj."),
            ("markov_head.", "logit_head.markov_head."),
            ("confidence_head.", "logit_head.confidence_head."),
        ]
    } else if weights.has("encoder.fc.weight") {
        &[
            ("hidden_norm.", "encoder.output_norm_enc."),
            ("fc.", "encoder.fc."),
        ]
    } else {
        &[]
    }
}
