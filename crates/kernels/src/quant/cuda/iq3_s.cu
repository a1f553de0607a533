// Products with weights in IQ3_S.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(IQ3_S, iq3_s)
