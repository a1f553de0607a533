// Computes distributions from logits, tokens from distributions, and verdicts on drafts, with one block
// of 1024 threads per row or sequence.
//
// The results are those of `sampling.rs` and `spec/verify.rs` on the CPU. Weights have the same bits.
// They are summed in another order, in f64, which changes a token only if a random number hits the
// last bits of a sum.
#include "cuda/common.cuh"

namespace {

constexpr int WARPS = 32;
// Stands for a token if none can be chosen.
constexpr uint32_t NO_TOKEN = 0xffffffffu;
using Mass = unsigned long long;

// A change of one logit; changes of the same row and id are adjacent.
struct RowAdjustment {
    uint32_t row, id;
    float repetition, subtract, bias;
};

// How a row of logits becomes a distribution, and the random number with which a token is drawn.
struct LogitsParams {
    uint32_t row, top_k;
    float temperature, min_p, top_p;
    double uniform;
};

// A drafted token and the distribution it was drawn from; null = it was not drawn from a model.
struct Node {
    const float *q;
    double uniform;
    uint32_t token, q_vocab;
};

// The draft of a sequence: `len` nodes from `node`, and the first of its `len + 1` rows. If
// `synthetic_acceptance` is not negative, nodes are accepted with that probability instead.
struct Chain {
    uint32_t node, len, row;
    double synthetic_acceptance;
};

struct Verdict {
    uint32_t accepted, next;
};

// Shared memory of the threads of a block.
struct Scratch {
    double pieces[WARPS];
    float values[WARPS];
    uint32_t ids[WARPS];
    Mass histogram[2048], scan[1024], rest;
    uint32_t digit;
};

// e^x as in `float.rs`, bit for bit.
__device__ __forceinline__ float portable_exp(float x) {
    const float ROUND = 12582912.f;
    float clamped = fminf(fmaxf(x, -88.f), 88.f);
    float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504088896341f), ROUND);
    float n = __fsub_rn(shifted, ROUND);
    float r = __fsub_rn(clamped, __fmul_rn(n, 0.6933594f));
    r = __fsub_rn(r, __fmul_rn(n, -2.1219444e-4f));
    float p = 1.9875691e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333452e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665796e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    float e_r = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.f);
    int bits = __float_as_int(shifted) - __float_as_int(ROUND);
    return x < -87.f ? 0.f : __fmul_rn(e_r, __int_as_float((bits + 127) << 23));
}

// Length of the piece of [start, end) that each warp has.
__device__ __forceinline__ int piece_len(int start, int end) { return (end - start + WARPS - 1) / WARPS; }

