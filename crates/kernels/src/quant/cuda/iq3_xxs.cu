// Products with weights in IQ3_XXS.
#include "formats.cuh"
#include "kernels.cuh"

KERNELS_OF(IQ3_XXS, iq3_xxs)
