// Moves keys or values from slot to slot of a pool, in the order of the moves.
#include "cuda/common.cuh"

// pool: [num_slots, width]; moves: [count] pairs of a source and a destination. Each thread owns a
// column of the pool, so its moves need no barrier.
template <typename T>
__device__ void kv_move(T *pool, const uint32_t *moves, int count, int width) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) {
        return;
    }
    for (int i = 0; i < count; i++) {
        pool[(size_t)moves[2 * i + 1] * width + column] = pool[(size_t)moves[2 * i] * width + column];
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void kv_move_##NAME(T *pool, const uint32_t *moves, int count, int width) { \
        kv_move(pool, moves, count, width);                                                        \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
