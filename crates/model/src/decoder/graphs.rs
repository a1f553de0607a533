//! A decoder that records forwards as CUDA graphs: decoding and verification.

mod chain;

use super::Decoder;
use super::one_launch::OneLaunch;
use crate::layers::inputs::Inputs;
use crate::lora::{LoraTarget, RowAdapters};
use crate::{Ends, LayerSplit, Layers, LoadedModel, ModelConfig};
use candle_core::{DType, Device, Tensor, TensorId};
use foretoken_core::error::Result;
use foretoken_core::kv::{KvShape, KvStore};
use foretoken_core::model::{Batch, Draw, ForwardOutput, Model, ModelInfo};
use foretoken_kernels::graph::{Graph, Recorder};
use foretoken_kernels::{
    AttentionBatch, AttentionTables, EXACT_ROWS, StateBatch, StateCapacity, TableCapacity, Writes,
};
use std::collections::HashMap;

/// Up to this many rows, each number of rows has its own graph.
const FEW_ROWS: usize = 16;
/// Maximum number of graphs: each takes some megabytes. A new one takes the place of the one that was used longest ago.
const MAX_GRAPHS: usize = 128;

/// The rows of the graph for `rows` rows, up to [`EXACT_ROWS`]: with more than a few, rows of padding fill it up to
/// a whole tile of the products, and with many to four.
fn graph_rows(rows: usize) -> usize {
    match rows {
        0..=FEW_ROWS => rows,
        17..=64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(32),
    }
}

/// Forwards with the same key differ only in their inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// The pool that is read and written.
    pool: TensorId,
    /// Rows, with padding; and so in what follows.
    rows: usize,
    logits: usize,
    /// Rows whose hidden states are requested. Their layers are always the same.
    taps: usize,
    capacity: TableCapacity,
    states: StateCapacity,
    /// What there is room for of the ranks of adapters; 0 = no row has one, and nothing is computed for them. Which rows
    /// have which adapters is an input, so graphs outlive adapters and take in those that are loaded later.
    adapters: usize,
    /// Whether all layers are in one launch.
    in_one: bool,
}

/// A graph, and all memory that it reads and writes, except the weights.
struct Recorded {
    /// Dropped first.
    graph: Graph,
    inputs: Inputs,
    tables: AttentionTables,
    /// `[key.logits or more, vocab_size]` f32; graphs share it.
    logits: Tensor,
    /// `[key.taps, ...]`.
    tapped: Option<Tensor>,
    /// The forward that used it last.
    used: u64,
    _pools: Vec<(Tensor, Tensor)>,
}

/// See the module.
pub struct GraphedDecoder {
    /// `None`: seen once. A forward that occurs only once is not worth recording. Dropped before the
    /// weights.
    seen: HashMap<Key, Option<Recorded>>,
    recorder: Recorder,
    /// The memory for the logits of graphs, `[rows, vocab_size]` f32, of as many rows as were needed so far.
    logits: Option<Tensor>,
    /// Forwards by graphs so far.
    forwards: u64,
    /// Whether forwards of few rows are in one launch, where the model and the GPU have such forwards.
    may_be_in_one: bool,
    /// For each pool, what forwards in one launch need; `None` = there are none.
    in_one: HashMap<TensorId, Option<OneLaunch>>,
    /// Recording failed once and is not tried again.
    off: bool,
    /// Holds the weights, which never change; a subset of it may hold them, too.
    decoder: Decoder,
}

