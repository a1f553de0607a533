//! The device that a model runs on.

use candle_core::Device;

/// The device that `spec` names: `cpu`, `cuda`, `cuda:N`, or `auto`. `auto` is the first GPU, or the CPU
/// if this build has no CUDA or there is no GPU.
///
/// # Errors
/// A message for the operator if `spec` is none of these, if this build has no CUDA, or if the GPU
/// cannot be opened.
pub fn device(spec: &str) -> Result<Device, String> {
    match (ordinal(spec)?, spec) {
        (None, _) => Ok(Device::Cpu),
        (Some(first), "auto") => Ok(cuda(first).unwrap_or_else(|reason| {
            if cfg!(feature = "cuda") {
                tracing::info!("using the CPU: {reason}");
            }
            Device::Cpu
        })),
        (Some(ordinal), _) => cuda(ordinal),
    }
}

/// The number of the GPU that `spec` names, the first one for `auto`; `None` = the CPU.
///
/// # Errors
/// A message for the operator if `spec` is none of those of [`device`].
pub(super) fn ordinal(spec: &str) -> Result<Option<usize>, String> {
    match spec {
        "cpu" => Ok(None),
        "auto" | "cuda" => Ok(Some(0)),
        _ => match spec.strip_prefix("cuda:").map(str::parse) {
            // The driver takes larger ones for others.
            Some(Ok(ordinal)) if ordinal <= usize::from(u16::MAX) => Ok(Some(ordinal)),
            _ => Err(format!(
                "unknown device '{spec}': expected cpu, cuda, cuda:N or auto"
            )),
        },
    }
}

fn cuda(ordinal: usize) -> Result<Device, String> {
    opened(ordinal, || Device::new_cuda(ordinal))
}

/// One of several GPUs that a program uses together, with a queue of work that all threads share. The queue of a thread,
/// which [`device`] gives, is named by a number that is the same on each GPU: the driver then takes that of the GPU
/// that the thread used last, also to free the memory of another one.
///
/// # Errors
/// As of [`device`].
pub(super) fn cuda_among_several(ordinal: usize) -> Result<Device, String> {
    let device = opened(ordinal, || Device::new_cuda_with_stream(ordinal))?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = &device {
        // Events of each tensor would be recorded by each kernel, and cannot be in a graph.
        // SAFETY: all memory of the GPU is allocated, used and freed in the order of its one queue, and copies to
        // another GPU wait for both (`copy_to`).
        unsafe { cuda.disable_event_tracking() };
    }
    Ok(device)
}

/// The GPU that `open` opens.
fn opened(
    ordinal: usize,
    open: impl FnOnce() -> candle_core::Result<Device> + std::panic::UnwindSafe,
) -> Result<Device, String> {
    if !cfg!(feature = "cuda") {
        return Err(
            "this build has no CUDA support: use --device cpu, or build with --features cuda"
                .into(),
        );
    }
    let opened = std::panic::catch_unwind(open);
    let reason = match opened {
        Ok(Ok(device)) => return Ok(device),
        Ok(Err(error)) => match error.to_string() {
            // The driver's own name for this error would not help the operator.
            reason if reason.contains("NO_DEVICE") => "no GPU, or no NVIDIA driver".to_owned(),
            reason => reason,
        },
        Err(_) => "the CUDA driver could not be loaded".to_owned(),
    };
    let reason = reason.lines().next().unwrap_or_default().to_owned();
    Err(format!("cannot open cuda:{ordinal}: {reason}"))
}

/// Free and total memory of a GPU, in bytes; `None` for the CPU.
///
/// # Errors
/// If the driver cannot report them.
pub fn device_memory(device: &Device) -> Result<Option<(u64, u64)>, String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            let asked = cuda.cuda_stream().context().bind_to_thread();
            let asked =
                asked.and_then(|()| candle_core::cuda::cudarc::driver::result::mem_get_info());
            match asked {
                Ok((free, total)) => Ok(Some((free as u64, total as u64))),
                Err(e) => Err(format!("cannot read the GPU's free memory: {e}")),
            }
        }
        _ => Ok(None),
    }
}

/// Lets this program keep the memory of a GPU that it frees, for what it allocates next. Otherwise the driver takes
/// it back whenever the host waits for the GPU, and to get gigabytes again takes longer than to compute with them. Does
/// nothing on the CPU.
///
/// # Errors
/// If the driver refuses.
pub fn keep_freed_memory(device: &Device) -> Result<(), String> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            use candle_core::cuda::cudarc::driver::{result, sys::CUmemPool_attribute};
            let stream = cuda.cuda_stream();
            let context = stream.context();
            if !context.has_async_alloc() {
                return Ok(());
            }
            let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let mut all = u64::MAX;
            let kept = context.bind_to_thread().and_then(|()| {
                // SAFETY: the pool is the one of the context's device, and the attribute is a u64.
                unsafe {
                    let pool = result::device::get_default_mem_pool(context.cu_device())?;
                    result::mem_pool::set_attribute(pool, attribute, (&raw mut all).cast())
                }
            });
            kept.map_err(|e| format!("cannot keep the GPU's memory: {e}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_and_auto_always_work_and_nonsense_is_named() {
        assert!(device("cpu").unwrap().is_cpu());
        device("auto").unwrap();
        let (large, huge) = ("cuda:4294967296", "cuda:18446744073709551615");
        for bad in ["", "gpu", "cuda:", "cuda:x", "cpu:0", large, huge] {
            let error = device(bad).unwrap_err();
            assert!(error.contains("expected cpu, cuda"), "{bad}: {error}");
        }
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn cuda_without_the_feature_is_one_line() {
        let error = device("cuda:1").unwrap_err();
        assert!(error.contains("--features cuda"));
        assert_eq!(error.lines().count(), 1);
    }
}
