// Products with weights in Q4_1.
#include "product.cuh"

KERNELS_OF(Q4_1, q4_1)
