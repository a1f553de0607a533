//! The folder: its key, its files, and which of them go when it is full. Several processes may use one folder: a file is
//! named by its contents, and appears and disappears as a whole.

use super::format::{self, Entry};
use crate::cache_key::CacheKey;
use foretoken_core::error::{Error, Result};
use foretoken_core::kv::BlockName;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// The name of the key's file.
const KEY: &str = "key";
/// The ends of the names of whole files, and of those that are being written.
const WHOLE: &str = "kv";
const PARTIAL: &str = "tmp";
/// A block counts as so much older for each block before it: fewer texts have it, and without those before it is of no
/// use.
const AGE_PER_BLOCK: Duration = Duration::from_millis(250);
/// What is still being written after this time has no writer any more.
const MAX_WRITE_TIME: Duration = Duration::from_secs(3600);
/// Bytes that a file system gives out at a time.
const PAGE: u64 = 4096;

/// A folder of blocks and states.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
    key: CacheKey,
    /// Distinguish the files that this process writes from those of others, and from each other.
    writer: u64,
    written: AtomicU64,
    /// Whether the log has a line about a damaged file. A broken disk damages many.
    has_warned: AtomicBool,
}

/// A file in the folder.
#[derive(Debug)]
struct StoredFile {
    path: PathBuf,
    /// On the disk.
    bytes: u64,
    modified: SystemTime,
}

impl Folder {
    /// Opens the folder at `root`, which it makes if there is none, and checks that files can be written to it.
    ///
    /// # Errors
    /// `Setup`, in one line: it is no folder, others may write to it, or it cannot be read or written.
    pub fn open(root: &Path) -> Result<Self> {
        let failed = |what: &str, e: io::Error| {
            let root = root.display();
            Error::setup(format!("--prefix-cache-disk {root}: {what}: {e}"))
        };
        private_folder(root).map_err(|e| failed("the folder cannot be made", e))?;
        check_owner(root)?;
        let key = key(&root.join(KEY)).map_err(|e| failed("its key", e))?;
        let folder = Self {
            root: root.into(),
            key,
            writer: rand::random(),
            written: AtomicU64::new(0),
            has_warned: AtomicBool::new(false),
        };
        let (mut file, path) = folder
            .partial(root)
            .map_err(|e| failed("no file can be written", e))?;
        let owned = check_uid(root, &file);
        let written = file.write_all(&[0]);
        let removed = fs::remove_file(&path);
        written
            .and(removed)
            .map_err(|e| failed("no file can be written", e))?;
        owned.map(|()| folder)
    }

    /// The key of the folder's names.
    pub fn key(&self) -> &CacheKey {
        &self.key
    }

    /// The path of the folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether there is a file of this entry.
    pub fn has(&self, entry: &Entry) -> bool {
        fs::symlink_metadata(self.path(entry)).is_ok_and(|found| found.is_file())
    }

