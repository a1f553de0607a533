// Head norms, rotary position embedding, and the scatter of keys and values into their pools. Each warp
// takes one head.
#include "rope_kv_write.cuh"
#include "slots.cuh"

// Heads has the arguments' meanings. q: [rows, heads, d]; pools: [num_slots, kv_heads, d]. Of rows without a slot,
// nothing is written to the pools. Without heads of keys, slots and pools may be null.
template <typename T>
__device__ void rope_kv_write(const Heads<T> &all, const uint32_t *slots, T *q, T *k_pool, T *v_pool, int rows) {
    const int kv_heads = all.kv_heads();
    int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int row = warp / all.all, head = warp % all.all;
    const uint32_t slot = row < rows && slots != nullptr ? slots[row] : 0;
    if (row >= rows || (head >= all.heads && slot == NO_SLOT)) {
        wait_for_previous();
        return;
    }
    auto place = [&](T *pool, int kv_head) { return pool + ((size_t)slot * kv_heads + kv_head) * all.d; };
    T *to = head < all.heads              ? q + ((size_t)row * all.heads + head) * all.d
            : head < all.heads + kv_heads ? place(k_pool, head - all.heads)
                                          : place(v_pool, head - all.heads - kv_heads);
    all.write(row, head, to, [] { wait_for_previous(); });
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void rope_kv_write_##NAME(                                               \
        const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm,                \
        const uint32_t *slots, T *q, T *k_pool, T *v_pool, int rows, int heads, int all, int d,    \
        int half, int whole, float eps, int norms_rotated, int values_are_keys, int norms_values,  \
        float value_eps, int stride) {                                                             \
        const Heads<T> all_heads{qkv,   cos, sin,           q_norm,          k_norm,               \
                                 heads, all, d,             half,            whole,                \
                                 eps,   norms_rotated,      values_are_keys, norms_values,         \
                                 value_eps, stride};                                               \
        rope_kv_write(all_heads, slots, q, k_pool, v_pool, rows);                                  \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
