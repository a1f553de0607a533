// Computes distributions from logits, tokens from distributions, and verdicts on drafts. Many blocks share a row
// of logits as far as it needs neither a filter nor a quantile; the rest has one block of 1024 threads per row or
// sequence.
//
// The results are those of `sampling.rs` and `spec/verify.rs` on the CPU. Weights, what the filters keep
// of them, and their races have the same bits. For quantiles, weights are summed in another order, in
// f64, which changes a token only if a random number hits the last bits of a sum.
#include "sample/gumbel_max.cuh"
#include "sample/pieces.cuh"

namespace {

// Most tokens of a row that a launch returns.
constexpr int MAX_BEST = 8;

// A change of one logit; changes of the same row and id are adjacent.
struct RowAdjustment {
    uint32_t row, id;
    float repetition, subtract, bias;
};

// How a row of logits becomes a distribution, and how a token is drawn from it: by a race of its weights
// against the exponential numbers of `key`, or by the quantile at `uniform`. `arrived` counts the blocks of the
// row; it is 0 between kernels.
struct LogitsParams {
    uint32_t row, top_k;
    float temperature, min_p, top_p;
    uint32_t by_race;
    uint64_t key;
    double uniform;
    uint32_t arrived;
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

// Whether the weights of a row are stored, because filters or a quantile read them several times.
__device__ __forceinline__ bool is_stored(const LogitsParams &params) {
    return params.temperature != 0.f && (!params.by_race || params.top_k > 0 || params.top_p < 1.f);
}

// Whether a token can be chosen from a row with this largest logit.
__device__ __forceinline__ bool has_token(float top) { return fabsf(top) < INFINITY; }

// The weight of logit `x` before top-k and top-p. That of a greedy row is at temperature 1.
__device__ __forceinline__ float weight_of(float x, float top, const LogitsParams &params) {
    const bool greedy = params.temperature == 0.f;
    float w = portable_exp(__fdiv_rn(__fsub_rn(x, top), greedy ? 1.f : params.temperature));
    return !greedy && w < params.min_p ? 0.f : w;
}

// What a token of weight `w` has in a race.
__device__ __forceinline__ float score_of(float w, uint64_t key, uint32_t id) {
    return w > 0.f ? __fdiv_rn(w, exponential(key, id)) : 0.f;
}

// The tokens of row blockIdx.x: see `process_logits`.
struct Output {
    uint32_t *ids, *tokens;
    int places;

    __device__ Output(uint32_t *ids, uint32_t *tokens, int siblings)
        : ids(ids), tokens(tokens), places(max(siblings, 1)) {}

    // All threads call it.
    __device__ void put(int place, uint32_t token, float p) const {
        if (threadIdx.x == 0) {
            if (place == 0) {
                ids[blockIdx.x] = token == NO_TOKEN ? 0 : token;
            }
            uint32_t *at = tokens + blockIdx.x;
            at[(size_t)place * gridDim.x] = token;
            at[(size_t)(places + place) * gridDim.x] = __float_as_uint(p);
        }
    }

