// The kernels of attention over pools in blocks of Q8_0, for heads of D values or of up to D.
#pragma once
#include "blocks.cuh"
#include "prefill.cuh"

#define Q8_0_KERNELS(NAME, D, PADDED)                                                              \
    ATTEND_KERNELS_OF_BLOCKS(float, f32_q8_0_##NAME, D, PADDED)                                    \
    ATTEND_KERNELS_OF_BLOCKS(f16, f16_q8_0_##NAME, D, PADDED)                                      \
    ATTEND_KERNELS_OF_BLOCKS(bf16, bf16_q8_0_##NAME, D, PADDED)                                    \
    PREFILL_KERNEL_OF_BLOCKS(f16, f16_q8_0_##NAME, D, PADDED)                                      \
    PREFILL_KERNEL_OF_BLOCKS(bf16, bf16_q8_0_##NAME, D, PADDED)

// Those that also rotate, for heads of up to 128 values.
#define Q8_0_ROTATING_KERNELS(NAME, D, PADDED)                                                     \
    ATTEND_ROTATING_KERNEL_OF_BLOCKS(f16, f16_q8_0_##NAME, D, PADDED)                              \
    ATTEND_ROTATING_KERNEL_OF_BLOCKS(bf16, bf16_q8_0_##NAME, D, PADDED)
