// Scatter of new keys or values into a pool; a block a row.
#include "cuda/common.cuh"

// pool: [num_slots, width]; rows: [n, width] with `stride` values from one to the next.
template <typename P, typename T>
__device__ void kv_write(P *pool, const T *rows, const uint32_t *slots, int width, int stride) {
    const T *from = rows + (size_t)blockIdx.x * stride;
    P *to = pool + (size_t)slots[blockIdx.x] * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        to[i] = narrow<P>(widen(from[i]));
    }
}

#define KERNEL(P, T, NAME)                                                                         \
    extern "C" __global__ void kv_write_##NAME(P *pool, const T *rows, const uint32_t *slots,      \
                                               int width, int stride) {                            \
        kv_write(pool, rows, slots, width, stride);                                                \
    }
KERNEL(float, float, f32_f32)
KERNEL(f16, float, f16_f32)
KERNEL(bf16, float, bf16_f32)
KERNEL(f16, f16, f16_f16)
KERNEL(bf16, bf16, bf16_bf16)
#undef KERNEL
