// Our kernels for quantized weights, for the emulated GPU.
#include "quant/cuda/f8e4m3.cu"
#include "quant/cuda/iq2_xs.cu"
#include "quant/cuda/iq2_xxs.cu"
#include "quant/cuda/iq3_s.cu"
#include "quant/cuda/iq3_xxs.cu"
#include "quant/cuda/iq4_nl.cu"
#include "quant/cuda/iq4_xs.cu"
#include "quant/cuda/mixed.cu"
#include "quant/cuda/mxfp4.cu"
#include "quant/cuda/nvfp4.cu"
#include "quant/cuda/q2_k.cu"
#include "quant/cuda/q4_0.cu"
#include "quant/cuda/q4_1.cu"
#include "quant/cuda/q4_k.cu"
#include "quant/cuda/q5_1.cu"
#include "quant/cuda/q5_k.cu"
#include "quant/cuda/q6_k.cu"
#include "quant/cuda/q8_0.cu"

#include "gpu.h"

namespace {

#define ADD(NAME) gpu::add(#NAME, NAME);
#define ADD_PRODUCTS(F, T)                                                                         \
    ADD(product_##F##_1_8_##T)                                                                     \
    ADD(product_##F##_1_16_##T)                                                                    \
    ADD(product_##F##_2_16_##T)                                                                    \
    ADD(product_##F##_low_##T)                                                                     \
    ADD(product_##F##_small_##T)                                                                   \
    ADD(product_##F##_medium_##T)                                                                  \
    ADD(product_##F##_large_##T)                                                                   \
    ADD(gated_##F##_1_8_##T)                                                                       \
    ADD(gated_##F##_1_16_##T)                                                                      \
    ADD(gated_##F##_2_16_##T)                                                                      \
    ADD(gated_##F##_low_##T)                                                                       \
    ADD(experts_##F##_8_##T)                                                                       \
    ADD(experts_##F##_16_##T)                                                                      \
    ADD(experts_##F##_large_##T)
#define ADD_MIXED(F, T)                                                                            \
    ADD(product_##F##_1_8_##T)                                                                     \
    ADD(product_##F##_1_16_##T)                                                                    \
    ADD(product_##F##_2_16_##T)
#define ADD_FORMAT(F)                                                                              \
    ADD_PRODUCTS(F, f16)                                                                           \
    ADD_PRODUCTS(F, bf16)                                                                          \
    ADD(dequantize_##F##_f32)                                                                      \
    ADD(dequantize_##F##_f16)                                                                      \
    ADD(dequantize_##F##_bf16)

[[maybe_unused]] const bool added = [] {
    ADD_FORMAT(f8e4m3)
    ADD_FORMAT(iq2_xs)
    ADD_FORMAT(iq2_xxs)
    ADD_FORMAT(iq3_s)
    ADD_FORMAT(iq3_xxs)
    ADD_FORMAT(iq4_nl)
    ADD_FORMAT(iq4_xs)
    ADD_FORMAT(mxfp4)
    ADD_FORMAT(nvfp4)
    ADD_FORMAT(q2_k)
    ADD_FORMAT(q4_0)
    ADD_FORMAT(q4_1)
    ADD_FORMAT(q4_k)
    ADD_FORMAT(q5_1)
    ADD_FORMAT(q5_k)
    ADD_FORMAT(q6_k)
    ADD_FORMAT(q8_0)
    ADD_MIXED(q4_k_q6_k, f16)
    ADD_MIXED(q4_k_q6_k, bf16)
    ADD_MIXED(q5_k_q6_k, f16)
    ADD_MIXED(q5_k_q6_k, bf16)
    return true;
}();

} // namespace
