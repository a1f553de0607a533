// Products with weights in Q8_0.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q8_0, q8_0)
