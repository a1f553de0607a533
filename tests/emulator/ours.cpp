// Our kernels, for the emulated GPU.
#include "dense/gemv.cu"
#include "kv_write.cu"
#include "norm.cu"
#include "paged_attention/paged_attention.cu"
#include "rope.cu"
#include "swiglu.cu"

#include "gpu.h"

namespace {

#define ADD(NAME) gpu::add(#NAME, NAME);
#define ADD_WIDTH(NAME, D)                                                                         \
    ADD(attend_whole_##NAME##_##D)                                                                 \
    ADD(attend_split_##NAME##_##D)                                                                 \
    ADD(merge_##NAME##_##D)
#define ADD_FLOAT(T, NAME)                                                                         \
    ADD(add_norm_##NAME)                                                                           \
    ADD(rope_##NAME)                                                                               \
    ADD(swiglu_##NAME)                                                                             \
    ADD(kv_write_##NAME##_##NAME)                                                                  \
    ADD_WIDTH(NAME, 64)                                                                            \
    ADD_WIDTH(NAME, 128)

[[maybe_unused]] const bool added = [] {
    FOR_FLOATS(ADD_FLOAT)
    ADD(gemv1_f16)
    ADD(gemv2_f16)
    ADD(gemv1_bf16)
    ADD(gemv2_bf16)
    ADD(kv_write_f16_f32)
    ADD(kv_write_bf16_f32)
    return true;
}();

} // namespace
