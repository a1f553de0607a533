// Attention over a paged pool for the rows of many sequences.
//
// Keys are divided into chunks of 64 by their position in the sequence. Each chunk has its own softmax
// (Dao et al. 2023, "Flash-Decoding for long-context inference"), and chunks are merged in ascending
// order, within one block or by the last of many. Both use the same instructions, so the bits do not
// depend on the grid. A query is a (row, query head) pair; the queries of one K/V head share the keys
// and values that are read from the pool.
//
// A row of a tree has last keys of its own: those of its ancestors and itself, or whatever rows of its span
// its mask names, also later ones. They count as consecutive, wherever in the pool they are, so that the row
// has the bits that it has in a sequence without branches.
//
// With a window, a row sees only its last keys up to its own position: those before have no weight, and chunks
// without any key that a tile sees are left out. A row of a text that is read whole may also see keys after its own.
//
// A kernel computes with heads of D values. Heads that have fewer are PADDED with zeros in shared memory. Keys of latent
// attention (MLA) are read once: their first values are the values, too.
#pragma once
#include "pools.cuh"

// Maximum number of queries per block; the same as in paged_attention/tables.rs. Warps with an even
// number have the first 16, the others the rest. Of the keys of a chunk and of the values of a head, a
// warp has the part number warp / 2. Within a warp, a thread has the queries and values that it has in a
// product on tensor cores: see tensor.cuh.
constexpr int MAX_QUERIES = 32, PARTS = 4, THREADS = MAX_QUERIES / 16 * PARTS * 32;
static_assert(CHUNK <= THREADS, "each thread finds a key");
// Floats from one query's weights to the next one's; padded against bank conflicts.
constexpr int WEIGHTS = CHUNK + 8;

struct Args {
    const Tile *tiles;
    const uint32_t *blocks;
    const uint64_t *trees;
    // Partial results: [rows of short spans, heads, chunks, d + 2].
    float *partials;
    int heads, kv_heads, block_size, chunks;
    Scores scores;
    // Values of a head, a multiple of 8, for kernels of heads that are PADDED.
    int values = 0;
    // Of latent keys: those values that are summed up, a multiple of 8. `kv_heads` then are groups of query heads.
    int latent = 0;
};

// The values of a head: D, which the compiler knows, or, if they are PADDED, what the call says.
template <int D, bool PADDED> __device__ __forceinline__ int values_of(const Args &args) {
    if constexpr (PADDED) {
        return args.values;
    } else {
        return D;
    }
}

// The values of a head that are summed up.
template <int D, bool PADDED> __device__ __forceinline__ int summed_of(const Args &args) {
    if constexpr (IS_LATENT<D>) {
        return args.latent;
    } else {
        return values_of<D, PADDED>(args);
    }
}

// The place of a key of `d` values in its pool.
template <int D> __device__ __forceinline__ size_t place_in_pool(const Args &args, int slot, int kv_head, int d) {
    return (IS_LATENT<D> ? (size_t)slot : (size_t)slot * args.kv_heads + kv_head) * d;
}

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

// The position in its sequence of a row of the tile: that of a row of a tree is after its ancestors.
__device__ __forceinline__ int position_of(const Tile &tile, const uint64_t *trees, int row) {
    const int number = tile.start + row;
    if (tile.tree < 0) {
        return tile.context + number;
    }
    const uint64_t up_to_itself = ~0ull >> (63 - number);
    return tile.context + __popcll(trees[tile.tree + number] & up_to_itself) - 1;
}

// The largest number of keys that a row of the tile sees.
__device__ __forceinline__ int keys_of(const Tile &tile, const Args &args) {
    if (tile.tree < 0) {
        return keys_of(tile, args.scores.ahead);
    }
    int most = 0;
    for (int row = 0; row < tile.rows; row++) {
        most = max(most, __popcll(args.trees[tile.tree + tile.start + row]));
    }
    return tile.context + most;
}

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

