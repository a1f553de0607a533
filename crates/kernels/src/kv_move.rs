//! Moves keys or values from slot to slot of a pool. A commit does this with the accepted nodes of a
//! draft tree.

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Result, Tensor};
use tracing::trace_span;

/// Moves that were checked to stay inside a pool of `num_slots` slots, in the memory of its device.
#[derive(Debug)]
pub struct KvMoves {
    /// Pairs of a source and a destination slot.
    moves: Vec<(u32, u32)>,
    /// `[2 * moves]` u32, only on a GPU.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only CUDA reads it"))]
    on_device: Option<Tensor>,
    num_slots: usize,
}

impl KvMoves {
    /// `(source, destination)` pairs for pools of `num_slots` slots. The moves happen in this order: a
    /// source that an earlier move has overwritten yields the new contents.
    ///
    /// # Errors
    /// If a slot is not below `num_slots`, or the device fails.
    pub fn new(moves: Vec<(u32, u32)>, num_slots: usize, device: &Device) -> Result<Self> {
        let slots = moves.iter().flat_map(|&(from, to)| [from, to]);
        if let Some(slot) = slots.clone().find(|&slot| slot as usize >= num_slots) {
            candle_core::bail!("kv-move: slot {slot} is outside a pool of {num_slots} slots");
        }
        let on_device = match moves.is_empty() || !device.is_cuda() {
            true => None,
            false => Some(Tensor::new(slots.collect::<Vec<u32>>(), device)?),
        };
        Ok(Self {
            moves,
            on_device,
            num_slots,
        })
    }

    /// Whether there are no moves.
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty()
    }
}

/// Does the moves one by one, in place, in `pool`, `[num_slots, kv_heads, head_dim]` in f32, f16, bf16 or u8
/// (bytes of blocks), contiguous. No other slot is touched.
///
/// # Errors
/// If the pool has fewer slots than the moves were made for, another dtype or layout, or is not on
/// the device of the moves.
pub fn kv_move(pool: &Tensor, moves: &KvMoves) -> Result<()> {
    if moves.is_empty() {
        return Ok(());
    }
    pool.inplace_op1(&Move(moves))
}

struct Move<'a>(&'a KvMoves);

const NAME: &str = "kv-move";

impl Move<'_> {
    /// Values per slot.
    fn width(&self, layout: &Layout) -> Result<usize> {
        match layout.dims() {
            &[slots, ref slot @ ..] if slots >= self.0.num_slots && !slot.is_empty() => {
                Ok(slot.iter().product())
            }
            dims => candle_core::bail!(
                "{NAME}: moves of {} slots do not fit a pool of {dims:?}",
                self.0.num_slots
            ),
        }
    }
}

impl InplaceOp1 for Move<'_> {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let width = self.width(layout)?;
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

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, pool: &mut super::gpu::CudaStorage, layout: &Layout) -> Result<()> {
        use super::gpu::{self, *};
        use super::q8_blocks;
        use candle_core::DType;
        const THREADS: usize = 128;
        let width = self.width(layout)?;
        let device = pool.device().clone();
        let Some(moves) = &self.0.on_device else {
            candle_core::bail!("{NAME}: the moves are not on the GPU");
        };
        let (moves, moves_layout) = moves.storage_and_layout();
        let dtype = pool.dtype();
        let count = self.0.moves.len() as i32;
        if dtype == DType::U8 {
            let before = q8_blocks::bytes_before_scales(pool, layout)?;
            if !width.is_multiple_of(q8_blocks::BYTES) {
                candle_core::bail!("{NAME}: slots of {width} bytes are not whole blocks");
            }
            let blocks = width / q8_blocks::BYTES;
            let words = blocks * q8_blocks::BLOCK / size_of::<u32>();
            let kernel = gpu::function(&device, "kv_move", gpu::KV_MOVE, "kv_move_q8_0")?;
            let pool = gpu::contiguous::<u8>(NAME, pool, layout)?;
            let (bytes, scales) = (pool.slice(..before), pool.slice(before..));
            let moves = gpu::view::<u32>(NAME, &moves, moves_layout)?;
            let mut args = kernel.builder();
            args.arg(&bytes).arg(&scales).arg(&moves);
            builder_arg!(args, count, words as i32, blocks as i32);
            let grid = gpu::grid(((words + blocks).div_ceil(THREADS), 1, 1), THREADS, 0);
            // SAFETY: as below, of a pool of whole blocks.
            unsafe { args.launch(grid) }.w()?;
            return Ok(());
        }
        if dtype == DType::F8E4M3 {
            if !width.is_multiple_of(size_of::<u32>()) {
                candle_core::bail!("{NAME}: slots of {width} bytes are not whole words");
            }
            let words = width / size_of::<u32>();
            let kernel = gpu::function(&device, "kv_move", gpu::KV_MOVE, "kv_move_fp8")?;
            if layout.contiguous_offsets().map(|(start, _)| start) != Some(0) {
                candle_core::bail!("{NAME}: a kernel needs a whole pool, got {layout:?}");
            }
            let pool = gpu::float8_address(pool, &device.cuda_stream())?;
            let moves = gpu::view::<u32>(NAME, &moves, moves_layout)?;
            let mut args = kernel.builder();
            args.arg(&pool).arg(&moves);
            builder_arg!(args, count, words as i32);
            let grid = gpu::grid((words.div_ceil(THREADS), 1, 1), THREADS, 0);
            // SAFETY: as below, of a pool of whole words.
            unsafe { args.launch(grid) }.w()?;
            return Ok(());
        }
        gpu::with_float!(NAME, dtype, T => {
            let kernel = format!("kv_move_{}", gpu::suffix(dtype));
            let kernel = gpu::function(&device, "kv_move", gpu::KV_MOVE, &kernel)?;
            let pool = gpu::contiguous::<T>(NAME, pool, layout)?;
            let moves = gpu::view::<u32>(NAME, &moves, moves_layout)?;
            let mut args = kernel.builder();
            args.arg(&pool).arg(&moves);
            builder_arg!(args, count, width as i32);
            // SAFETY: the arguments match the kernel's; `KvMoves::new` and `width` have checked that
            // all slots are inside the pool. All work is in the order of one stream, so nothing else
            // reads the pool meanwhile.
            unsafe { args.launch(gpu::grid((width.div_ceil(THREADS), 1, 1), THREADS, 0)) }.w()?;
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    /// The accepted path 1, 3, 4 of a tree whose nodes are in slots 2 to 6: each node moves to the slot
    /// of its depth, and the second overwrites the first one's old slot.
    #[test]
    fn slots_move_in_order_and_no_other_changes() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::U8] {
            let pool = Tensor::arange(0f32, 48., &Device::Cpu).unwrap();
            let pool = pool.reshape((8, 2, 3)).unwrap().to_dtype(dtype).unwrap();
            let moves = vec![(3, 2), (5, 3), (6, 4)];
            kv_move(&pool, &KvMoves::new(moves, 8, &Device::Cpu).unwrap()).unwrap();
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
        assert!(KvMoves::new(vec![(0, 8)], 8, &Device::Cpu).is_err());
        assert!(KvMoves::new(vec![(8, 0)], 8, &Device::Cpu).is_err());
        let moves = KvMoves::new(vec![(7, 0)], 8, &Device::Cpu).unwrap();
        let small = Tensor::zeros((4, 1, 2), DType::F32, &Device::Cpu).unwrap();
        assert!(kv_move(&small, &moves).is_err());
        let ids = Tensor::zeros((8, 1, 2), DType::U32, &Device::Cpu).unwrap();
        assert!(kv_move(&ids, &moves).is_err());
    }
}
