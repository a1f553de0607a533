// Moves keys and values from slot to slot of all pools, in the order of the moves.
#include "cuda/common.cuh"

// plane: [num_slots, width]; moves: [count] pairs of a source and a destination. Each thread owns a column of the plane, so
// its moves need no barrier.
template <typename T>
__device__ __forceinline__ void move_units(void *plane, const uint32_t *moves, int count, uint32_t width) {
    const uint32_t column = blockIdx.x * blockDim.x + threadIdx.x;
    T *units = static_cast<T *>(plane) + column;
    for (int i = 0; i < count && column < width; i++) {
        units[(size_t)moves[2 * i + 1] * width] = units[(size_t)moves[2 * i] * width];
    }
}

// words: `count` moves, and then four words of each plane of the pools: its address, the low half first, the units of a slot,
// and the bytes of a unit, for which the plane is aligned. The grid is [_, planes].
extern "C" __global__ void __launch_bounds__(128) kv_move(const uint32_t *words, int count) {
    wait_for_previous();
    const uint32_t *entry = words + 2 * (size_t)count + 4 * blockIdx.y;
    void *plane = reinterpret_cast<void *>((uint64_t)entry[1] << 32 | entry[0]);
    switch (entry[3]) {
    case 16:
        move_units<uint4>(plane, words, count, entry[2]);
        break;
    case 4:
        move_units<uint32_t>(plane, words, count, entry[2]);
        break;
    default:
        move_units<uint16_t>(plane, words, count, entry[2]);
    }
}
