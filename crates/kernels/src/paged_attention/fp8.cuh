// The kernels of attention over pools in FP8, for heads of D values or of up to D.
#pragma once
#include "blocks.cuh"
#include "prefill.cuh"

#define FP8_KERNELS(NAME, D, PADDED)                                                               \
    ATTEND_KERNELS_OF_FLOAT8S(float, f32_fp8_##NAME, D, PADDED)                                    \
    ATTEND_KERNELS_OF_FLOAT8S(f16, f16_fp8_##NAME, D, PADDED)                                      \
    ATTEND_KERNELS_OF_FLOAT8S(bf16, bf16_fp8_##NAME, D, PADDED)                                    \
    PREFILL_KERNEL_OF_FLOAT8S(f16, f16_fp8_##NAME, D, PADDED)                                      \
    PREFILL_KERNEL_OF_FLOAT8S(bf16, bf16_fp8_##NAME, D, PADDED)

// Those that also rotate, for heads of up to 128 values.
#define FP8_ROTATING_KERNELS(NAME, D, PADDED)                                                      \
    ATTEND_ROTATING_KERNEL_OF_FLOAT8S(f16, f16_fp8_##NAME, D, PADDED)                              \
    ATTEND_ROTATING_KERNEL_OF_FLOAT8S(bf16, bf16_fp8_##NAME, D, PADDED)