// Adds the sink of a head, if it has one: a chunk of one key without a value. Returns the factor of the weighted
// values.
__device__ __forceinline__ float add_sink(Running &all, const Scores &scores, int head) {
    float to_all = 1.f, to_sink;
    if (scores.sinks != nullptr) {
        merge(all, {scores.sinks[head], 1.f}, to_all, to_sink);
    }
    return to_all;
}

template <typename T, int D> struct Shared {
    static constexpr bool SHARES = IS_LATENT<D>;
    // Rows are padded against bank conflicts: of the threads that read 16 bytes of adjacent rows, and of
    // those that read the matrices of values. Where the keys are the values, no padding is good for both: see `place`.
    static constexpr int KEY = SHARES ? D : D + (sizeof(T) == 2 ? 32 : 4), VALUE = SHARES ? D : D + 8;
    // Keys and values of wide heads take turns.
    static constexpr bool TAKES_TURNS = IS_WIDE<D> && !SHARES;
    T keys_and_values[CHUNK * (TAKES_TURNS ? (KEY > VALUE ? KEY : VALUE) : SHARES ? KEY : KEY + VALUE)];
    // [query][key]: scores, then weights.
    float weights[MAX_QUERIES * WEIGHTS];
    float max[MAX_QUERIES], sum[MAX_QUERIES];
    // The pool slots of the keys; -1 = beyond the last key.
    int slots[CHUNK];

    __device__ __forceinline__ T *keys() { return keys_and_values; }
    __device__ __forceinline__ T *values() { return keys_and_values + (TAKES_TURNS || SHARES ? 0 : CHUNK * KEY); }

    // The place of a value within the row of a key. In rows that are not padded, parts of 16 bytes change places, in
    // eights: eight keys have the same part in eight groups of banks, and two neighbours four parts in all of them.
    static __device__ __forceinline__ int place(int key, int value) {
        if constexpr (SHARES) {
            constexpr int LEN = Pack<T>::LEN;
            static_assert(D % (8 * LEN) == 0, "parts stay within the row");
            return (value / LEN ^ ((key & 1) << 2 | (key >> 1 & 3))) * LEN + value % LEN;
        } else {
            return value;
        }
    }
};

