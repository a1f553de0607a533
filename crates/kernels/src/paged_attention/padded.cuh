// The kernels of attention for heads of any multiple of 8 values.
#pragma once
#include "blocks.cuh"
#include "prefill.cuh"

#define PADDED_KERNELS(D)                                                                          \
    ATTEND_KERNELS(float, f32_to_##D, D, true)                                                     \
    ATTEND_KERNELS(f16, f16_to_##D, D, true)                                                       \
    ATTEND_KERNELS(bf16, bf16_to_##D, D, true)                                                     \
    PREFILL_KERNEL(f16, f16_to_##D, D, true)                                                       \
    PREFILL_KERNEL(bf16, bf16_to_##D, D, true)
