// Attention over pools in blocks, of heads of up to 128 values.
#include "q8_0.cuh"

Q8_0_KERNELS(128, 128, false)
Q8_0_KERNELS(to_128, 128, true)
Q8_0_ROTATING_KERNELS(128, 128, false)
Q8_0_ROTATING_KERNELS(to_128, 128, true)