impl GraphedDecoder {
    /// Wraps `decoder`, without any graphs yet. With `one_launch`, forwards of few rows are in one launch where that is
    /// possible.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(decoder: Decoder, one_launch: bool) -> Result<Self> {
        Ok(Self {
            seen: HashMap::new(),
            recorder: Recorder::default(),
            logits: None,
            forwards: 0,
            may_be_in_one: one_launch,
            in_one: HashMap::new(),
            off: false,
            decoder,
        })
    }

    /// Maximum number of rows of a graph.
    fn max_rows(&self) -> usize {
        match self.decoder.activations() {
            // A library multiplies them, in another order for other numbers of rows.
            DType::F32 => FEW_ROWS,
            _ => EXACT_ROWS,
        }
    }

    /// Whether a forward of `batch` can be recorded and is worth it.
    fn may_be_recorded(&self, batch: &Batch, spans: &AttentionBatch<'_>) -> bool {
        batch.tokens.len() <= self.max_rows()
            && !batch.logits.is_empty()
            && batch.last_hidden.is_empty()
            && !spans.has_long_spans()
    }

    /// The output of a graph, if one exists for such batches or should be recorded now; `None` if it has
    /// to be computed kernel by kernel. The logits are valid until the next forward.
    fn forward_by_graph(&mut self, batch: &Batch, kv: &KvStore) -> Result<Option<ForwardOutput>> {
        let Some((key, padded, spans)) = self.fitted(batch, kv)? else {
            return Ok(None);
        };
        self.forwards += 1;
        let output = match self.seen.get_mut(&key) {
            Some(Some(recorded)) => {
                recorded.used = self.forwards;
                kv.prepare_states(&padded.states)?;
                recorded.replay(&self.decoder, &padded, &spans)?;
                recorded.output()?
            }
            _ if self.off => return Ok(None),
            Some(None) => self.record(key, &padded, spans, kv)?,
            None => {
                self.seen.insert(key, None);
                return Ok(None);
            }
        };
        without_padding(output, batch).map(Some)
    }

    /// The key of the graph for forwards like that of `batch`, and the batch with padding and its spans; `None` = there are
    /// no graphs of such forwards.
    fn fitted<'b>(
        &mut self,
        batch: &'b Batch,
        kv: &KvStore,
    ) -> Result<Option<(Key, Batch, AttentionBatch<'b>)>> {
        let Some((pool, _)) = kv.layers.first() else {
            return Ok(None);
        };
        let spans = self.decoder.spans(batch, kv)?;
        if !self.may_be_recorded(batch, &spans) {
            return Ok(None);
        }
        let mut padded = padded(batch, graph_rows(batch.tokens.len()))?;
        padded.states = self.decoder.state_rows(batch)?;
        let rows = padded.tokens.len();
        let capacity = spans.capacity(self.decoder.query_heads_a_key(), rows);
        let key = Key {
            pool: pool.id(),
            rows,
            logits: padded.logits.len(),
            taps: padded.taps.as_ref().map_or(0, |taps| taps.rows.len()),
            capacity,
            states: StateBatch::capacity_of(&padded.states, rows),
            adapters: RowAdapters::room(&padded.adapters)?,
            in_one: self.in_one_launch(kv, pool.id(), &padded, capacity),
        };
        Ok(Some((key, padded, spans)))
    }

    /// Whether the forward of `batch`, with this pool and capacity, is in one launch.
    fn in_one_launch(
        &mut self,
        kv: &KvStore,
        pool: TensorId,
        batch: &Batch,
        capacity: TableCapacity,
    ) -> bool {
        let decoder = &self.decoder;
        self.may_be_in_one
            && (self
                .in_one
                .entry(pool)
                .or_insert_with(|| one_launch(decoder, kv))
                .as_ref())
            .is_some_and(|one| one.takes(batch, capacity))
    }

    /// Computes the output of a padded batch, and records the computation.
    fn record(
        &mut self,
        key: Key,
        batch: &Batch,
        spans: AttentionBatch<'_>,
        kv: &KvStore,
    ) -> Result<ForwardOutput> {
        let logits = self.memory_for_logits(key.logits)?;
        let decoder = &self.decoder;
        let (device, group) = (decoder.device(), decoder.query_heads_a_key());
        let mut inputs = decoder.inputs(batch, kv)?;
        spans.send(device, group, false, Some(key.capacity))?;
        let is_recurrent = !batch.states.is_empty();
        if is_recurrent {
            inputs.states.send(device, key.rows, Some(key.states))?;
            kv.prepare_states(&batch.states)?;
        }
        let in_one = self.in_one.get(&key.pool).and_then(Option::as_ref);
        let in_one = in_one.filter(|_| key.in_one);
        let run = |inputs: &Inputs| match in_one {
            Some(one) => decoder.run_in_one_launch(one, inputs, &spans),
            None => decoder.run(inputs, &spans, None, kv),
        };
        let output = match (run(&inputs), key.in_one) {
            (Err(reason), true) => {
                tracing::warn!("forwards are not in one launch: {reason}");
                self.in_one.insert(key.pool, None);
                return decoder.run(&inputs, &spans, None, kv);
            }
            (output, _) => output?,
        };
        if is_recurrent {
            // Recording computes the forward once more, and states must not take in its tokens twice.
            inputs.write_nothing()?;
        }
        // Recording overwrites the hidden states of the graph, and those of this forward are still to be read.
        let tapped = output.tapped.as_ref().map(Tensor::copy).transpose()?;
        inputs.logits = Some(logits.clone());
        let work = || -> Result<()> {
            let again = run(&inputs)?;
            if let (Some(tapped), Some(again)) = (&tapped, &again.tapped) {
                tapped.slice_set(again, 0, 0)?;
            }
            Ok(())
        };
        // SAFETY: `run` reads and writes its arguments, the weights, `logits` and `tapped`. All but the weights
        // go to `Recorded`, which drops the graph first, and the weights are dropped after it. Adapters are read by the
        // addresses of rows, which are replaced before each replay by those of a batch that has them.
        let graph = unsafe { self.recorder.record(device, work) };
        match (graph, spans.into_tables()) {
            (Ok(graph), Some(tables)) => {
                let nodes = graph.nodes()?;
                tracing::debug!(?key, nodes, "a forward is recorded as a CUDA graph");
                let recorded = Recorded {
                    graph,
                    inputs,
                    tables,
                    logits,
                    tapped,
                    used: self.forwards,
                    _pools: kv.layers.clone(),
                };
                self.seen.insert(key, Some(recorded));
                self.drop_oldest();
            }
            (Ok(_), None) => (),
            (Err(reason), _) if key.in_one => {
                tracing::warn!("forwards in one launch are not recorded as CUDA graphs: {reason}");
                self.in_one.insert(key.pool, None);
            }
            (Err(reason), _) => {
                tracing::warn!("forwards are not recorded as CUDA graphs: {reason}");
                self.off = true;
            }
        }
        Ok(output)
    }

    /// Drops the graph that was used longest ago, if there are too many.
    fn drop_oldest(&mut self) {
        let graphs = self.seen.iter();
        let graphs = graphs.filter_map(|(key, graph)| Some((graph.as_ref()?.used, *key)));
        let graphs: Vec<(u64, Key)> = graphs.collect();
        if graphs.len() > MAX_GRAPHS
            && let Some((_, oldest)) = graphs.iter().min_by_key(|(used, _)| *used)
        {
            self.seen.remove(oldest);
        }
    }

    /// Memory for the logits of `rows` rows. Graphs share it, because the logits of a forward are valid only until the
    /// next one. It grows to powers of two, and graphs keep what they were recorded with.
    fn memory_for_logits(&mut self, rows: usize) -> Result<Tensor> {
        if let Some(logits) = self
            .logits
            .as_ref()
            .filter(|logits| logits.dims()[0] >= rows)
        {
            return Ok(logits.clone());
        }
        let rows = rows.next_power_of_two().max(FEW_ROWS);
        let dims = (rows, self.decoder.config().vocab_size);
        let logits = Tensor::zeros(dims, DType::F32, self.decoder.device())?;
        Ok(self.logits.insert(logits).clone())
    }
}

