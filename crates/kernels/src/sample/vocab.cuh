// Loops over a vocabulary, or over a piece of it, by the threads of a block.

#pragma once
#include "cuda/common.cuh"

namespace {

// Stands for a token if none can be chosen.
constexpr uint32_t NO_TOKEN = 0xffffffffu;
using Mass = unsigned long long;

// Shared memory of a block of WARPS warps, for sums and for the largest values.
template <int WARPS> struct Reduction {
    double pieces[WARPS];
    float values[WARPS];
    uint32_t ids[WARPS];
};

// That of 1024 threads, for all loops.
struct Scratch : Reduction<32> {
    union {
        Mass masses[2048];
        uint32_t counts[2048];
    };
    Mass scan[1024], rest;
    uint32_t digit;
};

// Length of the piece of [start, end) that each of WARPS warps has.
template <int WARPS> __device__ __forceinline__ int piece_len(int start, int end) {
    return (end - start + WARPS - 1) / WARPS;
}

// Sum of `value(i)` over [start, end), in an order that depends only on these bounds and the size of the block;
// calls `value` once for each i. Leaves the sums of the warps' pieces in `scratch`.
template <int WARPS, typename F> __device__ double sum(F value, int start, int end, Reduction<WARPS> &scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, len = piece_len<WARPS>(start, end);
    int from = min(start + warp * len, end), to = min(from + len, end);
    double total = 0.;
#pragma unroll 4
    for (int i = from + lane; i < to; i += 32) {
        total += (double)value(i);
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
        total += __shfl_xor_sync(0xffffffffu, total, mask);
    }
    __syncthreads();
    if (lane == 0) {
        scratch.pieces[warp] = total;
    }
    __syncthreads();
    total = 0.;
    for (int i = 0; i < WARPS; i++) {
        total += scratch.pieces[i];
    }
    return total;
}

// The first i in [0, count) for which the values up to and including i sum to more than `target`. Call
// `sum` over all values first. If rounding puts the target beyond the end, returns the last i whose
// value is above 0.
template <int WARPS, typename F>
__device__ int quantile(F value, int count, double target, Reduction<WARPS> &scratch) {
    for (int start = 0, end = count;;) {
        int found = -1, last = -1, len = piece_len<WARPS>(start, end);
        double before = 0., before_last = 0.;
        for (int i = 0; i < WARPS && found < 0; i++) {
            double piece = scratch.pieces[i];
            if (piece > 0.) {
                last = i;
                before_last = before;
            }
            if (before + piece > target) {
                found = i;
            } else {
                before += piece;
            }
        }
        if (found < 0 && last < 0) {
            return 0;
        }
        if (found < 0) {
            found = last;
            before = before_last;
        }
        target -= before;
        start += found * len;
        end = min(start + len, end);
        if (end - start == 1) {
            return start;
        }
        sum(value, start, end, scratch);
    }
}

// Whether `x` of `id` wins over `y` of `other` in the search for the largest value.
__device__ __forceinline__ bool larger(float x, uint32_t id, float y, uint32_t other) {
    return x > y || (x == y && id < other);
}

// Calls `give(k, value, id)` on all threads for the `count` largest of `value(i)` over [0, vocab), from
// k = 0 on; of equal values the lowest id is first. `count` is at most N. If there are fewer values, the
// others are minus infinity.
template <int N, int WARPS, typename F, typename G>
__device__ void best_of(F value, int vocab, int count, G give, Reduction<WARPS> &scratch) {
    // The best of this thread, best first.
    float values[N];
    uint32_t ids[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        values[k] = -INFINITY;
        ids[k] = NO_TOKEN;
    }
    auto insert = [&](float x, uint32_t id) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            float old = values[k];
            uint32_t old_id = ids[k];
            bool before = larger(x, id, old, old_id);
            values[k] = before ? x : old;
            ids[k] = before ? id : old_id;
            x = before ? old : x;
            id = before ? old_id : id;
        }
    };
    // Reads several values before it branches on the first: a block alone on its multiprocessor waits for
    // each read. Beyond the end it reads the last value again, because a condition would be a branch, too.
    const int AHEAD = 8;
    for (int from = threadIdx.x; from < vocab; from += AHEAD * blockDim.x) {
        float ahead[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            ahead[j] = value(min(from + j * (int)blockDim.x, vocab - 1));
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int i = from + j * blockDim.x;
            if (i < vocab && larger(ahead[j], i, values[N - 1], ids[N - 1])) {
                insert(ahead[j], i);
            }
        }
    }
    for (int k = 0; k < count; k++) {
        float best = values[0];
        uint32_t at = ids[0];
        for (int mask = 16; mask > 0; mask >>= 1) {
            float other = __shfl_xor_sync(0xffffffffu, best, mask);
            uint32_t there = __shfl_xor_sync(0xffffffffu, at, mask);
            if (larger(other, there, best, at)) {
                best = other;
                at = there;
            }
        }
        __syncthreads();
        if (threadIdx.x % 32 == 0) {
            scratch.values[threadIdx.x / 32] = best;
            scratch.ids[threadIdx.x / 32] = at;
        }
        __syncthreads();
        for (int i = 0; i < WARPS; i++) {
            if (larger(scratch.values[i], scratch.ids[i], best, at)) {
                best = scratch.values[i];
                at = scratch.ids[i];
            }
        }
        give(k, best, at);
        if (at == ids[0]) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                values[j] = j + 1 < N ? values[j + 1] : -INFINITY;
                ids[j] = j + 1 < N ? ids[j + 1] : NO_TOKEN;
            }
        }
    }
}

