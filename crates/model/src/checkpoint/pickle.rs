//! `pytorch_model.bin` and the like, in which older heads are published: a zip file with the values of tensors, and a
//! pickle that names them. Nothing of the pickle is executed.
//!
//! The pickle is bounded in bytes and in objects. No entry is compressed, as `torch.save` compresses none,
//! and together they are no larger than the file: so a file needs about as much memory as it has bytes.

mod objects;
mod state_dict;

use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result, clipped, first_line};
use objects::Objects;
use state_dict::StoredTensor;
use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use zip::read::ZipFile;
use zip::{CompressionMethod, ZipArchive};

/// The file's names in a folder or a repository; the second is that of Medusa heads.
pub(crate) const FILES: [&str; 2] = ["pytorch_model.bin", "medusa_lm_head.pt"];
/// Maximum bytes of the pickle: that of a head has a few thousand.
const MAX_PICKLE_BYTES: u64 = 1 << 20;

type Outcome<T> = std::result::Result<T, String>;

/// The file of `folder`, if it has one.
pub fn file_in(folder: &Path) -> Option<PathBuf> {
    let files = FILES.map(|name| folder.join(name));
    files.into_iter().find(|file| file.exists())
}

/// All tensors of `file`, on the CPU. Those that share a storage there share their values. The values of a tensor may
/// be in the order of columns.
///
/// # Errors
/// A setup error that names the file, if it is no such file, is broken, or is over a limit.
pub fn read(file: &Path) -> Result<HashMap<String, Tensor>> {
    tensors_of(file).map_err(|what| Error::in_file(file, what))
}

fn tensors_of(file: &Path) -> Outcome<HashMap<String, Tensor>> {
    let mut stored = StoredFile::open(file)?;
    let pickle = stored.pickle()?;
    let mut storages = HashMap::new();
    let tensors = state_dict::tensors(&Objects::read(&pickle)?)?;
    let tensors = tensors.into_iter().map(|(name, tensor)| {
        let found = stored.tensor(&tensor, &mut storages);
        let found = found.map_err(|what| format!("tensor {}: {what}", clipped(name)))?;
        Ok((name.to_owned(), found))
    });
    tensors.collect()
}

/// The names of all tensors of `file`.
///
/// # Errors
/// Returns the errors of [`read`].
pub fn names(file: &Path) -> Result<HashSet<String>> {
    let pickle = StoredFile::open(file).and_then(|mut stored| stored.pickle());
    let names = pickle.and_then(|pickle| names_in(&pickle));
    names.map_err(|what| Error::in_file(file, what))
}

/// The names of all tensors of a pickle, whose shapes are checked, too.
pub fn names_in(pickle: &[u8]) -> Outcome<HashSet<String>> {
    let tensors = state_dict::tensors(&Objects::read(pickle)?)?;
    Ok(tensors.into_iter().map(|(name, _)| name.into()).collect())
}

/// An open file, whose entries are checked.
struct StoredFile {
    zip: ZipArchive<File>,
    /// The prefix of the names of all entries.
    folder: String,
}

