// Our kernels whose blocks wait for one another, for the emulated GPU.
#include "forward/forward_bf16.cu"
#include "forward/forward_f16.cu"

#include "gpu.h"

namespace {

int phases_of(const Plan *plan) { return plan->count; }

#define ADD(NAME) gpu::add_together(#NAME, NAME, phases_of);

[[maybe_unused]] const bool added = [] {
    ADD(forward_f16_1)
    ADD(forward_f16_2)
    ADD(forward_bf16_1)
    ADD(forward_bf16_2)
    return true;
}();

} // namespace
