// Products with weights in IQ4_XS.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(IQ4_XS, iq4_xs)
