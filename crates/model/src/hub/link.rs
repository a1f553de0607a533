//! The names of a file's contents in the snapshots of the Hub's cache.

use std::io::ErrorKind::AlreadyExists;
use std::path::Path;

/// Makes the folder that `file` is to be in.
pub(super) fn make_folder_of(file: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(file.parent().unwrap_or(file))
}

/// Creates `pointer`, which is `name` in a commit's folder, as a link to `blob`. On Windows, where links need a right that few
/// users have, it is another name of the same contents.
pub(super) fn link(blob: &Path, pointer: &Path, name: &str) -> std::io::Result<()> {
    make_folder_of(pointer)?;
    if pointer.is_symlink() && !pointer.exists() {
        // A dangling link: its target is gone. Another process may be faster.
        let _ = std::fs::remove_file(pointer);
    }
    #[cfg(unix)]
    {
        // Up from the folders in `name` and from `snapshots/COMMIT/`.
        let up = 1 + Path::new(name).components().count();
        let mut target: std::path::PathBuf = std::iter::repeat_n("..", up).collect();
        target.push("blobs");
        target.push(blob.file_name().unwrap_or_default());
        match std::os::unix::fs::symlink(target, pointer) {
            Err(e) if e.kind() == AlreadyExists && pointer.exists() => Ok(()),
            made => made,
        }
    }
    #[cfg(not(unix))]
    {
        let _ = name;
        name_again(blob, pointer)
    }
}

/// Gives the contents of `blob` the name `pointer`, too. A file system that has one name for each file gets a copy.
#[cfg(any(not(unix), test))]
fn name_again(blob: &Path, pointer: &Path) -> std::io::Result<()> {
    match std::fs::hard_link(blob, pointer) {
        // Another process was faster.
        Err(e) if e.kind() == AlreadyExists => Ok(()),
        Err(_) => copy(blob, pointer),
        Ok(()) => Ok(()),
    }
}

/// Copies `blob` to `pointer`, where nobody finds a part of it.
#[cfg(any(not(unix), test))]
fn copy(blob: &Path, pointer: &Path) -> std::io::Result<()> {
    let mut part = pointer.as_os_str().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let copied = std::fs::copy(blob, &part).and_then(|_| std::fs::rename(&part, pointer));
    if copied.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    type Way = fn(&Path, &Path, &str) -> std::io::Result<()>;

    #[test]
    fn a_snapshot_has_the_contents_of_the_blob() {
        let cache = tempfile::tempdir().unwrap();
        let blob = cache.path().join("blobs/b");
        make_folder_of(&blob).unwrap();
        std::fs::write(&blob, "weights").unwrap();
        let commit = cache.path().join("snapshots/c");
        let ways: [(&str, Way); 3] = [
            ("part/linked", link),
            ("named", |blob, pointer, _| name_again(blob, pointer)),
            ("copied", |blob, pointer, _| copy(blob, pointer)),
        ];
        for (name, link) in ways {
            let pointer = commit.join(name);
            link(&blob, &pointer, name).unwrap();
            assert_eq!(std::fs::read(&pointer).unwrap(), b"weights", "{name}");
        }
        // What is there stays.
        name_again(&blob, &commit.join("copied")).unwrap();
        let none = cache.path().join("blobs/none");
        assert!(copy(&none, &commit.join("none")).is_err());
        assert_eq!(std::fs::read_dir(&commit).unwrap().count(), 3);
    }
}
