// Attention over pools in blocks, of heads of more than 128 and up to 256 values.
#include "q8_0.cuh"

Q8_0_KERNELS(to_256, 256, true)
