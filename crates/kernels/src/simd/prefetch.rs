//! Hints about what will be read.

/// Prefetches the cache line of `at`, which may be any address: into the first-level cache if `NEAR`, otherwise into
/// the second-level one.
#[inline(always)]
pub(crate) fn prefetch<T, const NEAR: bool>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 CPU has the instruction, a hint that reads nothing and faults at no address.
        unsafe {
            if NEAR {
                _mm_prefetch::<_MM_HINT_T0>(at.cast());
            } else {
                _mm_prefetch::<_MM_HINT_T1>(at.cast());
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint that reads nothing and faults at no address.
    unsafe {
        if NEAR {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags));
        } else {
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, preserves_flags));
        }
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
