// Products with weights in Q4_K.
#include "product.cuh"

KERNELS_OF(Q4_K, q4_k)
