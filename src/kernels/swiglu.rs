//! `silu(gate) * up`, the gated activation of the Llama MLP.

use super::parallel::{Shared, for_each};
use super::{contiguous, float};
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};

/// `silu(gate) * up`, elementwise, for two contiguous tensors of one shape and dtype.
///
/// One pass in f32 on the CPU; elsewhere, and for other dtypes, candle's own two ops.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.device().is_cpu() && gate.dtype() == DType::F32 {
        gate.apply_op2_no_bwd(up, &Swiglu)
    } else {
        gate.silu()? * up
    }
}

/// Elements a thread takes at a time.
const CHUNK: usize = 4096;

struct Swiglu;

impl CustomOp2 for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let gate = contiguous::<f32>(self.name(), gate, gate_layout)?;
        let up = contiguous::<f32>(self.name(), up, up_layout)?;
        if gate_layout.dims() != up_layout.dims() {
            candle_core::bail!("swiglu: {gate_layout:?} and {up_layout:?} differ in shape");
        }
        let mut out = vec![0f32; gate.len()];
        let shared = Shared::new(&mut out);
        for_each(gate.len().div_ceil(CHUNK), gate.len() > 2 * CHUNK, |i| {
            let (start, end) = (i * CHUNK, gate.len().min((i + 1) * CHUNK));
            // SAFETY: chunks do not overlap.
            let out = unsafe { shared.slice(start, end - start) };
            run(&gate[start..end], &up[start..end], out);
        });
        Ok((CpuStorage::F32(out), gate_layout.shape().clone()))
    }
}

fn run(gate: &[f32], up: &[f32], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2.
        return unsafe { run_avx2(gate, up, out) };
    }
    body(gate, up, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2(gate: &[f32], up: &[f32], out: &mut [f32]) {
    body(gate, up, out);
}

#[inline(always)]
fn body(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *out = g / (1.0 + float::exp(-g)) * u;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn agrees_with_candle_and_does_not_know_its_neighbours() {
        let cpu = Device::Cpu;
        let gate = Tensor::randn(0f32, 3.0, (7, 3001), &cpu).unwrap();
        let up = Tensor::randn(0f32, 1.0, (7, 3001), &cpu).unwrap();
        let ours = swiglu(&gate, &up).unwrap().to_vec2::<f32>().unwrap();
        let theirs = (gate.silu().unwrap() * &up)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        for (ours, theirs) in ours.iter().flatten().zip(theirs.iter().flatten()) {
            assert!((ours - theirs).abs() <= 1e-6 * theirs.abs().max(1e-3));
        }
        for (row, ours) in ours.iter().enumerate() {
            let pick = |t: &Tensor| t.narrow(0, row, 1).unwrap().contiguous().unwrap();
            let alone = swiglu(&pick(&gate), &pick(&up)).unwrap();
            assert_eq!(&alone.to_vec2::<f32>().unwrap()[0], ours);
        }
    }
}
