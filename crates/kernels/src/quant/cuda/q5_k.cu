// Products with weights in Q5_K.
#include "product.cuh"

using Q5_K = Format<5, 0, SuperOffsets>;
KERNELS_OF(Q5_K, q5_k)
