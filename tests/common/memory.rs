//! Counts the memory that a thread takes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Above this a thread that is measured gets no more memory, which ends the process before the machine suffers.
const MAX_BYTES: isize = 4 << 30;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

struct Counted;

#[derive(Clone, Copy, Default)]
struct Counts {
    is_measured: bool,
    held: isize,
    peak: isize,
}

thread_local! {
    static COUNTS: Cell<Counts> = const {
        Cell::new(Counts { is_measured: false, held: 0, peak: 0 })
    };
}

/// Counts `bytes` more; whether there may be so many.
fn grow(bytes: isize) -> bool {
    let mut counts = COUNTS.get();
    counts.held += bytes;
    if counts.is_measured && counts.held > MAX_BYTES {
        return false;
    }
    counts.peak = counts.peak.max(counts.held);
    COUNTS.set(counts);
    true
}

// SAFETY: all memory is that of the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !grow(layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !grow(layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        grow(-(layout.size() as isize));
        // SAFETY: the caller's.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !grow(size as isize - layout.size() as isize) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's.
        unsafe { System.realloc(place, layout, size) }
    }
}

/// The most bytes that this thread has while it does `work`, beyond those that it had before.
pub fn peak_of(work: impl FnOnce()) -> usize {
    COUNTS.set(Counts {
        is_measured: true,
        ..Counts::default()
    });
    work();
    let peak = COUNTS.get().peak;
    COUNTS.set(Counts::default());
    peak as usize
}
