// Rows that are multiplied with the weight of one expert. sort_experts makes a table of such groups; products have a
// block of the grid's first dimension for each place of it.
#pragma once
#include "../cuda/common.cuh"

namespace experts {

// Consecutive rows of one expert, of those that are sorted by expert; without rows, a place that no group takes.
struct Group {
    int expert, first, rows;
};

// The weight of a group. `weights` has the address of that of each expert.
template <typename W> __device__ __forceinline__ const W *weight_of(const uint64_t *weights, const Group &group) {
    return reinterpret_cast<const W *>(weights[group.expert]);
}

} // namespace experts