// Two of a warp's queries, eight apart, and their products with keys and values.
template <typename T, int D, bool PADDED> struct Queries {
    // Values of a head that four threads multiply, 8 consecutive ones each. Which value goes to which
    // place in the instruction does not matter, as long as both sides agree.
    static constexpr int STEP = 32, KEY = Shared<T, D>::KEY;
    // Values that the warp sums up.
    static constexpr int VALUES = SUMMED<D> / PARTS;
    // Registers have no room for wide heads: they are read again for each chunk.
    static constexpr bool KEPT = !IS_WIDE<D>;
    uint4 packs[KEPT ? D / STEP : 1][2];
    const T *rows[2];
    // Values of a head.
    int d;

    // Null = there is no such query.
    __device__ __forceinline__ void load(int half, const T *from) {
        rows[half] = from;
        if constexpr (KEPT) {
#pragma unroll
            for (int step = 0; step < D / STEP; step++) {
                packs[step][half] = pack(half, step);
            }
        }
    }

    __device__ __forceinline__ uint4 pack(int half, int step) const {
        const int at = step * STEP + threadIdx.x % 4 * 8;
        const bool exists = rows[half] != nullptr && (!PADDED || at < d);
        return exists ? *reinterpret_cast<const uint4 *>(rows[half] + at) : make_uint4(0, 0, 0, 0);
    }

    // Adds the products of some values with a key.
    static __device__ __forceinline__ void add(float (&s)[4], uint4 a, uint4 b, const T *key) {
        const uint4 c = *reinterpret_cast<const uint4 *>(key);
        const uint32_t one[4] = {a.x, b.x, a.y, b.y}, two[4] = {a.z, b.z, a.w, b.w};
        multiply<T>(s, one, c.x, c.y);
        multiply<T>(s, two, c.z, c.w);
    }

    // Scores of some times eight keys, whose first is at `keys`.
    template <int EIGHTS> __device__ __forceinline__ void scores(float (&s)[EIGHTS][4], const T *keys) const {
        const int key = threadIdx.x % 32 / 4, at = threadIdx.x % 4 * 8;
        auto place = [&](int n, int step) {
            return keys + (n * 8 + key) * KEY + Shared<T, D>::place(key, step * STEP + at);
        };
        if constexpr (KEPT) {
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
                for (int step = 0; step < D / STEP; step++) {
                    if (!PADDED || step * STEP < d) {
                        add(s[n], packs[step][0], packs[step][1], place(n, step));
                    }
                }
            }
        } else {
#pragma unroll 2
            for (int step = 0; step < (d + STEP - 1) / STEP; step++) {
                const uint4 a = pack(0, step), b = pack(1, step);
#pragma unroll
                for (int n = 0; n < EIGHTS; n++) {
                    add(s[n], a, b, place(n, step));
                }
            }
        }
    }

    // Adds the weighted values of all keys, from the head's value `first` on; `weights` are those of the thread's first
    // query.
    __device__ __forceinline__ void weigh(float (&dots)[VALUES / 8][4], const float *weights, const T *values, int first,
                                          int) const {
        const int thread = threadIdx.x % 32;
        auto pair = [&](int query, int key) {
            const float2 two = *reinterpret_cast<const float2 *>(weights + query * WEIGHTS + key + thread % 4 * 2);
            return narrow_pair<T>(two.x, two.y);
        };
#pragma unroll
        for (int key = 0; key < CHUNK; key += 16) {
            const uint32_t a[4] = {pair(0, key), pair(8, key), pair(0, key + 8), pair(8, key + 8)};
            const T *row = values + (key + thread % 16) * Shared<T, D>::VALUE;
#pragma unroll
            for (int n = 0; n < VALUES / 8; n += 2) {
                uint32_t b[4];
                load_transposed(b, row + Shared<T, D>::place(thread % 16, first + thread / 16 * 8 + n * 8));
                multiply<T>(dots[n], a, b[0], b[1]);
                multiply<T>(dots[n + 1], a, b[2], b[3]);
            }
        }
    }
};

// Tensor cores do not take f32: the same sums, one value at a time.
template <int D, bool PADDED> struct Queries<float, D, PADDED> {
    static constexpr int VALUES = SUMMED<D> / PARTS;
    const float *rows[2];
    int d;

    __device__ __forceinline__ void load(int half, const float *from) { rows[half] = from; }

    template <int EIGHTS> __device__ __forceinline__ void scores(float (&s)[EIGHTS][4], const float *keys) const {
#pragma unroll
        for (int n = 0; n < EIGHTS; n++) {
            for (int i = 0; i < 4; i++) {
                const int number = n * 8 + threadIdx.x % 4 * 2 + i % 2;
                const float *key = keys + number * Shared<float, D>::KEY;
                for (int at = 0; at < d && rows[i / 2] != nullptr; at++) {
                    s[n][i] = fmaf(rows[i / 2][at], key[Shared<float, D>::place(number, at)], s[n][i]);
                }
            }
        }
    }

    __device__ __forceinline__ void weigh(float (&dots)[VALUES / 8][4], const float *weights, const float *values, int first,
                                          int count) const {
        for (int key = 0; key < count; key++) {
#pragma unroll
            for (int n = 0; n < VALUES / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int at = first + n * 8 + threadIdx.x % 4 * 2 + i % 2;
                    const float value = values[key * Shared<float, D>::VALUE + Shared<float, D>::place(key, at)];
                    dots[n][i] = fmaf(weights[i / 2 * 8 * WEIGHTS + key], value, dots[n][i]);
                }
            }
        }
    }
};

// What THREADS threads compute together: a tile, a K/V head and, if chunks are split, one chunk.
struct Item {
    int tile, kv_head, chunk;
};

