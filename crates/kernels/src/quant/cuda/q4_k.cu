// Products with weights in Q4_K.
#include "product.cuh"

using Q4_K = Format<4, 0, SuperOffsets>;
KERNELS_OF(Q4_K, q4_k)
