// Head norms, rotary position embedding, and the scatter of keys and values into their pools. Each warp
// takes one head.
#include "cuda/common.cuh"

// The slot of rows that have none, as in slots.rs.
constexpr uint32_t NO_SLOT = 0xffffffffu;

// qkv: [rows, all, d]: first `heads` queries, then the keys, then as many values. cos, sin: [rows, half], or null
// if half is 0; values of a head from 2 * half on are not rotated. q_norm and k_norm: [d], or with `whole` [heads, d]
// and [kv_heads, d], or null. q: [rows, heads, d]; pools: [num_slots, kv_heads, d]. Of rows without a slot, nothing
// is written to the pools.
template <typename T>
__device__ void rope_kv_write(const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm,
                              const uint32_t *slots, T *q, T *k_pool, T *v_pool, int rows, int heads,
                              int all, int d, int half, int whole, float eps) {
    const int kv_heads = (all - heads) / 2;
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    int row = warp / all, head = warp % all;
    const uint32_t slot = row < rows ? slots[row] : 0;
    wait_for_previous();
    if (row >= rows || (head >= heads && slot == NO_SLOT)) {
        return;
    }
    const T *x = qkv + ((size_t)row * all + head) * d;
    auto place = [&](T *pool, int kv_head) { return pool + ((size_t)slot * kv_heads + kv_head) * d; };
    if (head >= heads + kv_heads) {
        T *to = place(v_pool, head - heads - kv_heads);
        for (int i = lane; i < d; i += 32) {
            to[i] = x[i];
        }
        return;
    }
    const bool key = head >= heads;
    T *to = key ? place(k_pool, head - heads) : q + ((size_t)row * heads + head) * d;
    const T *norm = key ? k_norm : q_norm;
    float scale = 1.f;
    if (norm != nullptr) {
        // All heads together have one norm, or each has its own.
        const T *from = whole ? qkv + ((size_t)row * all + (key ? heads : 0)) * d : x;
        const int width = whole ? (key ? kv_heads : heads) * d : d;
        norm += x - from;
        float square = 0.f;
        for (int i = lane; i < width; i += 32) {
            square = fmaf(widen(from[i]), widen(from[i]), square);
        }
        for (int mask = 16; mask > 0; mask >>= 1) {
            square += __shfl_xor_sync(0xffffffffu, square, mask);
        }
        scale = rsqrtf(square / width + eps);
    }
    for (int i = lane; i < half; i += 32) {
        float a = widen(x[i]), b = widen(x[i + half]);
        if (norm != nullptr) {
            a = a * scale * widen(norm[i]);
            b = b * scale * widen(norm[i + half]);
        }
        float c = widen(cos[row * half + i]), s = widen(sin[row * half + i]);
        to[i] = narrow<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
        to[i + half] = narrow<T>(__fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c)));
    }
    for (int i = 2 * half + lane; i < d; i += 32) {
        to[i] = norm != nullptr ? narrow<T>(widen(x[i]) * scale * widen(norm[i])) : x[i];
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void rope_kv_write_##NAME(                                               \
        const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm,                \
        const uint32_t *slots, T *q, T *k_pool, T *v_pool, int rows, int heads, int all, int d,    \
        int half, int whole, float eps) {                                                          \
        rope_kv_write(qkv, cos, sin, q_norm, k_norm, slots, q, k_pool, v_pool, rows, heads, all,   \
                      d, half, whole, eps);                                                        \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
