// silu(gate) * up.
#include "cuda/common.cuh"

// gate_up: [rows, 2 * width], out: [rows, width]. Each thread computes one value.
template <typename T> __device__ void swiglu(const T *gate_up, T *out, int width, uint32_t count) {
    wait_for_previous();
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    uint32_t row = i / width, column = i % width;
    const T *from = gate_up + (size_t)row * 2 * width + column;
    float gate = widen(from[0]), up = widen(from[width]);
    out[i] = narrow<T>(gate / (1.f + __expf(-gate)) * up);
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void swiglu_##NAME(const T *gate_up, T *out, int width,                  \
                                             uint32_t count) {                                     \
        swiglu(gate_up, out, width, count);                                                        \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
