// Attention over pools in FP8, of heads of more than 256 and up to 512 values.
#include "fp8.cuh"

FP8_KERNELS(to_512, 512, true)
