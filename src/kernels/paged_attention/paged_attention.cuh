// What the kernels of attention share with one another and with tables.rs.
#pragma once
#include "../cuda/common.cuh"

// Keys that are taken together: by their place in the sequence, which no call and no tile shifts.
constexpr int CHUNK = 64;

// Some rows of one sequence.
struct Tile {
    // Row of the call, and how many follow one another.
    int first, rows;
    // Tokens of the sequence before the rows of its segment; row of the tile 0 within the segment.
    int context, start;
    // Where the sequence's block table begins.
    int blocks;
    // Where its tree masks begin; -1 = causal.
    int tree;
    // Rows of short segments before it: where it may leave partial results.
    int partial;
};

// Keys up to the last that any row of the tile may see.
__device__ __forceinline__ int keys_of(const Tile &tile) { return tile.context + tile.start + tile.rows; }
