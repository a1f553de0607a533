// The end of products with gate and up in one launch: no other kernel reads what the activation takes.
#pragma once
#include "cuda/tensor.cuh"
#include "glu.cuh"

// As store_tile, for a block of 2 * WARPS warps: the first WARPS have sums of gates, the others those of the same outputs
// of up. Stores activation(gate) * up, of both rounded as their products would be.
template <typename T, int WARPS>
__device__ __forceinline__ void store_gated_tile(const float (&d)[4], float *own, const float *first, int stride, T *y,
                                                 int width, int rows, int outputs, int activation) {
    keep_tile(d, own);
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 8; i += 2 * WARPS * 32) {
        const int output = i % 16, row = i / 16;
        const float gate = sum_of_tile<WARPS>(first, stride, output, row);
        const float up = sum_of_tile<WARPS>(first + WARPS * stride, stride, output, row);
        if (row < rows && output < outputs) {
            y[(size_t)row * width + output] = gated(activation, narrow<T>(gate), narrow<T>(up));
        }
    }
}
