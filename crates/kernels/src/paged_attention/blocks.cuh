// Attention over a paged pool, a block for each item.
#pragma once
#include "new_rows.cuh"

// Maximum number of pairs of a tile and a K/V head whose chunks have a block each; FULL in cuda.rs.
constexpr int MAX_PAIRS = 264;
// Blocks of chunks that a multiprocessor has at a time, if its shared memory has room for them: most of their time, they
// wait for memory and for one another. Wide heads need more registers.
template <int D> constexpr int BLOCKS = IS_WIDE<D> ? 2 : 4;
// The blocks that have computed a chunk of a pair; 0 between kernels. Each module has its own, and its kernels follow one
// another in one stream, which each thread of the host has for itself: one thread uses a device.
static __device__ uint32_t arrived[MAX_PAIRS];

// A block, which takes an item; the queries are in global memory.
template <typename T, int D, bool PADDED, typename Pool> struct WholeBlock {
    const T *q;
    const Pool &k, &v;
    // The slots of the chunk's keys.
    const int *slots;
    const Args &args;

    __device__ __forceinline__ int thread() const { return threadIdx.x; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    // Most keys are older than the previous kernel, which writes the newest ones.
    __device__ __forceinline__ void prepare_keys(const Tile &, Item item) const {
        constexpr int LINE = Pool::LINE, LINES = (D + LINE - 1) / LINE;
        const int d = values_of<D, PADDED>(args);
#pragma unroll
        for (int first = 0; first < CHUNK * LINES; first += THREADS) {
            const int i = first + threadIdx.x, value = i % LINES * LINE;
            if (i < CHUNK * LINES && (!PADDED || value < d)) {
                const int slot = slots[i / LINES];
                if (slot >= 0) {
                    const size_t at = place_in_pool<D>(args, slot, item.kv_head, d) + value;
                    k.prefetch(at);
                    if (!IS_LATENT<D>) {
                        v.prefetch(at);
                    }
                }
            }
        }
        wait_for_previous();
    }
    __device__ __forceinline__ void prepare_queries(const Tile &, Item, int, int) const {}
    __device__ __forceinline__ const T *query(const Tile &tile, int kv_head, int i) const {
        return q + place_of(tile, args, kv_head, i, values_of<D, PADDED>(args));
    }
};

// A block that also rotates the queries and keys that it needs.
template <typename T, int D, bool PADDED, typename Pool, typename NewPool> struct RotatingBlock {
    WholeBlock<T, D, PADDED, Pool> block;
    NewRows<T, NewPool> rows;
    T *queries;

    __device__ __forceinline__ int thread() const { return threadIdx.x; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ void prepare_keys(const Tile &tile, Item item) const {
        block.prepare_keys(tile, item);
        rows.write_keys(*this, tile, item, block.slots);
    }
    __device__ __forceinline__ void prepare_queries(const Tile &tile, Item item, int from, int to) const {
        rows.template write_queries<D>(*this, tile, item, from, to, queries);
    }
    __device__ __forceinline__ const T *query(const Tile &, int, int i) const { return queries + i * D; }
};

// Merges the chunks of the item's tile and head, if all others have been computed.
template <typename T, int D, bool PADDED> __device__ __forceinline__ void merge_if_last(T *out, const Args &args, Item item) {
    __shared__ bool is_last;
    const Tile tile = args.tiles[item.tile];
    const Chunks chunks = chunks_of(tile, args);
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = is_last_of(&arrived[item.kv_head * gridDim.x + item.tile], chunks.end - chunks.first);
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    constexpr int VALUES = 2;
    const int group = args.heads / args.kv_heads, pieces = (summed_of<D, PADDED>(args) + 32 * VALUES - 1) / (32 * VALUES);
    for (int i = threadIdx.x / 32; i < tile.rows * group * pieces; i += THREADS / 32) {
        const int query = i / pieces, dim = i % pieces * 32 * VALUES + threadIdx.x % 32;
        merge_chunks<T, D, VALUES, PADDED>(out, args, tile, chunks, query / group, item.kv_head * group + query % group, dim);
    }
}

// A block takes a tile, a K/V head and, with SPLIT, one chunk; otherwise all chunks.
template <typename T, int D, bool SPLIT, bool PADDED = false, typename Pool>
__device__ void attend_by_blocks(const T *q, const Pool &k, const Pool &v, T *out, const Args &args) {
    DYNAMIC_SHARED(memory);
    Shared<T, D> &shared = *reinterpret_cast<Shared<T, D> *>(memory);
    const Item item = {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z};
    const WholeBlock<T, D, PADDED, Pool> team{q, k, v, shared.slots, args};
    if (!attend<T, D, SPLIT, PADDED>(team, shared, item, k, v, out, args)) {
        wait_for_previous();
    } else if (SPLIT) {
        merge_if_last<T, D, PADDED>(out, args, item);
    }
}

// A block takes a tile, a K/V head and one chunk of rows that are not rotated yet.
template <typename T, int D, bool PADDED, typename NewPool>
__device__ void attend_rotating(const Heads<T> &heads, const uint32_t *slots, int rows, const NewPool &k, const NewPool &v,
                                T *out, const Args &args) {
    DYNAMIC_SHARED(memory);
    Shared<T, D> &shared = *reinterpret_cast<Shared<T, D> *>(memory);
    const Item item = {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z};
    const auto keys = as_read(k), values = as_read(v);
    using Pool = std::remove_const_t<decltype(keys)>;
    const RotatingBlock<T, D, PADDED, Pool, NewPool> team{
        {nullptr, keys, values, shared.slots, args},
        {heads, reinterpret_cast<const int *>(slots), rows, k, v, heads_in(shared)},
        queries_in(shared)};
    if (attend<T, D, true, PADDED>(team, shared, item, keys, values, out, args)) {
        merge_if_last<T, D, PADDED>(out, args, item);
    } else {
        wait_for_previous();
    }
}

// Kernels of heads of D values, and kernels of heads of up to D.
#define ATTEND_PARAMETERS                                                                          \
    const Tile *tiles, const uint32_t *blocks, const uint64_t *trees, float *partials, int heads,  \
        int kv_heads, int block_size, int chunks, float scale, int window, int ahead, float cap,   \
        const float *sinks, int values, int latent
#define ATTEND_ARGS                                                                                \
    Args {                                                                                         \
        tiles, blocks, trees, partials, heads, kv_heads, block_size, chunks,                       \
            Scores{scale, window, cap, sinks, ahead}, values, latent                               \
    }
#define ATTEND_KERNELS(T, NAME, D, PADDED)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_whole_##NAME(const T *q, const T *k, const T *v, T *out, ATTEND_PARAMETERS) {       \
        attend_by_blocks<T, D, false, PADDED>(q, Numbers<T>{k}, Numbers<T>{v}, out, ATTEND_ARGS);  \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<D>)                               \
        attend_split_##NAME(const T *q, const T *k, const T *v, T *out, ATTEND_PARAMETERS) {       \
        attend_by_blocks<T, D, true, PADDED>(q, Numbers<T>{k}, Numbers<T>{v}, out, ATTEND_ARGS);   \
    }

