//! Compiles the CUDA kernels to PTX, with the feature `cuda`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    kernels();
}

#[cfg(feature = "cuda")]
fn kernels() {
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR").expect("cargo names a folder"));
    let built = cudaforge::KernelBuilder::new()
        .source_glob("src/**/*.cu")
        // For headers, and files that are added.
        .watch(["src"])
        .include_path("src")
        .args(["-O3", "-std=c++17"])
        .build_ptx();
    match built.and_then(|ptx| ptx.write(out.join("ptx.rs"))) {
        Ok(()) => (),
        Err(error) => panic!("the CUDA kernels cannot be compiled: {error}"),
    }
}
