// activation(gate) * up.
#include "glu.cuh"

// gate_up: [rows, 2 * width], out: [rows, width]. Each thread computes two values, which are next to each other if the
// width is even.
template <float (*ACTIVATION)(float), typename T>
__device__ void glu(const T *gate_up, T *out, int width, uint32_t count) {
    struct alignas(2 * sizeof(T)) Pair {
        T first, second;
    };
    const uint32_t i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    auto from = [&](uint32_t i) { return gate_up + (size_t)(i / width) * 2 * width + i % width; };
    wait_for_previous();
    if (i >= count) {
        return;
    }
    const T *gate = from(i);
    if (width % 2 == 0) {
        const Pair gates = *reinterpret_cast<const Pair *>(gate), ups = *reinterpret_cast<const Pair *>(gate + width);
        const T first = gated<ACTIVATION>(gates.first, ups.first), second = gated<ACTIVATION>(gates.second, ups.second);
        *reinterpret_cast<Pair *>(out + i) = {first, second};
        return;
    }
    out[i] = gated<ACTIVATION>(gate[0], gate[width]);
    if (i + 1 < count) {
        gate = from(i + 1);
        out[i + 1] = gated<ACTIVATION>(gate[0], gate[width]);
    }
}

#define ACTIVATED(ACTIVATION, T, NAME)                                                             \
    extern "C" __global__ void glu_##ACTIVATION##_##NAME(const T *gate_up, T *out, int width,      \
                                                         uint32_t count) {                         \
        glu<ACTIVATION>(gate_up, out, width, count);                                               \
    }
#define KERNEL(T, NAME)                                                                            \
    ACTIVATED(silu, T, NAME)                                                                       \
    ACTIVATED(gelu, T, NAME)                                                                       \
    ACTIVATED(gelu_tanh, T, NAME)                                                                  \
    ACTIVATED(relu2, T, NAME)
FOR_FLOATS(KERNEL)
#undef KERNEL
#undef ACTIVATED
