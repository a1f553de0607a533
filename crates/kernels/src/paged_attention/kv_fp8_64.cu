// Attention over pools in FP8, of heads of 64 values.
#include "fp8.cuh"

FP8_KERNELS(64, 64, false)
FP8_ROTATING_KERNELS(64, 64, false)
