#!/usr/bin/env bash
# emulated-gpu.sh COMMAND...: runs a command with an emulated GPU: CUDA libraries that run everything on
# the CPU (tests/emulator). They are slow, but find many bugs that a real GPU hides.
#
#   scripts/emulated-gpu.sh cargo test --features cuda --test cuda --test cuda_sampling
#
# Without a CUDA toolkit, it builds with a stand-in for nvcc (scripts/stand-in-cuda), because the emulator
# has its own kernels.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/target/emulated-gpu
library=$folder/libcuda.so.1
mkdir -p "$folder"
# It is compiled for the CPU that it runs on.
cpu=$(grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || true)
if [ ! -e "$library" ] || [ "$cpu" != "$(cat "$folder/cpu" 2>/dev/null)" ] \
    || [ -n "$(find "$root/tests/emulator" "$root/crates/kernels/src" "$root/scripts/emulated-gpu.sh" \
        \( -name '*.cu*' -o -name '*.cpp' -o -name '*.h' -o -name '*.sh' \) -newer "$library")" ]; then
    sources=(emulator memory streams devices driver cublas candle ours quantized together)
    # compile SOURCE
    compile() {
        ${CXX:-c++} -O2 -march=native -std=c++20 -fPIC -ffp-contract=off -fvisibility=hidden -Wall -Wno-unknown-pragmas \
            -I"$root/tests/emulator" -I"$root/crates/kernels/src" -c "$root/tests/emulator/$1.cpp" -o "$folder/$1.o"
    }
    export -f compile
    export root folder
    objects=("${sources[@]/#/$folder/}")
    printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I{} bash -c 'compile {}'
    ${CXX:-c++} -shared -o "$library.new" "${objects[@]/%/.o}"
    # One library under all names, so that it is loaded only once.
    ln -sf libcuda.so.1 "$folder/libcublas.so.13"
    ln -sf libcuda.so.1 "$folder/libcurand.so.10"
    ln -sf libcuda.so.1 "$folder/libcudart.so.13"
    mv "$library.new" "$library"
    printf '%s\n' "$cpu" >"$folder/cpu"
fi
# Binaries find the libraries by LD_LIBRARY_PATH or, if linked without a CUDA toolkit, by CUDA_SHIM_PATH.
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} CUDA_SHIM_PATH=$folder
export FORETOKEN_EMULATED_GPU=1 FORETOKEN_EMULATED_GPUS=${FORETOKEN_EMULATED_GPUS:-3}
if ! command -v nvcc >/dev/null; then
    toolkit=$folder/toolkit
    mkdir -p "$toolkit/lib"
    ln -sfn "$root/scripts/stand-in-cuda/bin" "$toolkit/bin"
    # The libraries that a binary is linked to and loads at start.
    for name in cuda cudart cublas cublasLt curand nvrtc; do
        ln -sf ../../libcuda.so.1 "$toolkit/lib/lib$name.so"
    done
    export CUDA_HOME=$toolkit CUDA_COMPUTE_CAP=90 PATH=$toolkit/bin:$PATH
    export LD_LIBRARY_PATH=$toolkit/lib:$LD_LIBRARY_PATH
fi
exec "$@"
