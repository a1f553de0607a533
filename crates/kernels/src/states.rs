//! Recurrent states: which rows of a forward read and write which, and where they are kept.

#[cfg(feature = "cuda")]
mod device;

use crate::pool_rows::append_values;
use candle_core::{DType, Device, Result};
#[cfg(feature = "cuda")]
use device::DeviceStates;
use std::ops::Range;

/// Maximum number of states of a layer on a GPU.
pub const MAX_GPU_STATES: usize = 1 << 14;

/// The rows of one sequence in a forward, for layers that keep a state of the whole text instead of K and V of its
/// tokens.
///
/// Such a state cannot be cut back to an earlier token, so it only takes in tokens that are certain. What a layer reads of
/// the nodes of a draft is kept beside it; the next forward takes in those that were accepted, before its own rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateRows {
    /// The rows of the forward: a chain of certain tokens, and then the nodes of a draft.
    pub rows: Range<usize>,
    /// The parent of each node, as in `Batch::push_span`.
    pub parents: Vec<Option<u16>>,
    /// `None` = the rows are the first of their sequence, and nothing is kept.
    pub kept: Option<KeptState>,
}

/// The state that a sequence goes on with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptState {
    /// Its slot, in all layers.
    pub slot: u32,
    /// The state before the rows and the accepted nodes.
    pub start: StateStart,
    /// The accepted nodes of the forward before, from the root down, which the state takes in first.
    pub accepted: Vec<u16>,
    /// Other slots that become like this one after so many of the accepted nodes and of the chain, at least 1.
    pub copies: Vec<(usize, u32)>,
}

/// The state before the first token that is taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateStart {
    /// The state of an empty text.
    Empty,
    /// The state in the sequence's slot.
    Kept,
    /// The state in another slot, which stays as it is.
    CopyOf(u32),
}

impl KeptState {
    /// The state that a chunk of a text without drafts keeps, be it the first one or a later one.
    pub fn of_chunk(slot: u32, is_first: bool) -> Self {
        Self {
            slot,
            start: if is_first {
                StateStart::Empty
            } else {
                StateStart::Kept
            },
            accepted: Vec::new(),
            copies: Vec::new(),
        }
    }
}

impl StateRows {
    /// Number of rows that are no nodes.
    pub fn chain(&self) -> usize {
        self.rows.len() - self.parents.len()
    }

    /// Checks that `all` have the first rows of a forward once each, in order, and no slot twice. Returns the number of
    /// rows.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn check(all: &[Self]) -> Result<usize> {
        let mut end = 0;
        let mut slots = Vec::new();
        for part in all {
            let is_next = part.rows.start == end && part.parents.len() <= part.rows.len();
            let mut nodes = part.parents.iter().enumerate();
            if !is_next || !nodes.all(|(i, parent)| parent.is_none_or(|p| usize::from(p) < i)) {
                candle_core::bail!("states: the rows {part:?} do not follow row {end}");
            }
            end = part.rows.end;
            if let Some(kept) = &part.kept {
                let most = kept.accepted.len() + part.chain();
                if kept.copies.iter().any(|(at, _)| !(1..=most).contains(at)) {
                    candle_core::bail!("states: copies {:?} of {most} tokens", kept.copies);
                }
                slots.push(kept.slot);
                slots.extend(kept.copies.iter().map(|(_, slot)| slot));
            }
        }
        slots.sort_unstable();
        if slots.windows(2).any(|pair| pair[0] == pair[1]) {
            candle_core::bail!("states: a slot has two writers in {all:?}");
        }
        Ok(end)
    }
}

/// Sizes of the states of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// Values of the matrices of all heads.
    pub matrices: usize,
    /// Values of the last tokens that a convolution reads.
    pub window: usize,
    /// Values that a state takes in of a token.
    pub inputs: usize,
}

impl StateShape {
    /// Bytes of one state, without the inputs of draft nodes.
    pub fn bytes(&self) -> usize {
        (self.matrices + self.window) * size_of::<f32>()
    }
}

/// The states of a layer, by slot. They are in f32: rounding would add up over a text.
#[derive(Debug)]
pub struct StatePool {
    shape: StateShape,
    memory: Memory,
}

/// Where states are.
#[derive(Debug)]
enum Memory {
    /// So many as were used so far.
    Host(Vec<StateBuffers>),
    #[cfg(feature = "cuda")]
    Device(DeviceStates),
}

/// One state.
#[derive(Debug, Default)]
pub(super) struct StateBuffers {
    pub matrices: Vec<f32>,
    /// Of the last tokens that were taken in, the last one at the end.
    pub window: Vec<f32>,
    /// The inputs of the nodes of the last forward.
    pub nodes: Vec<f32>,
}

