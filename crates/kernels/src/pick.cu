// Rows of a table, as an embedding looks them up.
#include "cuda/common.cuh"

// y: [rows, width], of which each row is that of x, [count, width], that `ids` says. A block copies a row.
template <typename T> __device__ void pick_rows(const T *x, const uint32_t *ids, T *y, int width, uint32_t count) {
    constexpr int LEN = Pack<T>::LEN;
    wait_for_previous();
    // An id that does not exist reads no other memory.
    x += (size_t)min(ids[blockIdx.x], count - 1) * width;
    y += (size_t)blockIdx.x * width;
    if (width % LEN == 0 && (uintptr_t)x % sizeof(uint4) == 0) {
        for (int i = threadIdx.x; i < width / LEN; i += blockDim.x) {
            reinterpret_cast<uint4 *>(y)[i] = reinterpret_cast<const uint4 *>(x)[i];
        }
        return;
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        y[i] = x[i];
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void pick_rows_##NAME(const T *x, const uint32_t *ids, T *y, int width,  \
                                                uint32_t count) {                                  \
        pick_rows(x, ids, y, width, count);                                                        \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
