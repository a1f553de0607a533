//! The contents of blocks and of recurrent states as bytes, for a place that is not a pool. In the byte order of this
//! machine.

use super::KvStore;
use crate::error::{Error, Result};
use foretoken_kernels::{PoolRows, StatePool, read_pool_rows, write_pool_rows};
use std::sync::{MutexGuard, PoisonError};

impl KvStore {
    /// Bytes of K and V of one block over all layers.
    pub fn block_bytes(&self) -> usize {
        self.parts(0).iter().map(PoolRows::bytes).sum()
    }

    /// K and V of `block`, layer after layer.
    ///
    /// # Errors
    /// If there is no such block, or the device fails.
    pub fn read_block(&self, block: u32) -> Result<Vec<u8>> {
        let parts = self.parts(block);
        let mut bytes = Vec::new();
        for parts in parts.chunk_by(are_together) {
            bytes.append(&mut read_pool_rows(parts)?);
        }
        Ok(bytes)
    }

    /// Overwrites K and V of `block` with what [`KvStore::read_block`] has returned.
    ///
    /// # Errors
    /// If there is no such block, the bytes are those of another shape, or the device fails. The block's contents are
    /// then not specified.
    pub fn write_block(&mut self, block: u32, bytes: &[u8]) -> Result<()> {
        let parts = self.parts(block);
        let length: usize = parts.iter().map(PoolRows::bytes).sum();
        if bytes.len() != length {
            let found = bytes.len();
            return Err(Error::internal(format!(
                "{found} bytes for a block of {length}"
            )));
        }
        let mut rest = bytes;
        for parts in parts.chunk_by(are_together) {
            let (own, later) = rest.split_at(parts.iter().map(PoolRows::bytes).sum());
            rest = later;
            write_pool_rows(parts, own)?;
        }
        Ok(())
    }

    /// The recurrent state in `slot`, layer after layer.
    ///
    /// # Errors
    /// If the device fails.
    pub fn read_state(&self, slot: u32) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for mut pool in self.state_pools() {
            pool.read(slot, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Overwrites the recurrent state in `slot` with what [`KvStore::read_state`] has returned.
    ///
    /// # Errors
    /// If the bytes are those of another shape; then nothing changes. If the device fails.
    pub fn write_state(&mut self, slot: u32, bytes: &[u8]) -> Result<()> {
        let length: usize = self.state_pools().map(|pool| pool.shape().bytes()).sum();
        if bytes.len() != length {
            let found = bytes.len();
            return Err(Error::internal(format!(
                "{found} bytes for a state of {length}"
            )));
        }
        let mut rest = bytes;
        for mut pool in self.state_pools() {
            let (own, later) = rest.split_at(pool.shape().bytes());
            rest = later;
            pool.write(slot, own)?;
        }
        Ok(())
    }

    /// The slots of `block` in the tensors that hold anything.
    fn parts(&self, block: u32) -> Vec<PoolRows<'_>> {
        let pools = self.layers.iter().flat_map(|(k, v)| [k, v]);
        let pools = pools.filter(|pool| pool.elem_count() > 0);
        let part = |pool| PoolRows {
            pool,
            first: block as usize * self.block_size,
            count: self.block_size,
        };
        pools.map(part).collect()
    }

    fn state_pools(&self) -> impl Iterator<Item = MutexGuard<'_, StatePool>> {
        let pools = self.states.iter();
        pools.map(|pool| pool.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether both are on the same device.
fn are_together(one: &PoolRows<'_>, other: &PoolRows<'_>) -> bool {
    one.pool.device().same_device(other.pool.device())
}

#[cfg(test)]
mod tests {
    use crate::kv::{KvForm, KvHeads, KvShape, KvStore, PoolGpus};
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
            gpus: PoolGpus::default(),
        };
        KvStore::new(shape, 3, 4, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_block_has_its_contents_after_it_was_elsewhere() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (from, mut to) = (store(dtype), store(dtype));
            for part in from.parts(0) {
                let pool = part.pool;
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
        let values = [1f32, 2., 3., 4., 5., 6.].map(f32::to_ne_bytes).concat();
        from.states[0].lock().unwrap().write(2, &values).unwrap();
        let bytes = from.read_state(2).unwrap();
        assert_eq!(bytes, values);
        assert!(to.write_state(1, &bytes[4..]).is_err());
        to.write_state(1, &bytes).unwrap();
        assert_eq!(to.read_state(1).unwrap(), bytes);
        assert_ne!(to.read_state(0).unwrap(), bytes);
    }
}
