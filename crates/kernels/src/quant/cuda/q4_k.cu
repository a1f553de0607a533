// Products with weights in Q4_K.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q4_K, q4_k)
