//! A decoder that records forwards with few rows as CUDA graphs: decoding and verification for a few
//! sequences.

use super::Decoder;
use crate::layers::inputs::Inputs;
use crate::{Ends, LoadedModel, ModelConfig};
use candle_core::{Device, Tensor, TensorId};
use foretoken_core::error::Result;
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::{Batch, ForwardOutput, Model, ModelInfo};
use foretoken_kernels::graph::{Graph, Recorder};
use foretoken_kernels::{AttentionBatch, AttentionTables, TableCapacity};
use std::collections::HashMap;

/// With more rows, a forward takes longer than its launches, whatever the weights. It is also the row
/// limit of our matrix products for few rows, whose bits do not depend on the number of rows.
const MAX_ROWS: usize = 16;
/// Maximum number of graphs; other forwards are launched kernel by kernel.
const MAX_GRAPHS: usize = 64;

/// Forwards with the same key differ only in their inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// The pool that is read and written.
    pool: TensorId,
    rows: usize,
    logits: usize,
    /// Rows whose hidden states are requested. Their layers are always the same.
    taps: usize,
    capacity: TableCapacity,
}

/// A graph, and all memory that it reads and writes, except the weights.
struct Recorded {
    /// Dropped first.
    graph: Graph,
    inputs: Inputs,
    tables: AttentionTables,
    output: ForwardOutput,
    _pools: Vec<(Tensor, Tensor)>,
}

/// See the module.
pub struct GraphedDecoder {
    /// `None`: seen once. A forward that occurs only once is not worth recording. Dropped before the
    /// weights.
    seen: HashMap<Key, Option<Recorded>>,
    recorder: Recorder,
    /// Recording failed once and is not tried again.
    off: bool,
    /// Holds the weights, which never change; a subset of it may hold them, too.
    decoder: Decoder,
}

impl GraphedDecoder {
    /// Wraps `decoder`, without any graphs yet.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(decoder: Decoder) -> Result<Self> {
        Ok(Self {
            seen: HashMap::new(),
            recorder: Recorder::default(),
            off: false,
            decoder,
        })
    }

    /// Whether a forward of `batch` can be recorded and is worth it.
    fn may_be_recorded(&self, batch: &Batch) -> bool {
        batch.tokens.len() <= MAX_ROWS
            && !batch.logits.is_empty()
            && batch.last_hidden.is_empty()
            && self.decoder.query_heads_a_key() <= MAX_ROWS
    }

    /// The output of a graph, if one exists for such batches or should be recorded now; `None` if it has
    /// to be computed kernel by kernel. The logits are valid until the next forward.
    fn forward_by_graph(&mut self, batch: &Batch, kv: &KvStore) -> Result<Option<ForwardOutput>> {
        let Some((pool, _)) = kv.layers.first() else {
            return Ok(None);
        };
        if !self.may_be_recorded(batch) {
            return Ok(None);
        }
        let spans = self.decoder.spans(batch, kv)?;
        let key = Key {
            pool: pool.id(),
            rows: batch.tokens.len(),
            logits: batch.logits.len(),
            taps: batch.taps.as_ref().map_or(0, |taps| taps.rows.len()),
            capacity: spans.capacity(self.decoder.query_heads_a_key()),
        };
        let full = self.seen.values().flatten().count() >= MAX_GRAPHS;
        match self.seen.get(&key) {
            Some(Some(recorded)) => {
                recorded.replay(&self.decoder, batch, &spans)?;
                recorded.output().map(Some)
            }
            Some(None) if !self.off => self.record(key, batch, spans, kv).map(Some),
            None if !self.off && !full => {
                self.seen.insert(key, None);
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Computes the output, and records the computation.
    fn record(
        &mut self,
        key: Key,
        batch: &Batch,
        spans: AttentionBatch<'_>,
        kv: &KvStore,
    ) -> Result<ForwardOutput> {
        let decoder = &self.decoder;
        let (device, group) = (decoder.device(), decoder.query_heads_a_key());
        let inputs = decoder.inputs(batch, kv)?;
        spans.send(device, group, false, Some(key.capacity))?;
        let output = decoder.run(&inputs, &spans, None, kv)?;
        let work = || -> Result<()> {
            let again = decoder.run(&inputs, &spans, None, kv)?;
            output.logits.slice_set(&again.logits, 0, 0)?;
            if let (Some(tapped), Some(again)) = (&output.tapped, &again.tapped) {
                tapped.slice_set(again, 0, 0)?;
            }
            Ok(())
        };
        // SAFETY: `run` reads and writes its arguments, the weights and `output`. All but the weights
        // go to `Recorded`, which drops the graph first, and the weights are dropped after it.
        let graph = unsafe { self.recorder.record(device, work) };
        match (graph, spans.into_tables()) {
            (Ok(graph), Some(tables)) => {
                tracing::debug!(?key, "a forward is recorded as a CUDA graph");
                let recorded = Recorded {
                    graph,
                    inputs,
                    tables,
                    output,
                    _pools: kv.layers.clone(),
                };
                let output = recorded.output()?;
                self.seen.insert(key, Some(recorded));
                return Ok(output);
            }
            (Ok(_), None) => (),
            (Err(reason), _) => {
                tracing::warn!("forwards are not recorded as CUDA graphs: {reason}");
                self.off = true;
            }
        }
        Ok(output)
    }
}

impl Recorded {
    /// The outputs that the graph computed last. The hidden states are a copy: a drafter keeps them for longer than
    /// until the next forward.
    fn output(&self) -> Result<ForwardOutput> {
        Ok(ForwardOutput {
            tapped: self.output.tapped.as_ref().map(Tensor::copy).transpose()?,
            ..ForwardOutput::of(self.output.logits.clone())
        })
    }

    /// Replays the graph for another batch of the same size.
    fn replay(&self, decoder: &Decoder, batch: &Batch, spans: &AttentionBatch<'_>) -> Result<()> {
        decoder.replace_inputs(&self.inputs, batch)?;
        spans.overwrite(&self.tables)?;
        // SAFETY: `Recorded` owns the memory, see `record`; both calls above have checked its contents.
        unsafe { self.graph.replay()? };
        Ok(())
    }
}

impl LoadedModel for GraphedDecoder {
    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    fn ends(&self) -> Option<Ends> {
        self.decoder.ends()
    }

    fn subset(&self, layers: &[usize]) -> Result<Box<dyn LoadedModel>> {
        Ok(Box::new(Self::new(self.decoder.subset(layers)?)?))
    }
}

impl Model for GraphedDecoder {
    fn info(&self) -> &ModelInfo {
        self.decoder.info()
    }

    fn kv_shape(&self) -> KvShape {
        self.decoder.kv_shape()
    }

    fn device(&self) -> &Device {
        self.decoder.device()
    }

    fn generates(&self) -> bool {
        self.decoder.generates()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        match self.forward_by_graph(batch, kv)? {
            Some(output) => Ok(output),
            None => self.decoder.forward(batch, kv),
        }
    }
}
