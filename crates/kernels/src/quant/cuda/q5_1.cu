// Products with weights in Q5_1.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q5_1, q5_1)
