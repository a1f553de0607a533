//! The CUDA kernels, compiled for the host and run in an emulator of the parts of CUDA that they use
//! (`tests/emulator`): compares their sums with f64, and a row's bits alone with those in a batch.
//!
//! This needs a C++ compiler but no GPU. It does not test the GPU compiler, races between threads, or
//! speed.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

/// Compiles files of `tests/emulator` to a program and runs it; shows its output if it failed.
fn run(sources: &[&str]) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let emulator = root.join("tests/emulator");
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("program");
    let compiled = Command::new(&compiler)
        .args(["-O1", "-std=c++20", "-ffp-contract=off"])
        .args(["-Wall", "-Werror", "-Wno-unknown-pragmas"])
        .arg(format!("-I{}", emulator.display()))
        .arg(format!("-I{}", root.join("crates/kernels/src").display()))
        .args(sources.iter().map(|source| emulator.join(source)))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap_or_else(|e| panic!("{compiler}, the C++ compiler (CXX names another): {e}"));
    let errors = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{errors}");
    let output = Command::new(&program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}

#[test]
fn kernels_agree_with_f64_and_with_themselves() {
    run(&[
        "float8.cpp",
        "kernels.cpp",
        "latent.cpp",
        "lora.cpp",
        "prefill.cpp",
        "products.cpp",
        "q8_blocks.cpp",
        "recurrent.cpp",
        "sample.cpp",
        "emulator.cpp",
    ]);
}

#[test]
fn a_forward_in_one_launch_has_the_bits_of_single_kernels() {
    run(&["forward.cpp", "emulator.cpp"]);
}

#[test]
fn the_emulator_finds_copies_that_nobody_waits_for() {
    run(&["copies.cpp", "emulator.cpp"]);
}

/// The emulated GPU (`scripts/emulated-gpu.sh`), on which the Rust side runs.
#[test]
fn the_emulated_gpu_finds_bugs() {
    run(&[
        "emulated_gpu.cpp",
        "memory.cpp",
        "streams.cpp",
        "driver.cpp",
        "devices.cpp",
        "candle.cpp",
        "emulator.cpp",
    ]);
}
