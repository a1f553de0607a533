//! Values for several tensors that reach a GPU together: in one copy, after which one launch puts them into their places.
//! Each copy and each launch keeps a GPU from the kernels of a step for a microsecond or two.

#[cfg(feature = "cuda")]
use super::gpu;
use super::graph::{Values, overwrite};
use candle_core::{DType, Device, Result, Shape, Tensor};
use half::{bf16, f16};
use std::ops::Range;

/// Values to write to some tensors.
#[derive(Debug, Default)]
pub struct Writes {
    /// The values of all parts, in 32 bits.
    words: Vec<u32>,
    parts: Vec<Part>,
}

/// The tensor that some words go to.
#[derive(Debug)]
struct Part {
    to: Tensor,
    words: Range<usize>,
}

/// Values on the device of the tensors that they are for.
#[derive(Debug)]
pub struct SentWrites {
    /// `[_]` u32. Other writes have their words there, too.
    words: Tensor,
    parts: Vec<Part>,
    /// Where the table of the parts begins among the words.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CUDA reads it"))]
    table: usize,
}

impl Writes {
    /// Adds values for the first elements of `to`, which must be contiguous. On a GPU, an even number of f32 is rounded for a
    /// tensor in f16 or bf16 that begins at an even place.
    ///
    /// # Errors
    /// If there are more values than elements, or they have another type.
    pub fn push(&mut self, to: &Tensor, values: Values<'_>) -> Result<()> {
        let dtype = values.dtype();
        let len = match values {
            Values::U32(values) => values.len(),
            Values::I64(values) => values.len(),
            Values::F32(values) => values.len(),
        };
        // A word has two values of 16 bits.
        let is_rounded = dtype == DType::F32
            && matches!(to.dtype(), DType::F16 | DType::BF16)
            && !to.device().is_cpu()
            && len.is_multiple_of(2)
            && to.layout().start_offset().is_multiple_of(2);
        let has_type = dtype == to.dtype() || is_rounded;
        if !has_type || len > to.elem_count() || !to.is_contiguous() {
            candle_core::bail!(
                "writes: {len} values of {dtype:?} for {:?} of {:?}",
                to.layout(),
                to.dtype()
            );
        }
        let start = self.words.len();
        match values {
            Values::U32(values) => self.words.extend_from_slice(values),
            Values::F32(values) => match to.dtype() {
                DType::F16 => self
                    .words
                    .extend(pairs(values, |x| f16::from_f32(x).to_bits())),
                DType::BF16 => self
                    .words
                    .extend(pairs(values, |x| bf16::from_f32(x).to_bits())),
                _ => self.words.extend(values.iter().map(|x| x.to_bits())),
            },
            Values::I64(values) => {
                let halves = |&x: &i64| [x as u32, (x >> 32) as u32];
                self.words.extend(values.iter().flat_map(halves));
            }
        }
        let words = start..self.words.len();
        if !words.is_empty() {
            let to = to.clone();
            self.parts.push(Part { to, words });
        }
        Ok(())
    }

    /// A new tensor of `shape`, at least one element, with these values: on a GPU once they are [written](Self::write), on
    /// the CPU at once.
    ///
    /// # Errors
    /// If there is another number of values, or the device fails.
    ///
    /// # Safety
    /// On a GPU, nothing reads the tensor before the values are written: its memory holds anything.
    pub unsafe fn tensor(
        &mut self,
        values: Values<'_>,
        shape: impl Into<Shape>,
        device: &Device,
    ) -> Result<Tensor> {
        // SAFETY: the caller promises it.
        unsafe { self.tensor_in(values.dtype(), values, shape, device) }
    }

    /// As [`tensor`](Self::tensor), in `dtype`, to which values are rounded as [`push`](Self::push) does.
    ///
    /// # Errors
    /// As of both.
    ///
    /// # Safety
    /// As of [`tensor`](Self::tensor).
    pub unsafe fn tensor_in(
        &mut self,
        dtype: DType,
        values: Values<'_>,
        shape: impl Into<Shape>,
        device: &Device,
    ) -> Result<Tensor> {
        let shape = shape.into();
        if device.is_cpu() {
            let tensor = match values {
                Values::U32(values) => Tensor::from_slice(values, shape, device),
                Values::I64(values) => Tensor::from_slice(values, shape, device),
                Values::F32(values) => Tensor::from_slice(values, shape, device),
            };
            return tensor?.to_dtype(dtype);
        }
        // SAFETY: the caller promises it.
        let tensor = unsafe { Tensor::empty(shape, dtype, device)? };
        let before = self.words.len();
        self.push(&tensor, values)?;
        let words = tensor.elem_count() * tensor.dtype().size_in_bytes() / size_of::<u32>();
        if self.words.len() - before != words {
            candle_core::bail!("writes: too few values for {:?}", tensor.layout());
        }
        Ok(tensor)
    }

