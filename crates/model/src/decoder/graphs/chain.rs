//! Forwards that follow one another without the host: it sends the inputs of all of them at once, and each takes the
//! tokens that were drawn from the logits of the one before it.

use super::{GraphedDecoder, Key, without_padding};
use crate::layers::inputs::drawn_for;
use candle_core::{Tensor, TensorId};
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::KvStore;
use foretoken_core::model::{Batch, Draw, ForwardOutput, Model};
use foretoken_kernels::{SentWrites, Writes};

/// The inputs of a forward for its graph, in device memory but not in their places: forwards before it may be by the
/// same graph.
pub(super) struct SentInputs {
    key: Key,
    /// Where the graph that they are for has its tokens.
    graph: TensorId,
    writes: SentWrites,
    /// The place of the tokens among them, `[rows with padding]` u32.
    tokens: Tensor,
}

impl GraphedDecoder {
    /// Sends the inputs of `batches` in one copy; `None` = there is no graph of such a forward yet, or it is computed
    /// kernel by kernel.
    pub(super) fn send_chain(
        &mut self,
        batches: &[Batch],
        kv: &KvStore,
    ) -> Result<Vec<Option<SentInputs>>> {
        let (mut found, mut all) = (Vec::with_capacity(batches.len()), Vec::new());
        for batch in batches {
            let fitted = self.fitted(batch, kv)?;
            // States are prepared forward by forward.
            let fitted = fitted.filter(|(_, padded, _)| padded.states.is_empty());
            let found_one = match &fitted {
                Some((key, padded, spans)) => match self.seen.get(key) {
                    Some(Some(recorded)) => {
                        all.push(recorded.inputs_of(&self.decoder, padded, spans)?);
                        Some((*key, recorded.inputs.tokens.clone()))
                    }
                    _ => None,
                },
                None => None,
            };
            found.push(found_one);
        }
        let mut sent = Writes::send(all, self.decoder.device())?.into_iter();
        let missing = || Error::internal("a forward of a chain has no tokens");
        let mut of_graph = |(key, to): (Key, Tensor)| -> Result<SentInputs> {
            let writes = sent.next().ok_or_else(missing)?;
            Ok(SentInputs {
                key,
                graph: to.id(),
                tokens: writes.values_for(&to)?.ok_or_else(missing)?,
                writes,
            })
        };
        let all = found
            .into_iter()
            .map(|one| one.map(&mut of_graph).transpose());
        all.collect()
    }

    /// See [`Model::forward_chain`]; `sent` has the inputs of each of `batches`.
    pub(super) fn run_chain(
        &mut self,
        batches: &mut [Batch],
        sent: Vec<Option<SentInputs>>,
        kv: &mut KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        let mut last = None;
        for step in 0..batches.len() {
            let by_graph = sent[step].as_ref().map(|sent| self.replay_sent(sent));
            let output = match by_graph.transpose()?.flatten() {
                Some(output) => without_padding(output, &batches[step])?,
                None => self.forward(&batches[step], kv)?,
            };
            if let Some(next) = batches.get_mut(step + 1) {
                let place = sent[step + 1].as_ref().map(|sent| &sent.tokens);
                next.drawn = Some(drawn_for(next, &output, place, draw)?);
            } else {
                draw(&output, None)?;
            }
            last = Some(output);
        }
        last.ok_or_else(|| Error::internal("a chain of no forwards"))
    }

    /// The output of the graph that these inputs are for; `None` if a forward since took its place.
    fn replay_sent(&mut self, sent: &SentInputs) -> Result<Option<ForwardOutput>> {
        let recorded = self.seen.get_mut(&sent.key).and_then(Option::as_mut);
        let Some(recorded) = recorded.filter(|one| one.inputs.tokens.id() == sent.graph) else {
            return Ok(None);
        };
        self.forwards += 1;
        recorded.used = self.forwards;
        sent.writes.write()?;
        // SAFETY: as in `Recorded::replay`.
        unsafe { recorded.graph.replay()? };
        recorded.output().map(Some)
    }
}