impl StatePool {
    /// Makes an empty pool of states with this shape on the CPU; slots are allocated when they are first used.
    pub fn new(shape: StateShape) -> Self {
        Self {
            shape,
            memory: Memory::Host(Vec::new()),
        }
    }

    /// As [`StatePool::new`], on `device`. On a GPU, `dtype` is that of activations.
    ///
    /// # Errors
    /// If the device has no memory.
    pub fn on(shape: StateShape, dtype: DType, device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            let memory = Memory::Device(DeviceStates::new(shape, dtype, device)?);
            return Ok(Self { shape, memory });
        }
        let _ = (dtype, device);
        Ok(Self::new(shape))
    }

    /// Makes a GPU ready for a forward with these rows: allocates slots, and copies the states that sequences begin with.
    /// To be called once before each forward; the CPU does that in the forward.
    ///
    /// # Errors
    /// If an accepted node was not in the forward before, or the device has no memory.
    pub fn prepare(&mut self, rows: &[StateRows]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Memory::Device(states) = &mut self.memory {
            return states.prepare(rows);
        }
        let _ = rows;
        Ok(())
    }

    /// The states of a GPU.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(&self) -> Option<&DeviceStates> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(states) => Some(states),
        }
    }

    /// The sizes of each state.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// Appends the matrices and the window of the state in `slot` to `bytes`, zeros if it was never used. On a GPU, the host
    /// waits for them.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read(&mut self, slot: u32, bytes: &mut Vec<u8>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Memory::Device(states) = &mut self.memory {
            append_values(&states.read(slot)?, bytes, f32::to_ne_bytes);
            return Ok(());
        }
        let state = &self.allocate(slot as usize + 1)?[slot as usize];
        append_values(&state.matrices, bytes, f32::to_ne_bytes);
        append_values(&state.window, bytes, f32::to_ne_bytes);
        Ok(())
    }

    /// Overwrites the state in `slot` with what [`StatePool::read`] has appended on the same kind of device.
    ///
    /// # Errors
    /// If the bytes are those of another shape, or the device fails.
    pub fn write(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        const FLOAT: usize = size_of::<f32>();
        if bytes.len() != self.shape.bytes() {
            candle_core::bail!("states: {} bytes for {}", bytes.len(), self.shape.bytes());
        }
        let floats = bytes.as_chunks::<FLOAT>().0.iter();
        let mut floats = floats.map(|&bytes| f32::from_ne_bytes(bytes));
        #[cfg(feature = "cuda")]
        if let Memory::Device(states) = &mut self.memory {
            return states.write(slot, floats.collect());
        }
        let state = &mut self.allocate(slot as usize + 1)?[slot as usize];
        let places = state.matrices.iter_mut().chain(&mut state.window);
        places
            .zip(&mut floats)
            .for_each(|(place, value)| *place = value);
        Ok(())
    }

    /// The states, of which there are at least `count`.
    fn allocate(&mut self, count: usize) -> Result<&mut [StateBuffers]> {
        match &mut self.memory {
            Memory::Host(slots) => {
                while slots.len() < count {
                    slots.push(StateBuffers {
                        matrices: vec![0.; self.shape.matrices],
                        window: vec![0.; self.shape.window],
                        nodes: Vec::new(),
                    });
                }
                Ok(slots)
            }
            #[cfg(feature = "cuda")]
            Memory::Device(_) => candle_core::bail!("states: they are not on the CPU"),
        }
    }

    /// The states in these slots, each of which is named once, those that were never used included.
    ///
    /// # Errors
    /// If the states are not on the CPU.
    pub(super) fn get_mut(&mut self, slots: &[u32]) -> Result<Vec<&mut StateBuffers>> {
        let wanted = slots.iter().map(|&slot| slot as usize + 1).max();
        let all = self.allocate(wanted.unwrap_or(0))?;
        let mut all: Vec<_> = all.iter_mut().map(Some).collect();
        let found = slots.iter().filter_map(|&slot| all[slot as usize].take());
        Ok(found.collect())
    }

    /// Makes slot `to` like slot `from`.
    ///
    /// # Errors
    /// If the states are not on the CPU.
    pub(super) fn copy(&mut self, from: u32, to: u32) -> Result<()> {
        if let [from, to] = &mut self.get_mut(&[from, to])?[..] {
            to.matrices.copy_from_slice(&from.matrices);
            to.window.copy_from_slice(&from.window);
        }
        Ok(())
    }
}