    /// Sends the values of `all` to `device` in one copy, and writes none of them yet.
    ///
    /// # Errors
    /// If a tensor is not there, or the device fails.
    pub fn send(all: Vec<Self>, device: &Device) -> Result<Vec<SentWrites>> {
        let (mut words, mut sent) = (Vec::new(), Vec::with_capacity(all.len()));
        for Self {
            words: own,
            mut parts,
        } in all
        {
            let first = words.len();
            words.extend(own);
            for part in &mut parts {
                part.words = part.words.start + first..part.words.end + first;
            }
            let table = words.len();
            words.extend(table_of(&parts, device)?);
            sent.push((parts, table));
        }
        if words.is_empty() {
            // GPUs have no empty allocations.
            words.push(0);
        }
        let len = words.len();
        let words = Tensor::from_vec(words, len, device)?;
        let with = |(parts, table)| SentWrites {
            words: words.clone(),
            parts,
            table,
        };
        Ok(sent.into_iter().map(with).collect())
    }

    /// Writes the values.
    ///
    /// # Errors
    /// As of [`send`](Self::send).
    pub fn write(self) -> Result<()> {
        let Some(first) = self.parts.first() else {
            return Ok(());
        };
        let device = first.to.device().clone();
        let sent = Self::send(vec![self], &device)?;
        sent.iter().try_for_each(SentWrites::write)
    }
}

/// Words of two values each, the first of which is in the lower half.
fn pairs(values: &[f32], bits: impl Fn(f32) -> u16) -> impl Iterator<Item = u32> {
    let (pairs, _) = values.as_chunks::<2>();
    let word = move |&[low, high]: &[f32; 2]| u32::from(bits(low)) | u32::from(bits(high)) << 16;
    pairs.iter().map(word)
}

/// The table of `parts`; empty on the CPU, which needs none.
fn table_of(parts: &[Part], device: &Device) -> Result<Vec<u32>> {
    if let Some(part) = (parts.iter()).find(|part| !part.to.device().same_device(device)) {
        candle_core::bail!("writes: {:?} is not on {device:?}", part.to.layout());
    }
    #[cfg(feature = "cuda")]
    if let Ok(device) = device.as_cuda_device() {
        let stream = device.cuda_stream();
        let mut table = Vec::new();
        for Part { to, words } in parts {
            let address = gpu::address(to, &stream)?;
            table.extend([address as u32, (address >> 32) as u32]);
            table.extend([words.start, words.len()].map(|n| n as u32));
        }
        return Ok(table);
    }
    Ok(Vec::new())
}

