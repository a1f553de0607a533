// Latent attention (MLA): keys of up to 576 values, whose first values are the values, and which all heads share.
#include "blocks.cuh"

#define LATENT(T, NAME) ATTEND_KERNELS(T, NAME##_latent, LATENT_KEY, true)
FOR_FLOATS(LATENT)
#undef LATENT
