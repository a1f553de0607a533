// Products with weights in Q6_K.
#include "product.cuh"

using Q6_K = Format<6, 32, HalfBlockScales>;
KERNELS_OF(Q6_K, q6_k)