impl SentWrites {
    /// The values for `to`, which another step may replace before they are written: `[values]` u32, the bits of other
    /// types. `None` = there are none for it.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub fn values_for(&self, to: &Tensor) -> Result<Option<Tensor>> {
        let part = self.parts.iter().find(|part| part.to.id() == to.id());
        let words = part.map(|part| self.words.narrow(0, part.words.start, part.words.len()));
        words.transpose()
    }

    /// Writes the values.
    ///
    /// # Errors
    /// If the device fails.
    pub fn write(&self) -> Result<()> {
        if self.parts.is_empty() {
            return Ok(());
        }
        #[cfg(feature = "cuda")]
        if let Ok(device) = self.words.device().as_cuda_device() {
            return self.write_on(device);
        }
        self.parts.iter().try_for_each(|part| {
            let words = self.words.narrow(0, part.words.start, part.words.len())?;
            let words: Vec<u32> = words.to_vec1()?;
            match part.to.dtype() {
                DType::I64 => {
                    let whole = |two: &[u32]| i64::from(two[1]) << 32 | i64::from(two[0]);
                    let values: Vec<i64> = words.chunks_exact(2).map(whole).collect();
                    overwrite(&part.to, Values::I64(&values))
                }
                DType::F32 => {
                    let values: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
                    overwrite(&part.to, Values::F32(&values))
                }
                _ => overwrite(&part.to, Values::U32(&words)),
            }
        })
    }

    #[cfg(feature = "cuda")]
    fn write_on(&self, device: &candle_core::CudaDevice) -> Result<()> {
        /// Threads of a block, as in the kernel, and words of a part for each block, up to a maximum of blocks.
        const THREADS: usize = 256;
        const MAX_BLOCKS: usize = 16;
        let longest = self.parts.iter().map(|part| part.words.len()).max();
        let blocks = longest.unwrap_or(0).div_ceil(THREADS).clamp(1, MAX_BLOCKS);
        let kernel = gpu::function(device, "writes", gpu::WRITES, "write_words")?;
        let launch = kernel.launch().tensor(&self.words)?.int(self.table);
        let grid = gpu::grid((blocks, self.parts.len(), 1), THREADS, 0);
        // SAFETY: the table has the addresses of tensors that this has, and no more words than they have. Kernels read
        // tables before they wait for the previous kernel.
        unsafe { launch.run_apart(grid) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_all_types_come_together_and_are_written_later() {
        let cpu = Device::Cpu;
        let ids = Tensor::new(&[1u32, 2, 3], &cpu).unwrap();
        let masks = Tensor::new(&[4i64, 5], &cpu).unwrap();
        let angles = Tensor::new(&[0.5f32, 1.5], &cpu).unwrap();
        let writes = |id: u32, mask: i64, angle: f32| {
            let mut writes = Writes::default();
            writes.push(&masks, Values::I64(&[mask])).unwrap();
            writes.push(&ids, Values::U32(&[id, id + 1])).unwrap();
            writes.push(&angles, Values::F32(&[angle; 2])).unwrap();
            writes.push(&ids, Values::U32(&[])).unwrap();
            writes
        };
        let two = vec![writes(7, -1 << 40, -0.25), writes(9, i64::MAX, 3.0)];
        let sent = Writes::send(two, &cpu).unwrap();
        assert_eq!(ids.to_vec1::<u32>().unwrap(), [1, 2, 3]);
        // What another step writes among the values.
        let drawn = sent[1].values_for(&ids).unwrap().unwrap();
        assert_eq!(drawn.to_vec1::<u32>().unwrap(), [9, 10]);
        overwrite(&drawn, Values::U32(&[8])).unwrap();
        for (sent, id, mask, angle) in [
            (&sent[1], [8, 10], i64::MAX, 3.0),
            (&sent[0], [7, 8], -1 << 40, -0.25),
        ] {
            sent.write().unwrap();
            assert_eq!(ids.to_vec1::<u32>().unwrap(), [id[0], id[1], 3]);
            assert_eq!(masks.to_vec1::<i64>().unwrap(), [mask, 5]);
            assert_eq!(angles.to_vec1::<f32>().unwrap(), [angle; 2]);
        }
        Writes::default().write().unwrap();
        let mut wrong = Writes::default();
        wrong.push(&ids, Values::U32(&[0; 4])).unwrap_err();
        wrong.push(&ids, Values::F32(&[0.0])).unwrap_err();
        wrong
            .push(&masks.get(0).unwrap(), Values::I64(&[0; 2]))
            .unwrap_err();
    }

    #[test]
    fn new_tensors_have_their_values() {
        let (cpu, mut writes) = (Device::Cpu, Writes::default());
        let mut tensor = |values: Values<'_>, dims: &[usize]| {
            // SAFETY: on the CPU they have their values at once.
            unsafe { writes.tensor(values, dims, &cpu) }
        };
        let ids = tensor(Values::U32(&[1, 2, 3, 4]), &[2, 2]).unwrap();
        assert_eq!(ids.to_vec2::<u32>().unwrap(), [[1, 2], [3, 4]]);
        let angles = tensor(Values::F32(&[0.5]), &[1, 1, 1]).unwrap();
        assert_eq!(angles.dims(), [1, 1, 1]);
        let masks = tensor(Values::I64(&[i64::MIN, 1]), &[2]).unwrap();
        assert_eq!(masks.to_vec1::<i64>().unwrap(), [i64::MIN, 1]);
        tensor(Values::U32(&[1]), &[2]).unwrap_err();
        writes.write().unwrap();
    }
}
