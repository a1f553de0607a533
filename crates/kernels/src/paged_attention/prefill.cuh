// Attention of a prompt's rows over a paged pool, on tensor cores (Dao 2023, "FlashAttention-2:
// faster attention with better parallelism and work partitioning").
//
// A query is a (row, query head) pair; the queries of one K/V head share the keys and values that are
// read from the pool. A query sees the keys up to its own row, or the last of them if there is a window, and of a
// text that is read whole also keys after its own. All queries of a tile go through the same chunks of keys, which
// begin at multiples of their length in the sequence; a chunk of which a query sees no key does not change its result.
// So a row's bits depend neither on its tile nor on the call that it is in, but they differ from those
// of attend.cuh.
//
// A kernel computes with heads of D values. Heads that have fewer are PADDED with zeros in shared memory.
#pragma once
#include "pools.cuh"

namespace prefill {

// Maximum number of queries per block, as MAX_LONG_QUERIES in tables.rs; a warp has 16, the rows of a
// matrix.
constexpr int MAX_QUERIES = 64, THREADS = MAX_QUERIES / 16 * 32;
// Values of a head that four threads multiply, 8 consecutive ones each. Which value goes to which place
// in the instruction does not matter, as long as both sides agree.
constexpr int STEP = 32;
// Values of a head that a block sums up, at most: registers have no room for more. The blocks of a wider head compute
// the same weights.
constexpr int MAX_VALUES = 256;

template <typename T, int D> struct Shared {
    // Rows are padded against bank conflicts: of the threads that read 16 bytes of adjacent rows, and of
    // those that read the matrices of values.
    // Values of the head that a block sums up.
    static constexpr int VALUES = D < MAX_VALUES ? D : MAX_VALUES;
    static constexpr int KEY = D + 32, VALUE = VALUES + 8;
    // Keys and values of wide heads take turns.
    static constexpr bool TAKES_TURNS = IS_WIDE<D>;
    static constexpr int STAGE = CHUNK * (TAKES_TURNS ? KEY : KEY + VALUE);
    // The pool slots of the keys of a chunk and of the next one; -1 = beyond the last key.
    int slots[2][CHUNK];
    // Of the first stage; those of a second one follow.
    T keys_and_values[STAGE];

    __device__ __forceinline__ T *keys(int stage) { return keys_and_values + stage * STAGE; }
    __device__ __forceinline__ T *values(int stage) { return keys(stage) + (TAKES_TURNS ? 0 : CHUNK * KEY); }

    // The bytes of a block with so many stages.
    static constexpr int bytes(int stages) { return sizeof(Shared) + (stages - 1) * STAGE * sizeof(T); }
};

struct Args {
    const Tile *tiles;
    const uint32_t *blocks;
    int heads, kv_heads, block_size;
    Scores scores;
    // Values of a head, a multiple of 8, for kernels of heads that are PADDED.
    int values;
    // The chunks that shared memory has room for: 1, or 2 of kernels that load ahead.
    int stages;
};

// Whether a block loads a chunk while it computes with another one: keys and values are copied as they are, and have
// places of their own.
template <int D, typename Pool> constexpr bool LOADS_AHEAD = !Pool::IS_WIDENED && !IS_WIDE<D>;

// A number that the compiler knows.
template <int N> struct Count {
    static constexpr int value = N;
};

__device__ __forceinline__ float max_of_four(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float sum_of_four(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// A block takes a tile, a K/V head and some of its values. A thread holds parts of two of its warp's 16 queries: `half` 0
// and 1 in its registers. k and v are Numbers<T>, Blocks, or Float8Pool.
template <typename T, int D, bool PADDED, typename Pool>
__device__ void attend(const T *q, const Pool &k, const Pool &v, T *out, const Args &args) {
    DYNAMIC_SHARED(memory);
    Shared<T, D> &shared = *reinterpret_cast<Shared<T, D> *>(memory);
    constexpr int KEY = Shared<T, D>::KEY, VALUE = Shared<T, D>::VALUE, VALUES = Shared<T, D>::VALUES;
    constexpr bool TAKES_TURNS = Shared<T, D>::TAKES_TURNS;
    const int d = PADDED ? args.values : D, first_value = VALUES < D ? blockIdx.z * VALUES : 0;
    // Whether the head has the eight values from a place on.
    auto has = [&](int value) { return !PADDED || value < d; };
    wait_for_previous();
    // Tiles at the end of a prompt have the most work, so they start first.
    const Tile tile = args.tiles[gridDim.x - 1 - blockIdx.x];
    const int kv_head = blockIdx.y, group = args.heads / args.kv_heads;
    const int ahead = args.scores.ahead, keys = keys_of(tile, ahead), begin = tile.context + tile.start;
    const int thread = threadIdx.x % 32, quarter = thread % 4;
    const int first_query = threadIdx.x / 32 * 16 + thread / 4;

    // Registers have no room for queries of wide heads, which are read again for each chunk.
    constexpr bool KEPT = !IS_WIDE<D>;
    uint4 queries[KEPT ? D / STEP : 1][2];
    // The position of the last key that a row at a position sees.
    auto last_of = [&](int position) { return position + min(ahead, keys - 1 - position); };
    // The position of the query's row in its sequence, and of the last key that it sees.
    int own[2], last[2];
    // The index of its head in `q` and `out`; -1 = there is no such query.
    long long at[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = first_query + 8 * half, row = query / group;
        own[half] = begin + row;
        last[half] = last_of(own[half]);
        at[half] = -1;
        if (row < tile.rows) {
            at[half] = ((long long)(tile.first + row) * args.heads + kv_head * group + query % group) * d;
        }
    }
    auto pack = [&](int half, int step) {
        const int value = step * STEP + quarter * 8;
        const bool exists = at[half] >= 0 && has(value);
        return exists ? *reinterpret_cast<const uint4 *>(q + at[half] + value) : make_uint4(0, 0, 0, 0);
    };
    if constexpr (KEPT) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int step = 0; step < D / STEP; step++) {
                queries[step][half] = pack(half, step);
            }
        }
    }

