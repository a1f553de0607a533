// The kernels of attention over a paged pool.
#include "attend.cuh"

// A block, which takes an item; the queries are in global memory.
template <typename T, int D> struct WholeBlock {
    const T *q;
    const Args &args;

    __device__ __forceinline__ int thread() const { return threadIdx.x; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    __device__ __forceinline__ void prepare_keys(const Tile &, Item) const { wait_for_previous(); }
    __device__ __forceinline__ void prepare_queries(const Tile &, Item) const {}
    __device__ __forceinline__ const T *query(const Tile &tile, int kv_head, int i) const {
        return q + place_of(tile, args, kv_head, i, D);
    }
};

// A block takes a tile, a K/V head and, with SPLIT, one chunk; otherwise all chunks.
template <typename T, int D, bool SPLIT>
__device__ void attend_by_blocks(const T *q, const T *k, const T *v, T *out, const Args &args) {
    DYNAMIC_SHARED(memory);
    const Item item = {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z};
    const WholeBlock<T, D> team{q, args};
    if (!attend<T, D, SPLIT>(team, *reinterpret_cast<Shared<T, D> *>(memory), item, k, v, out, args)) {
        wait_for_previous();
    }
}

// Merges the chunks of split tiles; a block takes a row of a tile and a head.
template <typename T, int D> __device__ void merge_by_blocks(T *out, const Args &args) {
    const Tile tile = args.tiles[blockIdx.x];
    wait_for_previous();
    if ((int)blockIdx.z < tile.rows) {
        merge_chunks<T, D>(out, args, tile, blockIdx.z, blockIdx.y, threadIdx.x);
    }
}

#define PARAMETERS                                                                                 \
    const Tile *tiles, const uint32_t *blocks, const uint64_t *trees, float *partials, int heads,  \
        int kv_heads, int block_size, int chunks, float scale, int window, float cap,              \
        const float *sinks
#define ARGS                                                                                       \
    Args {                                                                                         \
        tiles, blocks, trees, partials, heads, kv_heads, block_size, chunks,                       \
            Scores { scale, window, cap, sinks }                                                   \
    }
#define KERNELS(T, NAME, D)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_whole_##NAME##_##D(const T *q, const T *k, const T *v, T *out, PARAMETERS) {        \
        attend_by_blocks<T, D, false>(q, k, v, out, ARGS);                                         \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_split_##NAME##_##D(const T *q, const T *k, const T *v, T *out, PARAMETERS) {        \
        attend_by_blocks<T, D, true>(q, k, v, out, ARGS);                                          \
    }                                                                                              \
    extern "C" __global__ void merge_##NAME##_##D(T *out, PARAMETERS) {                            \
        merge_by_blocks<T, D>(out, ARGS);                                                          \
    }
#define WIDTHS(T, NAME)                                                                            \
    KERNELS(T, NAME, 64)                                                                           \
    KERNELS(T, NAME, 128)
FOR_FLOATS(WIDTHS)
#undef WIDTHS
#undef KERNELS
