//! Compiles the CUDA kernels to PTX, with the feature `cuda`; then `cfg(nvcc)` says whether candle's were
//! compiled, too: a stand-in for `nvcc` compiles nothing (`scripts/emulated-gpu.sh`).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(nvcc)");
    #[cfg(feature = "cuda")]
    kernels();
}

#[cfg(feature = "cuda")]
fn kernels() {
    let without_nvcc = "FORETOKEN_BUILT_WITHOUT_NVCC";
    println!("cargo:rerun-if-env-changed={without_nvcc}");
    if std::env::var_os(without_nvcc).is_none() {
        println!("cargo:rustc-cfg=nvcc");
    }
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR").expect("cargo names a folder"));
    let sources = [
        "src/kernels/dense/gemv.cu",
        "src/kernels/kv_move.cu",
        "src/kernels/norm.cu",
        "src/kernels/paged_attention/paged_attention.cu",
        "src/kernels/paged_attention/prefill.cu",
        "src/kernels/rope_kv_write.cu",
        "src/kernels/sample/sample.cu",
        "src/kernels/glu.cu",
    ];
    let built = cudaforge::KernelBuilder::new()
        .source_files(sources)
        .watch([
            "src/kernels/cuda/common.cuh",
            "src/kernels/cuda/tensor.cuh",
            "src/kernels/paged_attention/paged_attention.cuh",
            "src/kernels/sample/gumbel_max.cuh",
            "src/kernels/sample/vocab.cuh",
        ])
        .include_path("src/kernels")
        .args(["-O3", "-std=c++17"])
        .build_ptx();
    match built.and_then(|ptx| ptx.write(out.join("ptx.rs"))) {
        Ok(()) => (),
        Err(error) => panic!("the CUDA kernels cannot be compiled: {error}"),
    }
}
