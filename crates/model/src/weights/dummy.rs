//! Random weights, which no file has.

use candle_core::{DType, Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_core::sampling::mix;
use rayon::prelude::*;

/// Ones for a norm, zeros for a bias, and uniform noise of variance `1 / inputs` for a matrix. The noise
/// depends only on the seed and the name, so the order of loading does not matter.
pub(crate) fn tensor(seed: u64, name: &str, dims: &[usize]) -> Result<Tensor> {
    let cpu = Device::Cpu;
    match dims {
        &[outputs, inputs] => {
            let width = (3. / inputs as f32).sqrt();
            let start = name
                .bytes()
                .fold(mix(seed), |hash, byte| mix(hash ^ u64::from(byte)));
            // In parallel: a GPU would wait for billions of values.
            let noise = (1..=(outputs * inputs) as u64).into_par_iter().map(|i| {
                let state = start.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                (mix(state) >> 40) as f32 / (1u32 << 23) as f32 - 1.
            });
            let mut values = Vec::new();
            // The config may ask for more than the machine has.
            values.try_reserve_exact(outputs * inputs).map_err(|_| {
                Error::setup(format!(
                    "tensor {name} of shape {dims:?} does not fit in memory"
                ))
            })?;
            values.par_extend(noise.map(|x| x * width));
            Ok(Tensor::from_vec(values, dims, &cpu)?)
        }
        _ if name.ends_with(".bias") => Ok(Tensor::zeros(dims, DType::F32, &cpu)?),
        _ => Ok(Tensor::ones(dims, DType::F32, &cpu)?),
    }
}
