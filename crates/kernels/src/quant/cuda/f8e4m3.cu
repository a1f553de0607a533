// Products with weights in FP8.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(F8E4M3, f8e4m3)
