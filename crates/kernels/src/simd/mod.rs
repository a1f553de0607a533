//! Vectors, and loops over them that are compiled for each instruction set.

mod dispatch;
#[cfg(any(test, all(windows, target_env = "gnu")))]
mod fmaf;
#[cfg(target_arch = "aarch64")]
mod neon;
mod prefetch;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(super) use dispatch::run;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::widen_f16;
pub(super) use prefetch::prefetch;
#[cfg(test)]
pub(super) use vector::Portable;
pub(super) use vector::{Element, LANES, Loop, Simd, e4m3, exp2, exp2_for_bf16};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::amx;