// Sum of `value(i)` over [start, end), in an order that depends only on these bounds; calls `value` once
// for each i. Leaves the sums of the warps' pieces in `scratch`.
template <typename F> __device__ double sum(F value, int start, int end, Scratch &scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, len = piece_len(start, end);
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
template <typename F> __device__ int quantile(F value, int count, double target, Scratch &scratch) {
    for (int start = 0, end = count;;) {
        int found = -1, last = -1, len = piece_len(start, end);
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

// The largest value of a row, and the lowest id that has it. NaN counts as infinity: the result is
// finite exactly if a token can be chosen.
__device__ float largest(const float *row, int vocab, Scratch &scratch, uint32_t &id) {
    float best = -INFINITY;
    uint32_t at = 0xffffffffu;
#pragma unroll 4
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float x = row[i] == row[i] ? row[i] : INFINITY;
        if (larger(x, i, best, at)) {
            best = x;
            at = i;
        }
    }
    for (int mask = 16; mask > 0; mask >>= 1) {
        float other = __shfl_xor_sync(0xffffffffu, best, mask);
        uint32_t there = __shfl_xor_sync(0xffffffffu, at, mask);
        if (larger(other, there, best, at)) {
            best = other;
            at = there;
        }
    }
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
    id = at;
    return best;
}

// Measures of an entry of a row. They are integers, so their sum does not depend on the order.
struct Count {
    __device__ static Mass of(float) { return 1; }
};
struct Weight {
    // 2^19 weights of at most 1 do not overflow.
    __device__ static Mass of(float x) { return (Mass)(x * 17592186044416.f); }
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

// The largest x for which the entries that are at least x and at least `floor` have a total measure of
// at least `goal` (which is at least 1). Subtracts from `goal` the measure of the entries above x. If
// the total measure of all entries is below `goal`, returns `floor` and leaves `goal` unchanged.
// A radix search from the highest bits down: the bits of non-negative floats have the order of their
// values.
template <typename Measure>
__device__ float threshold(const float *row, int vocab, float floor, Mass &goal, Scratch &scratch) {
    const int SHIFTS[] = {20, 10, 0};
    uint32_t prefix = 0;
    for (int round = 0; round < 3; round++) {
        int shift = SHIFTS[round], digits = round == 0 ? 2048 : 1024, width = round == 0 ? 11 : 10;
        __syncthreads();
        for (int i = threadIdx.x; i < 2048; i += blockDim.x) {
            scratch.histogram[i] = 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            float x = row[i];
            uint32_t bits = __float_as_uint(x);
            if (x >= floor && bits >> (shift + width) == prefix) {
                atomicAdd(&scratch.histogram[bits >> shift & (digits - 1)], Measure::of(x));
            }
        }
        __syncthreads();
        // Two digits per thread, the highest first.
        int high = digits - 1 - 2 * threadIdx.x;
        Mass upper = high > 0 ? scratch.histogram[high] : 0;
        Mass both = high > 0 ? upper + scratch.histogram[high - 1] : 0;
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

// The id after the `wanted`-th entry equal to x; there are more such entries.
__device__ int cut_after(const float *row, int vocab, float x, Mass wanted, Scratch &scratch) {
    int len = (vocab + blockDim.x - 1) / blockDim.x;
    int from = min((int)threadIdx.x * len, vocab), to = min(from + len, vocab);
    Mass own = 0;
    for (int i = from; i < to; i++) {
        own += row[i] == x;
    }
    scan_block(own, scratch.scan);
    Mass seen = scratch.scan[threadIdx.x] - own;
    for (int i = from; i < to; i++) {
        seen += row[i] == x;
        if (row[i] == x && seen == wanted) {
            scratch.digit = i + 1;
        }
    }
    __syncthreads();
    return scratch.digit;
}

} // namespace

extern "C" __global__ void adjust_logits(float *logits, const RowAdjustment *adjustments, int count,
                                         int vocab) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    auto same = [&](int a, int b) {
        return adjustments[a].row == adjustments[b].row && adjustments[a].id == adjustments[b].id;
    };
    if (i >= count || (i > 0 && same(i - 1, i))) {
        return;
    }
    float &logit = logits[(size_t)adjustments[i].row * vocab + adjustments[i].id];
    for (int at = i; at < count && same(i, at); at++) {
        float x = logit, by = adjustments[at].repetition;
        x = x > 0.f ? __fdiv_rn(x, by) : __fmul_rn(x, by);
        logit = __fadd_rn(__fsub_rn(x, adjustments[at].subtract), adjustments[at].bias);
    }
}

// probs: [rows, vocab], not written for rows of temperature 0. tokens: [2, rows], ids to feed to a model
// (0 if no token can be chosen), then the same with NO_TOKEN instead. At temperature 0 the token is that
// of the largest logit; otherwise the one that the random number selects, or 0 without `draw`.
extern "C" __global__ void __launch_bounds__(1024)
    process_logits(const float *logits, const LogitsParams *all_params, float *probs, uint32_t *tokens,
                   int vocab, int draw) {
    __shared__ Scratch scratch;
    const LogitsParams params = all_params[blockIdx.x];
    const float *row = logits + (size_t)params.row * vocab;
    float *out = probs + (size_t)blockIdx.x * vocab;
    uint32_t best;
    const float top = largest(row, vocab, scratch, best);
    const bool finite = fabsf(top) < INFINITY;
    auto choose = [&](uint32_t token) {
        if (threadIdx.x == 0) {
            tokens[blockIdx.x] = finite ? token : 0;
            tokens[gridDim.x + blockIdx.x] = finite ? token : NO_TOKEN;
        }
    };
    if (params.temperature == 0.f || !finite) {
        choose(best);
        return;
    }
    auto weigh = [&](int i) {
        float w = portable_exp(__fdiv_rn(__fsub_rn(row[i], top), params.temperature));
        return out[i] = w < params.min_p ? 0.f : w;
    };
    double total = sum(weigh, 0, vocab, scratch);
    // Keeps all entries above `least`, and of those equal to `least` the ids below `cut`.
    float least = 0.f;
    int cut = vocab;
    if (params.top_k > 0) {
        Mass goal = params.top_k;
        least = threshold<Count>(out, vocab, least, goal, scratch);
    }
    if (params.top_p < 1.f) {
        auto mass = [&](int i) { return out[i] < least ? 0. : (double)Weight::of(out[i]); };
        double all = sum(mass, 0, vocab, scratch);
        Mass goal = max((Mass)ceil((double)params.top_p * all), (Mass)1);
        least = threshold<Weight>(out, vocab, least, goal, scratch);
        double equal = sum([&](int i) { return out[i] == least ? 1. : 0.; }, 0, vocab, scratch);
        Mass each = max(Weight::of(least), (Mass)1), wanted = (goal + each - 1) / each;
        if ((double)wanted < equal) {
            cut = cut_after(out, vocab, least, wanted, scratch);
        }
    }
    auto kept = [&](int i) { return out[i] > least || (out[i] == least && i < cut) ? out[i] : 0.f; };
    if (least > 0.f) {
        total = sum(kept, 0, vocab, scratch);
    }
    const double scale = 1. / total;
    auto normal = [&](int i) { return out[i] = (float)((double)kept(i) * scale); };
    total = sum(normal, 0, vocab, scratch);
    auto prob = [&](int i) { return out[i]; };
    choose(draw ? quantile(prob, vocab, params.uniform * total, scratch) : 0);
}

// The rule of `spec/verify.rs` for chains (Leviathan et al. 2023, Algorithm 1), over the output of
// `process_logits`; `points` are its tokens. The verdict on a row without a token is NO_TOKEN.
extern "C" __global__ void __launch_bounds__(1024)
    verify_chains(const float *probs, const uint32_t *points, const LogitsParams *params, const Node *nodes,
                  const Chain *chains, Verdict *verdicts, int vocab) {
    __shared__ Scratch scratch;
    const Chain chain = chains[blockIdx.x];
    const Node *node = nodes + chain.node;
    const bool greedy = params[chain.row].temperature == 0.f;
    uint32_t kept = 0;
    for (; kept < chain.len; kept++) {
        const Node &drafted = node[kept];
        const size_t row = chain.row + kept;
        if (points[row] == NO_TOKEN) {
            break;
        }
        double p = greedy ? (double)(points[row] == drafted.token)
                          : (double)probs[row * vocab + drafted.token];
        double q = drafted.q == nullptr ? 1. : (double)drafted.q[drafted.token];
        bool accepts = chain.synthetic_acceptance < 0. ? drafted.uniform * q < p
                                                       : drafted.uniform < chain.synthetic_acceptance;
        if (!accepts) {
            break;
        }
    }
    const size_t row = chain.row + kept;
    const float *p = probs + row * vocab;
    uint32_t next = points[row];
    if (!greedy && next != NO_TOKEN) {
        const double uniform = params[row].uniform;
        double total = 0.;
        if (kept < chain.len && chain.synthetic_acceptance < 0.) {
            const Node &rejected = node[kept];
            auto rest = [&](int i) {
                if (rejected.q == nullptr) {
                    return i == (int)rejected.token ? 0.f : p[i];
                }
                return i < (int)rejected.q_vocab ? fmaxf(__fsub_rn(p[i], rejected.q[i]), 0.f) : p[i];
            };
            total = sum(rest, 0, vocab, scratch);
            if (total > 0.) {
                const double scale = 1. / total;
                auto normal = [&](int i) { return (float)((double)rest(i) * scale); };
                total = sum(normal, 0, vocab, scratch);
                next = quantile(normal, vocab, uniform * total, scratch);
            }
        }
        // If nothing was rejected, or rounding leaves nothing of p - q, sample from p itself.
        if (!(total > 0.)) {
            auto prob = [&](int i) { return p[i]; };
            total = sum(prob, 0, vocab, scratch);
            next = quantile(prob, vocab, uniform * total, scratch);
        }
    }
    if (threadIdx.x == 0) {
        verdicts[blockIdx.x] = {kept, next};
    }
}
