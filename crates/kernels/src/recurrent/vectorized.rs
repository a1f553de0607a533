//! Compiles a piece of work once for each kind of vectors. The bits are the same with all.

#[cfg(target_arch = "x86_64")]
use crate::cpu::{self, Avx2, Avx512Vnni};

/// Work that compilers can vectorize. `run` must be inlined.
pub(super) trait Vectorized {
    fn run(self);
}

/// Does `work` with the widest vectors of this CPU.
pub(super) fn vectorized(work: impl Vectorized) {
    #[cfg(target_arch = "x86_64")]
    {
        let isa = cpu::isa();
        if let Some(proof) = isa.avx512() {
            // SAFETY: `proof` proves that the CPU has the instructions.
            return unsafe { run_avx512(proof, work) };
        }
        if let Some(proof) = isa.avx2() {
            // SAFETY: as above.
            return unsafe { run_avx2(proof, work) };
        }
    }
    work.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn run_avx2(_: Avx2, work: impl Vectorized) {
    work.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl")]
fn run_avx512(_: Avx512Vnni, work: impl Vectorized) {
    work.run();
}
