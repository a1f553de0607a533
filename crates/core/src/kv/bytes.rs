//! The contents of blocks and of recurrent states as bytes, for a place that is not a pool. In the byte order of this
//! machine.

use super::KvStore;
use crate::error::{Error, Result};
use candle_core::{CpuStorage, Device, Storage, Tensor};
use foretoken_kernels::StatePool;
use std::sync::{MutexGuard, PoisonError};

impl KvStore {
    /// Bytes of K and V of one block over all layers.
    pub fn block_bytes(&self) -> usize {
        self.parts().map(|pool| self.part_bytes(pool)).sum()
    }

    /// K and V of `block`, layer after layer.
    ///
    /// # Errors
    /// If there is no such block, or the pool is not on the CPU.
    pub fn read_block(&self, block: u32) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(self.block_bytes());
        for pool in self.parts() {
            let first = block as usize * self.block_size;
            append(&pool.narrow(0, first, self.block_size)?, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Overwrites K and V of `block` with what [`KvStore::read_block`] has returned.
    ///
    /// # Errors
    /// If there is no such block, the bytes are those of another shape, or the pool is not on the CPU. The block's
    /// contents are then not specified.
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.block_bytes() {
            return Err(wrong_length(bytes.len(), self.block_bytes()));
        }
        let mut rest = bytes;
        for pool in self.parts() {
            let (part, later) = rest.split_at(self.part_bytes(pool));
            rest = later;
            let dims = [&[self.block_size][..], &pool.dims()[1..]].concat();
            let part = Tensor::from_raw_buffer(part, pool.dtype(), &dims, &Device::Cpu)?;
            pool.slice_set(&part, 0, block as usize * self.block_size)?;
        }
        Ok(())
    }

    /// The recurrent state in `slot`, layer after layer.
    ///
    /// # Errors
    /// If the states are not on the CPU.
    pub fn read_state(&self, slot: u32) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for mut pool in self.state_pools() {
            let (matrices, window) = pool.state_mut(slot)?;
            put(matrices, &mut bytes, f32::to_ne_bytes);
            put(window, &mut bytes, f32::to_ne_bytes);
        }
        Ok(bytes)
    }

    /// Overwrites the recurrent state in `slot` with what [`KvStore::read_state`] has returned.
    ///
    /// # Errors
    /// If the bytes are those of another shape, or the states are not on the CPU; then nothing changes.
    pub fn write_state(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        const FLOAT: usize = size_of::<f32>();
        let length: usize = self.state_pools().map(|pool| pool.shape().bytes()).sum();
        if bytes.len() != length {
            return Err(wrong_length(bytes.len(), length));
        }
        let floats = bytes.chunks_exact(FLOAT).filter_map(<[u8]>::first_chunk);
        let mut floats = floats.map(|&bytes| f32::from_ne_bytes(bytes));
        for mut pool in self.state_pools() {
            let (matrices, window) = pool.state_mut(slot)?;
            let places = matrices.iter_mut().chain(window);
            places
                .zip(&mut floats)
                .for_each(|(place, value)| *place = value);
        }
        Ok(())
    }

    /// The tensors that hold anything.
    fn parts(&self) -> impl Iterator<Item = &Tensor> {
        let pools = self.layers.iter().flat_map(|(k, v)| [k, v]);
        pools.filter(|pool| pool.elem_count() > 0)
    }

    /// Bytes of a block in one tensor.
    fn part_bytes(&self, pool: &Tensor) -> usize {
        let values: usize = pool.dims()[1..].iter().product();
        self.block_size * values * pool.dtype().size_in_bytes()
    }

    fn state_pools(&self) -> impl Iterator<Item = MutexGuard<'_, StatePool>> {
        let pools = self.states.iter();
        pools.map(|pool| pool.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn wrong_length(found: usize, wanted: usize) -> Error {
    Error::internal(format!(
        "{found} bytes for a part of a pool that has {wanted}"
    ))
}

/// Appends the values of a contiguous tensor on the CPU.
fn append(tensor: &Tensor, bytes: &mut Vec<u8>) -> Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        return Err(Error::internal("a pool is not on the CPU"));
    };
    match storage {
        CpuStorage::F32(values) => put(&values[start..end], bytes, f32::to_ne_bytes),
        CpuStorage::F16(values) => put(&values[start..end], bytes, half::f16::to_ne_bytes),
        CpuStorage::BF16(values) => put(&values[start..end], bytes, half::bf16::to_ne_bytes),
        CpuStorage::U8(blocks) => bytes.extend_from_slice(&blocks[start..end]),
        _ => return Err(Error::internal("a pool is not of f32, f16, bf16 or blocks")),
    }
    Ok(())
}

/// Appends `values`, of `N` bytes each.
fn put<T: Copy, const N: usize>(values: &[T], bytes: &mut Vec<u8>, of: impl Fn(T) -> [u8; N]) {
    let start = bytes.len();
    bytes.resize(start + N * values.len(), 0);
    let places = bytes[start..].chunks_exact_mut(N);
    for (place, &value) in places.zip(values) {
        place.copy_from_slice(&of(value));
    }
}

#[cfg(test)]
mod tests {
    use crate::kv::{KvForm, KvHeads, KvShape, KvStore};
    use candle_core::{DType, Device, Tensor};
    use foretoken_kernels::StateShape;
    use foretoken_kernels::quant::BlockType;

    fn store(dtype: DType) -> KvStore {
        let shape = KvShape {
            // V of the second layer is a part of its K.
            layers: vec![
                KvHeads::new(2, 3),
                KvHeads {
                    has_values: false,
                    ..KvHeads::new(1, 5)
                },
                KvHeads {
                    form: Some(KvForm::Blocks(BlockType::Q8_0)),
                    ..KvHeads::new(2, 64)
                },
            ],
            dtype,
            states: vec![StateShape {
                matrices: 4,
                window: 2,
                inputs: 1,
            }],
        };
        KvStore::new(shape, 3, 4, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_block_has_its_contents_after_it_was_elsewhere() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (from, mut to) = (store(dtype), store(dtype));
            for pool in from.parts() {
                let values = Tensor::rand(1f32, 9., pool.dims(), &Device::Cpu).unwrap();
                pool.slice_set(&values.to_dtype(pool.dtype()).unwrap(), 0, 0)
                    .unwrap();
            }
            let bytes = from.read_block(1).unwrap();
            let floats = (2 * 2 * 3 + 5) * dtype.size_in_bytes();
            assert_eq!(bytes.len(), 4 * (floats + 2 * 2 * 68));
            to.write_block(2, &bytes).unwrap();
            assert_eq!(to.read_block(2).unwrap(), bytes);
            assert!(to.read_block(1).unwrap().iter().all(|&byte| byte == 0));
            assert!(to.write_block(3, &bytes).is_err(), "there is none");
            assert!(to.write_block(1, &bytes[1..]).is_err());
            assert!(from.read_block(3).is_err());
        }
    }

    #[test]
    fn a_state_has_its_values_after_it_was_elsewhere() {
        let (from, mut to) = (store(DType::F32), store(DType::F32));
        {
            let mut pool = from.states[0].lock().unwrap();
            let (matrices, window) = pool.state_mut(2).unwrap();
            matrices.copy_from_slice(&[1., 2., 3., 4.]);
            window.copy_from_slice(&[5., 6.]);
        }
        let bytes = from.read_state(2).unwrap();
        assert!(to.write_state(1, &bytes[4..]).is_err());
        to.write_state(1, &bytes).unwrap();
        assert_eq!(to.read_state(1).unwrap(), bytes);
        assert_ne!(to.read_state(0).unwrap(), bytes);
    }
}
