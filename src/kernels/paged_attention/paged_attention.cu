// Attention over a paged pool for the rows of many sequences.
//
// Keys are divided into chunks of 64 by their position in the sequence. Each chunk has its own softmax
// (Dao et al. 2023, "Flash-Decoding for long-context inference"), and chunks are merged in ascending
// order, within one block or by a second kernel. Both use the same instructions, so the bits do not
// depend on the grid. A query is a (row, query head) pair; the queries of one K/V head share the keys
// and values that are read from the pool.
//
// A row of a tree has last keys of its own: those of its ancestors and itself. They count as consecutive,
// wherever in the pool they are, so that the row has the bits that it has in a sequence without branches.
#include "paged_attention.cuh"

constexpr int THREADS = 128;
// Maximum number of queries per block; the same as in paged_attention/tables.rs.
constexpr int MAX_QUERIES = 32;
// Floats from one key's weights to the next key's.
constexpr int WEIGHTS = MAX_QUERIES + 4;

struct Args {
    const Tile *tiles;
    const uint32_t *blocks;
    const uint64_t *trees;
    // Partial results: [rows of short spans, heads, chunks, d + 2].
    float *partials;
    int heads, kv_heads, block_size, chunks;
    float scale;
};

// The keys of a row of a tree: the context, and the keys of its span that are in `mask`.
struct TreeRow {
    int context;
    uint64_t mask;

    __device__ int keys() const { return context + __popcll(mask); }

    // The place in the pool of the key that is number `key` of those that the row sees.
    __device__ int place_of(int key) const {
        if (key < context) {
            return key;
        }
        uint64_t rest = mask;
        for (int i = context; i < key; i++) {
            rest &= rest - 1;
        }
        return context + __ffsll(rest) - 1;
    }
};

// The state of a softmax over some keys: the largest score, and the sum of weights below it.
struct Running {
    float max, sum;
};

// Merges a chunk into `all`, and returns the factors of the weighted values of both.
__device__ __forceinline__ void merge(Running &all, Running chunk, float &to_all, float &to_chunk) {
    float max = fmaxf(all.max, chunk.max);
    to_all = all.max == -INFINITY ? 0.f : __expf(all.max - max);
    to_chunk = chunk.max == -INFINITY ? 0.f : __expf(chunk.max - max);
    all.sum = fmaf(all.sum, to_all, __fmul_rn(chunk.sum, to_chunk));
    all.max = max;
}

template <typename T, int D> struct Shared {
    // Rows are padded so that threads of different keys read different banks.
    static constexpr int PITCH = D + 16 / sizeof(T);
    T keys[CHUNK * PITCH];
    T values[CHUNK * D];
    float queries[MAX_QUERIES * D];
    // [key][query]; rows are padded against bank conflicts, by 16 bytes to keep vectors aligned.
    float weights[CHUNK * WEIGHTS];
    float max[MAX_QUERIES], sum[MAX_QUERIES];
};

