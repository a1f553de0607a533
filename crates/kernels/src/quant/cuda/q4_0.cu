// Products with weights in Q4_0.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q4_0, q4_0)
