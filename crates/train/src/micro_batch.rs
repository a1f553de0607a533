//! The number of rows that a forward of the student takes at once.

use super::DistillOptions;
use candle_core::Device;
use foretoken_core::console::say;
use foretoken_core::error::{Error, Result};
use foretoken_kernels as kernels;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The rows of a micro-batch. A GPU begins with as many as a step has, because it is busy only with thousands of
/// tokens, and takes half as many whenever its memory has no room for them.
pub struct MicroBatch {
    rows: AtomicUsize,
    /// Tokens of a row.
    len: usize,
}

impl MicroBatch {
    /// Begins with the rows that `options` ask for; without the flag, with one on the CPU and with those of a step on
    /// a GPU.
    pub fn new(options: &DistillOptions, device: &Device) -> Self {
        let most = if device.is_cpu() {
            1
        } else {
            options.batch_size
        };
        Self {
            rows: options.micro_batch.unwrap_or(most).into(),
            len: options.seq_len,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.load(Ordering::Relaxed)
    }

    /// Halves the micro-batches after one of `rows` rows on `device` has failed with `error`.
    ///
    /// # Errors
    /// `error`, unless the memory of the device was too small; `Setup`, if it is too small for one row.
    pub fn halve(&self, rows: usize, error: Error, device: &Device) -> Result<()> {
        if !is_out_of_memory(&error) {
            return Err(error);
        }
        if rows <= 1 {
            let len = self.len;
            let memory = kernels::device_memory(device).map_err(Error::setup)?;
            let total = memory.map_or(0, |(_, total)| total);
            return Err(Error::setup(format!(
                "to train on one row of {len} tokens takes more memory than the GPU has left of its {total} bytes: lower --seq-len"
            )));
        }
        let fewer = rows.div_ceil(2);
        say(format_args!(
            "the GPU has no memory for {rows} rows at once: from now on it takes {fewer}"
        ));
        self.rows.store(fewer, Ordering::Relaxed);
        Ok(())
    }
}

/// Whether the device had no memory left: the driver's word for it, or cuBLAS's.
fn is_out_of_memory(error: &Error) -> bool {
    let text = error.to_string();
    ["OUT_OF_MEMORY", "ALLOC_FAILED"]
        .iter()
        .any(|name| text.contains(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_memory_makes_micro_batches_smaller() {
        let micro_batch = MicroBatch {
            rows: 5.into(),
            len: 256,
        };
        let lack = || Error::internal("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
        micro_batch.halve(5, lack(), &Device::Cpu).unwrap();
        assert_eq!(micro_batch.rows(), 3);
        let other = Error::internal("DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"\")");
        micro_batch.halve(3, other, &Device::Cpu).unwrap_err();
        assert_eq!(micro_batch.rows(), 3);
        let last = micro_batch.halve(1, lack(), &Device::Cpu).unwrap_err();
        let line = last.to_string();
        assert!(
            line.contains("one row of 256 tokens") && line.lines().count() == 1,
            "{line}"
        );
    }
}
