//! Helpers that the CUDA sides of the ops share. The kernels themselves are in `.cu` files beside the
//! ops.

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaStream, DevicePtr, LaunchConfig, result, sys,
};
use candle_core::cuda_backend::{CudaStorageSlice, DeviceId};
use candle_core::{CudaDevice, DType, Result, Tensor};
pub(super) use candle_core::{CudaStorage, Storage};
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};

/// The types that an op's CUDA side needs.
pub(super) use candle_core::Layout;
pub(super) use candle_core::backend::BackendStorage;
pub(super) use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView};
pub(super) use candle_core::cuda_backend::{CudaDType, WrapErr};

/// The PTX of each `.cu` file: `NORM`, `SAMPLE` and so on.
mod ptx {
    include!(concat!(env!("OUT_DIR"), "/ptx.rs"));
}
pub(super) use ptx::*;

mod grids;
pub(super) use grids::{
    Division, FEW_ROWS, Groups, MAX_GROUPS, STRIP, TILE, check_blocks, grid, warps,
};

/// Runs `$body` with `$t` as the type of `$dtype`.
macro_rules! with_float {
    ($op:expr, $dtype:expr, $t:ident => $body:block) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            other => candle_core::bail!("{}: no CUDA kernel for {other:?}", $op),
        }
    };
}

mod outputs;
pub(super) use outputs::{Outputs, allocate, output, scratch};

/// The name of a dtype in kernel names.
pub(super) fn suffix(dtype: DType) -> &'static str {
    dtype.as_str()
}

/// A kernel that was looked up.
struct Loaded {
    function: sys::CUfunction,
    /// Bytes of dynamic shared memory that were asked for.
    shared: Mutex<usize>,
}

// SAFETY: the driver binds functions to no thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// The kernels of a device, by name.
type LoadedKernels = HashMap<String, Arc<Loaded>>;

/// The kernels of all devices that were looked up so far: the driver would compare their names at each launch. They belong to
/// modules, which devices own and unload. No later device has the id of an earlier one.
static LOADED: LazyLock<RwLock<HashMap<DeviceId, LoadedKernels>>> = LazyLock::new(RwLock::default);

/// Kernel `name` of the module called `module`, whose PTX is `ptx`. No other module has a kernel of this name.
pub(super) fn function(device: &CudaDevice, module: &str, ptx: &str, name: &str) -> Result<Kernel> {
    Ok(Kernel {
        loaded: loaded(device, module, ptx, name)?,
        stream: device.cuda_stream(),
        _device: device.clone(),
    })
}

/// See [`function`].
fn loaded(device: &CudaDevice, module: &str, ptx: &str, name: &str) -> Result<Arc<Loaded>> {
    let all = LOADED.read().unwrap_or_else(PoisonError::into_inner);
    let known = all.get(&device.id()).and_then(|own| own.get(name));
    if let Some(known) = known {
        return Ok(known.clone());
    }
    drop(all);
    // Kept while a module is loaded: another thread would load it, too, and replace this one.
    let mut all = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    let own = all.entry(device.id()).or_default();
    if let Some(known) = own.get(name) {
        return Ok(known.clone());
    }
    let module = format!("foretoken-{module}");
    let found = device.get_or_load_custom_func(name, &module, ptx)?;
    let found = Arc::new(Loaded {
        function: found.into_cuda_function().cu_function(),
        shared: Mutex::new(0),
    });
    own.insert(name.to_owned(), found.clone());
    Ok(found)
}

/// A kernel, and the stream that it is launched on.
pub(super) struct Kernel {
    loaded: Arc<Loaded>,
    stream: Arc<CudaStream>,
    /// Owns the kernel's module.
    _device: CudaDevice,
}

impl Kernel {
    /// This kernel, with up to `bytes` bytes of shared memory for each of its blocks.
    ///
    /// # Errors
    /// If the device has less.
    pub fn with_shared(self, bytes: usize) -> Result<Self> {
        let Loaded { function, shared } = &*self.loaded;
        let mut asked = shared.lock().unwrap_or_else(PoisonError::into_inner);
        // A block has 48 KiB without asking, less what its kernel declares. So all are asked for. What others have asked
        // for is not taken back: they may be about to launch.
        if bytes > *asked {
            self.stream.context().bind_to_thread().w()?;
            let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the device has the function.
            unsafe { result::function::set_function_attribute(*function, limit, bytes as i32) }
                .w()?;
            *asked = bytes;
        }
        drop(asked);
        Ok(self)
    }

