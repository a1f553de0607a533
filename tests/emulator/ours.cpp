// Our kernels, for the emulated GPU.
#include "dense/gemv.cu"
#include "dense/tiles.cu"
#include "glu.cu"
#include "kv_move.cu"
#include "norm.cu"
#include "paged_attention/paged_attention.cu"
#include "paged_attention/prefill.cu"
#include "rope_kv_write.cu"
#include "sample/sample.cu"
#include "sample/top_logits.cu"
#include "widen.cu"

#include "gpu.h"

namespace {

#define ADD(NAME) gpu::add(#NAME, NAME);
#define ADD_WIDTH(NAME, D)                                                                         \
    ADD(attend_whole_##NAME##_##D)                                                                 \
    ADD(attend_split_##NAME##_##D)
#define ADD_FLOAT(T, NAME)                                                                         \
    ADD(kv_move_##NAME)                                                                            \
    ADD(widen_##NAME)                                                                              \
    ADD(add_norm_##NAME)                                                                           \
    ADD(rope_kv_write_##NAME)                                                                      \
    ADD(glu_silu_##NAME)                                                                           \
    ADD(glu_gelu_##NAME)                                                                           \
    ADD(glu_gelu_tanh_##NAME)                                                                      \
    ADD_WIDTH(NAME, 64)                                                                            \
    ADD_WIDTH(NAME, 128)

[[maybe_unused]] const bool added = [] {
    FOR_FLOATS(ADD_FLOAT)
    ADD(gemv1_8_f16)
    ADD(gemv2_8_f16)
    ADD(gemv1_16_f16)
    ADD(gemv2_16_f16)
    ADD(gemv1_8_bf16)
    ADD(gemv2_8_bf16)
    ADD(gemv1_16_bf16)
    ADD(gemv2_16_bf16)
    ADD(tiles_small_f16)
    ADD(tiles_wide_f16)
    ADD(tiles_large_f16)
    ADD(tiles_small_bf16)
    ADD(tiles_wide_bf16)
    ADD(tiles_large_bf16)
    ADD(prefill_f16_64)
    ADD(prefill_f16_128)
    ADD(prefill_bf16_64)
    ADD(prefill_bf16_128)
    ADD(adjust_logits)
    ADD(best_logits)
    ADD(largest_logits)
    ADD(process_logits)
    ADD(top_logits)
    ADD(verify_chains)
    ADD(weigh_logits)
    return true;
}();

} // namespace