/// `batch` with rows of padding up to `rows` rows, and without spans, which cover no padding. Padding has logits, and
/// hidden states if they are requested.
fn padded(batch: &Batch, rows: usize) -> Result<Batch> {
    let own = batch.tokens.len();
    let padding = rows - own;
    let numbers = own as u32..rows as u32;
    // Without the block tables of the spans, which are long.
    let mut padded = Batch {
        tokens: batch.tokens.clone(),
        drawn: batch.drawn.clone(),
        positions: batch.positions.clone(),
        slots: batch.slots.clone(),
        padding,
        adapters: batch.adapters.clone(),
        logits: batch.logits.clone(),
        last_hidden: batch.last_hidden.clone(),
        taps: batch.taps.clone(),
        ..Batch::default()
    };
    padded.tokens.resize(rows, 0);
    padded.positions.resize(rows, 0);
    padded.logits.extend(numbers.clone());
    if let Some(taps) = padded.taps.as_mut().filter(|taps| !taps.rows.is_empty()) {
        taps.rows.extend(numbers);
    }
    if let Some(drawn) = padded.drawn.take() {
        padded.drawn = Some(drawn.pad_with_zeros(0, 0, padding)?);
    }
    Ok(padded)
}

/// The part of `output` that `batch` asked for.
fn without_padding(output: ForwardOutput, batch: &Batch) -> Result<ForwardOutput> {
    let taps = batch.taps.as_ref().map_or(0, |taps| taps.rows.len());
    let tapped = output.tapped.map(|tapped| tapped.narrow(0, 0, taps));
    Ok(ForwardOutput {
        tapped: tapped.transpose()?,
        ..ForwardOutput::of(output.logits.narrow(0, 0, batch.logits.len())?)
    })
}

