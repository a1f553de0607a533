// Residual sum and RMSNorm of each row, with one block per row.
#include "cuda/common.cuh"

// out: [2, rows, width], first the sums, then the normalized sums.
template <typename T>
__device__ void add_norm(const T *x, const T *delta, const T *weight, T *out, int width, float eps) {
    __shared__ float scratch[32];
    size_t at = (size_t)blockIdx.x * width;
    T *sums = out + at, *normed = out + (size_t)gridDim.x * width + at;
    float square = 0.f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        T sum = narrow<T>(__fadd_rn(widen(x[at + i]), widen(delta[at + i])));
        sums[i] = sum;
        square = fmaf(widen(sum), widen(sum), square);
    }
    float scale = rsqrtf(block_sum(square, scratch) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        normed[i] = narrow<T>(widen(sums[i]) * scale * widen(weight[i]));
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void add_norm_##NAME(const T *x, const T *delta, const T *weight,        \
                                               T *out, int width, float eps) {                     \
        add_norm(x, delta, weight, out, width, eps);                                               \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
