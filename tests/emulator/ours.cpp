// Our kernels, for the emulated GPU.
#include "dense/gemv.cu"
#include "dense/tiles.cu"
#include "experts/experts.cu"
#include "glu.cu"
#include "kv_move.cu"
#include "latent/head_products.cu"
#include "latent/latent_rows.cu"
#include "lora/lora.cu"
#include "norm.cu"
#include "paged_attention/kv_fp8_128.cu"
#include "paged_attention/kv_fp8_256.cu"
#include "paged_attention/kv_fp8_512.cu"
#include "paged_attention/kv_fp8_64.cu"
#include "paged_attention/kv_q8_0_128.cu"
#include "paged_attention/kv_q8_0_256.cu"
#include "paged_attention/kv_q8_0_512.cu"
#include "paged_attention/kv_q8_0_64.cu"
#include "paged_attention/latent.cu"
#include "paged_attention/padded_128.cu"
#include "paged_attention/padded_256.cu"
#include "paged_attention/padded_512.cu"
#include "paged_attention/paged_attention.cu"
#include "paged_attention/prefill.cu"
#include "pick.cu"
#include "recurrent/recurrent.cu"
#include "rope_kv_write.cu"
#include "sample/sample.cu"
#include "sample/top_logits.cu"
#include "short_conv.cu"
#include "spread.cu"
#include "widen.cu"
#include "writes.cu"

#include "gpu.h"

namespace {

#define ADD(NAME) gpu::add(#NAME, NAME);
#define ADD_WIDTH(NAME)                                                                            \
    ADD(attend_whole_##NAME)                                                                       \
    ADD(attend_split_##NAME)
#define ADD_WIDTHS(NAME)                                                                           \
    ADD_WIDTH(NAME##_64)                                                                           \
    ADD_WIDTH(NAME##_128)                                                                          \
    ADD_WIDTH(NAME##_to_128)                                                                       \
    ADD_WIDTH(NAME##_to_256)                                                                       \
    ADD_WIDTH(NAME##_to_512)
#define ADD_ROTATING(NAME)                                                                         \
    ADD(attend_rotating_##NAME##_64)                                                               \
    ADD(attend_rotating_##NAME##_128)                                                              \
    ADD(attend_rotating_##NAME##_to_128)
#define ADD_LONG(NAME)                                                                             \
    ADD(prefill_##NAME##_64)                                                                       \
    ADD(prefill_##NAME##_128)                                                                      \
    ADD(prefill_##NAME##_to_128)                                                                   \
    ADD(prefill_##NAME##_to_256)                                                                   \
    ADD(prefill_##NAME##_to_512)
#define ADD_FLOAT(T, NAME)                                                                         \
    ADD(widen_##NAME)                                                                              \
    ADD(pick_rows_##NAME)                                                                          \
    ADD(spread_##NAME)                                                                             \
    ADD(add_norm_##NAME)                                                                           \
    ADD(add_layer_norm_##NAME)                                                                     \
    ADD(rope_kv_write_##NAME)                                                                      \
    ADD(rope_kv_write_q8_0_##NAME)                                                                 \
    ADD(rope_kv_write_fp8_##NAME)                                                                  \
    ADD(glu_silu_##NAME)                                                                           \
    ADD(glu_gelu_##NAME)                                                                           \
    ADD(glu_gelu_tanh_##NAME)                                                                      \
    ADD(glu_relu2_##NAME)                                                                          \
    ADD(glu_sigmoid_##NAME)                                                                        \
    ADD(recurrent_mix_##NAME)                                                                      \
    ADD(recurrent_finish_##NAME)                                                                   \
    ADD(recurrent_keep_##NAME)                                                                     \
    ADD(short_conv_##NAME)                                                                         \
    ADD(short_conv_write_##NAME)                                                                   \
    ADD_WIDTHS(NAME)                                                                               \
    ADD_WIDTHS(NAME##_q8_0)                                                                        \
    ADD_WIDTHS(NAME##_fp8)                                                                         \
    ADD_WIDTH(NAME##_latent)                                                                       \
    ADD(norm_part_##NAME)                                                                          \
    ADD(latent_write_##NAME)                                                                       \
    ADD(head_products_any_##NAME)                                                                  \
    ADD(lora_shrink_##NAME)                                                                        \
    ADD(lora_expand_##NAME)                                                                        \
    ADD(score_experts_##NAME)                                                                      \
    ADD(experts_any_##NAME)                                                                        \
    ADD(gather_experts_##NAME)                                                                     \
    ADD(activate_experts_##NAME)                                                                   \
    ADD(combine_experts_##NAME)

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
    ADD_ROTATING(f16)
    ADD_ROTATING(f16_fp8)
    ADD_ROTATING(f16_q8_0)
    ADD_ROTATING(bf16)
    ADD_ROTATING(bf16_fp8)
    ADD_ROTATING(bf16_q8_0)
    ADD(gated_gemv1_8_f16)
    ADD(gated_gemv2_8_f16)
    ADD(gated_gemv1_16_f16)
    ADD(gated_gemv2_16_f16)
    ADD(gated_gemv1_8_bf16)
    ADD(gated_gemv2_8_bf16)
    ADD(gated_gemv1_16_bf16)
    ADD(gated_gemv2_16_bf16)
    ADD(tiles_small_f16)
    ADD(tiles_wide_f16)
    ADD(tiles_large_f16)
    ADD(tiles_small_bf16)
    ADD(tiles_wide_bf16)
    ADD(tiles_large_bf16)
    ADD(kv_move)
    ADD_LONG(f16)
    ADD_LONG(bf16)
    ADD_LONG(f16_fp8)
    ADD_LONG(bf16_fp8)
    ADD_LONG(f16_q8_0)
    ADD_LONG(bf16_q8_0)
    ADD(experts_gemv_8_f16)
    ADD(experts_gemv_16_f16)
    ADD(experts_gemv_8_bf16)
    ADD(experts_gemv_16_bf16)
    ADD(experts_tiles_small_f16)
    ADD(experts_tiles_wide_f16)
    ADD(experts_tiles_small_bf16)
    ADD(experts_tiles_wide_bf16)
    ADD(head_products_1_f16)
    ADD(head_products_2_f16)
    ADD(head_products_many_f16)
    ADD(head_products_1_bf16)
    ADD(head_products_2_bf16)
    ADD(head_products_many_bf16)
    ADD(recurrent_delta_4)
    ADD(recurrent_delta_8)
    ADD(recurrent_mamba_4)
    ADD(recurrent_mamba_8)
    ADD(choose_experts)
    ADD(sort_experts)
    ADD(adjust_logits)
    ADD(best_logits)
    ADD(largest_logits)
    ADD(process_logits)
    ADD(top_logits)
    ADD(verify_chains)
    ADD(weigh_logits)
    ADD(write_words)
    return true;
}();

} // namespace