// A logit as searches compare it: NaN counts as infinity.
__device__ __forceinline__ float comparable(float x) { return x == x ? x : INFINITY; }

// The largest of `value(i)` over [0, count), and the lowest i that has it. NaN counts as infinity: of logits,
// the result is finite exactly if a token can be chosen.
template <int WARPS, typename F>
__device__ float largest(F value, int count, Reduction<WARPS> &scratch, uint32_t &at) {
    float best = 0.f;
    auto give = [&](int, float x, uint32_t i) {
        best = x;
        at = i;
    };
    best_of<1>([&](int i) { return comparable(value(i)); }, count, 1, give, scratch);
    return best;
}

// Measures of a weight, and sums of them for each digit. They are integers, so their sum does not depend on the order.
// Tokens that a row cannot have are not counted.
struct Count {
    __device__ static uint32_t of(float x) { return x > 0.f; }
    // A GPU adds 32 bits in shared memory faster than 64.
    __device__ static uint32_t *sums(Scratch &scratch) { return scratch.counts; }
};
struct Weight {
    // 2^19 weights of at most 1 do not overflow.
    __device__ static Mass of(float x) { return (Mass)(x * 17592186044416.f); }
    __device__ static Mass *sums(Scratch &scratch) { return scratch.masses; }
};

// scan[i] = the sum of `own` over all threads up to and including i.
__device__ void scan_block(Mass own, Mass *scan) {
    int i = threadIdx.x;
    scan[i] = own;
    __syncthreads();
    for (int step = 1; step < (int)blockDim.x; step *= 2) {
        Mass sum = scan[i] + (i >= step ? scan[i - step] : 0);
        __syncthreads();
        scan[i] = sum;
        __syncthreads();
    }
}

// The largest x for which the weights that are at least x and at least `floor` have a total measure of
// at least `goal` (which is at least 1). Subtracts from `goal` the measure of the weights above x. If
// the total measure of all weights is below `goal`, returns `floor` and leaves `goal` unchanged.
// A radix search from the highest bits down: the bits of non-negative floats have the order of their
// values.
template <typename Measure, typename F>
__device__ float threshold(F weight, int vocab, float floor, Mass &goal, Scratch &scratch) {
    const int SHIFTS[] = {20, 10, 0};
    uint32_t prefix = 0;
    auto *sums = Measure::sums(scratch);
    for (int round = 0; round < 3; round++) {
        int shift = SHIFTS[round], digits = round == 0 ? 2048 : 1024, width = round == 0 ? 11 : 10;
        __syncthreads();
        for (int i = threadIdx.x; i < 2048; i += blockDim.x) {
            sums[i] = 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            float x = weight(i);
            uint32_t bits = __float_as_uint(x);
            const auto own = Measure::of(x);
            // Filters leave zeros in most places, and all of them have the same digit: threads would wait for one another
            // to add nothing.
            if (own > 0 && x >= floor && bits >> (shift + width) == prefix) {
                atomicAdd(&sums[bits >> shift & (digits - 1)], own);
            }
        }
        __syncthreads();
        // Two digits per thread, the highest first.
        int high = digits - 1 - 2 * threadIdx.x;
        Mass upper = high > 0 ? sums[high] : 0;
        Mass both = high > 0 ? upper + sums[high - 1] : 0;
        scan_block(both, scratch.scan);
        Mass through = scratch.scan[threadIdx.x], above = through - both;
        if (scratch.scan[blockDim.x - 1] < goal) {
            return floor;
        }
        if (above < goal && goal <= through) {
            bool lower = above + upper < goal;
            scratch.digit = high - lower;
            scratch.rest = goal - above - (lower ? upper : 0);
        }
        __syncthreads();
        prefix = prefix << width | scratch.digit;
        goal = scratch.rest;
    }
    return __uint_as_float(prefix);
}

// The id after the `wanted`-th weight equal to x; there are more such weights.
template <typename F>
__device__ int cut_after(F weight, int vocab, float x, Mass wanted, Scratch &scratch) {
    int len = (vocab + blockDim.x - 1) / blockDim.x;
    int from = min((int)threadIdx.x * len, vocab), to = min(from + len, vocab);
    Mass own = 0;
    for (int i = from; i < to; i++) {
        own += weight(i) == x;
    }
    scan_block(own, scratch.scan);
    Mass seen = scratch.scan[threadIdx.x] - own;
    for (int i = from; i < to; i++) {
        bool equal = weight(i) == x;
        seen += equal;
        if (equal && seen == wanted) {
            scratch.digit = i + 1;
        }
    }
    __syncthreads();
    return scratch.digit;
}

} // namespace