// The place of a query's head in all queries and in `out`, in values.
__device__ __forceinline__ size_t place_of(const Tile &tile, const Args &args, int kv_head, int query, int d) {
    const int group = args.heads / args.kv_heads;
    return ((size_t)(tile.first + query / group) * args.heads + kv_head * group + query % group) * d;
}

// Computes an item: with SPLIT the partial result of its chunk, otherwise all chunks. `shared` is memory that the
// threads share. `team` is these threads:
// - thread(): the number of this one, sync(): waits for all of them;
// - prepare_keys(tile, item): called by all of them, once, before anything of k and v is read;
// - prepare_queries(tile, item, from, to): called by all of them before they read these queries of the item. It may use
//   the memory of `weights` for them, until `shared` gets weights;
// - query(tile, kv_head, i): the values of the item's i-th query.
// False: the item has no keys. k and v are Numbers<T>, Blocks, or Float8Pool.
template <typename T, int D, bool SPLIT, bool PADDED = false, typename Team, typename Pool>
__device__ __forceinline__ bool attend(const Team &team, Shared<T, D> &shared, Item item, const Pool &k, const Pool &v,
                                       T *out, const Args &args) {
    const Tile tile = args.tiles[item.tile];
    const int kv_head = item.kv_head, group = args.heads / args.kv_heads, d = values_of<D, PADDED>(args);
    // The values that are summed up; a warp has VALUES of them.
    const int summed = summed_of<D, PADDED>(args);
    constexpr int VALUES = SUMMED<D> / PARTS;
    const int queries = tile.rows * group, keys = keys_of(tile, args);
    const int before = first_key_of(tile, args.scores.window) / CHUNK;
    const int first = SPLIT ? item.chunk : before;
    const int end = SPLIT ? first + 1 : (keys + CHUNK - 1) / CHUNK;
    if (first < before || first * CHUNK >= keys) {
        return false;
    }
    const int warp = team.thread() / 32, part = warp / 2;
    // The thread's first query, and values of a head: two of every eight from `value`.
    const int own = warp % 2 * 16 + threadIdx.x % 32 / 4, value = part * VALUES + threadIdx.x % 4 * 2;
    // The rows of its two queries, and their positions.
    int rows[2], positions[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int query = own + half * 8;
        rows[half] = query / group;
        positions[half] = query < queries ? position_of(tile, args.trees, rows[half]) : 0;
    }
    // Whether the head has the eight values from a place on.
    auto has = [&](int value) { return !PADDED || value < d; };
    auto sums = [&](int value) { return !PADDED || value < summed; };
    Queries<T, D, PADDED> pair;
    pair.d = d;
    float o[VALUES / 8][4];
    Running all[2] = {{-INFINITY, 0.f}, {-INFINITY, 0.f}};
#pragma unroll
    for (int n = 0; n < VALUES / 8; n++) {
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    }
    int chunk = first, pass = 0;
    while (chunk < end) {
        // All rows share the chunk, or each row of a tree takes a pass over its own keys.
        const bool shares = tile.tree < 0 || (chunk + 1) * CHUNK <= tile.context;
        const TreeRow row = {tile.context, shares ? 0 : args.trees[tile.tree + tile.start + pass]};
        const int base = chunk * CHUNK, count = min(CHUNK, (shares ? keys : row.keys()) - base);
        const int from_query = shares ? 0 : pass * group, to_query = shares ? queries : from_query + group;
        team.sync();
        if (const int key = team.thread(); key < CHUNK) {
            int slot = -1;
            if (key < count) {
                int place = shares ? base + key : row.place_of(base + key);
                uint32_t block = args.blocks[tile.blocks + place / args.block_size];
                slot = block * args.block_size + place % args.block_size;
            }
            shared.slots[key] = slot;
        }
        team.sync();
        const bool is_begin = chunk == first && pass == 0;
        if (is_begin) {
            team.prepare_keys(tile, item);
        }
        constexpr bool TAKES_TURNS = Shared<T, D>::TAKES_TURNS, SHARES = Shared<T, D>::SHARES;
        // Where a value of a key is in the pools; below 0 = there is none. Those beyond the last key become zeros: the pool
        // could hold NaN there, which a weight of zero would not hide.
        auto place = [&](int key, int at) -> long long {
            const int slot = shared.slots[key];
            return slot >= 0 && has(at) ? (long long)place_in_pool<D>(args, slot, kv_head, d) + at : -1;
        };
        auto load = [&](T *to, int pitch, const Pool &pool) {
            if constexpr (Pool::IS_WIDENED) {
                widen_chunk<D, THREADS, T, 1, Pool>(team.thread(), place, {{pool, to, pitch}});
            } else {
                constexpr int PACKS = D / Pack<T>::LEN;
                auto copy = [&](int key, int at) {
                    const int slot = shared.slots[key];
                    copy_async(to + key * pitch + Shared<T, D>::place(key, at),
                               pool.values + place_in_pool<D>(args, max(slot, 0), kv_head, d) + at, slot >= 0 && has(at));
                };
                if constexpr (THREADS % PACKS == 0) {
                    // Keys that the threads copy at a time.
                    constexpr int KEYS = THREADS / PACKS;
                    const int first = team.thread() / PACKS, at = team.thread() % PACKS * Pack<T>::LEN;
#pragma unroll
                    for (int i = 0; i < CHUNK / KEYS; i++) {
                        copy(i * KEYS + first, at);
                    }
                } else {
#pragma unroll 6
                    for (int i = team.thread(); i < CHUNK * PACKS; i += THREADS) {
                        copy(i / PACKS, i % PACKS * Pack<T>::LEN);
                    }
                }
                end_of_copies();
            }
        };
        constexpr int KEY = Shared<T, D>::KEY, VALUE = Shared<T, D>::VALUE;
        if constexpr (Pool::IS_WIDENED && !TAKES_TURNS) {
            widen_chunk<D, THREADS, T, 2, Pool>(team.thread(), place, {{k, shared.keys(), KEY}, {v, shared.values(), VALUE}});
        } else {
            load(shared.keys(), KEY, k);
            if (!TAKES_TURNS && !SHARES) {
                load(shared.values(), VALUE, v);
            }
        }
        // With SPLIT, a second pass is rare, and registers that keep queries for it would leave room for fewer blocks.
        if (SPLIT || is_begin) {
            team.prepare_queries(tile, item, SPLIT ? from_query : 0, SPLIT ? to_query : queries);
            pair.load(0, own < queries ? team.query(tile, kv_head, own) : nullptr);
            pair.load(1, own + 8 < queries ? team.query(tile, kv_head, own + 8) : nullptr);
        }
        wait_for_copies<TAKES_TURNS || SHARES ? 0 : 1>();
        team.sync();
        if (warp % 2 * 16 < to_query) {
            constexpr int EIGHTS = CHUNK / PARTS / 8;
            float s[EIGHTS][4] = {};
            pair.scores(s, shared.keys() + part * EIGHTS * 8 * Shared<T, D>::KEY);
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int query = own + i / 2 * 8, key = (part * EIGHTS + n) * 8 + threadIdx.x % 4 * 2 + i % 2;
                    int position = positions[i / 2];
                    // In u32: the sum may be too large for an int.
                    bool early = uint32_t(base + key) <= uint32_t(position) + args.scores.ahead;
                    bool late = base + key > position - args.scores.window;
                    bool seen = key < count && late && (early || !shares);
                    shared.weights[query * WEIGHTS + key] = seen ? args.scores.of(s[n][i]) : -INFINITY;
                }
            }
        }
        team.sync();
        if (TAKES_TURNS) {
            load(shared.values(), VALUE, v);
        }
        // Weights: a warp takes two queries at a time, and each of its threads two keys of both.
        constexpr int WARPS = THREADS / 32, AT_A_TIME = 2;
        for (int query = from_query + warp; query < to_query; query += AT_A_TIME * WARPS) {
            float *weights = shared.weights + query * WEIGHTS + threadIdx.x % 32;
            float a[AT_A_TIME] = {}, b[AT_A_TIME] = {}, max[AT_A_TIME], sum[AT_A_TIME];
#pragma unroll
            for (int i = 0; i < AT_A_TIME; i++) {
                if (query + i * WARPS < to_query) {
                    a[i] = weights[i * WARPS * WEIGHTS], b[i] = weights[i * WARPS * WEIGHTS + 32];
                }
                max[i] = fmaxf(a[i], b[i]);
            }
#pragma unroll
            for (int mask = 16; mask > 0; mask >>= 1) {
#pragma unroll
                for (int i = 0; i < AT_A_TIME; i++) {
                    max[i] = fmaxf(max[i], __shfl_xor_sync(0xffffffffu, max[i], mask));
                }
            }
#pragma unroll
            for (int i = 0; i < AT_A_TIME; i++) {
                a[i] = a[i] == -INFINITY ? 0.f : __expf(a[i] - max[i]);
                b[i] = b[i] == -INFINITY ? 0.f : __expf(b[i] - max[i]);
                sum[i] = __fadd_rn(a[i], b[i]);
            }
#pragma unroll
            for (int mask = 16; mask > 0; mask >>= 1) {
#pragma unroll
                for (int i = 0; i < AT_A_TIME; i++) {
                    sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(0xffffffffu, sum[i], mask));
                }
            }
