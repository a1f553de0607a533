//! A draft model whose ids are those of a joint vocabulary.

use super::vocabulary::JointVocabulary;
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::{Batch, ForwardOutput, Model, ModelInfo};

/// Takes joint ids and gives logits over the joint vocabulary, minus infinity for the tokens that only
/// the target has.
pub struct JointModel {
    model: Box<dyn Model>,
    info: ModelInfo,
    /// The model's id for each joint id. The model's number of ids = it has no such id.
    ids: Vec<u32>,
    /// `ids` in the memory of the model's device, since the first forward.
    sent: Option<Tensor>,
}

impl JointModel {
    /// `model`, whose ids are the draft's in `vocabulary`.
    pub fn new(model: Box<dyn Model>, vocabulary: &JointVocabulary) -> Self {
        let mut info = model.info().clone();
        let none = info.vocab_size as u32;
        info.vocab_size = vocabulary.size();
        let joint = 0..vocabulary.size() as u32;
        let ids = joint.map(|id| vocabulary.of_draft(id).unwrap_or(none));
        Self {
            ids: ids.collect(),
            model,
            info,
            sent: None,
        }
    }

    /// `ids` on `device`.
    fn sent_to(&mut self, device: &Device) -> Result<&Tensor> {
        let ids = match self.sent.take() {
            Some(ids) => ids,
            None => Tensor::new(self.ids.as_slice(), device)?,
        };
        Ok(self.sent.insert(ids))
    }

    /// The model's ids in place of joint ones.
    ///
    /// # Errors
    /// If the model does not have a token.
    fn translated(&mut self, batch: &Batch) -> Result<Batch> {
        let mut batch = batch.clone();
        let none = self.model.info().vocab_size as u32;
        if let Some(drawn) = &mut batch.drawn {
            let ids = self.sent_to(drawn.device())?.index_select(drawn, 0)?;
            // Where a GPU could draw no token it says 0, which may be one that only the target has.
            *drawn = ids.lt(none)?.where_cond(&ids, &ids.zeros_like()?)?;
            return Ok(batch);
        }
        for token in &mut batch.tokens {
            let id = self.ids.get(*token as usize).copied();
            *token = id.filter(|&id| id != none).ok_or_else(|| {
                Error::internal(format!(
                    "the draft model has no token for the joint id {token}"
                ))
            })?;
        }
        Ok(batch)
    }
}

impl Model for JointModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn kv_shape(&self) -> KvShape {
        self.model.kv_shape()
    }

    fn device(&self) -> &Device {
        self.model.device()
    }

    fn padded_rows(&self, rows: usize) -> usize {
        self.model.padded_rows(rows)
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        let batch = self.translated(batch)?;
        let mut output = self.model.forward(&batch, kv)?;
        let logits = &output.logits;
        let rows = logits.dim(0)?;
        if rows == 0 {
            return Ok(output);
        }
        // One column more, for the tokens that the model does not have.
        let never = Tensor::full(f32::NEG_INFINITY, (rows, 1), logits.device())?;
        let logits = Tensor::cat(&[logits, &never], 1)?;
        let ids = self.sent_to(logits.device())?;
        output.logits = logits.index_select(ids, 1)?;
        Ok(output)
    }
}
