// Attention over pools in FP8, of heads of up to 128 values.
#include "fp8.cuh"

FP8_KERNELS(128, 128, false)
FP8_KERNELS(to_128, 128, true)
FP8_ROTATING_KERNELS(128, 128, false)
FP8_ROTATING_KERNELS(to_128, 128, true)
