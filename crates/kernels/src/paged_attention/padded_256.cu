// Attention of heads of more than 128 and up to 256 values.
#include "padded.cuh"

PADDED_KERNELS(256)
