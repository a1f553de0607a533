//! A draft model whose ids are those of a joint vocabulary.

use super::vocabulary::JointVocabulary;
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::{Batch, Draw, ForwardOutput, Model, ModelInfo};
use foretoken_kernels::spread;

/// Takes joint ids and gives logits over the joint vocabulary, minus infinity for the tokens that only
/// the target has.
pub struct JointModel {
    model: Box<dyn Model>,
    info: ModelInfo,
    ids: ModelIds,
}

/// A model's id for each joint id.
struct ModelIds {
    /// `none` = it has no such id.
    all: Vec<u32>,
    /// The model's number of ids.
    none: u32,
    /// `all` in the memory of the model's device, since the first forward.
    sent: Option<Tensor>,
}

impl JointModel {
    /// `model`, whose ids are the draft's in `vocabulary`.
    pub fn new(model: Box<dyn Model>, vocabulary: &JointVocabulary) -> Self {
        let mut info = model.info().clone();
        let none = info.vocab_size as u32;
        info.vocab_size = vocabulary.size();
        let joint = 0..vocabulary.size() as u32;
        let all = joint.map(|id| vocabulary.of_draft(id).unwrap_or(none));
        Self {
            ids: ModelIds {
                all: all.collect(),
                none,
                sent: None,
            },
            model,
            info,
        }
    }
}

impl ModelIds {
    /// `all` on `device`.
    fn sent_to(&mut self, device: &Device) -> Result<&Tensor> {
        let ids = match self.sent.take() {
            Some(ids) => ids,
            None => Tensor::new(self.all.as_slice(), device)?,
        };
        Ok(self.sent.insert(ids))
    }

    /// The model's ids in place of joint ones, which a GPU drew.
    fn of_drawn(&mut self, drawn: &Tensor) -> Result<Tensor> {
        let ids = self.sent_to(drawn.device())?.index_select(drawn, 0)?;
        // Where a GPU could draw no token it says 0, which may be one that only the target has.
        Ok(ids.lt(self.none)?.where_cond(&ids, &ids.zeros_like()?)?)
    }

    /// The model's ids in place of joint ones.
    ///
    /// # Errors
    /// If the model does not have a token.
    fn of_batch(&mut self, batch: &Batch) -> Result<Batch> {
        let mut batch = batch.clone();
        if let Some(drawn) = &mut batch.drawn {
            *drawn = self.of_drawn(drawn)?;
            return Ok(batch);
        }
        for token in &mut batch.tokens {
            let id = self.all.get(*token as usize).copied();
            *token = id.filter(|&id| id != self.none).ok_or_else(|| {
                Error::internal(format!(
                    "the draft model has no token for the joint id {token}"
                ))
            })?;
        }
        Ok(batch)
    }

    /// Logits over the joint vocabulary, for those of the model.
    fn joint(&mut self, logits: &Tensor) -> Result<Tensor> {
        if logits.dim(0)? == 0 {
            return Ok(logits.clone());
        }
        Ok(spread(logits, self.sent_to(logits.device())?, None)?)
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
        let batch = self.ids.of_batch(batch)?;
        let mut output = self.model.forward(&batch, kv)?;
        output.logits = self.ids.joint(&output.logits)?;
        Ok(output)
    }

