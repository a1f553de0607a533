// The kernels of attention over a paged pool.
#include "attend.cuh"

// Maximum number of pairs of a tile and a K/V head whose chunks have a block each; FULL in cuda.rs.
constexpr int MAX_PAIRS = 264;
// Blocks of chunks that a multiprocessor has at a time, if its shared memory has room for them: most of their time, they
// wait for memory and for one another.
constexpr int BLOCKS = 4;
// The blocks that have computed a chunk of a pair; 0 between kernels. Each module has its own, and its kernels follow one
// another in one stream, which each thread of the host has for itself: one thread uses a device.
static __device__ uint32_t arrived[MAX_PAIRS];

// A block, which takes an item; the queries are in global memory.
template <typename T, int D> struct WholeBlock {
    const T *q, *k, *v;
    // The slots of the chunk's keys.
    const int *slots;
    const Args &args;

    __device__ __forceinline__ int thread() const { return threadIdx.x; }
    __device__ __forceinline__ void sync() const { __syncthreads(); }
    // Most keys are older than the previous kernel, which writes the newest ones.
    __device__ __forceinline__ void prepare_keys(const Tile &, Item item) const {
        constexpr int LINE = 128 / sizeof(T), LINES = D / LINE;
        static_assert(CHUNK * LINES <= THREADS, "each thread takes a line");
        if (const int i = threadIdx.x; i < CHUNK * LINES) {
            const int slot = slots[i / LINES];
            if (slot >= 0) {
                const size_t at = ((size_t)slot * args.kv_heads + item.kv_head) * D + i % LINES * LINE;
                prefetch_line(k + at);
                prefetch_line(v + at);
            }
        }
        wait_for_previous();
    }
    __device__ __forceinline__ void prepare_queries(const Tile &, Item) const {}
    __device__ __forceinline__ const T *query(const Tile &tile, int kv_head, int i) const {
        return q + place_of(tile, args, kv_head, i, D);
    }
};

// Merges the chunks of the item's tile and head, if all others have been computed.
template <typename T, int D> __device__ __forceinline__ void merge_if_last(T *out, const Args &args, Item item) {
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
    constexpr int VALUES = 2, PIECES = D / (32 * VALUES);
    const int group = args.heads / args.kv_heads;
    for (int i = threadIdx.x / 32; i < tile.rows * group * PIECES; i += THREADS / 32) {
        const int query = i / PIECES, dim = i % PIECES * 32 * VALUES + threadIdx.x % 32;
        merge_chunks<T, D, VALUES>(out, args, tile, chunks, query / group, item.kv_head * group + query % group, dim);
    }
}

// A block takes a tile, a K/V head and, with SPLIT, one chunk; otherwise all chunks.
template <typename T, int D, bool SPLIT>
__device__ void attend_by_blocks(const T *q, const T *k, const T *v, T *out, const Args &args) {
    DYNAMIC_SHARED(memory);
    Shared<T, D> &shared = *reinterpret_cast<Shared<T, D> *>(memory);
    const Item item = {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z};
    const WholeBlock<T, D> team{q, k, v, shared.slots, args};
    if (!attend<T, D, SPLIT>(team, shared, item, k, v, out, args)) {
        wait_for_previous();
    } else if (SPLIT) {
        merge_if_last<T, D>(out, args, item);
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
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                  \
        attend_split_##NAME##_##D(const T *q, const T *k, const T *v, T *out, PARAMETERS) {        \
        attend_by_blocks<T, D, true>(q, k, v, out, ARGS);                                          \
    }
#define WIDTHS(T, NAME)                                                                            \
    KERNELS(T, NAME, 64)                                                                           \
    KERNELS(T, NAME, 128)
FOR_FLOATS(WIDTHS)
#undef WIDTHS
#undef KERNELS
