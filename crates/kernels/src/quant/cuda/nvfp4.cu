// Products with weights in NVFP4.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(NVFP4, nvfp4)
