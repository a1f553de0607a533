// The formats of quantized weights for which there are kernels.
#pragma once
#include "unpack.cuh"

using Q2_K = Format<2, 0, HalfBlockOffsets>;
using Q4_0 = Format<4, 8, BlockScales>;
using Q4_1 = Format<4, 0, BlockOffsets>;
using Q4_K = Format<4, 0, SuperOffsets>;
using Q5_1 = Format<5, 0, BlockOffsets>;
using Q5_K = Format<5, 0, SuperOffsets>;
using Q6_K = Format<6, 32, HalfBlockScales>;
using Q8_0 = Format<8, 128, BlockScales>;
using IQ4_NL = Format<4, 0, BlockScales, Iq4Values>;
using IQ4_XS = Format<4, 0, SuperScales, Iq4Values>;
// See formats.rs for their magnitudes.
using IQ3_S = Format<4, 0, Eighths<SuperScales>, SignedValues<8, 24, 40, 56, 72, 88, 104, 120>>;
using IQ3_XXS = Format<4, 0, Eighths<SuperScales>, SignedValues<8, 24, 40, 56, 72, 88, 104, 124>>;
using IQ2_XXS = Format<4, 0, Eighths<SuperScales>, SignedValues<8, 25, 43, 1, 7, 9, 0, 0>>;
using IQ2_XS = Format<4, 0, Eighths<HalfBlockScales>, IQ2_XXS::Values>;
using MXFP4 = Format<4, 0, BlockExponents, Floats>;
using NVFP4 = Format<4, 0, GroupScales, Floats>;
using F8E4M3 = Format<8, 0, UnitScales, Floats>;

// DO(format, the number of its blocks in GGUF files, or QuantKind's) for each.
#define FOR_FORMATS(DO)                                                                            \
    DO(Q4_0, 2)                                                                                    \
    DO(Q4_1, 3)                                                                                    \
    DO(Q5_1, 7)                                                                                    \
    DO(Q8_0, 8)                                                                                    \
    DO(Q2_K, 10)                                                                                   \
    DO(Q4_K, 12)                                                                                   \
    DO(Q5_K, 13)                                                                                   \
    DO(Q6_K, 14)                                                                                   \
    DO(IQ2_XXS, 16)                                                                                \
    DO(IQ2_XS, 17)                                                                                 \
    DO(IQ3_XXS, 18)                                                                                \
    DO(IQ4_NL, 20)                                                                                 \
    DO(IQ3_S, 21)                                                                                  \
    DO(IQ4_XS, 23)                                                                                 \
    DO(MXFP4, 39)                                                                                  \
    DO(F8E4M3, 256)                                                                                \
    DO(NVFP4, 257)
