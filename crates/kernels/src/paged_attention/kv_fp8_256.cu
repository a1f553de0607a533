// Attention over pools in FP8, of heads of more than 128 and up to 256 values.
#include "fp8.cuh"

FP8_KERNELS(to_256, 256, true)
