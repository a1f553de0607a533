// Products with weights in IQ2_XXS, which hold IQ1_S, too.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(IQ2_XXS, iq2_xxs)
