// Head norms, rotary position embedding, and the scatter of keys and values into their pools. Each warp
// takes one head.
#include "float8_pool.cuh"
#include "q8_blocks.cuh"
#include "rope_kv_write.cuh"
#include "slots.cuh"

// The head of a warp, and where it goes: to the queries, or to a pool.
struct HeadPlace {
    int row, head;
    bool exists, is_query, is_key;
    // Values before it, in the queries or in its pool.
    size_t at;
};

template <typename T> __device__ __forceinline__ HeadPlace place_of(const Heads<T> &all, const uint32_t *slots, int rows) {
    const int kv_heads = all.kv_heads(), warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int row = warp / all.all, head = warp % all.all;
    const uint32_t slot = row < rows && slots != nullptr ? slots[row] : 0;
    const bool is_query = head < all.heads, is_key = !is_query && head < all.heads + kv_heads;
    const int kv_head = head - all.heads - (is_key ? 0 : kv_heads);
    const bool exists = row < rows && (is_query || slot != NO_SLOT);
    const size_t at = is_query ? (size_t)row * all.heads + head : (size_t)slot * kv_heads + kv_head;
    return {row, head, exists, is_query, is_key, at * all.d};
}

// Heads has the arguments' meanings. q: [rows, heads, d]; pools: [num_slots, kv_heads, d]. Of rows without a slot,
// nothing is written to the pools. Without heads of keys, slots and pools may be null.
template <typename T>
__device__ void rope_kv_write(const Heads<T> &all, const uint32_t *slots, T *q, T *k_pool, T *v_pool, int rows) {
    const HeadPlace place = place_of(all, slots, rows);
    if (!place.exists) {
        wait_for_previous();
        return;
    }
    T *to = place.is_query ? q : place.is_key ? k_pool : v_pool;
    all.write(place.row, place.head, to + place.at, [] { wait_for_previous(); });
}

// The same with pools in blocks or in FP8. Keys and values are rounded once, from f32.
template <typename T, typename Pool>
__device__ void rope_kv_write_rounded(const Heads<T> &all, const uint32_t *slots, T *q, const Pool &k_pool,
                                      const Pool &v_pool, int rows) {
    DYNAMIC_SHARED(memory);
    const HeadPlace place = place_of(all, slots, rows);
    if (!place.exists) {
        wait_for_previous();
        return;
    }
    if (place.is_query) {
        all.write(place.row, place.head, q + place.at, [] { wait_for_previous(); });
        return;
    }
    float *head = reinterpret_cast<float *>(memory) + threadIdx.x / 32 * all.d;
    all.write_rounded(place.row, place.head, head, place.is_key ? k_pool : v_pool, place.at, [] { wait_for_previous(); });
}

#define PARAMETERS int rows, int heads, int all, int d, HEAD_PARAMETERS
#define KERNELS(T, NAME)                                                                           \
    extern "C" __global__ void rope_kv_write_##NAME(                                               \
        const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm,                \
        const uint32_t *slots, T *q, T *k_pool, T *v_pool, PARAMETERS) {                           \
        rope_kv_write(HEADS(T), slots, q, k_pool, v_pool, rows);                                   \
    }                                                                                              \
    extern "C" __global__ void rope_kv_write_q8_0_##NAME(                                          \
        const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm,                \
        const uint32_t *slots, T *q, int8_t *k_pool, f16 *k_scales, int8_t *v_pool,                \
        f16 *v_scales, PARAMETERS) {                                                               \
        rope_kv_write_rounded(HEADS(T), slots, q, NewQ8Blocks{k_pool, k_scales},                   \
                              NewQ8Blocks{v_pool, v_scales}, rows);                                \
    }                                                                                              \
    extern "C" __global__ void rope_kv_write_fp8_##NAME(                                           \
        const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm,                \
        const uint32_t *slots, T *q, uint8_t *k_pool, uint8_t *v_pool, PARAMETERS) {               \
        rope_kv_write_rounded(HEADS(T), slots, q, NewFloat8s{k_pool}, NewFloat8s{v_pool}, rows);   \
    }
FOR_FLOATS(KERNELS)
#undef KERNELS
#undef PARAMETERS
