// Products with weights in Q6_K.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q6_K, q6_k)