impl StoredFile {
    /// Opens `file` and checks its entries.
    fn open(file: &Path) -> Outcome<Self> {
        let opened = File::open(file).map_err(failed)?;
        let mut left = opened.metadata().map_err(failed)?.len();
        let zip = ZipArchive::new(opened);
        let mut zip = zip.map_err(|e| format!("no file of torch.save since PyTorch 1.6: {e}"))?;
        let mut folders = Vec::new();
        for entry in 0..zip.len() {
            let entry = zip.by_index_raw(entry).map_err(failed)?;
            let name = entry.name().map_err(failed)?;
            if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
                return Err(format!(
                    "{} is compressed or encrypted, which is not supported",
                    clipped(&name)
                ));
            }
            let rest = left.checked_sub(entry.size());
            left = rest.ok_or("its entries have more bytes than it has")?;
            let folder = name.strip_suffix("data.pkl");
            folders.extend(
                folder
                    .filter(|at| at.is_empty() || at.ends_with('/'))
                    .map(str::to_owned),
            );
        }
        let folder = match folders.pop() {
            Some(folder) if folders.is_empty() => folder,
            _ => return Err("it must have one data.pkl".to_owned()),
        };
        let mut stored = Self { zip, folder };
        stored.check_byte_order()?;
        Ok(stored)
    }

    /// Checks that values are stored as this reads them. Older files do not say.
    fn check_byte_order(&mut self) -> Outcome<()> {
        const LITTLE: &[u8] = b"little";
        if self.zip.index_for_name(&self.name("byteorder")).is_none() {
            return Ok(());
        }
        let size = self.entry("byteorder")?.size();
        if size == LITTLE.len() as u64 && self.bytes("byteorder", size)? == LITTLE {
            Ok(())
        } else {
            Err("its byteorder is not supported: only little is".to_owned())
        }
    }

    fn name(&self, entry: &str) -> String {
        format!("{}{entry}", self.folder)
    }

    fn entry(&mut self, name: &str) -> Outcome<ZipFile<'_, File>> {
        let name = self.name(name);
        let entry = self.zip.by_name(&name);
        entry.map_err(|e| format!("{}: {e}", clipped(&name)))
    }

    /// The first `len` bytes of an entry, which has at least these.
    fn bytes(&mut self, name: &str, len: u64) -> Outcome<Vec<u8>> {
        let mut entry = self.entry(name)?;
        let size = entry.size();
        if len > size {
            return Err(format!("{} has {size} bytes, not {len}", clipped(name)));
        }
        // No more than the file has.
        let mut bytes = vec![0; len as usize];
        // Not to the end, as torch.save can be told to write no checksums.
        entry.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    fn pickle(&mut self) -> Outcome<Vec<u8>> {
        let size = self.entry("data.pkl")?.size();
        if size > MAX_PICKLE_BYTES {
            return Err(format!(
                "its pickle has {size} bytes, over the limit of {MAX_PICKLE_BYTES}"
            ));
        }
        self.bytes("data.pkl", size)
    }

    /// The tensor, whose storage is read unless it is one of `storages`.
    fn tensor<'p>(
        &mut self,
        tensor: &StoredTensor<'p>,
        storages: &mut HashMap<&'p str, Tensor>,
    ) -> Outcome<Tensor> {
        let key = tensor.storage;
        let storage = match storages.get(key) {
            Some(storage) => storage,
            None => {
                let read = self.storage(tensor)?;
                storages.entry(key).or_insert(read)
            }
        };
        if (storage.dtype(), storage.elem_count()) != (tensor.dtype, tensor.storage_len) {
            return Err("another tensor describes its storage differently".to_owned());
        }
        view(storage, tensor).map_err(|e| first_line(&e))
    }

    /// The whole storage of a tensor.
    fn storage(&mut self, tensor: &StoredTensor<'_>) -> Outcome<Tensor> {
        let (len, size) = (tensor.storage_len, tensor.dtype.size_in_bytes());
        let bytes = (len as u64).saturating_mul(size as u64);
        let bytes = self.bytes(&format!("data/{}", tensor.storage), bytes)?;
        let storage = Tensor::from_raw_buffer(&bytes, tensor.dtype, &[len], &Device::Cpu);
        storage.map_err(|e| first_line(&e))
    }
}

/// The values of `tensor`, which stay in the storage.
fn view(storage: &Tensor, tensor: &StoredTensor<'_>) -> candle_core::Result<Tensor> {
    let layout = &tensor.layout;
    let count = layout.shape().elem_count();
    let values = storage.narrow(0, layout.start_offset(), count)?;
    if layout.is_contiguous() {
        return values.reshape(layout.dims());
    }
    let columns_first: Vec<usize> = layout.dims().iter().rev().copied().collect();
    let order: Vec<usize> = (0..columns_first.len()).rev().collect();
    values.reshape(columns_first)?.permute(order)
}

fn failed(e: impl Display) -> String {
    e.to_string()
}

#[cfg(test)]
mod tests;
