// activation(gate) * up.
#include "glu.cuh"

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
    out[i] = gated<ACTIVATION>(from[0], from[width]);
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
