#!/usr/bin/env bash
# emulated-gpu.sh COMMAND...: runs a command on a machine without a GPU as if it had one: with CUDA
# libraries that emulate it on the CPU (tests/emulator), slowly, and find much that a GPU forgives.
#
#   scripts/emulated-gpu.sh cargo test --features cuda --test cuda --test cuda_sampling
#
# Where there is no CUDA toolkit either, a stand-in for nvcc (scripts/stand-in-cuda) is enough to build
# with: the emulator has its own kernels. Only candle's products with quantized weights are missing then.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$root/target/emulated-gpu
library=$folder/libcuda.so.1
mkdir -p "$folder"
if [ ! -e "$library" ] || [ -n "$(find "$root/tests/emulator" "$root/src/kernels" \
    \( -name '*.cu*' -o -name '*.cpp' -o -name '*.h' \) -newer "$library")" ]; then
    sources=(emulator memory streams driver runtime cublas candle quantized ours)
    objects=()
    for source in "${sources[@]}"; do
        objects+=("$folder/$source.o")
        ${CXX:-c++} -O2 -std=c++20 -fPIC -ffp-contract=off -fvisibility=hidden -Wall -Wno-unknown-pragmas \
            -I"$root/tests/emulator" -I"$root/src/kernels" -c "$root/tests/emulator/$source.cpp" \
            -o "$folder/$source.o"
    done
    ${CXX:-c++} -shared -o "$library.new" "${objects[@]}"
    # The libraries are one, which is opened once whatever its name.
    ln -sf libcuda.so.1 "$folder/libcublas.so.13"
    ln -sf libcuda.so.1 "$folder/libcurand.so.10"
    ln -sf libcuda.so.1 "$folder/libcudart.so.13"
    mv "$library.new" "$library"
fi
# Binaries find them as any library, or, without a CUDA toolkit at link time, by CUDA_SHIM_PATH.
export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} CUDA_SHIM_PATH=$folder
export FORETOKEN_EMULATED_GPU=1
if ! command -v nvcc >/dev/null; then
    toolkit=$folder/toolkit
    mkdir -p "$toolkit/lib"
    ln -sfn "$root/scripts/stand-in-cuda/bin" "$toolkit/bin"
    # What a binary is linked to, and then starts with.
    for name in cuda cudart cublas cublasLt curand nvrtc; do
        ln -sf ../../libcuda.so.1 "$toolkit/lib/lib$name.so"
    done
    export CUDA_HOME=$toolkit CUDA_COMPUTE_CAP=90 PATH=$toolkit/bin:$PATH
    export LD_LIBRARY_PATH=$toolkit/lib:$LD_LIBRARY_PATH FORETOKEN_BUILT_WITHOUT_NVCC=1
fi
exec "$@"
