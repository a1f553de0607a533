//! The pool slots that the keys and values of a forward's rows are written to.

use super::graph::{Values, overwrite};
use candle_core::{Device, Result, Tensor};

/// The pool slots of a forward's rows, one per row, in device memory.
///
/// All slots are inside any pool that has [`num_slots`](Self::num_slots) slots: they are checked on the
/// host before they are sent to the device, and no one else can change that memory. So kernels need not
/// check them again, which a GPU could not do.
#[derive(Debug)]
pub struct Slots {
    /// `[rows]` u32.
    tensor: Tensor,
    num_slots: usize,
}

impl Slots {
    /// Sends `slots`, at least one, to `device`.
    ///
    /// # Errors
    /// If a slot is not below `num_slots`, or the device fails.
    pub fn new(slots: &[u32], num_slots: usize, device: &Device) -> Result<Self> {
        check(slots, num_slots)?;
        let tensor = Tensor::new(slots, device)?;
        Ok(Self { tensor, num_slots })
    }

    /// Overwrites them with the same number of other slots, in the same memory.
    ///
    /// # Errors
    /// If the number differs, a slot is not below [`num_slots`](Self::num_slots), or the device fails.
    pub fn replace(&self, slots: &[u32]) -> Result<()> {
        if slots.len() != self.len() {
            candle_core::bail!("slots: cannot replace {} by {}", self.len(), slots.len());
        }
        check(slots, self.num_slots)?;
        overwrite(&self.tensor, Values::U32(slots))
    }

    /// The number of slots, which is the number of rows.
    #[allow(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.tensor.elem_count()
    }

    /// The number of slots of the smallest pool that contains all of them.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// The slots `[rows]` u32, for kernels, which only read them.
    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Checks that all of `slots` are below `num_slots`.
pub(super) fn check(slots: &[u32], num_slots: usize) -> Result<()> {
    match slots.iter().find(|&&slot| slot as usize >= num_slots) {
        None => Ok(()),
        Some(slot) => candle_core::bail!("slot {slot} is outside the pool of {num_slots}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_outside_the_pool_are_refused_also_on_replay() {
        let cpu = Device::Cpu;
        let slots = Slots::new(&[4, 0], 5, &cpu).unwrap();
        assert_eq!((slots.len(), slots.num_slots()), (2, 5));
        for wrong in [&[0, 5][..], &[u32::MAX, 0], &[1], &[1, 2, 3]] {
            slots.replace(wrong).unwrap_err();
            assert_eq!(slots.tensor().to_vec1::<u32>().unwrap(), [4, 0]);
        }
        slots.replace(&[3, 1]).unwrap();
        assert_eq!(slots.tensor().to_vec1::<u32>().unwrap(), [3, 1]);
        Slots::new(&[5], 5, &cpu).unwrap_err();
    }
}