    auto find = [&](int base, int turn) {
        int place = base + threadIdx.x;
        if (threadIdx.x < CHUNK) {
            int slot = -1;
            if (place < keys) {
                uint32_t block = args.blocks[tile.blocks + place / args.block_size];
                slot = block * args.block_size + place % args.block_size;
            }
            shared.slots[turn][threadIdx.x] = slot;
        }
    };
    // Brings COUNT values of the keys of a chunk, from one of the head's values on, from pools to shared memory. Those beyond
    // the last key become zeros: a pool could hold NaN there, which a weight of zero would not hide. Values that are not
    // widened come while the thread goes on.
    auto load = [&](auto count, int turn, int from, auto... all) {
        constexpr int COUNT = decltype(count)::value;
        const int slot_values = args.kv_heads * d, first = kv_head * d + from;
        auto place_of = [&](int slot, int value) { return (long long)slot * slot_values + (first + value); };
        if constexpr (Pool::IS_WIDENED) {
            // Below 0 = there are none.
            auto place = [&](int key, int value) -> long long {
                const int slot = shared.slots[turn][key];
                return slot >= 0 && has(from + value) ? place_of(slot, value) : -1;
            };
            widen_chunk<COUNT, THREADS, T, sizeof...(all), Pool>(threadIdx.x, place, {all...});
        } else {
            // Keys that the threads copy at a time.
            constexpr int PACKS = COUNT / Pack<T>::LEN, KEYS = THREADS / PACKS;
            const int value = threadIdx.x % PACKS * Pack<T>::LEN;
#pragma unroll
            for (int i = 0; i < CHUNK; i += KEYS) {
                const int key = i + threadIdx.x / PACKS, slot = shared.slots[turn][key];
                const long long at = place_of(max(slot, 0), value);
                const bool exists = slot >= 0 && has(from + value);
                (copy_async(all.to + key * all.pitch + value, all.from.values + at, exists), ...);
            }
        }
    };
    auto keys_at = [&](int stage) { return Destination<T, Pool>{k, shared.keys(stage), KEY}; };
    auto values_at = [&](int stage) { return Destination<T, Pool>{v, shared.values(stage), VALUE}; };
    // Waits for the copies of all threads. None of them needs what was read before any more.
    auto arrive = [&] {
        end_of_copies();
        wait_for_copies<0>();
        __syncthreads();
    };
    // Scores are scaled by log2(e): powers of two are cheaper than powers of e.
    constexpr float LOG2_E = 1.44269504f;
    const bool capped = args.scores.cap != 0.f;
    const float scale = capped ? LOG2_E : __fmul_rn(args.scores.scale, LOG2_E);
    const int window = args.scores.window;
    float o[VALUES / 8][4];
#pragma unroll
    for (int n = 0; n < VALUES / 8; n++) {
        o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.f;
    }
    // The largest score, and the thread's part of the sum of weights.
    float largest[2] = {-INFINITY, -INFINITY}, sums[2] = {0.f, 0.f};
    const int start = first_key_of(tile, window) / CHUNK * CHUNK;
    // With two stages, a chunk is loaded while the one before is multiplied. With one, its keys are loaded while the values
    // before are multiplied, and its values while its keys are.
    constexpr bool AHEAD = LOADS_AHEAD<D, Pool>;
    const bool has_two = AHEAD && args.stages == 2;
    auto load_ahead = [&](int turn) {
        if (has_two) {
            load(Count<D>(), turn, 0, keys_at(turn), values_at(turn));
        } else {
            load(Count<D>(), turn, 0, keys_at(0));
        }
    };
    find(start, 0);
    find(start + CHUNK, 1);
    if constexpr (AHEAD) {
        __syncthreads();
        load_ahead(0);
    }
    for (int base = start, turn = 0; base < keys; base += CHUNK, turn ^= 1) {
        const int stage = has_two ? turn : 0;
        // All that the chunk needs from its slots has begun.
        auto next = [&] {
            if constexpr (AHEAD) {
                if (base + CHUNK < keys) {
                    load_ahead(turn ^ 1);
                }
            }
            find(base + 2 * CHUNK, turn);
        };
        if constexpr (!AHEAD) {
            __syncthreads();
            if constexpr (TAKES_TURNS) {
                load(Count<D>(), turn, 0, keys_at(0));
            } else {
                load(Count<D>(), turn, 0, keys_at(0), values_at(0));
            }
        }
        arrive();
        if (AHEAD ? has_two : !TAKES_TURNS) {
            next();
        } else if constexpr (AHEAD) {
            load(Count<D>(), turn, 0, values_at(0));
        }

        // Scores, eight keys at a time: s[n][i] is key 8 * n + 2 * quarter + i % 2 of half i / 2.
        float s[CHUNK / 8][4];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
            s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
        }
        auto add = [&](float(&s)[4], int n, int step, uint4 a, uint4 b) {
            const T *row = shared.keys(stage) + (n * 8 + thread / 4) * KEY + quarter * 8;
            const uint4 c = *reinterpret_cast<const uint4 *>(row + step * STEP);
            const uint32_t one[4] = {a.x, b.x, a.y, b.y}, two[4] = {a.z, b.z, a.w, b.w};
            multiply<T>(s, one, c.x, c.y);
            multiply<T>(s, two, c.z, c.w);
        };
        if constexpr (KEPT) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (int step = 0; step < D / STEP; step++) {
                    if (has(step * STEP)) {
                        add(s[n], n, step, queries[step][0], queries[step][1]);
                    }
                }
            }
        } else {
#pragma unroll 1
            for (int step = 0; step < (d + STEP - 1) / STEP; step++) {
                const uint4 a = pack(0, step), b = pack(1, step);
#pragma unroll
                for (int n = 0; n < CHUNK / 8; n++) {
                    add(s[n], n, step, a, b);
                }
            }
            // Values take the place of the keys.
            __syncthreads();
            load(Count<VALUES>(), turn, first_value, values_at(0));
        }
        if (AHEAD && !has_two) {
            arrive();
            next();
        }
        // Whether some query does not see the whole chunk.
        const bool cut = base + CHUNK - 1 > last_of(begin) || base <= begin + tile.rows - 1 - window;
        if (capped) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[n][i] = args.scores.of(s[n][i]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = base + n * 8 + quarter * 2 + i % 2;
                bool hidden = cut && (key > last[i / 2] || key <= own[i / 2] - window);
                s[n][i] = hidden ? -INFINITY : __fmul_rn(s[n][i], scale);
            }
        }
        // Weights. Earlier sums are scaled down if the largest score grew; otherwise the factor is
        // exactly one.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float max = largest[half];
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
                max = fmaxf(max, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            }
            max = max_of_four(max);
            const float scaled = max == -INFINITY ? 0.f : exp2f(__fsub_rn(largest[half], max));
            largest[half] = max;
            // The query has not seen any key yet.
            max = max == -INFINITY ? 0.f : max;
            sums[half] = __fmul_rn(sums[half], scaled);
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[n][i] = exp2f(__fsub_rn(s[n][i], max));
                    sums[half] = __fadd_rn(sums[half], s[n][i]);
                }
            }
