// Products with weights of two formats in one launch, as files in Q4_K_M and Q5_K_M have them for q, k and v.
#include "formats.cuh"
#include "kernels.cuh"

// As product, with weights in FIRST before column `from` of y, and in SECOND from there on.
template <typename FIRST, typename SECOND, typename T, int TILES, int WARPS>
__device__ void mixed_product(const Weights &weights, const T *x, T *y, int inputs, int rows, int width, int column,
                              int from) {
    constexpr int OF_FIRST = WarpRing<FIRST, WARPS>::BYTES, OF_SECOND = WarpRing<SECOND, WARPS>::BYTES;
    __shared__ __align__(16) unsigned char rings[WARPS * (OF_FIRST > OF_SECOND ? OF_FIRST : OF_SECOND)];
    const BlockOfWeight weight = BlockOfWeight::of<1>(weights, column);
    if (weight.column < from) {
        product_of_strip<FIRST, T, TILES, WARPS>(rings, weight, x, y, inputs, rows, width);
    } else {
        product_of_strip<SECOND, T, TILES, WARPS>(rings, weight, x, y, inputs, rows, width);
    }
}

#define MIXED(FIRST, SECOND, NAME, T, SUFFIX, TILES, WARPS)                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, min_blocks(TILES, WARPS))                        \
        product_##NAME##_##TILES##_##WARPS##_##SUFFIX(PARAMETERS(T), int from) {                              \
        mixed_product<FIRST, SECOND, T, TILES, WARPS>(WEIGHTS, x, y, inputs, rows, width, column, from);      \
    }
#define MIXED_OF(FIRST, SECOND, NAME, T, SUFFIX)                                                              \
    MIXED(FIRST, SECOND, NAME, T, SUFFIX, 1, 8)                                                               \
    MIXED(FIRST, SECOND, NAME, T, SUFFIX, 1, 16)                                                              \
    MIXED(FIRST, SECOND, NAME, T, SUFFIX, 2, 16)
MIXED_OF(Q4_K, Q6_K, q4_k_q6_k, f16, f16)
MIXED_OF(Q4_K, Q6_K, q4_k_q6_k, bf16, bf16)
MIXED_OF(Q5_K, Q6_K, q5_k_q6_k, f16, f16)
MIXED_OF(Q5_K, Q6_K, q5_k_q6_k, bf16, bf16)
#undef MIXED_OF
#undef MIXED
