//! Forwards of few rows, recorded as CUDA graphs: decoding and verification for some sequences.

use super::Batch;
use super::decoder::Inputs;
use crate::error::Result;
use crate::kernels::graph::Graph;
use crate::kernels::{Room, Rows, Tables};
use crate::kv::KvStore;
use candle_core::{Device, Tensor, TensorId};
use std::collections::HashMap;

/// Rows above which a forward takes longer than its launches, whatever the weights. It is as many as
/// our products of few rows take, whose bits do not depend on the number of rows.
const MOST_ROWS: usize = 16;
/// Graphs that are kept; what comes after them is launched kernel by kernel.
const MOST_GRAPHS: usize = 64;

/// What makes two forwards the same but for their inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// The pool that is read and written.
    pool: TensorId,
    rows: usize,
    logits: usize,
    room: Room,
}

/// A graph, and where it finds its inputs and leaves its output.
struct Recorded {
    graph: Graph,
    inputs: Inputs,
    tables: Tables,
    logits: Tensor,
}

/// One of them.
pub struct Forward<'a> {
    pub batch: &'a Batch,
    pub rows: Rows<'a>,
    pub kv: &'a KvStore,
    /// The model's, for the angles of its rows.
    pub frequencies: &'a [f32],
    /// Query heads that share one of keys.
    pub group: usize,
    pub device: &'a Device,
}

/// The forwards of one model.
pub struct Graphs {
    /// Most rows of a forward that may be recorded.
    most_rows: usize,
    /// `None`: was seen once. What comes but once is not worth recording.
    seen: HashMap<Key, Option<Recorded>>,
    /// Recording failed once, and is not tried again.
    off: bool,
}

impl Graphs {
    /// None yet; forwards of more rows than `most_rows` are not recorded.
    pub fn new(most_rows: usize) -> Self {
        Self {
            most_rows: most_rows.min(MOST_ROWS),
            seen: HashMap::new(),
            off: false,
        }
    }

    /// `None` where the forward cannot be recorded, or is not worth it.
    fn key(&self, forward: &Forward<'_>) -> Option<Key> {
        let (batch, group) = (forward.batch, forward.group);
        let (rows, logits) = (batch.tokens.len(), batch.logits.len());
        let branches = batch.spans.iter().any(|span| span.tree.is_some());
        if rows > self.most_rows || logits == 0 || branches || group > MOST_ROWS {
            return None;
        }
        Some(Key {
            pool: forward.kv.layers.first()?.0.id(),
            rows,
            logits,
            room: forward.rows.room(group),
        })
    }

    /// The logits, valid until the next forward; `None` if they have to be computed kernel by kernel.
    /// `run` is the model's forward.
    ///
    /// # Errors
    /// Where the device fails.
    pub fn forward(
        &mut self,
        forward: Forward<'_>,
        run: impl Fn(&Inputs, &Rows<'_>) -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(key) = self.key(&forward) else {
            return Ok(None);
        };
        let full = self.seen.values().flatten().count() >= MOST_GRAPHS;
        match self.seen.get(&key) {
            Some(Some(recorded)) => {
                let inputs = &recorded.inputs;
                inputs.replace(forward.batch, forward.frequencies)?;
                recorded.tables.replace(&forward.rows)?;
                recorded.graph.replay()?;
                return Ok(Some(recorded.logits.clone()));
            }
            Some(None) if !self.off => {}
            None if !self.off && !full => {
                self.seen.insert(key, None);
                return Ok(None);
            }
            _ => return Ok(None),
        }
        let (rows, device) = (forward.rows, forward.device);
        let inputs = Inputs::new(forward.batch, forward.frequencies, device)?;
        rows.send(device, forward.group, false, Some(key.room))?;
        let logits = run(&inputs, &rows)?;
        let recorded: Result<Graph> = Graph::record(device, || {
            logits.slice_set(&run(&inputs, &rows)?, 0, 0)?;
            Ok(())
        });
        match recorded {
            Ok(graph) => {
                tracing::debug!(?key, "a forward is recorded as a CUDA graph");
                let recorded = rows.into_tables().map(|tables| Recorded {
                    graph,
                    inputs,
                    tables,
                    logits: logits.clone(),
                });
                self.seen.insert(key, recorded);
            }
            Err(reason) => {
                tracing::warn!("forwards are not recorded as CUDA graphs: {reason}");
                self.off = true;
            }
        }
        Ok(Some(logits))
    }
}