    __device__ void put_one(uint32_t token, float p) const {
        put(0, token, p);
        for (int place = 1; place < places; place++) {
            put(place, NO_TOKEN, 0.f);
        }
    }
};

// Which weights the filters keep: all above `least`, and of those equal to `least` the ids below `cut`.
struct Kept {
    float least;
    int cut;
};

// The weights that top-k and top-p keep.
template <typename F>
__device__ Kept filter(F weight, int vocab, const LogitsParams &params, Scratch &scratch) {
    float least = 0.f;
    if (params.top_k > 0) {
        Mass goal = params.top_k;
        least = threshold<Count>(weight, vocab, least, goal, scratch);
    }
    if (params.top_p >= 1.f) {
        return {least, vocab};
    }
    Mass own = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float w = weight(i);
        own += w < least ? 0 : Weight::of(w);
    }
    __syncthreads();
    scan_block(own, scratch.scan);
    Mass all = scratch.scan[blockDim.x - 1];
    __syncthreads();
    Mass goal = max((Mass)ceil((double)params.top_p * (double)all), (Mass)1);
    least = threshold<Weight>(weight, vocab, least, goal, scratch);
    double equal = sum([&](int i) { return weight(i) == least ? 1. : 0.; }, 0, vocab, scratch);
    Mass each = max(Weight::of(least), (Mass)1), wanted = (goal + each - 1) / each;
    bool cuts = (double)wanted < equal;
    return {least, cuts ? cut_after(weight, vocab, least, wanted, scratch) : vocab};
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

// Three kernels process rows; the second and the third are launched if there are rows for them. With
// n = max(siblings, 1):
//
// ids: [rows]: the first token of each row, to feed to a model; 0 if no token can be chosen.
//
// tokens: [2n, rows]: the n best tokens of each row, best first, NO_TOKEN where there are fewer; and the f32
// bits of their probabilities, 0 unless `siblings` is above 0. At temperature 0 the best tokens are those of
// the largest logits, and the probabilities those at temperature 1. Of a race they are the winner and those
// that would win without the tokens before them. A row with a quantile has only one token, and 0 in its place
// if `siblings` is 0.
//
// found: [rows] of rows, then [rows, pieces] of their pieces.
//
// The first finds the largest logit of each row. It writes the tokens of rows that have none, and of greedy rows
// if `siblings` is 0.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    largest_logits(const float *logits, LogitsParams *all_params, Found *all_found, uint32_t *ids, uint32_t *tokens,
                   int vocab, int siblings) {
    __shared__ Reduction<PIECE_THREADS / 32> scratch;
    LogitsParams &params = all_params[blockIdx.x];
    Found *found = all_found + gridDim.x + (size_t)blockIdx.x * gridDim.y;
    const Piece piece(vocab);
    const float *values = logits + (size_t)params.row * vocab + piece.start;
    uint32_t id, at;
    float top = largest([&](int i) { return values[i]; }, piece.len, scratch, id);
    if (threadIdx.x == 0) {
        found[blockIdx.y] = {top, piece.start + id, 0.};
    }
    if (!is_last(&params.arrived)) {
        return;
    }
    // Of equal pieces, the first has the lowest id.
    top = largest([&](int i) { return found[i].value; }, gridDim.y, scratch, at);
    id = found[at].id;
    if (threadIdx.x == 0) {
        all_found[blockIdx.x] = {top, id, 0.};
    }
    const Output output(ids, tokens, siblings);
    if (!has_token(top)) {
        output.put_one(NO_TOKEN, 0.f);
    } else if (params.temperature == 0.f && siblings == 0) {
        output.put_one(id, 0.f);
    }
}

// The second is for rows whose weights are not stored. It sums the weights if `siblings` is above 0, and writes the
// tokens if it is not above 1.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    weigh_logits(const float *logits, LogitsParams *all_params, Found *all_found, uint32_t *ids, uint32_t *tokens,
                 int vocab, int siblings) {
    __shared__ Reduction<PIECE_THREADS / 32> scratch;
    __shared__ float weights[PIECE];
    const LogitsParams params = all_params[blockIdx.x];
    const Found best = all_found[blockIdx.x];
    const bool greedy = params.temperature == 0.f;
    if (is_stored(params) || !has_token(best.value) || (greedy && siblings == 0)) {
        return;
    }
    Found *found = all_found + gridDim.x + (size_t)blockIdx.x * gridDim.y;
    const Piece piece(vocab);
    const float *row = logits + (size_t)params.row * vocab;
    // All reads of a thread come before the first weight, which has branches.
    const int EACH = PIECE / PIECE_THREADS;
    float x[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        x[j] = row[piece.start + min((int)threadIdx.x + j * PIECE_THREADS, piece.len - 1)];
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        weights[threadIdx.x + j * PIECE_THREADS] = weight_of(x[j], best.value, params);
    }
    __syncthreads();
    Found own = {0.f, best.id, 0.};
    if (siblings > 0) {
        own.mass = sum([&](int i) { return weights[i]; }, 0, piece.len, scratch);
    }
    if (!greedy && siblings <= 1) {
        auto score = [&](int i) { return score_of(weights[i], params.key, piece.start + i); };
        own.value = largest(score, piece.len, scratch, own.id);
        own.id += piece.start;
    }
    if (threadIdx.x == 0) {
        found[blockIdx.y] = own;
    }
    if (!is_last(&all_params[blockIdx.x].arrived)) {
        return;
    }
    const double mass = sum([&](int i) { return found[i].mass; }, 0, gridDim.y, scratch);
    if (siblings > 1) {
        if (threadIdx.x == 0) {
            all_found[blockIdx.x].mass = mass;
        }
        return;
    }
    uint32_t at;
    largest([&](int i) { return found[i].value; }, gridDim.y, scratch, at);
    const uint32_t token = found[at].id;
    const float w = weight_of(row[token], best.value, params);
    const double scale = siblings > 0 ? 1. / mass : 0.;
    Output(ids, tokens, siblings).put_one(w > 0.f ? token : NO_TOKEN, (float)((double)w * scale));
}

