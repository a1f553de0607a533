// Shared by the attention kernels, and the same as in tables.rs.
#pragma once
#include "../cuda/common.cuh"

// Keys per chunk. Chunks are counted from the start of the sequence, so they do not depend on the call
// or the tile.
constexpr int CHUNK = 64;

// Whether heads of so many values are wide: a thread does not keep those of its queries in registers, and shared memory
// has either keys or values of a chunk; the same as in cuda.rs.
template <int VALUES> constexpr bool IS_WIDE = VALUES > 128;

// Keys of latent attention have up to so many values, of which up to LATENT_VALUES, the first, are the values, too. All
// heads share them: a pool has one key a token. The same as in tables.rs.
constexpr int LATENT_KEY = 576, LATENT_VALUES = 512;
template <int D> constexpr bool IS_LATENT = D == LATENT_KEY;
// The values that are summed up, at most, if keys have D.
template <int D> constexpr int SUMMED = IS_LATENT<D> ? LATENT_VALUES : D;

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
    // Rows of its span after it.
    int after;
    // Rows of short spans before it: its place in the partial results.
    int partial;
};

// Number of keys up to the last one that any row of a causal tile may see, if a row sees up to `ahead` keys after its own.
__device__ __forceinline__ int keys_of(const Tile &tile, int ahead) {
    return tile.context + tile.start + tile.rows + min(ahead, tile.after);
}

// The first key that any row of the tile may see, if a row sees at most `window` keys up to its own position.
// No row of a tree is before the context.
__device__ __forceinline__ int first_key_of(const Tile &tile, int window) {
    return max(0, tile.context + (tile.tree < 0 ? tile.start : 0) + 1 - window);
}

// What becomes of the product of a query and a key.
struct Scores {
    float scale;
    // The number of keys up to its own position that a row sees; INT_MAX = all.
    int window;
    // Scores are cap * tanh(score / cap); 0 = they are not capped.
    float cap;
    // [heads]: a further score of each head's softmax, without a value; null = none.
    const float *sinks;
    // The number of keys after its own that a row of a causal span sees of that span.
    int ahead = 0;

    __device__ __forceinline__ float of(float product) const {
        const float score = __fmul_rn(product, scale);
        return cap == 0.f ? score : capped(score);
    }

    __device__ __forceinline__ float capped(float score) const {
        const float x = __fdividef(score, cap);
        return __fmul_rn(cap, __fsub_rn(1.f, __fdividef(2.f, __fadd_rn(__expf(__fadd_rn(x, x)), 1.f))));
    }
};
