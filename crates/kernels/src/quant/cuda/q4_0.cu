// Products with weights in Q4_0.
#include "product.cuh"

using Q4_0 = Format<4, 8, BlockScales>;
KERNELS_OF(Q4_0, q4_0)
