// Attention of heads of up to 128 values.
#include "padded.cuh"

PADDED_KERNELS(128)
