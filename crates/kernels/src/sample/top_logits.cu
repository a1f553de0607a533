// The largest logits of each row, and what all others weigh, with one block of 1024 threads per row: what
// training stores of a target's distributions.
#include "sample/vocab.cuh"

namespace {

// Orders logits as `total_cmp` on the CPU: a key is larger if its logit is, and of equal logits if its id is
// lower. All keys of a row are different.
__device__ __forceinline__ Mass key_of(float logit, int id) {
    uint32_t bits = __float_as_uint(logit);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
    return (Mass)bits << 32 | ~(uint32_t)id;
}

// A bound that exactly `k` of the keys reach, from 1 to `vocab`. A radix search from the highest bits down,
// which seldom needs more than those of the logit. `counts` has a place for each digit.
template <typename F> __device__ Mass bound_of(F key, int vocab, uint32_t k, uint32_t *counts) {
    Mass prefix = 0;
    for (int shift = 56;; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) {
            counts[threadIdx.x] = 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            const Mass x = key(i);
            if (shift == 56 || x >> (shift + 8) == prefix) {
                atomicAdd(&counts[x >> shift & 255], 1u);
            }
        }
        __syncthreads();
        int digit = 255;
        for (; counts[digit] < k; digit--) {
            k -= counts[digit];
        }
        prefix = prefix << 8 | digit;
        if (counts[digit] == k) {
            return prefix << shift;
        }
    }
}

} // namespace

// top: [rows, 2k + 2]: the ids of the k largest logits of a row in any order, the bits of their logits in the
// same order, and an f64: the sum of e^(logit - largest) over the others.
extern "C" __global__ void __launch_bounds__(1024)
    top_logits(const float *logits, uint32_t *top, int vocab, int k) {
    __shared__ Scratch scratch;
    __shared__ uint32_t counts[256], place;
    const float *row = logits + (size_t)blockIdx.x * vocab;
    uint32_t *to = top + (size_t)blockIdx.x * (2 * k + 2);
    if (threadIdx.x == 0) {
        place = 0;
    }
    auto key = [&](int i) { return key_of(row[i], i); };
    const Mass bound = bound_of(key, vocab, k, counts);
    uint32_t best;
    largest([&](int i) { return row[i]; }, vocab, scratch, best);
    const double highest = row[best];
    auto rest = [&](int i) {
        if (key(i) < bound) {
            return exp((double)row[i] - highest);
        }
        const uint32_t at = atomicAdd(&place, 1u);
        to[at] = i;
        to[k + at] = __float_as_uint(row[i]);
        return 0.;
    };
    const double total = sum(rest, 0, vocab, scratch);
    if (threadIdx.x == 0) {
        memcpy(to + 2 * k, &total, sizeof total);
    }
}
