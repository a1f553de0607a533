//! `pytorch_model.bin`, in which older heads are published: a zip file with tensors, and a pickle that names
//! them. Nothing of the pickle is executed.

use crate::error::{Error, Result, first_line};
use candle_core::Tensor;
use candle_core::pickle::PthTensors;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::Path;
use zip::ZipArchive;

/// The file's name in a folder or a repository.
pub const FILE: &str = "pytorch_model.bin";
/// Maximum bytes of the pickle: that of a head has a few thousand.
const MAX_PICKLE_BYTES: u64 = 1 << 20;

/// All tensors of `file`, on the CPU.
///
/// # Errors
/// A setup error that names the file, if it is no such file, is broken, or its pickle is over the limit.
pub fn read(file: &Path) -> Result<HashMap<String, Tensor>> {
    open(file, |stored| {
        let names = stored.tensor_infos().keys();
        let tensors = names.filter_map(|name| {
            let tensor = stored.get(name).transpose()?;
            Some(tensor.and_then(|tensor| Ok((name.clone(), tensor.contiguous()?))))
        });
        tensors.collect()
    })
}

/// The names of all tensors of `file`.
///
/// # Errors
/// As [`read`].
pub fn names(file: &Path) -> Result<HashSet<String>> {
    open(file, |stored| {
        Ok(stored.tensor_infos().keys().cloned().collect())
    })
}

fn open<R>(file: &Path, work: impl FnOnce(PthTensors) -> candle_core::Result<R>) -> Result<R> {
    let broken = |what: String| Error::in_file(file, what);
    let opened = File::open(file).map_err(|e| Error::in_file(file, e))?;
    let mut zip = ZipArchive::new(opened).map_err(|e| broken(format!("no PyTorch file: {e}")))?;
    for entry in 0..zip.len() {
        let entry = zip.by_index(entry).map_err(|e| broken(e.to_string()))?;
        let name = entry.name().map_err(|e| broken(e.to_string()))?;
        if name.ends_with(".pkl") && entry.size() > MAX_PICKLE_BYTES {
            let size = entry.size();
            return Err(broken(format!(
                "its pickle has {size} bytes, over the limit of {MAX_PICKLE_BYTES}"
            )));
        }
    }
    // The library panics at some invalid pickles.
    let hook = take_hook();
    set_hook(Box::new(|_| ()));
    let done = catch_unwind(AssertUnwindSafe(|| work(PthTensors::new(file, None)?)));
    set_hook(hook);
    match done {
        Ok(done) => done.map_err(|e| broken(first_line(&e))),
        Err(_) => Err(broken("its pickle is invalid".into())),
    }
}
