// Values in f32.
#include "cuda/common.cuh"

template <typename T> __device__ void widen_all(const T *x, float *out, uint32_t count) {
    // Values of a thread that are next to one another, and how many times it takes so many; as in widen.rs.
    constexpr int VALUES = 4, TIMES = 2;
    struct alignas(VALUES * sizeof(T)) Narrow {
        T values[VALUES];
    };
    struct alignas(VALUES * sizeof(float)) Wide {
        float values[VALUES];
    };
    const uint32_t step = blockDim.x * VALUES, first = blockIdx.x * step * TIMES + threadIdx.x * VALUES;
    const bool is_aligned = (uintptr_t)x % sizeof(Narrow) == 0 && (uintptr_t)out % sizeof(Wide) == 0;
    wait_for_previous();
    Narrow narrow[TIMES];
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const uint32_t at = first + i * step;
        if (is_aligned && at + VALUES <= count) {
            narrow[i] = *reinterpret_cast<const Narrow *>(x + at);
        }
    }
#pragma unroll
    for (int i = 0; i < TIMES; i++) {
        const uint32_t at = first + i * step;
        if (is_aligned && at + VALUES <= count) {
            Wide wide;
#pragma unroll
            for (int value = 0; value < VALUES; value++) {
                wide.values[value] = widen(narrow[i].values[value]);
            }
            *reinterpret_cast<Wide *>(out + at) = wide;
        } else {
            for (uint32_t value = at; value < min(at + VALUES, count); value++) {
                out[value] = widen(x[value]);
            }
        }
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void widen_##NAME(const T *x, float *out, uint32_t count) {              \
        widen_all(x, out, count);                                                                  \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
