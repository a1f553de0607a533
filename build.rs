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
        "src/kernels/dense/gemv.cu",
        "src/kernels/kv_move.cu",
        "src/kernels/norm.cu",
        "src/kernels/paged_attention/paged_attention.cu",
        "src/kernels/paged_attention/prefill.cu",
        "src/kernels/quant/cuda/q4_0.cu",
        "src/kernels/quant/cuda/q4_1.cu",
        "src/kernels/quant/cuda/q4_k.cu",
        "src/kernels/quant/cuda/q5_1.cu",
        "src/kernels/quant/cuda/q5_k.cu",
        "src/kernels/quant/cuda/q6_k.cu",
        "src/kernels/quant/cuda/q8_0.cu",
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
            "src/kernels/quant/cuda/product.cuh",
            "src/kernels/quant/cuda/unpack.cuh",
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
