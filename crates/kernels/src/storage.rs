//! Access to the elements of tensors, for kernels.

use super::parallel::Shared;
use candle_core::{Layout, Result, WithDType};
use std::mem::MaybeUninit;

/// The elements of a contiguous CPU tensor, for op `op`.
pub(super) fn contiguous<'a, T: WithDType>(
    op: &str,
    storage: &'a candle_core::CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => candle_core::bail!("{op}: the tensor must be contiguous, got {layout:?}"),
    }
}

/// A float of an output that no thread may have written yet.
pub(super) type Place = MaybeUninit<f32>;

/// An output of `len` floats, of which the threads of `work` write disjoint parts. To fill it with zeros first
/// would be one more pass over memory, on one thread.
///
/// # Safety
/// `work` writes every float.
pub(super) unsafe fn output(len: usize, work: impl FnOnce(&Shared<'_, Place>)) -> Vec<f32> {
    let mut out = Vec::with_capacity(len);
    let places = &mut out.spare_capacity_mut()[..len];
    if cfg!(debug_assertions) {
        // So that tests see what is not written.
        places.fill(Place::new(f32::NAN));
    }
    work(&Shared::new(places));
    // SAFETY: there is room for them, and all are written.
    unsafe { out.set_len(len) };
    out
}

/// Writes `values` to `places`.
///
/// # Panics
/// If their numbers differ.
#[inline(always)]
pub(super) fn write(places: &mut [Place], values: &[f32]) {
    // SAFETY: a float has the layout of its place.
    let values = unsafe { &*(std::ptr::from_ref(values) as *const [Place]) };
    places.copy_from_slice(values);
}

/// Fills `places` with zeros: cheap where the same thread writes them at once.
#[inline(always)]
pub(super) fn zeros(places: &mut [Place]) -> &mut [f32] {
    places.fill(Place::new(0.0));
    // SAFETY: all are written.
    unsafe { written(places) }
}

/// The floats at `places`.
///
/// # Safety
/// All are written.
#[inline(always)]
pub(super) unsafe fn written(places: &mut [Place]) -> &mut [f32] {
    // SAFETY: a written place has the layout of its float.
    unsafe { &mut *(std::ptr::from_mut(places) as *mut [f32]) }
}
