// Products with weights in IQ2_XS, which hold IQ2_S and IQ1_M, too.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(IQ2_XS, iq2_xs)