    /// Starts a launch of a kernel of a model's layers, whose arguments are tensors and numbers; see
    /// [`Launch::run`].
    pub fn launch(&self) -> Launch<'_> {
        Launch {
            kernel: self,
            args: Vec::new(),
        }
    }
}

/// A launch of a kernel, with its arguments so far.
pub(super) struct Launch<'a> {
    kernel: &'a Kernel,
    /// Values, each in the first bytes of its place.
    args: Vec<u64>,
}

impl Launch<'_> {
    /// Adds the address of a tensor.
    ///
    /// # Errors
    /// If the tensor is not contiguous, or not on the GPU.
    pub fn tensor(mut self, tensor: &Tensor) -> Result<Self> {
        self.args.push(address(tensor, &self.kernel.stream)?);
        Ok(self)
    }

    /// Adds the address of a tensor whose rows are each contiguous, and returns the number of values from one to the next.
    /// Rows begin at even places if that number is even.
    ///
    /// # Errors
    /// If its last dimension is not contiguous, it begins at an odd place, or it is not on the GPU.
    pub fn rows(mut self, tensor: &Tensor) -> Result<(Self, usize)> {
        let (start, strides) = (tensor.layout().start_offset(), tensor.stride());
        let [row, inner @ ..] = strides else {
            candle_core::bail!("a kernel needs rows, got {tensor:?}");
        };
        let packed = tensor.dims()[1..].iter().rev().scan(1, |next, &len| {
            let stride = *next;
            *next *= len;
            Some((len, stride))
        });
        let is_packed = (packed.zip(inner.iter().rev()))
            .all(|((len, packed), &stride)| len == 1 || stride == packed);
        if !is_packed || !start.is_multiple_of(2) {
            candle_core::bail!("a kernel needs contiguous rows, got {:?}", tensor.layout());
        }
        self.args
            .push(address_of_first(tensor, &self.kernel.stream)?);
        Ok((self, *row))
    }

    /// Adds the address of device memory.
    pub fn memory<T>(mut self, values: &impl DevicePtr<T>) -> Self {
        self.args.push(values.device_ptr(&self.kernel.stream).0);
        self
    }

    /// Adds the address of a tensor, or a null pointer.
    ///
    /// # Errors
    /// See [`tensor`](Self::tensor).
    pub fn optional(self, tensor: Option<&Tensor>) -> Result<Self> {
        match tensor {
            Some(tensor) => self.tensor(tensor),
            None => Ok(self.bits(0)),
        }
    }

    pub fn int(self, value: usize) -> Self {
        self.bits(u64::from(value as u32))
    }

    pub fn float(self, value: f32) -> Self {
        self.bits(u64::from(value.to_bits()))
    }

    fn bits(mut self, bits: u64) -> Self {
        self.args.push(bits);
        self
    }

    /// Launches a kernel that calls `wait_for_previous` before it reads what an earlier kernel wrote, and
    /// before it writes anything. It may start while the previous kernel ends (programmatic dependent
    /// launch), if it was compiled for a GPU that can do that.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters, and the kernel accesses no memory outside of them.
    pub unsafe fn run(self, grid: LaunchConfig) -> Result<()> {
        // SAFETY: the caller vouches for it.
        unsafe { self.run_in_clusters(grid, 1) }
    }

    /// [`run`](Self::run) in clusters of `blocks` blocks of the grid's second dimension, up to [`max_cluster`]: they run
    /// at the same time, and read each other's shared memory.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    ///
    /// # Safety
    /// See [`run`](Self::run).
    pub unsafe fn run_in_clusters(self, grid: LaunchConfig, blocks: usize) -> Result<()> {
        let mut attributes = Vec::new();
        if may_overlap(&self.kernel.stream) {
            let mut overlap = attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            );
            overlap.value.programmaticStreamSerializationAllowed = 1;
            attributes.push(overlap);
        }
        if blocks > 1 {
            let mut cluster =
                attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
            cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: 1,
                y: blocks as u32,
                z: 1,
            };
            attributes.push(cluster);
        }
        // SAFETY: the caller vouches for it.
        unsafe { self.run_with(grid, &mut attributes) }
    }

    /// Launches an ordinary kernel, which starts when the previous one has ended.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters, and the kernel accesses no memory outside of them.
    pub unsafe fn run_ordinary(self, grid: LaunchConfig) -> Result<()> {
        // SAFETY: the caller vouches for it.
        unsafe { self.run_with(grid, &mut []) }
    }

    /// Launches an ordinary kernel whose writes [kernels of layers](Self::run) read before they wait for the previous
    /// kernel, as they do with tables. So the next of them on this stream starts only when this one has ended.
    ///
    /// # Errors
    /// If the driver refuses the launch.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters, and the kernel accesses no memory outside of them.
    pub unsafe fn run_apart(self, grid: LaunchConfig) -> Result<()> {
        let key = key_of(&self.kernel.stream);
        APART.with_borrow_mut(|apart| apart.insert(key));
        // SAFETY: the caller vouches for it.
        unsafe { self.run_ordinary(grid) }
    }

    /// Launches a kernel whose blocks wait for one another, so all of them run at the same time.
    ///
    /// # Errors
    /// If the driver refuses the launch, also because there is no room for all blocks.
    ///
    /// # Safety
    /// The arguments match the kernel's parameters, and the kernel accesses no memory outside of them.
    pub unsafe fn run_together(self, grid: LaunchConfig) -> Result<()> {
        let mut together = attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
        together.value.cooperative = 1;
        // SAFETY: the caller vouches for it.
        unsafe { self.run_with(grid, &mut [together]) }
    }

    /// Launches with `attributes`.
    unsafe fn run_with(
        mut self,
        grid: LaunchConfig,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> Result<()> {
        let stream = &self.kernel.stream;
        let context = stream.context();
        context.bind_to_thread().w()?;
        let config = sys::CUlaunchConfig {
            gridDimX: grid.grid_dim.0,
            gridDimY: grid.grid_dim.1,
            gridDimZ: grid.grid_dim.2,
            blockDimX: grid.block_dim.0,
            blockDimY: grid.block_dim.1,
            blockDimZ: grid.block_dim.2,
            sharedMemBytes: grid.shared_mem_bytes,
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut places: Vec<*mut c_void> = self
            .args
            .iter_mut()
            .map(|arg| ptr::from_mut(arg).cast())
            .collect();
        let function = self.kernel.loaded.function;
        // SAFETY: the pointers outlive the call, and the caller vouches for the arguments.
        let launched = unsafe {
            sys::cuLaunchKernelEx(&config, function, places.as_mut_ptr(), ptr::null_mut())
        };
        launched.result().w()
    }
}

/// Whether the kernels wait for each other: only if they were compiled for compute capability 9.0 or higher.
/// If they were compiled for less, they run on such a GPU, too, but must not start early there.
static THEY_WAIT: LazyLock<bool> = LazyLock::new(|| NORM.contains("griddepcontrol.wait"));

/// Whether launches say that they may overlap. A stand-in for nvcc makes no kernels: the emulated GPU has its own, and
/// checks what launches say.
static MAY_OVERLAP: LazyLock<bool> = LazyLock::new(|| *THEY_WAIT || !NORM.contains(".entry "));

thread_local! {
    /// Streams on which this thread has launched [apart](Launch::run_apart), and no kernel of a layer since. If another
    /// thread launches there in between, its kernel waits for the one apart before this thread's next one can start.
    static APART: RefCell<BTreeSet<StreamKey>> = const { RefCell::new(BTreeSet::new()) };
}

/// A stream of a GPU: default streams of all GPUs have one handle.
type StreamKey = (sys::CUcontext, sys::CUstream);

fn key_of(stream: &CudaStream) -> StreamKey {
    (stream.context().cu_ctx(), stream.cu_stream())
}

/// Whether the next kernel of a layer on `stream` may start while the previous kernel ends. It is asked once for each.
fn may_overlap(stream: &CudaStream) -> bool {
    let key = key_of(stream);
    let is_after = APART.with_borrow_mut(|apart| apart.remove(&key));
    *MAY_OVERLAP && !is_after
}

/// Maximum number of blocks of a cluster; 1 = the kernels were compiled for GPUs that have none.
pub(super) fn max_cluster() -> usize {
    if *THEY_WAIT { 8 } else { 1 }
}

/// The multiprocessors of a GPU, and the bytes of shared memory that a block may have.
///
/// # Errors
/// If the driver fails.
pub(super) fn size(context: &CudaContext) -> Result<(usize, usize)> {
    use sys::CUdevice_attribute as Attribute;
    let read = |attribute| context.attribute(attribute).w();
    let count = read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let shared = read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok((count as usize, shared as usize))
}

/// A launch attribute without its value.
fn attribute(id: sys::CUlaunchAttributeID) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute {
        id,
        pad: [0; 4],
        // SAFETY: a union of plain values, for which zeros are valid.
        value: unsafe { std::mem::zeroed() },
    }
}

