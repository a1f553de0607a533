//! Moves keys and values from slot to slot of pools. A commit does this with the accepted nodes of a
//! draft tree.

#[cfg(feature = "cuda")]
use candle_core::Device;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use tracing::trace_span;

/// Moves that were checked to stay inside pools of `num_slots` slots.
#[derive(Debug)]
pub struct KvMoves {
    /// Pairs of a source and a destination slot.
    moves: Vec<(u32, u32)>,
    num_slots: usize,
}

impl KvMoves {
    /// `(source, destination)` pairs for pools of `num_slots` slots. The moves happen in this order: a
    /// source that an earlier move has overwritten yields the new contents.
    ///
    /// # Errors
    /// If a slot is not below `num_slots`.
    pub fn new(moves: Vec<(u32, u32)>, num_slots: usize) -> Result<Self> {
        let mut slots = moves.iter().flat_map(|&(from, to)| [from, to]);
        if let Some(slot) = slots.find(|&slot| slot as usize >= num_slots) {
            candle_core::bail!("kv-move: slot {slot} is outside a pool of {num_slots} slots");
        }
        Ok(Self { moves, num_slots })
    }

    /// Whether there are no moves.
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty()
    }

    /// Values per slot of a pool with these dimensions.
    fn width(&self, dims: &[usize]) -> Result<usize> {
        match dims {
            &[slots, ref slot @ ..] if slots >= self.num_slots && !slot.is_empty() => {
                Ok(slot.iter().product())
            }
            dims => candle_core::bail!(
                "{NAME}: moves of {} slots do not fit a pool of {dims:?}",
                self.num_slots
            ),
        }
    }
}

/// Does the moves one by one, in place, in each of `pools`, `[num_slots, kv_heads, head_dim]` in f32, f16, bf16 or u8
/// (bytes of blocks), on a GPU also in FP8, contiguous. No other slot is touched. The pools are on one device; a GPU takes
/// one launch for all of them.
///
/// # Errors
/// If a pool has fewer slots than the moves were made for, another dtype or layout, or is on another device. The contents
/// of the destinations are then not specified.
pub fn kv_move(pools: &[&Tensor], moves: &KvMoves) -> Result<()> {
    if moves.is_empty() {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if let Some(Device::Cuda(gpu)) = pools.first().map(|pool| pool.device()) {
        return device::launch(gpu, pools, moves);
    }
    pools
        .iter()
        .try_for_each(|pool| pool.inplace_op1(&Move(moves)))
}

struct Move<'a>(&'a KvMoves);

const NAME: &str = "kv-move";

impl InplaceOp1 for Move<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let width = self.0.width(layout.dims())?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("{NAME}: the pool must be contiguous");
        };
        fn copy<T: Copy>(pool: &mut [T], moves: &[(u32, u32)], width: usize) {
            for &(from, to) in moves {
                let from = from as usize * width;
                pool.copy_within(from..from + width, to as usize * width);
            }
        }
        let moves = &self.0.moves;
        trace_span!("kv_write").in_scope(|| {
            match pool {
                CpuStorage::F32(pool) => copy(&mut pool[start..end], moves, width),
                CpuStorage::F16(pool) => copy(&mut pool[start..end], moves, width),
                CpuStorage::BF16(pool) => copy(&mut pool[start..end], moves, width),
                CpuStorage::U8(pool) => copy(&mut pool[start..end], moves, width),
                _ => candle_core::bail!("{NAME}: the pool must be f32, f16, bf16 or blocks"),
            }
            Ok(())
        })
    }
}

#[cfg(feature = "cuda")]
mod device {
    use super::{KvMoves, NAME};
    use crate::{gpu, q8_blocks};
    use candle_core::{CudaDevice, DType, Result, Tensor};

    /// Threads of a block, as in the kernel.
    const THREADS: usize = 128;
    /// Bytes that a thread may move at a time, the most first.
    const UNITS: [usize; 3] = [16, 4, 2];

