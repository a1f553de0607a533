//! The allocator of the program.

use std::ffi::{c_int, c_long};

/// Every step allocates and frees the same few sizes, some of them large. With the system allocator
/// that took 5% of a step.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Time for which freed memory stays with the process.
const PURGE_DELAY_MS: c_long = 10_000;

/// `mi_option_purge_delay` of mimalloc.h.
const PURGE_DELAY: c_int = 15;

unsafe extern "C" {
    safe fn mi_option_set_default(option: c_int, value: c_long);
}

/// Lets freed memory stay with the process for a while, unless `MIMALLOC_PURGE_DELAY` says for how long. By default
/// it goes back to the system after 10 ms: then nearly each forward of a prompt gets fresh pages, which the system
/// fills with zeros first: up to a fifth of its time.
pub fn keep_freed_memory() {
    mi_option_set_default(PURGE_DELAY, PURGE_DELAY_MS);
}