#pragma unroll
            for (int n = 0; n < VALUES / 8; n++) {
                o[n][2 * half] = __fmul_rn(o[n][2 * half], scaled);
                o[n][2 * half + 1] = __fmul_rn(o[n][2 * half + 1], scaled);
            }
        }
        if (TAKES_TURNS) {
            arrive();
            next();
        }
        // Weighted values: the scores are in the registers in which the product expects the weights.
#pragma unroll
        for (int step = 0; step < CHUNK / 16; step++) {
            const float(&left)[4] = s[2 * step], (&right)[4] = s[2 * step + 1];
            const uint32_t weights[4] = {narrow_pair<T>(left[0], left[1]), narrow_pair<T>(left[2], left[3]),
                                         narrow_pair<T>(right[0], right[1]), narrow_pair<T>(right[2], right[3])};
            const T *row = shared.values(stage) + (step * 16 + thread % 16) * VALUE + thread / 16 * 8;
#pragma unroll
            for (int n = 0; n < VALUES / 16; n++) {
                if (has(first_value + n * 16)) {
                    uint32_t b[4];
                    load_transposed(b, row + n * 16);
                    multiply<T>(o[2 * n], weights, b[0], b[1]);
                    multiply<T>(o[2 * n + 1], weights, b[2], b[3]);
                }
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = sum_of_four(sums[half]), by = 1.f;
        if (at[half] >= 0) {
            if (args.scores.sinks != nullptr) {
                const int head = kv_head * group + (first_query + 8 * half) % group;
                const float sink = __fmul_rn(args.scores.sinks[head], LOG2_E), max = fmaxf(largest[half], sink);
                by = exp2f(__fsub_rn(largest[half], max));
                sum = fmaf(sum, by, exp2f(__fsub_rn(sink, max)));
            }
            T *to = out + at[half] + first_value + quarter * 2;
#pragma unroll
            for (int n = 0; n < VALUES / 8; n++) {
                if (has(first_value + n * 8)) {
                    *reinterpret_cast<uint32_t *>(to + n * 8) =
                        narrow_pair<T>(__fdividef(__fmul_rn(o[n][2 * half], by), sum),
                                       __fdividef(__fmul_rn(o[n][2 * half + 1], by), sum));
                }
            }
        }
    }
}

} // namespace prefill

