// activation(gate) * up.
#include "cuda/common.cuh"

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }

__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// gate_up: [rows, 2 * width], out: [rows, width]. Each thread computes one value.
template <float (*ACTIVATION)(float), typename T>
__device__ void glu(const T *gate_up, T *out, int width, uint32_t count) {
    wait_for_previous();
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    uint32_t row = i / width, column = i % width;
    const T *from = gate_up + (size_t)row * 2 * width + column;
    float gate = widen(from[0]), up = widen(from[width]);
    out[i] = narrow<T>(ACTIVATION(gate) * up);
}

#define ACTIVATED(ACTIVATION, T, NAME)                                                             \
    extern "C" __global__ void glu_##ACTIVATION##_##NAME(const T *gate_up, T *out, int width,      \
                                                         uint32_t count) {                         \
        glu<ACTIVATION>(gate_up, out, width, count);                                               \
    }
#define KERNEL(T, NAME)                                                                            \
    ACTIVATED(silu, T, NAME)                                                                       \
    ACTIVATED(gelu, T, NAME)                                                                       \
    ACTIVATED(gelu_tanh, T, NAME)
FOR_FLOATS(KERNEL)
#undef KERNEL
#undef ACTIVATED