// The third has one block for each row. It writes the tokens of rows whose weights are stored, and of all rows if
// `siblings` is above 1.
//
// probs: [rows, vocab]: the distributions of rows with a quantile and a temperature above 0. The rows of
// races that top-k or top-p filters are overwritten; others are not touched.
extern "C" __global__ void __launch_bounds__(1024)
    process_logits(const float *logits, const LogitsParams *all_params, const Found *found, float *probs,
                   uint32_t *ids, uint32_t *tokens, int vocab, int siblings) {
    __shared__ Scratch scratch;
    const LogitsParams params = all_params[blockIdx.x];
    const float *row = logits + (size_t)params.row * vocab;
    const float top = found[blockIdx.x].value;
    const bool stored = is_stored(params);
    if (!has_token(top) || (!stored && siblings <= 1)) {
        return;
    }
    const Output output(ids, tokens, siblings);
    const bool greedy = params.temperature == 0.f, by_quantile = !greedy && !params.by_race;
    float *out = probs + (size_t)blockIdx.x * vocab;
    auto weigh = [&](int i) { return weight_of(row[i], top, params); };
    if (stored) {
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            out[i] = weigh(i);
        }
        __syncthreads();
    }
    auto weight = [&](int i) { return stored ? out[i] : weigh(i); };
    const Kept keeps = stored ? filter(weight, vocab, params, scratch) : Kept{0.f, vocab};
    auto kept = [&](int i) {
        float w = weight(i);
        return w > keeps.least || (w == keeps.least && i < keeps.cut) ? w : 0.f;
    };
    double mass = found[blockIdx.x].mass;
    if (by_quantile || (stored && siblings > 0)) {
        mass = sum(kept, 0, vocab, scratch);
    }
    const double scale = by_quantile || siblings > 0 ? 1. / mass : 0.;
    if (by_quantile) {
        auto normal = [&](int i) { return out[i] = (float)((double)kept(i) * scale); };
        double total = sum(normal, 0, vocab, scratch);
        auto prob = [&](int i) { return out[i]; };
        uint32_t token = siblings > 0 ? quantile(prob, vocab, params.uniform * total, scratch) : 0;
        output.put_one(token, siblings > 0 ? out[token] : 0.f);
        return;
    }
    auto score = [&](int i) { return score_of(kept(i), params.key, i); };
    auto give = [&](int place, float, uint32_t token) {
        float w = token < (uint32_t)vocab ? kept(token) : 0.f;
        output.put(place, w > 0.f ? token : NO_TOKEN, (float)((double)w * scale));
    };
    auto logit = [&](int i) { return row[i]; };
    if (siblings > 1) {
        greedy ? best_of<MAX_BEST>(logit, vocab, siblings, give, scratch)
               : best_of<MAX_BEST>(score, vocab, siblings, give, scratch);
    } else {
        best_of<1>(score, vocab, 1, give, scratch);
    }
}

