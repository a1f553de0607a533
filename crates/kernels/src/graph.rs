//! CUDA graphs: GPU work that is recorded once and replayed as a whole. A forward launches hundreds of
//! kernels, and each launch costs the host some microseconds, which is longer than a kernel of a small
//! model runs.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Tensor};
use std::ops::Range;

#[cfg(feature = "cuda")]
use super::gpu::*;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, DeviceRepr, sys};
#[cfg(feature = "cuda")]
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Recorded work. It holds device addresses: it neither owns nor borrows the memory that it reads and
/// writes, except the outputs of our ops.
pub struct Graph {
    #[cfg(feature = "cuda")]
    graph: CudaGraph,
    #[cfg(feature = "cuda")]
    _outputs: Outputs,
    #[cfg(not(feature = "cuda"))]
    never: std::convert::Infallible,
}

/// Records graphs that are replayed one after the other: they share the memory of their ops' outputs.
#[derive(Default)]
pub struct Recorder {
    #[cfg(feature = "cuda")]
    outputs: Outputs,
}

// SAFETY: the driver does not bind a graph to a thread. A graph is not `Sync`, so only one thread uses
// it at a time.
#[cfg(feature = "cuda")]
unsafe impl Send for Graph {}

/// Held while work is recorded.
#[cfg(feature = "cuda")]
static RECORDING: Mutex<()> = Mutex::new(());

/// Until this is dropped, nothing is recorded. Where threads share the queue of a GPU, what one of them asks of it would
/// be part of what another one records.
#[cfg(feature = "cuda")]
pub(super) fn unrecorded() -> MutexGuard<'static, ()> {
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorder {
    /// Runs `work` once, then records a second call of it without running it on the device. `work` must
    /// free what it allocates, and must neither copy between host and device nor wait.
    ///
    /// # Errors
    /// The error of `work`, or that `work` cannot be recorded.
    ///
    /// # Safety
    /// All device memory that `work` reads or writes, except what it allocates and frees itself, must
    /// still be allocated whenever the graph is replayed, and graphs of one recorder are replayed on one
    /// thread.
    pub unsafe fn record<E: From<candle_core::Error>>(
        &mut self,
        device: &Device,
        mut work: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Graph, E> {
        #[cfg(feature = "cuda")]
        {
            let cuda = device.as_cuda_device()?;
            // The first call loads modules, and kernel parameters that are kept in memory.
            let _parameters = cuda.enable_cuda_graph_htod_cache();
            self.outputs.during(&mut work)?;
            let stream = cuda.cuda_stream();
            let recording = unrecorded();
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).w()?;
            let worked = self.outputs.during(&mut work);
            let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).w();
            drop(recording);
            worked?;
            match graph? {
                Some(graph) => Ok(Graph {
                    graph,
                    _outputs: self.outputs.clone(),
                }),
                None => Err(candle_core::Error::msg("nothing was recorded").into()),
            }
        }
        #[cfg(not(feature = "cuda"))]
        {
            work()?;
            let message = format!("nothing is recorded on {:?}", device.location());
            Err(candle_core::Error::msg(message).into())
        }
    }
}

impl Graph {
    /// Number of launches and other pieces of work that it has.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn nodes(&self) -> Result<usize> {
        #[cfg(feature = "cuda")]
        {
            let (graph, mut count) = (self.graph.cu_graph(), 0);
            // SAFETY: the graph is alive. Without room for nodes, the driver only counts them.
            let counted =
                unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) };
            counted.result().w()?;
            Ok(count)
        }
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }

    /// Runs the recorded work again, after everything that was launched before.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Safety
    /// The recorded memory is still allocated (see [`Recorder::record`]), and the current values of the
    /// inputs (slots, block tables, ids) are within the bounds of what they index.
    pub unsafe fn replay(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        return self.graph.launch().w();
        #[cfg(not(feature = "cuda"))]
        match self.never {}
    }
}

/// Values to write to a tensor.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Values of a u32 tensor.
    U32(&'a [u32]),
    /// Values of an i64 tensor.
    I64(&'a [i64]),
    /// Values of an f32 tensor.
    F32(&'a [f32]),
}

impl Values<'_> {
    /// The type of the tensor.
    pub fn dtype(&self) -> DType {
        match self {
            Self::U32(_) => DType::U32,
            Self::I64(_) => DType::I64,
            Self::F32(_) => DType::F32,
        }
    }
}

/// Overwrites the first elements of `tensor`, which must be contiguous, in place.
///
/// # Errors
/// If there are more values than elements, or they have another type.
pub fn overwrite(tensor: &Tensor, values: Values<'_>) -> Result<()> {
    tensor.inplace_op1(&Overwrite(values))
}

struct Overwrite<'a>(Values<'a>);

/// The range of the first `len` elements in the storage.
fn place(layout: &Layout, len: usize) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) if end - start >= len => Ok(start..start + len),
        _ => candle_core::bail!("overwrite: {len} values for {layout:?}"),
    }
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match (storage, self.0) {
            (CpuStorage::U32(to), Values::U32(values)) => {
                to[place(layout, values.len())?].copy_from_slice(values);
            }
            (CpuStorage::I64(to), Values::I64(values)) => {
                to[place(layout, values.len())?].copy_from_slice(values);
            }
            (CpuStorage::F32(to), Values::F32(values)) => {
                to[place(layout, values.len())?].copy_from_slice(values);
            }
            (to, values) => candle_core::bail!("overwrite: {values:?} for {:?}", to.dtype()),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        fn write<T: CudaDType + DeviceRepr + 'static>(
            values: &[T],
            storage: &mut CudaStorage,
            layout: &Layout,
        ) -> Result<()> {
            let place = place(layout, values.len())?;
            let device = storage.device().clone();
            let mut to = storage.as_cuda_slice_mut::<T>()?.slice_mut(place);
            device.memcpy_htod(values, &mut to)
        }
        match self.0 {
            Values::U32(values) => write(values, storage, layout),
            Values::I64(values) => write(values, storage, layout),
            Values::F32(values) => write(values, storage, layout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwriting_is_in_place_and_keeps_the_other_elements() {
        let tensor = Tensor::new(&[[1u32, 2], [3, 4]], &Device::Cpu).unwrap();
        let alias = tensor.clone();
        overwrite(&tensor, Values::U32(&[7, 8, 9])).unwrap();
        assert_eq!(alias.to_vec2::<u32>().unwrap(), [[7, 8], [9, 4]]);
        assert!(overwrite(&tensor, Values::U32(&[0; 5])).is_err());
        assert!(overwrite(&tensor, Values::F32(&[0.; 2])).is_err());
    }
}
