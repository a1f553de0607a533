#!/usr/bin/env bash
# emulated-gpu.sh COMMAND...: runs a command on a machine without a GPU as if it had one: with CUDA
# libraries that emulate it on the CPU (tests/emulator), slowly, and find much that a GPU forgives.
#
#   scripts/emulated-gpu.sh cargo test --release --features cuda --test cuda
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
exec "$@"
