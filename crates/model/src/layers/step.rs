//! The inputs of a forward's layers.

use super::block_conv::BlockPlaces;
use super::inputs::Inputs;
use crate::config::ModelConfig;
use crate::lora::RowAdapters;
use candle_core::Tensor;
use foretoken_core::error::Result;
use foretoken_kernels::{AttentionBatch, Slots, StateBatch};
use std::cell::Cell;

/// The inputs that all layers of one forward share.
pub(crate) struct Step<'a> {
    /// The configuration of the model or head.
    pub config: &'a ModelConfig,
    pub slots: &'a Slots,
    /// The angles of the rows: one entry for each of [`RopeTables`](super::rope::RopeTables).
    pub angles: Vec<Angles>,
    /// The spans of the rows that attend.
    pub spans: &'a AttentionBatch<'a>,
    /// The rows that attend, u32; `None` = the last ones, or all.
    pub attending: Option<&'a Tensor>,
    /// The inputs of all layers, which [`LayerInputs`](super::input::LayerInputs) computes.
    pub layer_inputs: Option<Tensor>,
    /// All rows by their sequences, if layers have states.
    pub states: &'a StateBatch,
    /// The places of the rows that attend in their blocks, if layers have convolutions.
    pub places: Option<&'a BlockPlaces>,
    /// The adapters of all rows.
    pub adapters: &'a RowAdapters,
    /// The adapters of the rows that attend.
    pub attending_adapters: &'a RowAdapters,
    pub experts_read: &'a Cell<usize>,
}

/// Cosines and sines by which a position embedding rotates the rows, in the compute dtype.
#[derive(Clone)]
pub(crate) struct Angles {
    /// `[rows, width / 2]` each.
    pub cos: Tensor,
    pub sin: Tensor,
    /// `[rows, 1, 1]`: the factor of a row's queries, if there is one.
    pub query_scale: Option<Tensor>,
}

impl<'a> Step<'a> {
    /// The inputs of a forward over `spans`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn new(
        config: &'a ModelConfig,
        inputs: &'a Inputs,
        spans: &'a AttentionBatch<'a>,
    ) -> Result<Self> {
        let angles = inputs.angles.iter();
        let angles = angles.map(|angles| {
            let both = &angles.both;
            let scale = angles.query_scale.as_ref();
            Ok(Angles {
                cos: both.get(0)?,
                sin: both.get(1)?,
                query_scale: scale
                    .map(|scale| scale.to_dtype(both.dtype()))
                    .transpose()?,
            })
        });
        Ok(Self {
            config,
            slots: &inputs.slots,
            angles: angles.collect::<Result<_>>()?,
            spans,
            attending: None,
            layer_inputs: None,
            states: &inputs.states,
            places: None,
            adapters: &inputs.adapters,
            attending_adapters: &inputs.adapters,
            experts_read: &inputs.experts_read,
        })
    }

    /// Sets the places of the rows in their blocks, if layers need them.
    pub fn with_places(self, places: Option<&'a BlockPlaces>) -> Self {
        Self { places, ..self }
    }

    /// Sets the inputs of all layers, if layers have inputs of their own.
    pub fn with_layer_inputs(self, layer_inputs: Option<Tensor>) -> Self {
        Self {
            layer_inputs,
            ..self
        }
    }

    /// This step for a layer after which only `rows`, u32, are needed. `spans` and `adapters` are those of `rows`.
    pub fn of_rows(
        &self,
        rows: &'a Tensor,
        spans: &'a AttentionBatch<'a>,
        adapters: &'a RowAdapters,
    ) -> Self {
        Self {
            spans,
            attending: Some(rows),
            attending_adapters: adapters,
            angles: self.angles.clone(),
            layer_inputs: self.layer_inputs.clone(),
            ..*self
        }
    }

    /// This step for layers that have only `rows`, u32, and write nothing. `spans` and `adapters` are those of `rows`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn only(
        &self,
        rows: &Tensor,
        spans: &'a AttentionBatch<'a>,
        adapters: &'a RowAdapters,
    ) -> Result<Self> {
        let pick = |all: &Tensor| all.index_select(rows, 0);
        let angles = self.angles.iter().map(|angles| {
            Ok(Angles {
                cos: pick(&angles.cos)?,
                sin: pick(&angles.sin)?,
                query_scale: angles.query_scale.as_ref().map(pick).transpose()?,
            })
        });
        Ok(Self {
            config: self.config,
            slots: self.slots,
            angles: angles.collect::<Result<_>>()?,
            spans,
            attending: None,
            layer_inputs: self.layer_inputs.as_ref().map(pick).transpose()?,
            states: self.states,
            places: None,
            adapters,
            attending_adapters: adapters,
            experts_read: self.experts_read,
        })
    }

    /// What norms add to mean squares.
    pub fn eps(&self) -> f32 {
        self.config.rms_norm_eps as f32
    }

    /// The rows of `all` that attend, `count` of them.
    ///
    /// # Errors
    /// If the device fails.
    pub fn pick(&self, all: &Tensor, count: usize) -> Result<Tensor> {
        Ok(match self.attending {
            Some(rows) => all.contiguous()?.index_select(rows, 0)?,
            None => all.narrow(0, all.dim(0)? - count, count)?,
        })
    }
}
