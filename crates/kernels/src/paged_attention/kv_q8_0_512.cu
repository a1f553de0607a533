// Attention over pools in blocks, of heads of more than 256 and up to 512 values.
#include "q8_0.cuh"

Q8_0_KERNELS(to_512, 512, true)
