// Rows that many blocks share: each block reads a piece of a row, and the last of them merges what all found.
// The grid is [rows, pieces].

#pragma once
#include "sample/vocab.cuh"

namespace {

// Values of a piece, and threads of a block that reads one; as in `cuda.rs`.
constexpr int PIECE = 2048, PIECE_THREADS = 256;

// What a block found in its piece, or the last block in its row: the largest of some values, the lowest id that
// has it, and the sum of the weights.
struct Found {
    float value;
    uint32_t id;
    double mass;
};

// The piece of this block.
struct Piece {
    int start, len;

    __device__ explicit Piece(int vocab) : start(blockIdx.y * PIECE), len(min(vocab - start, PIECE)) {}
};

// Whether this block is the last of its row to come here: then it sees what the first threads of the others wrote
// before. `arrived` is 0 before the first and after the last.
__device__ bool is_last(uint32_t *arrived) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        last = is_last_of(arrived, gridDim.y);
    }
    __syncthreads();
    return last;
}

} // namespace
