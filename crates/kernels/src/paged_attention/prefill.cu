// The kernels of attention of prompts, for heads of 64 and of 128 values.
#include "prefill.cuh"

PREFILL_KERNEL(f16, f16_64, 64, false)
PREFILL_KERNEL(f16, f16_128, 128, false)
PREFILL_KERNEL(bf16, bf16_64, 64, false)
PREFILL_KERNEL(bf16, bf16_128, 128, false)
