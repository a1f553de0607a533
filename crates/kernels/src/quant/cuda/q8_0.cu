// Products with weights in Q8_0.
#include "product.cuh"

using Q8_0 = Format<8, 128, BlockScales>;
KERNELS_OF(Q8_0, q8_0)
