//! The CUDA kernels, compiled for the host and run in an emulator of what they use of CUDA
//! (`tests/emulator`): their sums against f64, and a row's bits alone and in company.
//!
//! This needs a C++ compiler and no GPU. What it cannot see: the compiler for GPUs, races between
//! threads, and speed.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

/// Compiles files of `tests/emulator` to a program, runs it and shows what it said if it failed.
fn run(sources: &[&str]) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        println!("no C++ compiler ({compiler}): the CUDA kernels are not tested");
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let emulator = root.join("tests/emulator");
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let compiled = Command::new(&compiler)
        .args(["-O1", "-std=c++20", "-ffp-contract=off"])
        .args(["-Wall", "-Werror", "-Wno-unknown-pragmas"])
        .arg(format!("-I{}", emulator.display()))
        .arg(format!("-I{}", root.join("src/kernels").display()))
        .args(sources.iter().map(|source| emulator.join(source)))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(&program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}

#[test]
fn kernels_do_what_they_say() {
    run(&["kernels.cpp", "prefill.cpp", "sample.cpp", "emulator.cpp"]);
}

/// The emulated GPU (`scripts/emulated-gpu.sh`), which the Rust side runs on.
#[test]
fn the_emulated_gpu_finds_bugs() {
    run(&[
        "emulated_gpu.cpp",
        "memory.cpp",
        "streams.cpp",
        "driver.cpp",
        "candle.cpp",
        "emulator.cpp",
    ]);
}
