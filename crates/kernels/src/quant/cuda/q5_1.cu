// Products with weights in Q5_1.
#include "product.cuh"

using Q5_1 = Format<5, 0, BlockOffsets>;
KERNELS_OF(Q5_1, q5_1)
