//! The choice of an instruction set.

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::vector::{Loop, Portable};
#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::cpu::Isa;

/// Runs `work` with the instructions of `isa`.
pub(crate) fn run<L: Loop>(isa: Isa, work: L) -> L::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if let Some(bf16) = isa.avx512_bf16() {
            // SAFETY: `bf16` proves that the CPU has the instructions.
            return unsafe { x86::run_avx512_bf16(bf16, work) };
        }
        if let Some(avx512) = isa.avx512() {
            // SAFETY: `avx512` proves that the CPU has the instructions.
            return unsafe { x86::run_avx512(avx512, work) };
        }
        if let Some(avx2) = isa.avx2() {
            // SAFETY: `avx2` proves that the CPU has the instructions.
            return unsafe { x86::run_avx2(avx2, work) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        if let Some(bf16) = isa.neon_bf16() {
            // SAFETY: `bf16` proves that the CPU has the instructions.
            return unsafe { neon::run_bf16(bf16, work) };
        }
        if let Some(neon) = isa.neon() {
            return work.run(neon);
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = isa;
    work.run(Portable)
}
