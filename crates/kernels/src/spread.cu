// Logits over a vocabulary of which an output layer has some ids.
#include "cuda/common.cuh"

// x: [rows, outputs]; places: [vocab], the output of each id; out: [rows, vocab], minus infinity for ids whose place is not
// below `outputs`. The grid is [rows, blocks of ids].
template <typename T>
__device__ void spread(const T *x, const uint32_t *places, float *out, uint32_t outputs, uint32_t vocab) {
    const uint32_t id = blockIdx.y * blockDim.x + threadIdx.x;
    wait_for_previous();
    if (id >= vocab) {
        return;
    }
    const uint32_t place = places[id];
    out[(size_t)blockIdx.x * vocab + id] = place < outputs ? widen(x[(size_t)blockIdx.x * outputs + place]) : -INFINITY;
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void spread_##NAME(const T *x, const uint32_t *places, float *out,       \
                                             uint32_t outputs, uint32_t vocab) {                   \
        spread(x, places, out, outputs, vocab);                                                    \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