// Kernels of few rows that also rotate queries and keys, and write keys and values.
#define ROTATING_PARAMETERS(T)                                                                     \
    const T *qkv, const T *cos, const T *sin, const T *q_norm, const T *k_norm, const uint32_t *slots
#define ATTEND_ROTATING_KERNEL(T, NAME, D, PADDED)                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<D>)                               \
        attend_rotating_##NAME(ROTATING_PARAMETERS(T), T *k, T *v, T *out, int rows,               \
                               HEAD_PARAMETERS, ATTEND_PARAMETERS) {                               \
        const int all = heads + 2 * kv_heads, d = PADDED ? values : D;                             \
        attend_rotating<T, D, PADDED>(HEADS(T), slots, rows, k, v, out, ATTEND_ARGS);              \
    }

// Kernels of pools in blocks.
#define POOLS_IN_BLOCKS                                                                            \
    const int8_t *k, const f16 *k_scales, const int8_t *v, const f16 *v_scales
#define ATTEND_KERNELS_OF_BLOCKS(T, NAME, D, PADDED)                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_whole_##NAME(const T *q, POOLS_IN_BLOCKS, T *out, ATTEND_PARAMETERS) {              \
        attend_by_blocks<T, D, false, PADDED>(q, Blocks{{k, k_scales}}, Blocks{{v, v_scales}}, out,\
                                              ATTEND_ARGS);                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<D>)                               \
        attend_split_##NAME(const T *q, POOLS_IN_BLOCKS, T *out, ATTEND_PARAMETERS) {              \
        attend_by_blocks<T, D, true, PADDED>(q, Blocks{{k, k_scales}}, Blocks{{v, v_scales}}, out, \
                                             ATTEND_ARGS);                                         \
    }
#define ATTEND_ROTATING_KERNEL_OF_BLOCKS(T, NAME, D, PADDED)                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<D>)                               \
        attend_rotating_##NAME(ROTATING_PARAMETERS(T), int8_t *k, f16 *k_scales, int8_t *v,        \
                               f16 *v_scales, T *out, int rows, HEAD_PARAMETERS,                   \
                               ATTEND_PARAMETERS) {                                                \
        const int all = heads + 2 * kv_heads, d = PADDED ? values : D;                             \
        attend_rotating<T, D, PADDED>(HEADS(T), slots, rows, NewQ8Blocks{k, k_scales},             \
                                      NewQ8Blocks{v, v_scales}, out, ATTEND_ARGS);                 \
    }

// The same for pools in FP8.
#define ATTEND_KERNELS_OF_FLOAT8S(T, NAME, D, PADDED)                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_whole_##NAME(const T *q, const uint8_t *k, const uint8_t *v, T *out,                \
                            ATTEND_PARAMETERS) {                                                   \
        attend_by_blocks<T, D, false, PADDED>(q, Float8Pool{{k}}, Float8Pool{{v}}, out,            \
                                              ATTEND_ARGS);                                        \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<D>)                               \
        attend_split_##NAME(const T *q, const uint8_t *k, const uint8_t *v, T *out,                \
                            ATTEND_PARAMETERS) {                                                   \
        attend_by_blocks<T, D, true, PADDED>(q, Float8Pool{{k}}, Float8Pool{{v}}, out,             \
                                             ATTEND_ARGS);                                         \
    }
#define ATTEND_ROTATING_KERNEL_OF_FLOAT8S(T, NAME, D, PADDED)                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<D>)                               \
        attend_rotating_##NAME(ROTATING_PARAMETERS(T), uint8_t *k, uint8_t *v, T *out, int rows,   \
                               HEAD_PARAMETERS, ATTEND_PARAMETERS) {                               \
        const int all = heads + 2 * kv_heads, d = PADDED ? values : D;                             \
        attend_rotating<T, D, PADDED>(HEADS(T), slots, rows, NewFloat8s{k}, NewFloat8s{v}, out,    \
                                      ATTEND_ARGS);                                                \
    }