/// What forwards in one launch need; `None`, if there are none.
fn one_launch(decoder: &Decoder, kv: &KvStore) -> Option<OneLaunch> {
    match decoder.one_launch(kv) {
        Ok(one) => {
            tracing::debug!("forwards of few rows are in one launch");
            Some(one)
        }
        Err(reason) => {
            tracing::debug!("forwards are not in one launch: {reason}");
            None
        }
    }
}

impl Recorded {
    /// The outputs that the graph computed last. The hidden states are a copy: a drafter keeps them for longer than
    /// until the next forward.
    fn output(&self) -> Result<ForwardOutput> {
        Ok(ForwardOutput {
            tapped: self.tapped.as_ref().map(Tensor::copy).transpose()?,
            ..ForwardOutput::of(self.logits.clone())
        })
    }

    /// The inputs of another batch of the same size, checked.
    fn inputs_of(
        &self,
        decoder: &Decoder,
        batch: &Batch,
        spans: &AttentionBatch<'_>,
    ) -> Result<Writes> {
        let mut writes = Writes::default();
        decoder.replace_inputs(&self.inputs, batch, &mut writes)?;
        spans.overwrite(&self.tables, &mut writes)?;
        Ok(writes)
    }

    /// Replays the graph for another batch of the same size.
    fn replay(&self, decoder: &Decoder, batch: &Batch, spans: &AttentionBatch<'_>) -> Result<()> {
        self.inputs_of(decoder, batch, spans)?.write()?;
        if let Some(drawn) = &batch.drawn {
            self.inputs.tokens.slice_set(drawn, 0, 0)?;
        }
        // SAFETY: `Recorded` owns the memory, see `record`; what was written has been checked.
        unsafe { self.graph.replay()? };
        Ok(())
    }
}

impl LoadedModel for GraphedDecoder {
    fn config(&self) -> &ModelConfig {
        self.decoder.config()
    }

    fn lora_target(&self) -> Option<&LoraTarget> {
        self.decoder.lora_target()
    }

    fn split(&self) -> &LayerSplit {
        self.decoder.split()
    }

    fn ends(&self) -> Option<Ends> {
        self.decoder.ends()
    }

    fn layers(&self) -> Layers {
        self.decoder.layers()
    }

    fn subset(&self, layers: &[usize]) -> Result<Box<dyn LoadedModel>> {
        let decoder = self.decoder.subset(layers)?;
        Ok(Box::new(Self::new(decoder, self.may_be_in_one)?))
    }
}

impl Model for GraphedDecoder {
    fn info(&self) -> &ModelInfo {
        self.decoder.info()
    }

    fn takes_adapters(&self) -> bool {
        self.decoder.takes_adapters()
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

    fn padded_rows(&self, rows: usize) -> usize {
        if rows <= self.max_rows() {
            graph_rows(rows)
        } else {
            rows
        }
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvStore) -> Result<ForwardOutput> {
        match self.forward_by_graph(batch, kv)? {
            Some(output) => Ok(output),
            None => self.decoder.forward(batch, kv),
        }
    }

    fn forward_chain(
        &mut self,
        batches: &mut [Batch],
        kv: &mut KvStore,
        draw: &mut Draw<'_>,
    ) -> Result<ForwardOutput> {
        let sent = self.send_chain(batches, kv)?;
        self.run_chain(batches, sent, kv, draw)
    }
}
