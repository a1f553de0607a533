//! Several GPUs of one machine: which they are, and copies between them.
//!
//! A GPU has its own queue of work. A copy waits for the work of both, and later work of both waits for the copy; the
//! host waits for nothing. The driver copies directly where the GPUs reach each other, otherwise through the host.

use crate::device::{cuda_among_several, device, ordinal};
use candle_core::{Device, Result, Tensor};

/// `count` GPUs from the one that `spec` names on, or the single device of `spec` if `count` is 1; `auto` is the first
/// GPU if there are to be several.
///
/// # Errors
/// A message for the operator: `spec` names no GPU, there are fewer GPUs, or they differ in their compute capability, so
/// that layers would have other kernels on one than on another.
pub fn devices(spec: &str, count: usize) -> std::result::Result<Vec<Device>, String> {
    if count <= 1 {
        return Ok(vec![device(spec)?]);
    }
    let Some(first) = ordinal(spec)? else {
        return Err(format!(
            "{count} GPUs are asked for, and --device {spec} is none: cuda, cuda:N and auto are accepted"
        ));
    };
    let mut opened = Vec::new();
    for there in 0..count {
        let device = cuda_among_several(first + there).map_err(|reason| match there {
            // There is no GPU at all.
            0 => reason,
            _ => {
                let are = if there == 1 { "is" } else { "are" };
                format!(
                    "{count} GPUs are asked for, and from cuda:{first} on there {are} {there}: ask for {there}, or see CUDA_VISIBLE_DEVICES ({reason})"
                )
            }
        })?;
        opened.push(device);
    }
    check_alike(first, &opened)?;
    Ok(opened)
}

/// Checks that the GPUs have one compute capability.
#[cfg(feature = "cuda")]
fn check_alike(first: usize, devices: &[Device]) -> std::result::Result<(), String> {
    let capability = |device: &Device| {
        let read = |cuda: &candle_core::CudaDevice| {
            let found = cuda.cuda_stream().context().compute_capability();
            found.map_err(|e| format!("cannot read the GPU's compute capability: {e}"))
        };
        device
            .as_cuda_device()
            .map_err(|e| e.to_string())
            .and_then(read)
    };
    let (major, minor) = capability(&devices[0])?;
    for (other, device) in devices.iter().enumerate().skip(1) {
        let (other_major, other_minor) = capability(device)?;
        if (other_major, other_minor) != (major, minor) {
            return Err(format!(
                "cuda:{first} has compute capability {major}.{minor} and cuda:{} {other_major}.{other_minor}: a model is spread over GPUs of one capability, so that its bits do not depend on where a layer is",
                first + other
            ));
        }
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn check_alike(_: usize, _: &[Device]) -> std::result::Result<(), String> {
    Ok(())
}

/// `tensor` on `device`: itself if it is there, otherwise a copy.
///
/// # Errors
/// If a device fails.
pub fn copy_to(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if !tensor.device().same_device(device) {
        let whole = tensor.contiguous()?;
        // The copy is in the queue of `device`, after the work of the other one.
        let copy = whole.to_device(device)?;
        // Otherwise the memory of `whole` could be freed, and used anew, before it is read.
        wait_for(whole.device(), device)?;
        return Ok(copy);
    }
    tensor.to_device(device)
}

/// Lets the work that `device` gets from now on wait for what `other` has got so far, if both are GPUs.
///
/// # Errors
/// If a device fails.
pub fn wait_for(device: &Device, other: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let (Device::Cuda(device), Device::Cuda(other)) = (device, other) {
        use candle_core::cuda_backend::WrapErr;
        device.cuda_stream().join(&other.cuda_stream()).w()?;
    }
    let _ = (device, other);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_devices_are_gpus() {
        assert_eq!(devices("cpu", 1).unwrap().len(), 1);
        let error = devices("cpu", 2).unwrap_err();
        assert!(
            error.starts_with("2 GPUs are asked for, and --device cpu"),
            "{error}"
        );
        assert!(devices("gpu", 2).unwrap_err().contains("expected cpu"));
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn several_gpus_need_the_feature() {
        let error = devices("auto", 2).unwrap_err();
        assert!(error.contains("--features cuda"), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}
