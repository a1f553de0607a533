// The kernels of a whole forward in one launch. Each dtype has a file of its own, because a driver takes seconds to
// translate one.
#pragma once
#include "forward.cuh"

#define FORWARD(T, NAME, TILES)                                                                    \
    extern "C" __global__ void __launch_bounds__(FORWARD_THREADS, 1) forward_##NAME##_##TILES(     \
        const Plan *plan, T *x, const T *cos, const T *sin, const uint32_t *slots,                 \
        const Tile *tiles, const uint32_t *blocks, const uint64_t *trees, float *partials,         \
        const uint32_t *wanted, float *logits, T *normed, int rows, int wanted_count,              \
        int tile_count, int chunks, int ring_at, int ring_slots) {                                 \
        const Rows<T> all{x,      cos,    sin,    slots,  tiles,        blocks,     trees,         \
                          partials, wanted, logits, normed, rows, wanted_count, tile_count, chunks}; \
        forward<T, TILES>(*plan, all, ring_at, ring_slots);                                        \
    }
#define FORWARDS(T, NAME)                                                                          \
    FORWARD(T, NAME, 1)                                                                            \
    FORWARD(T, NAME, 2)
