// Products with weights in Q2_K.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q2_K, q2_k)
