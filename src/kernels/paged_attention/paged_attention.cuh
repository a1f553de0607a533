// Shared by the attention kernels, and the same as in tables.rs.
#pragma once
#include "../cuda/common.cuh"

// Keys per chunk. Chunks are counted from the start of the sequence, so they do not depend on the call
// or the tile.
constexpr int CHUNK = 64;

// Some rows of one sequence.
struct Tile {
    // First row of the call, and number of rows.
    int first, rows;
    // Tokens of the sequence before the rows of its span; the tile's first row within the span.
    int context, start;
    // Index of the sequence's block table in `blocks`.
    int blocks;
    // Index of its tree masks in `trees`; -1 = causal.
    int tree;
    // Rows of short spans before it: its place in the partial results.
    int partial;
};

// Number of keys up to the last one that any row of a causal tile may see.
__device__ __forceinline__ int keys_of(const Tile &tile) { return tile.context + tile.start + tile.rows; }
