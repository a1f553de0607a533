// Products with weights in MXFP4.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(MXFP4, mxfp4)