#pragma unroll
            for (int i = 0; i < AT_A_TIME; i++) {
                if (query + i * WARPS < to_query) {
                    weights[i * WARPS * WEIGHTS] = a[i];
                    weights[i * WARPS * WEIGHTS + 32] = b[i];
                    if (threadIdx.x % 32 == 0) {
                        shared.max[query + i * WARPS] = max[i];
                        shared.sum[query + i * WARPS] = sum[i];
                    }
                }
            }
        }
        wait_for_copies<0>();
        team.sync();
        float dots[VALUES / 8][4];
#pragma unroll
        for (int n = 0; n < VALUES / 8; n++) {
            dots[n][0] = dots[n][1] = dots[n][2] = dots[n][3] = 0.f;
        }
        if (warp % 2 * 16 < to_query && sums(part * VALUES)) {
            pair.weigh(dots, shared.weights + own * WEIGHTS, shared.values(), part * VALUES, count);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = own + half * 8;
            if (query < from_query || query >= to_query) {
                continue;
            }
            Running now = {shared.max[query], shared.sum[query]};
            if constexpr (SPLIT) {
                const int head = kv_head * group + query - rows[half] * group;
                size_t pair = (size_t)(tile.partial + rows[half]) * args.heads + head;
                float *to = args.partials + (pair * args.chunks + chunk) * (summed + 2);
#pragma unroll
                for (int n = 0; n < VALUES / 8; n++) {
                    if (sums(value + n * 8)) {
                        *reinterpret_cast<float2 *>(to + value + n * 8) =
                            make_float2(dots[n][2 * half], dots[n][2 * half + 1]);
                    }
                }
                if (value == 0) {
                    *reinterpret_cast<float2 *>(to + summed) = make_float2(now.max, now.sum);
                }
            } else {
                float to_all, to_now;
                merge(all[half], now, to_all, to_now);
#pragma unroll
                for (int n = 0; n < VALUES / 8; n++) {
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        o[n][i] = fmaf(o[n][i], to_all, __fmul_rn(dots[n][i], to_now));
                    }
                }
            }
        }
        pass = shares || pass + 1 == tile.rows ? 0 : pass + 1;
        chunk += pass == 0;
    }
    if constexpr (!SPLIT) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = own + half * 8;
            if (query < queries) {
                T *to = out + place_of(tile, args, kv_head, query, summed) + value;
                const float by = add_sink(all[half], args.scores, kv_head * group + query % group);
#pragma unroll
                for (int n = 0; n < VALUES / 8; n++) {
                    if (sums(value + n * 8)) {
                        to[n * 8] = narrow<T>(__fdividef(__fmul_rn(o[n][2 * half], by), all[half].sum));
                        to[n * 8 + 1] = narrow<T>(__fdividef(__fmul_rn(o[n][2 * half + 1], by), all[half].sum));
                    }
                }
            }
        }
    }
    return true;
}

