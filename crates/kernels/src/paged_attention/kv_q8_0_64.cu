// Attention over pools in blocks, of heads of 64 values.
#include "q8_0.cuh"

Q8_0_KERNELS(64, 64, false)
Q8_0_ROTATING_KERNELS(64, 64, false)
