// The phase of attention: rope and the write of K and V, the attention of chunks, and their merge.
#pragma once
#include "../paged_attention/new_rows.cuh"
#include "ring.cuh"

// Teams of THREADS threads, each of which takes an item at a time.
constexpr int TEAMS = COMPUTING / THREADS;

// Shared memory of a team.
template <typename T, int D> struct alignas(16) TeamMemory {
    Shared<T, D> attention;
    int is_last;
};

template <typename T, int D, typename NewPool> struct Team {
    NewRows<T, NewPool> rows;
    T *queries;
    // The slots of the chunk's keys.
    const int *slots;
    int id;

    __device__ __forceinline__ int thread() const { return threadIdx.x % THREADS; }
    __device__ __forceinline__ void sync() const { sync_team<THREADS>(2 + id); }
    __device__ __forceinline__ const T *query(const Tile &, int, int i) const { return queries + i * D; }
    __device__ __forceinline__ void prepare_keys(const Tile &tile, Item item) const {
        rows.write_keys(*this, tile, item, slots);
    }
    __device__ __forceinline__ void prepare_queries(const Tile &tile, Item item, int from, int to) const {
        rows.template write_queries<D>(*this, tile, item, from, to, queries);
    }
};

// The items of a phase that are this block's.
template <typename T, int D, typename NewPool>
__device__ CALLED void attention_phase(const Plan &plan, const Phase &phase, const Rows<T> &rows, unsigned char *memory,
                                       const NewPool k, const NewPool v) {
    const int id = threadIdx.x / THREADS;
    TeamMemory<T, D> &shared = reinterpret_cast<TeamMemory<T, D> *>(memory)[id];
    const auto keys = as_read(k), values = as_read(v);
    T *out = static_cast<T *>(plan.attended);
    const Heads<T> heads{static_cast<const T *>(plan.qkv),
                         rows.cos,
                         rows.sin,
                         static_cast<const T *>(phase.q_norm),
                         static_cast<const T *>(phase.k_norm),
                         plan.heads,
                         plan.heads + 2 * plan.kv_heads,
                         D,
                         phase.half,
                         phase.whole,
                         phase.head_eps};
    const Team<T, D, NewPool> team{
        {heads, reinterpret_cast<const int *>(rows.slots), rows.rows, k, v, heads_in(shared.attention)},
        queries_in(shared.attention),
        shared.attention.slots,
        id};
    const Args args{rows.tiles,
                    rows.blocks,
                    rows.trees,
                    rows.partials,
                    plan.heads,
                    plan.kv_heads,
                    plan.block_size,
                    rows.chunks,
                    Scores{phase.scale, phase.window, phase.cap, phase.sinks}};
    const int items = rows.tile_count * plan.kv_heads * rows.chunks, group = plan.heads / plan.kv_heads;
    for (int i = blockIdx.x + gridDim.x * id; i < items; i += gridDim.x * TEAMS) {
        // The items of the last chunks come last, because tables have room for more chunks than there are.
        const int pair = i % (rows.tile_count * plan.kv_heads);
        const Item item{pair % rows.tile_count, pair / rows.tile_count, i / (rows.tile_count * plan.kv_heads)};
        if (!attend<T, D, true>(team, shared.attention, item, keys, values, out, args)) {
            continue;
        }
        // Whoever is the last with a tile and head merges its chunks.
        const Tile tile = rows.tiles[item.tile];
        const Chunks chunks = chunks_of(tile, args);
        team.sync();
        if (team.thread() == 0) {
            shared.is_last = is_last_of(&plan.arrived[pair], chunks.end - chunks.first);
        }
        team.sync();
        if (shared.is_last) {
            for (int at = team.thread(); at < tile.rows * group * D; at += THREADS) {
                const int query = at / D;
                merge_chunks<T, D>(out, args, tile, query / group, item.kv_head * group + query % group, at % D);
            }
        }
    }
}

template <typename T, int D>
__device__ __forceinline__ void attention_phase(const Plan &plan, const Phase &phase, const Rows<T> &rows,
                                                unsigned char *memory) {
    void *k = const_cast<void *>(phase.k), *v = const_cast<void *>(phase.v);
    if (phase.pools == NUMBERS) {
        attention_phase<T, D>(plan, phase, rows, memory, static_cast<T *>(k), static_cast<T *>(v));
    } else if (phase.pools == BLOCKS_OF_8_BITS) {
        auto blocks = [](void *bytes, const void *scales) {
            return NewQ8Blocks{static_cast<int8_t *>(bytes), static_cast<f16 *>(const_cast<void *>(scales))};
        };
        attention_phase<T, D>(plan, phase, rows, memory, blocks(k, phase.k_scales), blocks(v, phase.v_scales));
    } else {
        attention_phase<T, D>(plan, phase, rows, memory, NewFloat8s{static_cast<uint8_t *>(k)},
                              NewFloat8s{static_cast<uint8_t *>(v)});
    }
}
