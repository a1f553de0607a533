// The phase of attention: rope and the write of K and V, the attention of chunks, and their merge.
#pragma once
#include "../paged_attention/attend.cuh"
#include "../rope_kv_write.cuh"
#include "ring.cuh"

// Teams of THREADS threads, each of which takes an item at a time.
constexpr int TEAMS = COMPUTING / THREADS;

// Shared memory of a team.
template <typename T, int D> struct alignas(16) TeamMemory {
    Shared<T, D> attention;
    // The rotated queries of the item.
    T queries[MAX_QUERIES * D];
    int is_last;
};

// Rotates the queries of an item. If keys of this call are in its chunk, rotates and writes all of them before: several
// teams then write the same values to the same places, and each reads only after it has written.
template <typename T, int D> struct Team {
    const Rows<T> &rows;
    const Heads<T> &heads;
    T *queries, *k, *v;
    // The slots of the chunk's keys; rows of a tree have other ones in the chunks after the context.
    const int *slots;
    int id;

    __device__ __forceinline__ int thread() const { return threadIdx.x % THREADS; }
    __device__ __forceinline__ void sync() const { sync_team<THREADS>(2 + id); }
    __device__ __forceinline__ const T *query(const Tile &, int, int i) const { return queries + i * D; }

    __device__ __forceinline__ void prepare_keys(const Tile &tile, Item item) const {
        bool is_new = tile.tree >= 0 && (item.chunk + 1) * CHUNK > tile.context;
        for (int row = 0; row < rows.rows; row++) {
            const int slot = rows.slots[row], lane = threadIdx.x % 32;
            is_new |= slot == slots[lane] || slot == slots[lane + 32];
        }
        if (!__any_sync(0xffffffffu, is_new)) {
            return;
        }
        const int kv_heads = heads.kv_heads();
        for (int i = thread() / 32; i < 2 * rows.rows; i += THREADS / 32) {
            const int row = i / 2, is_value = i % 2;
            T *to = (is_value ? v : k) + ((size_t)rows.slots[row] * kv_heads + item.kv_head) * D;
            heads.write(row, heads.heads + is_value * kv_heads + item.kv_head, to);
        }
        sync();
    }

    __device__ __forceinline__ void prepare_queries(const Tile &tile, Item item) const {
        const int group = heads.heads / heads.kv_heads();
        for (int i = thread() / 32; i < tile.rows * group; i += THREADS / 32) {
            heads.write(tile.first + i / group, item.kv_head * group + i % group, queries + i * D);
        }
        sync();
    }
};

// The items of a phase that are this block's.
template <typename T, int D>
__device__ CALLED void attention_phase(const Plan &plan, const Phase &phase, const Rows<T> &rows, unsigned char *memory) {
    const int id = threadIdx.x / THREADS;
    TeamMemory<T, D> &shared = reinterpret_cast<TeamMemory<T, D> *>(memory)[id];
    T *k = static_cast<T *>(const_cast<void *>(phase.k)), *v = static_cast<T *>(const_cast<void *>(phase.v));
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
    const Team<T, D> team{rows, heads, shared.queries, k, v, shared.attention.slots, id};
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
        if (!attend<T, D, true>(team, shared.attention, item, Numbers<T>{k}, Numbers<T>{v}, out, args)) {
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
