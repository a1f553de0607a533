// The kernels of attention over a paged pool, for heads of 64 and of 128 values.
#include "blocks.cuh"

#define WIDTHS(T, NAME)                                                                            \
    ATTEND_KERNELS(T, NAME##_64, 64, false)                                                        \
    ATTEND_KERNELS(T, NAME##_128, 128, false)
FOR_FLOATS(WIDTHS)
#undef WIDTHS
ATTEND_ROTATING_KERNEL(f16, f16_64, 64, false)
ATTEND_ROTATING_KERNEL(f16, f16_128, 128, false)
ATTEND_ROTATING_KERNEL(bf16, bf16_64, 64, false)
ATTEND_ROTATING_KERNEL(bf16, bf16_128, 128, false)