// A block takes a tile, a K/V head and, with SPLIT, one chunk; otherwise all chunks.
template <typename T, int D, bool SPLIT>
__device__ void attend(const T *q, const T *k, const T *v, T *out, const Args &args) {
    DYNAMIC_SHARED(memory);
    Shared<T, D> &shared = *reinterpret_cast<Shared<T, D> *>(memory);
    const Tile tile = args.tiles[blockIdx.x];
    const int kv_head = blockIdx.y, group = args.heads / args.kv_heads;
    const int queries = tile.rows * group, keys = keys_of(tile);
    const int first = SPLIT ? blockIdx.z : 0;
    const int end = SPLIT ? first + 1 : (keys + CHUNK - 1) / CHUNK;
    if (first * CHUNK >= keys) {
        return;
    }
    auto head_of = [&](int query) { return kv_head * group + query % group; };
    auto row_of = [&](int query) { return tile.first + query / group; };
    for (int i = threadIdx.x; i < queries * D; i += THREADS) {
        int query = i / D;
        const T *from = q + ((size_t)row_of(query) * args.heads + head_of(query)) * D;
        shared.queries[i] = __fmul_rn(widen(from[i % D]), args.scale);
    }
    // WIDE threads share a query's dimensions: thread t has dimensions t % WIDE, + WIDE, ...
    // These threads are a set; a set has OWN consecutive queries.
    constexpr int WIDE = D < THREADS ? D : THREADS;
    constexpr int SETS = THREADS / WIDE, DIMS = D / WIDE, OWN = MAX_QUERIES / SETS;
    static_assert(THREADS % WIDE == 0 && D % WIDE == 0 && OWN % 4 == 0, "other widths need other threads");
    const int dim = threadIdx.x % WIDE, own = threadIdx.x / WIDE * OWN;
    float o[OWN][DIMS];
    Running all[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        all[i] = {-INFINITY, 0.f};
#pragma unroll
        for (int j = 0; j < DIMS; j++) {
            o[i][j] = 0.f;
        }
    }
    int chunk = first, pass = 0;
    while (chunk < end) {
        // All rows share the chunk, or each row of a tree takes a pass over its own keys.
        const bool shares = tile.tree < 0 || (chunk + 1) * CHUNK <= tile.context;
        const TreeRow row = {tile.context, shares ? 0 : args.trees[tile.tree + tile.start + pass]};
        const int base = chunk * CHUNK, count = min(CHUNK, (shares ? keys : row.keys()) - base);
        const int from_query = shares ? 0 : pass * group, to_query = shares ? queries : from_query + group;
        __syncthreads();
        // Loads the keys and values of the chunk, 16 bytes per thread.
        constexpr int PACKS = D / Pack<T>::LEN;
        for (int i = threadIdx.x; i < CHUNK * PACKS; i += THREADS) {
            int key = i / PACKS, at = i % PACKS * Pack<T>::LEN;
            Pack<T> ks, vs;
            ks.bits = vs.bits = make_uint4(0, 0, 0, 0);
            if (key < count) {
                int place = shares ? base + key : row.place_of(base + key);
                uint32_t block = args.blocks[tile.blocks + place / args.block_size];
                size_t slot = (size_t)block * args.block_size + place % args.block_size;
                size_t from = (slot * args.kv_heads + kv_head) * D + at;
                ks.load(k + from);
                vs.load(v + from);
            }
            *reinterpret_cast<uint4 *>(shared.keys + key * Shared<T, D>::PITCH + at) = ks.bits;
            *reinterpret_cast<uint4 *>(shared.values + key * D + at) = vs.bits;
        }
        __syncthreads();
        // Scores: a thread has one key and every second query, four at a time.
        {
            constexpr int STEP = THREADS / CHUNK;
            const int key = threadIdx.x % CHUNK;
            const T *mine = shared.keys + key * Shared<T, D>::PITCH;
            for (int query = from_query + threadIdx.x / CHUNK; query < to_query; query += 4 * STEP) {
                float dots[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
                for (int at = 0; at < D; at += Pack<T>::LEN) {
                    Pack<T> values;
                    values.load(mine + at);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        // Queries beyond the last are read but not used.
                        const float *scaled = shared.queries + min(query + j * STEP, MAX_QUERIES - 1) * D + at;
#pragma unroll
                        for (int e = 0; e < Pack<T>::LEN; e++) {
                            dots[j] = fmaf(widen(values.values[e]), scaled[e], dots[j]);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int scored = query + j * STEP;
                    if (scored < to_query) {
                        bool causal = base + key <= tile.context + tile.start + scored / group;
                        bool seen = key < count && (causal || !shares);
                        shared.weights[key * WEIGHTS + scored] = seen ? dots[j] : -INFINITY;
                    }
                }
            }
        }
        __syncthreads();
        // Weights: a warp takes a query, and each of its threads two keys.
        for (int query = from_query + threadIdx.x / 32; query < to_query; query += THREADS / 32) {
            int at = threadIdx.x % 32;
            float &first_weight = shared.weights[at * WEIGHTS + query];
            float &second_weight = shared.weights[(at + 32) * WEIGHTS + query];
            float a = first_weight, b = second_weight, max = fmaxf(a, b);
            for (int mask = 16; mask > 0; mask >>= 1) {
                max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, mask));
            }
            a = a == -INFINITY ? 0.f : __expf(a - max);
            b = b == -INFINITY ? 0.f : __expf(b - max);
            first_weight = a;
            second_weight = b;
            float sum = __fadd_rn(a, b);
            for (int mask = 16; mask > 0; mask >>= 1) {
                sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
            }
            if (at == 0) {
                shared.max[query] = max;
                shared.sum[query] = sum;
            }
        }
        __syncthreads();
        // Weighted values.
        float dots[OWN][DIMS];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int j = 0; j < DIMS; j++) {
                dots[i][j] = 0.f;
            }
        }