    /// One launch for all pools, after one copy that brings the moves and the table of the pools.
    pub fn launch(device: &CudaDevice, pools: &[&Tensor], moves: &KvMoves) -> Result<()> {
        let stream = device.cuda_stream();
        let slots = moves.moves.iter().flat_map(|&(from, to)| [from, to]);
        let mut words: Vec<u32> = slots.collect();
        let (mut planes, mut longest) = (0, 1);
        for pool in pools {
            if !pool.device().same_device(pools[0].device()) {
                candle_core::bail!("{NAME}: the pools are on several devices");
            }
            for (plane, bytes) in planes_of(pool, moves)? {
                let address = gpu::address(&plane, &stream)?;
                let fits =
                    |unit: usize| bytes.is_multiple_of(unit) && address.is_multiple_of(unit as u64);
                let Some(unit) = UNITS.into_iter().find(|&unit| fits(unit)) else {
                    candle_core::bail!("{NAME}: no kernel for slots of {bytes} bytes");
                };
                let units = bytes / unit;
                words.extend([address as u32, (address >> 32) as u32]);
                words.extend([units, unit].map(|n| n as u32));
                planes += 1;
                longest = longest.max(units);
            }
        }
        let words = Tensor::new(words, pools[0].device())?;
        let kernel = gpu::function(device, "kv_move", gpu::KV_MOVE, "kv_move")?;
        let launch = kernel.launch().tensor(&words)?.int(moves.moves.len());
        let grid = gpu::grid((longest.div_ceil(THREADS), planes, 1), THREADS, 0);
        // SAFETY: the table has the addresses of parts of pools that the caller has, and the length of their slots.
        // `KvMoves` has checked that all slots are inside the pools. All work is in the order of one stream, so nothing else
        // reads the pools meanwhile.
        unsafe { launch.run(grid) }
    }

    /// The parts of a pool that have a place for each slot, and the bytes of such a place: blocks are in two parts, their
    /// bytes and their scales.
    fn planes_of(pool: &Tensor, moves: &KvMoves) -> Result<Vec<(Tensor, usize)>> {
        let width = moves.width(pool.dims())?;
        let planes = match pool.dtype() {
            DType::U8 if !width.is_multiple_of(q8_blocks::BYTES) => {
                candle_core::bail!("{NAME}: slots of {width} bytes are not whole blocks")
            }
            DType::U8 | DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => {
                q8_blocks::planes(pool)?
            }
            other => candle_core::bail!("{NAME}: no kernel for a pool of {other:?}"),
        };
        let slots = pool.dim(0)?;
        let with_bytes = |plane: Tensor| {
            let bytes = plane.elem_count() / slots * plane.dtype().size_in_bytes();
            (plane, bytes)
        };
        Ok(planes.into_iter().map(with_bytes).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// The accepted path 1, 3, 4 of a tree whose nodes are in slots 2 to 6: each node moves to the slot
    /// of its depth, and the second overwrites the first one's old slot.
    #[test]
    fn slots_move_in_order_and_no_other_changes() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::U8] {
            let pool = Tensor::arange(0f32, 48., &Device::Cpu).unwrap();
            let pool = pool.reshape((8, 2, 3)).unwrap().to_dtype(dtype).unwrap();
            let moves = vec![(3, 2), (5, 3), (6, 4)];
            // Pools of other sizes take part.
            let narrow = pool.narrow(2, 0, 1).unwrap().contiguous().unwrap();
            kv_move(&[&pool, &narrow], &KvMoves::new(moves, 8).unwrap()).unwrap();
            let expected = pool.narrow(2, 0, 1).unwrap().flatten_all().unwrap();
            let expected = expected.to_dtype(DType::F32).unwrap().to_vec1::<f32>();
            let narrow = narrow.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
            assert_eq!(narrow.to_vec1::<f32>().unwrap(), expected.unwrap());
            let pool = pool.to_dtype(DType::F32).unwrap().flatten_from(1).unwrap();
            let first: Vec<f32> = pool
                .to_vec2::<f32>()
                .unwrap()
                .iter()
                .map(|row| row[0] / 6.)
                .collect();
            assert_eq!(first, [0., 1., 3., 5., 6., 5., 6., 7.], "{dtype:?}");
        }
    }

    #[test]
    fn what_leaves_the_pool_is_an_error() {
        assert!(KvMoves::new(vec![(0, 8)], 8).is_err());
        assert!(KvMoves::new(vec![(8, 0)], 8).is_err());
        let moves = KvMoves::new(vec![(7, 0)], 8).unwrap();
        let small = Tensor::zeros((4, 1, 2), DType::F32, &Device::Cpu).unwrap();
        assert!(kv_move(&[&small], &moves).is_err());
        let ids = Tensor::zeros((8, 1, 2), DType::U32, &Device::Cpu).unwrap();
        assert!(kv_move(&[&ids], &moves).is_err());
    }
}
