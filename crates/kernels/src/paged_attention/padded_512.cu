// Attention of heads of more than 256 and up to 512 values.
#include "padded.cuh"

PADDED_KERNELS(512)