// ids: [rows, count], those of the largest logits of each row, best first; NO_TOKEN where there are fewer,
// and in rows that are not finite. `count` is at most MAX_BEST.
//
// found: [rows, pieces, count]. `arrived`: a zero for each row.
extern "C" __global__ void __launch_bounds__(PIECE_THREADS)
    best_logits(const float *logits, Found *all_found, uint32_t *arrived, uint32_t *ids, int vocab, int count) {
    __shared__ Reduction<PIECE_THREADS / 32> scratch;
    const Piece piece(vocab);
    const float *values = logits + (size_t)blockIdx.x * vocab + piece.start;
    Found *found = all_found + (size_t)blockIdx.x * gridDim.y * count;
    auto keep = [&](int place, float x, uint32_t id) {
        if (threadIdx.x == 0) {
            found[blockIdx.y * count + place] = {x, piece.start + id, 0.};
        }
    };
    best_of<MAX_BEST>([&](int i) { return comparable(values[i]); }, piece.len, count, keep, scratch);
    if (!is_last(&arrived[blockIdx.x])) {
        return;
    }
    // Of equal logits, the first has the lowest id: pieces and their places are in this order.
    bool finite = true;
    auto give = [&](int place, float x, uint32_t at) {
        finite = finite && x < INFINITY;
        if (threadIdx.x == 0) {
            ids[(size_t)blockIdx.x * count + place] = finite && x > -INFINITY ? found[at].id : NO_TOKEN;
        }
    };
    best_of<MAX_BEST>([&](int i) { return found[i].value; }, gridDim.y * count, count, give, scratch);
}

// The rule of `spec/verify.rs` for chains (Sun et al. 2024, Algorithm 2), over the output of `process_logits`;
// `points` are its tokens. The verdict on a row without a token is NO_TOKEN.
extern "C" __global__ void __launch_bounds__(1024)
    verify_chains(const float *probs, const uint32_t *points, const LogitsParams *params, const Node *nodes,
                  const Chain *chains, Verdict *verdicts, int vocab) {
    __shared__ Scratch scratch;
    const Chain chain = chains[blockIdx.x];
    const Node *node = nodes + chain.node;
    const bool greedy = params[chain.row].temperature == 0.f, synthetic = chain.synthetic_acceptance >= 0.;
    // What the token of a node multiplies the weight of its path with; 0 ends the path.
    auto ratio = [&](uint32_t at) {
        const size_t row = chain.row + at;
        const Node &drafted = node[at];
        if (points[row] == NO_TOKEN) {
            return 0.;
        }
        double p = greedy ? (double)(points[row] == drafted.token)
                          : (double)probs[row * vocab + drafted.token];
        return p / (drafted.q == nullptr ? 1. : (double)drafted.q[drafted.token]);
    };
    // The weight of the first `len` nodes. It is computed again for each of them: that reads little.
    auto path_weight = [&](uint32_t len) {
        double weight = 1.;
        for (uint32_t i = 0; i < len; i++) {
            weight = fmin(weight * ratio(i), 1.);
        }
        return weight;
    };
    // What the path of `len` nodes leaves of p for the token after it, if it is the longest that stands.
    auto rest_of = [&](uint32_t len, float weight, int i) {
        float p = __fmul_rn(weight, probs[(chain.row + len) * (size_t)vocab + i]);
        const Node &after = node[len];
        if (len == chain.len || (after.q != nullptr && i >= (int)after.q_vocab)) {
            return p;
        }
        if (after.q == nullptr) {
            return i == (int)after.token ? 0.f : p;
        }
        return fmaxf(__fsub_rn(p, after.q[i]), 0.f);
    };
    uint32_t kept = 0;
    double weight = 1.;
    if (synthetic) {
        while (kept < chain.len && points[chain.row + kept] != NO_TOKEN &&
               node[kept].uniform < chain.synthetic_acceptance) {
            kept++;
        }
    } else {
        while (kept < chain.len && ratio(kept) > 0.) {
            kept++;
        }
        for (; kept > 0; kept--) {
            weight = path_weight(kept);
            if (weight >= 1.) {
                break;
            }
            double mass = weight;
            if (kept < chain.len && points[chain.row + kept] != NO_TOKEN) {
                mass = sum([&](int i) { return rest_of(kept, (float)weight, i); }, 0, vocab, scratch);
            }
            if (node[kept - 1].uniform < mass / (mass + 1. - weight)) {
                break;
            }
        }
        weight = path_weight(kept);
    }
    const size_t row = chain.row + kept;
    const float *p = probs + row * vocab;
    uint32_t next = points[row];
    if (!greedy && next != NO_TOKEN) {
        const double uniform = params[row].uniform;
        double total = 0.;
        if (kept < chain.len && !synthetic) {
            auto rest = [&](int i) { return rest_of(kept, (float)weight, i); };
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