    /// Writes the file of an entry. Returns the bytes that it takes on the disk.
    ///
    /// # Errors
    /// If it cannot be written; then nothing of it is left.
    pub fn write(&self, entry: &Entry, contents: &[u8]) -> io::Result<u64> {
        let path = self.path(entry);
        let folder = path.parent().unwrap_or(&self.root);
        let (mut file, partial) = match self.partial(folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                private_folder(folder)?;
                self.partial(folder)?
            }
            found => found?,
        };
        let rename = || match fs::rename(&partial, &path) {
            // It has the same contents, or is written again when it is needed.
            Err(e) if is_held(&e) => fs::remove_file(&partial),
            renamed => renamed,
        };
        let written = format::write(&mut file, entry, contents)
            .and_then(|()| file.set_modified(time_of(entry)))
            .and_then(|()| rename());
        if written.is_err() {
            // Otherwise it would stay for an hour.
            let _ = fs::remove_file(&partial);
        }
        written.map(|()| on_disk((format::HEADER_BYTES + contents.len()) as u64))
    }

    /// The contents of an entry's file, of `bytes` bytes, which is then as young as if it were just written; `None` if
    /// there is no such file. A file that is damaged is removed, and the log says so of the first one.
    pub fn read(&self, entry: &Entry, bytes: usize) -> Option<Vec<u8>> {
        let path = self.path(entry);
        let contents = || -> io::Result<Vec<u8>> {
            let mut file = open_regular(&path)?;
            let length = file.metadata()?.len();
            format::read(&mut file, length, entry, bytes)
        };
        match contents() {
            Ok(contents) => {
                self.touch(entry);
                Some(contents)
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound || is_held(&e) => None,
            Err(damage) => {
                let name = path.display();
                if self.has_warned.swap(true, Ordering::Relaxed) {
                    tracing::debug!("prefix cache: {name} is removed: {damage}");
                } else {
                    tracing::warn!("prefix cache: {name} is removed, and others like it: {damage}");
                }
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// Makes an entry's file as young as if it were just written.
    pub fn touch(&self, entry: &Entry) {
        // It may be gone by now, or another user's, who decides how old it is.
        let file = OpenOptions::new().append(true).open(self.path(entry));
        let _ = file.and_then(|file| file.set_modified(time_of(entry)));
    }

    /// Bytes of all files on the disk. If they are more than `limit`, the oldest ones go first, until a part of the limit is
    /// free.
    ///
    /// # Errors
    /// If the folder cannot be read.
    pub fn evict(&self, limit: u64) -> io::Result<u64> {
        let mut files = self.files()?;
        let mut sum: u64 = files.iter().map(|file| file.bytes).sum();
        if sum <= limit {
            return Ok(sum);
        }
        files.sort_by_key(|file| file.modified);
        for file in files {
            if sum <= limit - limit / 16 {
                break;
            }
            match fs::remove_file(&file.path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound && !is_held(&e) => return Err(e),
                _ => sum -= file.bytes,
            }
        }
        Ok(sum)
    }

    /// The files of this program, of all models. Those that nobody finished are removed.
    fn files(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = Vec::new();
        for pool in folders(&self.root, 32)? {
            for part in folders(&pool, 2).unwrap_or_default() {
                for entry in fs::read_dir(&part).into_iter().flatten().flatten() {
                    let path = entry.path();
                    let is_partial = match path.extension().and_then(|end| end.to_str()) {
                        Some(WHOLE) => false,
                        Some(PARTIAL) => true,
                        _ => continue,
                    };
                    let Some(found) = entry.metadata().ok().filter(fs::Metadata::is_file) else {
                        continue;
                    };
                    let modified = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    if is_partial {
                        // Whoever writes it makes it a whole one.
                        if modified.elapsed().is_ok_and(|age| age > MAX_WRITE_TIME) {
                            let _ = fs::remove_file(&path);
                        }
                        continue;
                    }
                    files.push(StoredFile {
                        path,
                        bytes: on_disk(found.len()),
                        modified,
                    });
                }
            }
        }
        Ok(files)
    }

    /// Where the file of an entry is.
    fn path(&self, entry: &Entry) -> PathBuf {
        let name = hex(entry.name);
        let (part, rest) = name.split_at(2);
        let mut path = self.root.join(hex(entry.pool));
        path.push(part);
        path.push(rest);
        path.set_extension(WHOLE);
        path
    }

    /// A new file in `folder` that gets its name later, and its path.
    fn partial(&self, folder: &Path) -> io::Result<(File, PathBuf)> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{:016x}-{number}.{PARTIAL}", self.writer));
        Ok((
            private(OpenOptions::new().create_new(true)).open(&path)?,
            path,
        ))
    }
}

/// Whether `e` is what Windows says of a file that somebody has open, or that goes when they close it.
fn is_held(e: &io::Error) -> bool {
    cfg!(windows) && e.kind() == io::ErrorKind::PermissionDenied
}

/// The time that an entry's file has when it was just used.
fn time_of(entry: &Entry) -> SystemTime {
    let depth = u32::try_from(entry.depth).unwrap_or(u32::MAX);
    let now = SystemTime::now();
    now.checked_sub(AGE_PER_BLOCK * depth).unwrap_or(now)
}

/// Bytes that a file of `length` bytes takes.
fn on_disk(length: u64) -> u64 {
    length.next_multiple_of(PAGE)
}

fn hex(name: BlockName) -> String {
    name.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folders in `path` whose names are so many hexadecimal digits.
fn folders(path: &Path, digits: usize) -> io::Result<Vec<PathBuf>> {
    let is_ours = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let name = name.as_encoded_bytes();
        let is_name = name.len() == digits && name.iter().all(u8::is_ascii_hexdigit);
        is_name && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let all = fs::read_dir(path)?.flatten();
    Ok(all.filter(is_ours).map(|entry| entry.path()).collect())
}

/// Opens a file for reading, if it is one and no link.
fn open_regular(path: &Path) -> io::Result<File> {
    if fs::symlink_metadata(path)?.is_file() {
        return File::open(path);
    }
    Err(io::Error::other("it is no regular file"))
}

/// The key in the file at `path`, which the first process makes.
fn key(path: &Path) -> io::Result<CacheKey> {
    let mut file =
        private(OpenOptions::new().read(true).create(true).truncate(false)).open(path)?;
    // Nobody reads it before it is whole.
    file.lock()?;
    let mut bytes = Vec::new();
    (&file)
        .take(CacheKey::LENGTH as u64 + 1)
        .read_to_end(&mut bytes)?;
    if bytes.is_empty() {
        let key = CacheKey::random();
        file.write_all(key.bytes())?;
        file.sync_all()?;
        return Ok(key);
    }
    let bytes = bytes.try_into().map_err(|_| {
        io::Error::other("the file `key` is not of this program, or damaged: remove it")
    })?;
    Ok(CacheKey::of_bytes(bytes))
}

/// Options for a file that only its owner can read and write.
fn private(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.write(true)
}

/// Makes a folder that only its owner can read and write, unless there is one.
fn private_folder(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

/// Checks that no other user may put files into the folder: what is in them becomes a part of texts.
#[cfg(unix)]
fn check_owner(root: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(root).map_or(0, |found| found.permissions().mode());
    if mode & 0o022 == 0 {
        return Ok(());
    }
    let root = root.display();
    Err(Error::setup(format!(
        "--prefix-cache-disk {root}: other users may write to this folder (mode {:03o}): chmod go-w it, or name a new folder in it",
        mode & 0o777
    )))
}

/// Checks that the folder is this user's, as `file` in it is, or root's: its owner may put files into it.
#[cfg(unix)]
fn check_uid(root: &Path, file: &File) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let uids = fs::metadata(root).and_then(|found| Ok((found.uid(), file.metadata()?.uid())));
    match uids {
        Ok((owner, own)) if owner == 0 || owner == own => Ok(()),
        _ => Err(Error::setup(format!(
            "--prefix-cache-disk {}: the folder is another user's: name one of your own",
            root.display()
        ))),
    }
}

#[cfg(not(unix))]
fn check_uid(_: &Path, _: &File) -> Result<()> {
    Ok(())
}

/// Says that nothing is checked.
#[cfg(not(unix))]
fn check_owner(root: &Path) -> Result<()> {
    let root = root.display();
    tracing::warn!(
        "--prefix-cache-disk {root}: on this system, it is not checked whether other users may write to this folder, which they must not"
    );
    Ok(())
}

#[cfg(test)]
mod tests;