// The chunks of a tile that have keys: from the first up to the second one. All of them are computed, also those of
// which a row sees no key.
struct Chunks {
    int first, end;
};
__device__ __forceinline__ Chunks chunks_of(const Tile &tile, const Args &args) {
    return {first_key_of(tile, args.scores.window) / CHUNK, (keys_of(tile, args) + CHUNK - 1) / CHUNK};
}

// Merges these chunks of a row of a tile and a head: VALUES values of the head, 32 apart, from `dim` on. The threads of a
// warp do it together, with consecutive `dim`; each finds the factors of other chunks.
template <typename T, int D, int VALUES, bool PADDED = false>
__device__ __forceinline__ void merge_chunks(T *out, const Args &args, const Tile &tile, Chunks chunks, int row, int head,
                                             int dim) {
    const int end = chunks.end, lane = threadIdx.x % 32, d = summed_of<D, PADDED>(args);
    const float *from = args.partials + ((size_t)(tile.partial + row) * args.heads + head) * args.chunks * (d + 2);
    auto has = [&](int n) { return !PADDED || dim + n * 32 < d; };
    Running all = {-INFINITY, 0.f};
    // Chunks that are loaded together.
    constexpr int AHEAD = 16;
    float o[VALUES] = {}, dots[AHEAD][VALUES];
    auto load = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const float *part = from + (size_t)(chunk + i) * (d + 2) + dim;
#pragma unroll
            for (int n = 0; n < VALUES; n++) {
                dots[i][n] = chunk + i < end && has(n) ? part[n * 32] : 0.f;
            }
        }
    };
    for (int base = chunks.first; base < end; base += 32) {
        Running chunk = {-INFINITY, 0.f};
        if (base + lane < end) {
            const float *part = from + (size_t)(base + lane) * (d + 2) + d;
            chunk = {part[0], part[1]};
        }
        load(base);
        // The largest score up to each chunk is the same in any order.
        float up_to = lane == 0 ? fmaxf(all.max, chunk.max) : chunk.max;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            up_to = fmaxf(up_to, __shfl_up_sync(0xffffffffu, up_to, distance));
        }
        const float before = __shfl_up_sync(0xffffffffu, up_to, 1);
        Running earlier = {lane == 0 ? all.max : before, 0.f};
        float to_all, to_chunk;
        merge(earlier, chunk, to_all, to_chunk);
        all.max = __shfl_sync(0xffffffffu, up_to, 31);
