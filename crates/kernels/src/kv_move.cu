// Moves keys or values from slot to slot of a pool, in the order of the moves.
#include "cuda/common.cuh"

// pool: [num_slots, width]; moves: [count] pairs of a source and a destination. Each thread owns a
// column of the pool, so its moves need no barrier.
template <typename T>
__device__ void kv_move(T *pool, const uint32_t *moves, int count, int width, int column) {
    if (column >= width) {
        return;
    }
    for (int i = 0; i < count; i++) {
        pool[(size_t)moves[2 * i + 1] * width + column] = pool[(size_t)moves[2 * i] * width + column];
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void kv_move_##NAME(T *pool, const uint32_t *moves, int count, int width) { \
        kv_move(pool, moves, count, width, blockIdx.x * blockDim.x + threadIdx.x);                 \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL

// Of a pool in blocks (q8_blocks.cuh): a slot has `words` words of bytes and `blocks` scales.
extern "C" __global__ void kv_move_q8_0(uint32_t *bytes, f16 *scales, const uint32_t *moves, int count, int words, int blocks) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < words) {
        kv_move(bytes, moves, count, words, column);
    } else {
        kv_move(scales, moves, count, blocks, column - words);
    }
}

// Of a pool in FP8: a slot has `words` words.
extern "C" __global__ void kv_move_fp8(uint32_t *pool, const uint32_t *moves, int count, int words) {
    kv_move(pool, moves, count, words, blockIdx.x * blockDim.x + threadIdx.x);
}
