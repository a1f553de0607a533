// Products with weights in IQ4_NL.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(IQ4_NL, iq4_nl)
