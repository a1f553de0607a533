//! Where the keys and values of a forward's rows go.

use super::graph::{Values, overwrite};
use candle_core::{Device, Result, Tensor};

/// Pool slots of the rows of a forward, one a row, in the memory of a device.
///
/// All are inside of any pool that has [`num_slots`](Self::num_slots) slots: they are checked where
/// they come from, on the host, and nobody else can change the memory that they are sent to. So
/// kernels need not check them again, and a GPU could not.
#[derive(Debug)]
pub struct Slots {
    /// `[rows]` u32.
    tensor: Tensor,
    num_slots: usize,
}

impl Slots {
    /// Sends `slots` to `device`; at least one.
    ///
    /// # Errors
    /// Where a slot is not below `num_slots`, or the device fails.
    pub fn new(slots: &[u32], num_slots: usize, device: &Device) -> Result<Self> {
        check(slots, num_slots)?;
        let tensor = Tensor::new(slots, device)?;
        Ok(Self { tensor, num_slots })
    }

    /// Puts as many others in their place, in the same memory.
    ///
    /// # Errors
    /// Where there are more or fewer, one is not below [`num_slots`](Self::num_slots), or the device
    /// fails.
    pub fn replace(&self, slots: &[u32]) -> Result<()> {
        if slots.len() != self.len() {
            candle_core::bail!("slots: {} in the place of {}", slots.len(), self.len());
        }
        check(slots, self.num_slots)?;
        overwrite(&self.tensor, Values::U32(slots))
    }

    /// Rows.
    #[allow(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.tensor.elem_count()
    }

    /// Slots of the smallest pool that all of them are inside of.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// For kernels, which only read it.
    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Whether all of `slots` are inside of a pool of `num_slots`.
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
    fn what_is_outside_the_pool_is_refused_also_on_replay() {
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