#pragma unroll 1
        for (int key = 0; key < count; key++) {
            float values[DIMS];
#pragma unroll
            for (int j = 0; j < DIMS; j++) {
                values[j] = widen(shared.values[key * D + dim + j * WIDE]);
            }
            const float4 *weights = reinterpret_cast<const float4 *>(shared.weights + key * WEIGHTS + own);
#pragma unroll
            for (int i = 0; i < OWN; i += 4) {
                if (own + i < to_query && own + i + 4 > from_query) {
                    const float4 four = weights[i / 4];
#pragma unroll
                    for (int j = 0; j < DIMS; j++) {
                        dots[i][j] = fmaf(four.x, values[j], dots[i][j]);
                        dots[i + 1][j] = fmaf(four.y, values[j], dots[i + 1][j]);
                        dots[i + 2][j] = fmaf(four.z, values[j], dots[i + 2][j]);
                        dots[i + 3][j] = fmaf(four.w, values[j], dots[i + 3][j]);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int query = own + i;
            if (query < from_query || query >= to_query) {
                continue;
            }
            Running part = {shared.max[query], shared.sum[query]};
            if constexpr (SPLIT) {
                size_t pair = (size_t)(tile.partial + query / group) * args.heads + head_of(query);
                float *to = args.partials + (pair * args.chunks + chunk) * (D + 2);
#pragma unroll
                for (int j = 0; j < DIMS; j++) {
                    to[dim + j * WIDE] = dots[i][j];
                }
                if (dim == 0) {
                    to[D] = part.max;
                    to[D + 1] = part.sum;
                }
            } else {
                float to_all, to_chunk;
                merge(all[i], part, to_all, to_chunk);
#pragma unroll
                for (int j = 0; j < DIMS; j++) {
                    o[i][j] = fmaf(o[i][j], to_all, __fmul_rn(dots[i][j], to_chunk));
                }
            }
        }
        pass = shares || pass + 1 == tile.rows ? 0 : pass + 1;
        chunk += pass == 0;
    }
    if constexpr (!SPLIT) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            int query = own + i;
            if (query < queries) {
                T *to = out + ((size_t)row_of(query) * args.heads + head_of(query)) * D;
#pragma unroll
                for (int j = 0; j < DIMS; j++) {
                    to[dim + j * WIDE] = narrow<T>(__fdividef(o[i][j], all[i].sum));
                }
            }
        }
    }
}

// Merges the chunks of split tiles; a block takes a row of a tile and a head.
template <typename T, int D> __device__ void merge_chunks(T *out, const Args &args) {
    const Tile tile = args.tiles[blockIdx.x];
    const int row = blockIdx.z, head = blockIdx.y, dim = threadIdx.x;
    if (row >= tile.rows) {
        return;
    }
    // All chunks of the tile were computed, also those of which this row sees no key.
    const int chunks = (keys_of(tile) + CHUNK - 1) / CHUNK;
    size_t pair = (size_t)(tile.partial + row) * args.heads + head;
    const float *from = args.partials + pair * args.chunks * (D + 2);
    Running all = {-INFINITY, 0.f};
    float o = 0.f;
    for (int chunk = 0; chunk < chunks; chunk++, from += D + 2) {
        float to_all, to_chunk;
        merge(all, {from[D], from[D + 1]}, to_all, to_chunk);
        o = fmaf(o, to_all, __fmul_rn(from[dim], to_chunk));
    }
    out[((size_t)(tile.first + row) * args.heads + head) * D + dim] = narrow<T>(__fdividef(o, all.sum));
}

#define PARAMETERS                                                                                 \
    const Tile *tiles, const uint32_t *blocks, const uint64_t *trees, float *partials, int heads,  \
        int kv_heads, int block_size, int chunks, float scale
#define ARGS                                                                                       \
    Args { tiles, blocks, trees, partials, heads, kv_heads, block_size, chunks, scale }
#define KERNELS(T, NAME, D)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_whole_##NAME##_##D(const T *q, const T *k, const T *v, T *out, PARAMETERS) {        \
        attend<T, D, false>(q, k, v, out, ARGS);                                                   \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        attend_split_##NAME##_##D(const T *q, const T *k, const T *v, T *out, PARAMETERS) {        \
        attend<T, D, true>(q, k, v, out, ARGS);                                                    \
    }                                                                                              \
    extern "C" __global__ void merge_##NAME##_##D(T *out, PARAMETERS) {                            \
        merge_chunks<T, D>(out, ARGS);                                                             \
    }
#define WIDTHS(T, NAME)                                                                            \
    KERNELS(T, NAME, 64)                                                                           \
    KERNELS(T, NAME, 128)
FOR_FLOATS(WIDTHS)
#undef WIDTHS
#undef KERNELS