/// The address of a contiguous tensor's first element.
///
/// # Errors
/// If it is not contiguous, or not on the GPU.
pub(super) fn address(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    if !tensor.is_contiguous() {
        let layout = tensor.layout();
        candle_core::bail!("a kernel needs contiguous tensors, got {layout:?}");
    }
    address_of_first(tensor, stream)
}

/// The address of a tensor's first element.
fn address_of_first(tensor: &Tensor, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let start = layout.start_offset();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("a kernel needs tensors on the GPU, got {layout:?}");
    };
    fn of<T: CudaDType>(storage: &CudaStorage, stream: &CudaStream) -> Result<u64> {
        Ok(storage.as_cuda_slice::<T>()?.device_ptr(stream).0)
    }
    let dtype = storage.dtype();
    let base = match dtype {
        DType::U8 => of::<u8>(storage, stream)?,
        DType::U32 => of::<u32>(storage, stream)?,
        DType::I64 => of::<i64>(storage, stream)?,
        DType::F8E4M3 => float8_address(storage, stream)?,
        _ => with_float!("launch", dtype, T => { of::<T>(storage, stream)? }),
    };
    Ok(base + (start * dtype.size_in_bytes()) as u64)
}

/// The address of numbers of FP8 (E4M3).
///
/// # Errors
/// If they are other numbers.
pub(super) fn float8_address(storage: &CudaStorage, stream: &CudaStream) -> Result<u64> {
    match &storage.slice {
        CudaStorageSlice::F8E4M3(numbers) => Ok(numbers.device_ptr(stream).0),
        _ => candle_core::bail!("a kernel needs FP8, got {:?}", storage.dtype()),
    }
}

