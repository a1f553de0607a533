//! The pool slots that the keys and values of a forward's rows are written to.

use super::graph::Values;
use super::writes::Writes;
use candle_core::{Device, Result, Tensor};

/// The place of a slot of a row of padding.
const NONE: u32 = u32::MAX;

/// The pool slots of a forward's rows, one per row, in device memory. The last rows may be padding, which has no
/// slot: kernels of a GPU write nothing of it. The CPU takes none.
///
/// All slots are inside any pool that has [`num_slots`](Self::num_slots) slots: they are checked on the
/// host before they are sent to the device, and no one else can change that memory. So kernels need not
/// check them again, which a GPU could not do.
#[derive(Debug)]
pub struct Slots {
    /// `[rows]` u32, [`NONE`] for padding.
    tensor: Tensor,
    num_slots: usize,
}

impl Slots {
    /// Sends `slots`, at least one, to `device`.
    ///
    /// # Errors
    /// If a slot is not below `num_slots`, or the device fails.
    pub fn new(slots: &[u32], num_slots: usize, device: &Device) -> Result<Self> {
        Self::padded(slots, slots.len(), num_slots, device)
    }

    /// Sends `slots` of the first of `rows` rows to `device`; the rows after them are padding.
    ///
    /// # Errors
    /// If there are more slots than rows, a slot is not below `num_slots`, or the device is a CPU and there is
    /// padding, or fails.
    pub fn padded(slots: &[u32], rows: usize, num_slots: usize, device: &Device) -> Result<Self> {
        let mut writes = Writes::default();
        // SAFETY: they are written here.
        let slots = unsafe { Self::padded_with(slots, rows, num_slots, device, &mut writes)? };
        writes.write()?;
        Ok(slots)
    }

    /// As [`padded`](Self::padded), but a GPU has them once `writes` are written.
    ///
    /// # Errors
    /// As of [`padded`](Self::padded).
    ///
    /// # Safety
    /// No kernel reads them before.
    pub unsafe fn padded_with(
        slots: &[u32],
        rows: usize,
        num_slots: usize,
        device: &Device,
        writes: &mut Writes,
    ) -> Result<Self> {
        if rows > slots.len() && device.is_cpu() {
            candle_core::bail!("slots: {} for {rows} rows on the CPU", slots.len());
        }
        let slots = in_rows(slots, rows, num_slots)?;
        // SAFETY: the caller promises it.
        let tensor = unsafe { writes.tensor(Values::U32(&slots), rows, device)? };
        Ok(Self { tensor, num_slots })
    }

    /// Adds to `writes` other slots, for the same memory. If there are fewer than rows, the rest is padding.
    ///
    /// # Errors
    /// As of [`padded`](Self::padded).
    pub fn replace(&self, slots: &[u32], writes: &mut Writes) -> Result<()> {
        if slots.len() < self.len() && self.tensor.device().is_cpu() {
            candle_core::bail!("slots: cannot replace {} by {}", self.len(), slots.len());
        }
        let slots = in_rows(slots, self.len(), self.num_slots)?;
        writes.push(&self.tensor, Values::U32(&slots))
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

    /// The device of their memory.
    pub fn device(&self) -> &Device {
        self.tensor.device()
    }

    /// The slots `[rows]` u32, for kernels, which only read them.
    pub(super) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// `slots`, checked, and then padding up to `rows` rows.
fn in_rows(slots: &[u32], rows: usize, num_slots: usize) -> Result<Vec<u32>> {
    if slots.len() > rows {
        candle_core::bail!("slots: {} for {rows} rows", slots.len());
    }
    check(slots, num_slots)?;
    let padding = std::iter::repeat_n(NONE, rows - slots.len());
    Ok(slots.iter().copied().chain(padding).collect())
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
        Slots::padded(&[4, 0], 3, 5, &cpu).unwrap_err();
        let replace = |new: &[u32]| {
            let mut writes = Writes::default();
            slots.replace(new, &mut writes)?;
            writes.write()
        };
        // The CPU takes no padding, so one slot is too few.
        for wrong in [&[0, 5][..], &[u32::MAX, 0], &[1], &[1, 2, 3]] {
            replace(wrong).unwrap_err();
            assert_eq!(slots.tensor().to_vec1::<u32>().unwrap(), [4, 0]);
        }
        replace(&[3, 1]).unwrap();
        assert_eq!(slots.tensor().to_vec1::<u32>().unwrap(), [3, 1]);
        Slots::new(&[5], 5, &cpu).unwrap_err();
    }
}