    fn forward_chain(
        &mut self,
        batches: &mut [Batch],
        kv: &mut KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        let Self { model, ids, .. } = self;
        let mut own = Vec::with_capacity(batches.len());
        for batch in &*batches {
            own.push(if own.is_empty() {
                ids.of_batch(batch)?
            } else {
                // Its tokens are drawn.
                Batch {
                    tokens: vec![0; batch.tokens.len()],
                    ..batch.clone()
                }
            });
        }
        let mut logits = None;
        let mut output = model.forward_chain(&mut own, kv, &mut |output, place| {
            let joint = ForwardOutput::of(ids.joint(&output.logits)?);
            let drawn = ids.of_drawn(&draw(&joint, None)?)?;
            logits = Some(joint.logits);
            let Some(place) = place else {
                return Ok(drawn);
            };
            place.slice_set(&drawn, 0, 0)?;
            Ok(place.narrow(0, 0, drawn.elem_count())?)
        })?;
        if let Some(logits) = logits {
            output.logits = logits;
        }
        Ok(output)
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocabulary::tests::WordTokenizer;
    use super::*;
    use foretoken_core::kv::{BlockAllocator, BlockTable};
    use foretoken_core::model::toy::ToyModel;

    const BLOCKS: usize = 8;
    const BLOCK_SIZE: usize = 4;

    /// A model with chains alone, whose tokens are drawn to places of its own.
    struct Chained(ToyModel);

    impl Model for Chained {
        fn info(&self) -> &ModelInfo {
            self.0.info()
        }

        fn kv_shape(&self) -> KvShape {
            self.0.kv_shape()
        }

        fn device(&self) -> &Device {
            self.0.device()
        }

        fn forward(&mut self, _: &Batch, _: &mut KvStore) -> Result<ForwardOutput> {
            Err(Error::internal("a forward that is no part of a chain"))
        }

        fn forward_chain(
            &mut self,
            batches: &mut [Batch],
            kv: &mut KvStore,
            draw: &mut Draw<'_>,
        ) -> Result<ForwardOutput> {
            let mut last = None;
            for at in 0..batches.len() {
                let output = self.0.forward(&batches[at], kv)?;
                let place = Tensor::new(&[u32::MAX; 2], self.device())?;
                draw(&output, Some(&place))?;
                if let Some(next) = batches.get_mut(at + 1) {
                    next.tokens = place.narrow(0, 0, next.tokens.len())?.to_vec1()?;
                }
                last = Some(output);
            }
            last.ok_or_else(|| Error::internal("a chain of no forwards"))
        }
    }

    #[test]
    fn a_chain_draws_what_single_forwards_do() {
        const LENGTH: usize = 4;
        // Only the target has 1, and only the draft 4.
        let words = |tokens: &[&str]| Box::new(WordTokenizer::new(tokens, false));
        let target = words(&["</s>", "x", "a", "b"]);
        let vocabulary = JointVocabulary::new(target, words(&["b", "</s>", "c", "a"]), 4, 4);
        let toy = ToyModel::new(4, 64, 7, 0.0);
        let (mut blocks, mut table) = (
            BlockAllocator::new(BLOCKS, BLOCK_SIZE),
            BlockTable::default(),
        );
        blocks.reserve(&mut table, 3 + LENGTH).unwrap();
        let batch = |tokens: &[u32], context: usize| {
            let mut batch = Batch::default();
            batch.push_span(tokens, &[], context, &table, BLOCK_SIZE);
            batch.logits = vec![tokens.len() as u32 - 1];
            batch
        };
        let mut single = JointModel::new(Box::new(toy.clone()), &vocabulary);
        let mut kv = single.new_kv(BLOCKS, BLOCK_SIZE).unwrap();
        let (mut tokens, mut context, mut want) = (vec![2, 3, 4], 0, Vec::new());
        for _ in 0..LENGTH {
            let output = single.forward(&batch(&tokens, context), &mut kv).unwrap();
            context += tokens.len();
            tokens = output.logits.argmax(1).unwrap().to_vec1::<u32>().unwrap();
            want.extend_from_slice(&tokens);
        }
        let mut chained = JointModel::new(Box::new(Chained(toy)), &vocabulary);
        let mut kv = chained.new_kv(BLOCKS, BLOCK_SIZE).unwrap();
        let mut batches = vec![batch(&[2, 3, 4], 0)];
        batches.extend((3..2 + LENGTH).map(|context| batch(&[1], context)));
        let mut drawn = Vec::new();
        let output = chained.forward_chain(&mut batches, &mut kv, &mut |output, _| {
            let ids = output.logits.argmax(1)?;
            drawn.extend(ids.to_vec1::<u32>()?);
            Ok(ids)
        });
        assert_eq!(drawn, want);
        assert_eq!(output.unwrap().logits.dims(), [1, 5]);
    }
}
