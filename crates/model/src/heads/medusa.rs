//! Medusa heads: output layers that each look one token further ahead from the same hidden state of the
//! target (Cai et al. 2024, arXiv 2401.10774, section 2.1.1).
//!
//! The target's output layer predicts the token after a position; head `k`, from 0, the token `k + 2` after
//! it. A head is one or more residual blocks `x + silu(W x + b)` and an output layer.

use super::input::Fusion;
use super::states;
use crate::layers::linear::Linear;
use crate::weights::Weights;
use crate::weights::dtypes::Dtypes;
use crate::{Ends, ModelConfig};
use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result, clipped};
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::{
    Batch, ForwardOutput, Head, MAX_TREE_NODES, MaskedBlock, Model, ModelInfo,
};
use serde_json::Value;

/// The heads of a target. To a drafter they are a parallel head whose context is the last hidden state.
pub struct MedusaHeads {
    config: ModelConfig,
    info: ModelInfo,
    reads: [usize; 1],
    fusion: Fusion,
    heads: Vec<MedusaHead>,
    dtypes: Dtypes,
    device: Device,
}

struct MedusaHead {
    blocks: Vec<Linear>,
    output: Linear,
}

/// The numbers of a `config.json`: heads, and residual blocks of each.
///
/// # Errors
/// A message that names what is missing or not supported.
fn sizes(json: &Value) -> Result<(usize, usize), String> {
    let number = |key: &str, max: usize| match json[key].as_u64() {
        Some(n) if (1..=max as u64).contains(&n) => Ok(n as usize),
        _ => Err(format!(
            "{key} must be a number from 1 to {max}, not {}",
            clipped(&json[key].to_string())
        )),
    };
    Ok((
        number("medusa_num_heads", MAX_TREE_NODES - 1)?,
        number("medusa_num_layers", 16)?,
    ))
}

impl MedusaHeads {
    /// Reads the heads of `target` that the `config.json` with the content `json` describes.
    ///
    /// # Errors
    /// What the configuration lacks, or a setup error that names a tensor that is missing or has a wrong
    /// shape.
    pub(crate) fn load(
        json: &Value,
        mut weights: Weights,
        target: &ModelConfig,
        ends: &Ends,
    ) -> Result<Self> {
        let (count, blocks) = sizes(json).map_err(Error::setup)?;
        let hidden = target.hidden_size;
        let mut load = |head: usize| {
            let mut linear = |part: String, outputs, bias| {
                weights.linear(&format!("{head}.{part}"), (outputs, hidden), bias)
            };
            Ok(MedusaHead {
                blocks: (0..blocks)
                    .map(|block| linear(format!("{block}.linear"), hidden, true))
                    .collect::<Result<_>>()?,
                output: linear(blocks.to_string(), target.vocab_size, false)?,
            })
        };
        let heads = (0..count).map(&mut load).collect::<Result<_>>()?;
        weights.finish(|_| false)?;
        weights.device().synchronize()?;
        Ok(Self {
            info: target.info(),
            config: target.clone(),
            reads: [target.num_layers()],
            fusion: Fusion::of_last(&weights, target, ends),
            heads,
            dtypes: weights.dtypes(),
            device: weights.device().clone(),
        })
    }
}

impl MedusaHead {
    /// `[rows, vocab_size]` of the target's normed hidden states `x`, `[rows, hidden]`.
    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for block in &self.blocks {
            x = (&x + block.forward(&x)?.silu()?)?;
        }
        self.output.forward(&x)
    }
}

impl Model for MedusaHeads {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn kv_shape(&self) -> KvShape {
        // A position's normed hidden state is its K and V.
        let states = states::shape(self.config.hidden_size);
        KvShape::new(vec![states], self.dtypes.kv)
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        if let Some(states) = &batch.context_features {
            states::write(states, &batch.slots[..states.dim(0)?], &kv.layers[0])?;
        }
        // For each head the slots of the states that it reads, and the places of its logits.
        let mut asked = vec![(Vec::new(), Vec::new()); self.heads.len()];
        for (place, &row) in batch.logits.iter().enumerate() {
            let row = row as usize;
            let span = batch.spans.iter().find(|span| span.rows.contains(&row));
            let span = span.ok_or_else(|| Error::internal(format!("no span has row {row}")))?;
            // Without a context, as in calibration, any state will do.
            let last = span.context.saturating_sub(1);
            let slot =
                span.blocks[last / kv.block_size] as usize * kv.block_size + last % kv.block_size;
            let head = (row - span.rows.start).saturating_sub(1) % self.heads.len();
            asked[head].0.push(slot as u32);
            asked[head].1.push(place);
        }
        let (mut logits, mut places) = (Vec::new(), Vec::new());
        for (head, (slots, of_head)) in self.heads.iter().zip(asked) {
            if !slots.is_empty() {
                let read = states::read(&slots, &kv.layers[0], self.dtypes.activations)?;
                logits.push(head.logits(&read)?);
                places.extend(of_head);
            }
        }
        if logits.is_empty() {
            return ForwardOutput::none(self.config.vocab_size);
        }
        let mut order = vec![0u32; places.len()];
        (0..)
            .zip(places)
            .for_each(|(row, place): (u32, usize)| order[place] = row);
        let order = Tensor::new(order, &self.device)?;
        let logits = Tensor::cat(&logits, 0)?.index_select(&order, 0)?;
        Ok(ForwardOutput::of(logits.to_dtype(DType::F32)?))
    }
}

impl Head for MedusaHeads {
    fn reads(&self) -> &[usize] {
        &self.reads
    }

    fn fuse(&self, hidden: &Tensor) -> Result<Tensor> {
        self.fusion.forward(hidden)
    }

    fn masked_block(&self) -> Option<MaskedBlock> {
        // No head reads a mask.
        Some(MaskedBlock {
            size: self.heads.len() + 1,
            mask: 0,
            from_anchor: false,
        })
    }

    fn layout(&self) -> String {
        format!("Medusa of {} heads", self.heads.len())
    }
}
