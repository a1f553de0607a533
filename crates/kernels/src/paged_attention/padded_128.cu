// Attention of heads of up to 128 values.
#include "padded.cuh"

PADDED_KERNELS(128)
ATTEND_ROTATING_KERNEL(f16, f16_to_128, 128, true)
ATTEND_ROTATING_KERNEL(bf16, bf16_to_128, 128, true)