#pragma unroll
        for (int half = 0; half < 32; half += AHEAD) {
            if (half > 0 && base + half < end) {
                load(base + half);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const float by_all = __shfl_sync(0xffffffffu, to_all, half + i);
                const float by_chunk = __shfl_sync(0xffffffffu, to_chunk, half + i);
                const float sum = __shfl_sync(0xffffffffu, chunk.sum, half + i);
                if (base + half + i < end) {
                    all.sum = fmaf(all.sum, by_all, __fmul_rn(sum, by_chunk));
#pragma unroll
                    for (int n = 0; n < VALUES; n++) {
                        o[n] = fmaf(o[n], by_all, __fmul_rn(dots[i][n], by_chunk));
                    }
                }
            }
        }
    }
    const float by = add_sink(all, args.scores, head);
    T *to = out + ((size_t)(tile.first + row) * args.heads + head) * d + dim;
#pragma unroll
    for (int n = 0; n < VALUES; n++) {
        if (has(n)) {
            to[n * 32] = narrow<T>(__fdividef(__fmul_rn(o[n], by), all.sum));
        }
    }
}

// All chunks of a row of a tile and a head, for one value.
template <typename T, int D>
__device__ __forceinline__ void merge_chunks(T *out, const Args &args, const Tile &tile, int row, int head, int dim) {
    merge_chunks<T, D, 1>(out, args, tile, chunks_of(tile, args), row, head, dim);
}
