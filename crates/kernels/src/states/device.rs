//! States in the memory of a GPU. Slots get memory when they are first used, and kernels find it by a table of addresses,
//! so that a recorded graph also reads slots that are newer than itself.

use super::{StateRows, StateShape, StateStart};
use crate::gpu;
use crate::graph::{Values, overwrite};
use candle_core::{DType, Device, Result, Tensor};

/// Addresses of a slot: of its state, and of its nodes.
const ADDRESSES: usize = 2;

/// The states of a layer.
#[derive(Debug)]
pub(crate) struct DeviceStates {
    shape: StateShape,
    /// The dtype of the inputs of nodes.
    dtype: DType,
    device: Device,
    slots: Vec<Slot>,
    /// `[MAX_GPU_STATES * ADDRESSES]` i64
    addresses: Tensor,
}

/// The memory of a slot.
#[derive(Debug, Default)]
struct Slot {
    /// `[matrices + window]` f32, as `recurrent.cu` divides it; `None` = it was never used.
    state: Option<Tensor>,
    /// `[nodes * inputs]`: room for the inputs of so many nodes.
    nodes: Option<Tensor>,
    /// Number of nodes of the last forward.
    num_nodes: usize,
}

impl DeviceStates {
    /// No states, of this shape and with inputs of this dtype.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn new(shape: StateShape, dtype: DType, device: &Device) -> Result<Self> {
        let count = super::MAX_GPU_STATES * ADDRESSES;
        Ok(Self {
            shape,
            dtype,
            device: device.clone(),
            slots: Vec::new(),
            addresses: Tensor::zeros(count, DType::I64, device)?,
        })
    }

    /// The addresses of all slots, for kernels.
    pub fn addresses(&self) -> &Tensor {
        &self.addresses
    }

    /// See [`StatePool::prepare`](super::StatePool::prepare).
    pub fn prepare(&mut self, rows: &[StateRows]) -> Result<()> {
        let kept = || rows.iter().filter_map(|part| part.kept.as_ref());
        for kept in kept() {
            self.reserve(kept.slot)?;
            let nodes = self.slots[kept.slot as usize].num_nodes;
            if let Some(node) = kept.accepted.iter().find(|&&n| usize::from(n) >= nodes) {
                candle_core::bail!("states: node {node} was not in the forward before");
            }
            for &(_, slot) in &kept.copies {
                self.reserve(slot)?;
            }
        }
        for kept in kept() {
            if let StateStart::CopyOf(from) = kept.start {
                self.copy(from, kept.slot)?;
            }
        }
        for part in rows {
            if let Some(kept) = &part.kept {
                self.reserve_nodes(kept.slot, part.parents.len())?;
                for &(_, slot) in &kept.copies {
                    self.slots[slot as usize].num_nodes = 0;
                }
            }
        }
        Ok(())
    }

    /// Checks that a forward with these rows, whose inputs have this dtype, finds all memory.
    ///
    /// # Errors
    /// If it was not prepared.
    pub fn check(&self, rows: &[StateRows], dtype: DType) -> Result<()> {
        let has_state = |slot: u32| (self.slots.get(slot as usize)).is_some_and(Slot::has_state);
        let is_ready = |part: &StateRows| {
            let Some(kept) = &part.kept else { return true };
            let Some(slot) = self.slots.get(kept.slot as usize) else {
                return false;
            };
            let room = slot.room(self.shape.inputs);
            slot.has_state()
                && kept.copies.iter().all(|&(_, slot)| has_state(slot))
                && kept.accepted.iter().all(|&node| usize::from(node) < room)
                && part.parents.len() <= room
        };
        if dtype != self.dtype || !rows.iter().all(is_ready) {
            candle_core::bail!("states: {rows:?} of {dtype:?} were not prepared");
        }
        Ok(())
    }

    /// Gives a slot memory, if it has none.
    fn reserve(&mut self, slot: u32) -> Result<()> {
        let at = slot as usize;
        if at >= super::MAX_GPU_STATES {
            let most = super::MAX_GPU_STATES;
            candle_core::bail!("states: slot {slot}, and a GPU has up to {most}");
        }
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, Slot::default);
        }
        if self.slots[at].state.is_none() {
            let len = self.shape.matrices + self.shape.window;
            let state = Tensor::zeros(len.max(1), DType::F32, &self.device)?;
            self.note(at * ADDRESSES, &state)?;
            self.slots[at].state = Some(state);
        }
        Ok(())
    }

    /// Gives a slot room for the inputs of `count` nodes. Those that it has stay.
    fn reserve_nodes(&mut self, slot: u32, count: usize) -> Result<()> {
        let (at, inputs) = (slot as usize, self.shape.inputs);
        let before = &mut self.slots[at];
        before.num_nodes = count;
        if count > before.room(inputs) {
            let len = count.next_power_of_two() * inputs;
            let nodes = Tensor::zeros(len, self.dtype, &self.device)?;
            if let Some(before) = &before.nodes {
                nodes.slice_set(before, 0, 0)?;
            }
            self.note(at * ADDRESSES + 1, &nodes)?;
            self.slots[at].nodes = Some(nodes);
        }
        Ok(())
    }

    /// Writes the address of `memory` to its place in the table.
    fn note(&self, place: usize, memory: &Tensor) -> Result<()> {
        let stream = self.device.as_cuda_device()?.cuda_stream();
        let address = gpu::address(memory, &stream)? as i64;
        overwrite(
            &self.addresses.narrow(0, place, 1)?,
            Values::I64(&[address]),
        )
    }

    /// The matrices and the window of the state in `slot`.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&mut self, slot: u32) -> Result<Vec<f32>> {
        self.reserve(slot)?;
        match &self.slots[slot as usize].state {
            Some(state) => state.to_vec1(),
            None => Ok(Vec::new()),
        }
    }

    /// Overwrites the state in `slot` with such values. It has no nodes then.
    ///
    /// # Errors
    /// If there are more or fewer, or the device fails.
    pub fn write(&mut self, slot: u32, values: Vec<f32>) -> Result<()> {
        self.reserve(slot)?;
        let own = &mut self.slots[slot as usize];
        own.num_nodes = 0;
        match &own.state {
            Some(state) => state.slice_set(&Tensor::new(values, &self.device)?, 0, 0),
            None => Ok(()),
        }
    }

    /// Makes slot `to` like slot `from`, without nodes.
    fn copy(&mut self, from: u32, to: u32) -> Result<()> {
        self.reserve(from)?;
        let state = |slot: u32| self.slots[slot as usize].state.as_ref();
        match (state(from), state(to)) {
            (Some(from_state), Some(to_state)) if from != to => {
                to_state.slice_set(from_state, 0, 0)
            }
            _ => Ok(()),
        }
    }
}

impl Slot {
    fn has_state(&self) -> bool {
        self.state.is_some()
    }

    /// Number of nodes, of so many inputs each, that it has room for.
    fn room(&self, inputs: usize) -> usize {
        let nodes = self.nodes.as_ref();
        nodes.map_or(0, |nodes| nodes.elem_count() / inputs)
    }
}
