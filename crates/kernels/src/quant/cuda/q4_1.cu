// Products with weights in Q4_1.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q4_1, q4_1)