/// Checks that the tensors of op `op` have the same dtype, which the names of kernels contain.
///
/// # Errors
/// If one has another.
pub(super) fn expect_dtype<'a>(
    op: &str,
    dtype: DType,
    tensors: impl IntoIterator<Item = &'a Tensor>,
) -> Result<()> {
    for tensor in tensors {
        if tensor.dtype() != dtype {
            candle_core::bail!("{op}: {tensor:?} is not in {dtype:?}");
        }
    }
    Ok(())
}

/// The elements of a contiguous tensor, for op `op`.
pub(super) fn contiguous<'a, T: CudaDType>(
    op: &str,
    storage: &'a CudaStorage,
    layout: &Layout,
) -> Result<CudaView<'a, T>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(storage.as_cuda_slice::<T>()?.slice(start..end)),
        None => candle_core::bail!("{op}: the tensor must be contiguous, got {layout:?}"),
    }
}

/// The elements of a contiguous tensor with this storage and layout, for op `op`.
pub(super) fn view<'a, T: CudaDType>(
    op: &str,
    storage: &'a Storage,
    layout: &Layout,
) -> Result<CudaView<'a, T>> {
    match storage {
        Storage::Cuda(storage) => contiguous(op, storage, layout),
        _ => candle_core::bail!("{op}: a tensor is not on the GPU"),
    }
}
