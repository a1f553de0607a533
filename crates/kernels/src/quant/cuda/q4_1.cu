// Products with weights in Q4_1.
#include "product.cuh"

using Q4_1 = Format<4, 0, BlockOffsets>;
KERNELS_OF(Q4_1, q4_1)
