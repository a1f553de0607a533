// Rope and the write of keys and values by those who attend: no launch comes before theirs, and no rotated query goes to
// memory.
#pragma once
#include "../rope_kv_write.cuh"
#include "attend.cuh"

// The rows of a call, up to 32, none of which has been rotated or written. NewPool is T *, NewQ8Blocks or NewFloat8s.
template <typename T, typename NewPool> struct NewRows {
    const Heads<T> &heads;
    // The slot of each row; below 0 = its key and value are not written.
    const int *slots;
    int count;
    NewPool k, v;
    // A head for each warp, before it is rounded, if pools are in blocks or in FP8.
    float *in_f32;

    // Writes keys and values of the rows that are among the keys of a chunk, whose slots are `of_chunk`. Several teams may
    // write the same values to the same places, and each reads only after it has written.
    template <typename Team>
    __device__ __forceinline__ void write_keys(const Team &team, const Tile &tile, Item item, const int *of_chunk) const {
        const int lane = threadIdx.x % 32, kv_heads = heads.kv_heads();
        const int first = of_chunk[lane], second = of_chunk[lane + 32], own = lane < count ? slots[lane] : -1;
        // Rows of a tree see other keys than `of_chunk` says in the chunks after the context.
        const bool sees_others = tile.tree >= 0 && (item.chunk + 1) * CHUNK > tile.context;
        bool has_written = false;
        for (int row = 0; row < count; row++) {
            const int slot = __shfl_sync(0xffffffffu, own, row);
            if (slot < 0 || !(__any_sync(0xffffffffu, slot == first || slot == second) || sees_others)) {
                continue;
            }
            has_written = true;
            // Each of a row's two heads is that of one of the warps.
            const int is_value = (team.thread() / 32 - 2 * row) & (THREADS / 32 - 1);
            if (is_value < 2) {
                const int head = heads.heads + is_value * kv_heads + item.kv_head;
                const size_t at = ((size_t)slot * kv_heads + item.kv_head) * heads.d;
                const NewPool &to = is_value ? v : k;
                if constexpr (std::is_same_v<NewPool, T *>) {
                    heads.write(row, head, to + at);
                } else {
                    // The memory may still have the head before: all threads must have read it.
                    __syncwarp();
                    heads.write_rounded(row, head, in_f32 + team.thread() / 32 * heads.d, to, at, [] {});
                }
            }
        }
        if (has_written) {
            team.sync();
        }
    }

    // Rotates queries of an item to `to`, D values from one to the next.
    template <int D, typename Team>
    __device__ __forceinline__ void write_queries(const Team &team, const Tile &tile, Item item, int from, int end,
                                                  T *to) const {
        const int group = heads.heads / heads.kv_heads();
        for (int i = from + team.thread() / 32; i < end; i += THREADS / 32) {
            heads.write(tile.first + i / group, item.kv_head * group + i % group, to + i * D);
        }
        team.sync();
    }
};

// Where heads are before they are rounded: queries and weights come later.
template <typename T, int D> __device__ __forceinline__ float *heads_in(Shared<T, D> &shared) {
    static_assert(THREADS / 32 * D * sizeof(float) <= sizeof(shared.weights), "no room");
    return shared.weights;
}

// Where queries are rotated to: weights come later.
template <typename T, int D> __device__ __forceinline__ T *queries_in(Shared<T, D> &shared) {
    static_assert(MAX_QUERIES * D * sizeof(T) <= sizeof(shared.weights) && Queries<T, D, false>::KEPT, "no room");
    return reinterpret_cast<T *>(shared.weights);
}
