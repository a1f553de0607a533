//! How fast the threads of the kernels read memory.

use super::parallel::{Shared, for_each, threads};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Bytes that are read in a pass: more than caches hold.
const BYTES: usize = 256 << 20;
/// Numbers that a thread reads at a time.
const PIECE: usize = 1 << 17;
/// Time of all passes.
const TIME: Duration = Duration::from_millis(300);

/// Bytes per second that [`threads`] threads read from memory: that of the fastest of the passes that fit into
/// a third of a second, because other programs only make it slower.
pub fn read_bandwidth() -> f64 {
    let mut numbers = vec![0u64; BYTES / size_of::<u64>()];
    let pieces = numbers.len() / PIECE;
    let parallelize = threads() > 1;
    let shared = Shared::new(&mut numbers);
    // Untouched pages are all the same page of zeros.
    for_each(pieces, parallelize, |i| {
        // SAFETY: no two calls have the same piece.
        unsafe { shared.slice(i * PIECE, PIECE) }.fill(i as u64);
    });
    let (mut best, start) = (0f64, Instant::now());
    while start.elapsed() < TIME {
        let pass = Instant::now();
        for_each(pieces, parallelize, |i| {
            // SAFETY: as above.
            let piece = unsafe { shared.slice(i * PIECE, PIECE) };
            let sum = piece.iter().fold(0u64, |sum, &n| sum.wrapping_add(n));
            black_box(sum);
        });
        best = best.max(BYTES as f64 / pass.elapsed().as_secs_f64());
    }
    best
}