// A kernel of heads of D values, or of up to D.
#define PREFILL_PARAMETERS                                                                         \
    const Tile *tiles, const uint32_t *blocks, int heads, int kv_heads, int block_size,            \
        float scale, int window, int ahead, float cap, const float *sinks, int values, int stages
#define PREFILL_ARGS                                                                               \
    prefill::Args {                                                                                \
        tiles, blocks, heads, kv_heads, block_size, {scale, window, cap, sinks, ahead}, values,    \
            stages                                                                                 \
    }
#define PREFILL_KERNEL(T, NAME, D, PADDED)                                                         \
    extern "C" __global__ void __launch_bounds__(prefill::THREADS)                                 \
        prefill_##NAME(const T *q, const T *k, const T *v, T *out, PREFILL_PARAMETERS) {           \
        prefill::attend<T, D, PADDED>(q, Numbers<T>{k}, Numbers<T>{v}, out, PREFILL_ARGS);         \
    }

// The same for pools in blocks.
#define PREFILL_KERNEL_OF_BLOCKS(T, NAME, D, PADDED)                                               \
    extern "C" __global__ void __launch_bounds__(prefill::THREADS)                                 \
        prefill_##NAME(const T *q, const int8_t *k, const f16 *k_scales, const int8_t *v,          \
                       const f16 *v_scales, T *out, PREFILL_PARAMETERS) {                          \
        prefill::attend<T, D, PADDED>(q, Blocks{{k, k_scales}}, Blocks{{v, v_scales}}, out,        \
                                      PREFILL_ARGS);                                               \
    }

// The same for pools in FP8.
#define PREFILL_KERNEL_OF_FLOAT8S(T, NAME, D, PADDED)                                              \
    extern "C" __global__ void __launch_bounds__(prefill::THREADS)                                 \
        prefill_##NAME(const T *q, const uint8_t *k, const uint8_t *v, T *out,                     \
                       PREFILL_PARAMETERS) {                                                       \
        prefill::attend<T, D, PADDED>(q, Float8Pool{{k}}, Float8Pool{{v}}, out, PREFILL_ARGS);     \
    }
