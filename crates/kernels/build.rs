//! Compiles the CUDA kernels to PTX, with the feature `cuda`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    kernels();
}

#[cfg(feature = "cuda")]
fn kernels() {
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR").expect("cargo names a folder"));
    let sources = [
        "src/dense/gemv.cu",
        "src/kv_move.cu",
        "src/norm.cu",
        "src/paged_attention/paged_attention.cu",
        "src/paged_attention/prefill.cu",
        "src/quant/cuda/q4_0.cu",
        "src/quant/cuda/q4_1.cu",
        "src/quant/cuda/q4_k.cu",
        "src/quant/cuda/q5_1.cu",
        "src/quant/cuda/q5_k.cu",
        "src/quant/cuda/q6_k.cu",
        "src/quant/cuda/q8_0.cu",
        "src/rope_kv_write.cu",
        "src/sample/sample.cu",
        "src/glu.cu",
    ];
    let built = cudaforge::KernelBuilder::new()
        .source_files(sources)
        .watch([
            "src/cuda/common.cuh",
            "src/cuda/tensor.cuh",
            "src/paged_attention/paged_attention.cuh",
            "src/quant/cuda/product.cuh",
            "src/quant/cuda/unpack.cuh",
            "src/sample/gumbel_max.cuh",
            "src/sample/vocab.cuh",
        ])
        .include_path("src")
        .args(["-O3", "-std=c++17"])
        .build_ptx();
    match built.and_then(|ptx| ptx.write(out.join("ptx.rs"))) {
        Ok(()) => (),
        Err(error) => panic!("the CUDA kernels cannot be compiled: {error}"),
    }
}
