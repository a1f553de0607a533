// activation(gate) * up.
#include "glu.cuh"

// gate: [rows, width] with gate_stride values from row to row, up: with up_stride, out: [rows, width]. Each thread
// computes two values, which are next to each other if widths and strides are even.
template <float (*ACTIVATION)(float), typename T>
__device__ void glu(const T *gate, const T *up, T *out, int width, int gate_stride, int up_stride, uint32_t count) {
    struct alignas(2 * sizeof(T)) Pair {
        T first, second;
    };
    const uint32_t i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    auto gate_at = [&](uint32_t i) { return gate + (size_t)(i / width) * gate_stride + i % width; };
    auto up_at = [&](uint32_t i) { return up + (size_t)(i / width) * up_stride + i % width; };
    wait_for_previous();
    if (i >= count) {
        return;
    }
    if ((width | gate_stride | up_stride) % 2 == 0) {
        const Pair gates = *reinterpret_cast<const Pair *>(gate_at(i)), ups = *reinterpret_cast<const Pair *>(up_at(i));
        const T first = gated<ACTIVATION>(gates.first, ups.first), second = gated<ACTIVATION>(gates.second, ups.second);
        *reinterpret_cast<Pair *>(out + i) = {first, second};
        return;
    }
    out[i] = gated<ACTIVATION>(*gate_at(i), *up_at(i));
    if (i + 1 < count) {
        out[i + 1] = gated<ACTIVATION>(*gate_at(i + 1), *up_at(i + 1));
    }
}

#define ACTIVATED(ACTIVATION, T, NAME)                                                             \
    extern "C" __global__ void glu_##ACTIVATION##_##NAME(const T *gate, const T *up, T *out,       \
                                                         int width, int gate_stride,               \
                                                         int up_stride, uint32_t count) {          \
        glu<ACTIVATION>(gate, up, out, width, gate_stride, up_stride, count);                      \
    }
#define KERNEL(T, NAME)                                                                            \
    ACTIVATED(silu, T, NAME)                                                                       \
    ACTIVATED(gelu, T, NAME)                                                                       \
    ACTIVATED(gelu_tanh, T, NAME)                                                                  \
    ACTIVATED(relu2, T, NAME)                                                                      \
    ACTIVATED(sigmoid, T, NAME)
FOR_FLOATS(KERNEL)
#undef KERNEL
#undef ACTIVATED
