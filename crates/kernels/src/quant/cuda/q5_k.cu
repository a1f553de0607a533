// Products with weights in Q5_K.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(Q5_K, q5_k)
