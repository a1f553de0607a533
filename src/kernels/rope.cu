// Rotary position embedding in place, and norms of heads before it; a warp a head.
#include "cuda/common.cuh"

// qkv: [rows, all, d], of which the first heads + kv_heads are turned; cos, sin: [rows, d / 2].
// q_norm and k_norm: [d], or null.
template <typename T>
__device__ void rope(T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm, int rows,
                     int heads, int all, int d, float eps) {
    int turned = (all + heads) / 2;
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    int row = warp / turned, head = warp % turned;
    if (row >= rows) {
        return;
    }
    T *x = qkv + ((size_t)row * all + head) * d;
    int half = d / 2;
    const T *norm = head < heads ? q_norm : k_norm;
    float scale = 1.f;
    if (norm != nullptr) {
        float square = 0.f;
        for (int i = lane; i < d; i += 32) {
            square = fmaf(widen(x[i]), widen(x[i]), square);
        }
        for (int mask = 16; mask > 0; mask >>= 1) {
            square += __shfl_xor_sync(0xffffffffu, square, mask);
        }
        scale = rsqrtf(square / d + eps);
    }
    for (int i = lane; i < half; i += 32) {
        float a = widen(x[i]), b = widen(x[i + half]);
        if (norm != nullptr) {
            a = a * scale * widen(norm[i]);
            b = b * scale * widen(norm[i + half]);
        }
        float c = widen(cos[row * half + i]), s = widen(sin[row * half + i]);
        x[i] = narrow<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
        x[i + half] = narrow<T>(__fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c)));
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void rope_##NAME(T *qkv, const T *cos, const T *sin, const T *q_norm,    \
                                           const T *k_norm, int rows, int heads, int all, int d,   \
                                           float eps) {                                            \
        rope(qkv, cos, sin, q_norm, k_norm, rows, heads, all, d, eps);                             \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
