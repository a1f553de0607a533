//! The project's files and its program.

use std::path::PathBuf;

/// The folder of tests that run elsewhere than they were built: it has the project's files as far as they were packed, and
/// the program as `bin/foretoken` (`scripts/gpu-day.sh --pack`).
const UNPACKED: &str = "FORETOKEN_UNPACKED";

fn unpacked() -> Option<PathBuf> {
    std::env::var_os(UNPACKED).map(PathBuf::from)
}

/// The project's folder.
pub fn root() -> PathBuf {
    unpacked().unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into())
}

/// The program.
pub fn program() -> PathBuf {
    let built = || env!("CARGO_BIN_EXE_foretoken").into();
    unpacked().map_or_else(built, |folder| folder.join("bin/foretoken"))
}

/// A file or folder of the project. `None`: it was not packed, and the test is to be skipped. Where nothing was packed,
/// a missing file fails the test.
pub fn file(name: &str) -> Option<PathBuf> {
    let path = root().join(name);
    if unpacked().is_some() && !path.exists() {
        println!("skipped: {name} was not packed");
        return None;
    }
    Some(path)
}
