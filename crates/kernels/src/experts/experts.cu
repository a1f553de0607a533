// What layers with experts compute besides products on tensor cores: scores of experts, the experts of each row, rows
// sorted by expert, activations, and weighted sums.
//
// A use is an expert of a row: use i is choice i % per_token of row i / per_token. Uses are sorted by expert, so that
// those of an expert share a pass over its weights. What a row gets depends on the row alone, whatever others chose
// and whatever place its uses get.
#include "../glu.cuh"
#include "groups.cuh"

namespace experts {

constexpr uint32_t ALL = 0xffffffffu;

// Rows that share a pass over a weight.
constexpr int SCORED_ROWS = 4, PRODUCT_ROWS = 8;

// The sums over `inputs` of a weight's row and each of ROWS rows of x; all threads of a warp get them. In the place of
// missing rows is the last one again.
template <int ROWS, typename W, typename T>
__device__ __forceinline__ void multiply(float (&sums)[ROWS], const W *w, const T *x, int rows, int inputs) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r] = 0.f;
    }
    for (int i = lane; i < inputs; i += 32) {
        const float by = widen(w[i]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            sums[r] = fmaf(by, widen(x[(size_t)min(r, rows - 1) * inputs + i]), sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r] = warp_sum(sums[r]);
    }
}

// Products in f32 with a weight in f32. w: [outputs, inputs], bias: [outputs] or null, x: [rows, inputs], y: [rows,
// outputs]. A warp computes an output of SCORED_ROWS rows.
template <typename T>
__device__ void scores(const float *w, const float *bias, const T *x, float *y, int outputs, int inputs, int rows) {
    wait_for_previous();
    const int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, first = blockIdx.y * SCORED_ROWS;
    if (output >= outputs) {
        return;
    }
    float sums[SCORED_ROWS];
    multiply(sums, w + (size_t)output * inputs, x + (size_t)first * inputs, rows - first, inputs);
    const float plus = bias ? bias[output] : 0.f;
    for (int r = 0; r < min(SCORED_ROWS, rows - first); r++) {
        if (threadIdx.x % 32 == 0) {
            y[(size_t)(first + r) * outputs + output] = __fadd_rn(sums[r], plus);
        }
    }
}

// Groups times the weights of their experts, for dtypes and numbers of inputs that tensor cores do not take. A warp
// computes an output. x: [rows, inputs], y: [rows, outputs].
template <typename T>
__device__ void product(const uint64_t *weights, const Group *groups, const T *x, T *y, int outputs, int inputs) {
    wait_for_previous();
    const Group group = groups[blockIdx.x];
    const int output = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (output >= outputs || group.rows == 0) {
        return;
    }
    const T *w = weight_of<T>(weights, group) + (size_t)output * inputs;
    for (int first = 0; first < group.rows; first += PRODUCT_ROWS) {
        const int row = group.first + first, rows = min(PRODUCT_ROWS, group.rows - first);
        float sums[PRODUCT_ROWS];
        multiply(sums, w, x + (size_t)row * inputs, rows, inputs);
#pragma unroll
        for (int r = 0; r < PRODUCT_ROWS; r++) {
            if (threadIdx.x % 32 == 0 && r < rows) {
                y[(size_t)(row + r) * outputs + output] = narrow<T>(sums[r]);
            }
        }
    }
}

// An integer for a float, in the same order. NaNs have places, too: whatever the scores are, each expert has one.
__device__ __forceinline__ int key(float x) {
    const int bits = (int)__float_as_uint(x);
    return bits ^ (bits < 0 ? 0x7fffffff : 0);
}

// Whether `a` at place i comes before `b` at place j: of equal ones the first.
__device__ __forceinline__ bool is_before(int a, int i, int b, int j) { return a > b || (a == b && i < j); }

// How a row's experts are chosen; as in experts/mod.rs.
struct Choice {
    int count, per_token, is_softmax, groups, groups_per_token, best, is_normalized;
    float min_sum, scale;
};

// The largest value of a block's threads; every thread gets it. `scratch` has 32 floats.
__device__ __forceinline__ float block_max(float x, float *scratch) {
    for (int mask = 16; mask > 0; mask >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(ALL, x, mask));
    }
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = scratch[0];
    for (int i = 1; i < (int)blockDim.x / 32; i++) {
        x = fmaxf(x, scratch[i]);
    }
    __syncthreads();
    return x;
}

// The sum of the best scores of a group of `size` experts, in their order. `ranks` are the scores that `keys` were made
// of.
__device__ __forceinline__ float sum_of_best(const float *ranks, const int *keys, int size, int best) {
    float sum = 0.f;
    for (int n = 0, last = -1; n < best; n++) {
        int found = -1;
        for (int i = 0; i < size; i++) {
            const bool is_left = last < 0 || is_before(keys[last], last, keys[i], i);
            if (is_left && (found < 0 || is_before(keys[i], i, keys[found], found))) {
                found = i;
            }
        }
        sum = __fadd_rn(sum, ranks[found]);
        last = found;
    }
    return sum;
}

// The experts of row blockIdx.x and their weights, [rows, per_token], in the order of their scores. logits: [rows, count];
// correction and factors, those of the weights of each expert: [count] or null.
__device__ void choose(const float *logits, const float *correction, const float *factors, int *ids, float *weights,
                       const Choice &by) {
    DYNAMIC_SHARED(memory);
    float *score = reinterpret_cast<float *>(memory), *rank = score + by.count;
    int *keys = reinterpret_cast<int *>(rank + by.count);
    float *scratch = reinterpret_cast<float *>(keys + by.count);
    wait_for_previous();
    logits += (size_t)blockIdx.x * by.count;
    const int first = threadIdx.x, step = blockDim.x;
    if (by.is_softmax) {
        float max = -INFINITY, sum = 0.f;
        for (int i = first; i < by.count; i += step) {
            max = fmaxf(max, logits[i]);
        }
        max = block_max(max, scratch);
        for (int i = first; i < by.count; i += step) {
            score[i] = expf(__fsub_rn(logits[i], max));
            sum = __fadd_rn(sum, score[i]);
        }
        sum = block_sum(sum, scratch);
        for (int i = first; i < by.count; i += step) {
            score[i] = __fdiv_rn(score[i], sum);
        }
    } else {
        for (int i = first; i < by.count; i += step) {
            score[i] = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-logits[i])));
        }
    }
    for (int i = first; i < by.count; i += step) {
        rank[i] = correction ? __fadd_rn(score[i], correction[i]) : score[i];
        keys[i] = key(rank[i]);
    }
    __syncthreads();
    if (by.groups > 0) {
        const int size = by.count / by.groups;
        // The sums take the place of the scores that they are made of, after all threads have read those: a thread has
        // whole groups.
        for (int g = first; g < by.groups; g += step) {
            rank[g * size] = sum_of_best(rank + g * size, keys + g * size, size, by.best);
        }
        __syncthreads();
        for (int g = first; g < by.groups; g += step) {
            const int own = key(rank[g * size]);
            int before = 0;
            for (int h = 0; h < by.groups; h++) {
                before += is_before(key(rank[h * size]), h, own, g);
            }
            for (int i = 0; before >= by.groups_per_token && i < size; i++) {
                keys[g * size + i] = key(-INFINITY);
            }
        }
        __syncthreads();
    }
    // Nobody reads the ranks any more.
    int *chosen = reinterpret_cast<int *>(rank);
    for (int i = first; i < by.count; i += step) {
        int before = 0;
        for (int j = 0; j < by.count; j++) {
            before += is_before(keys[j], j, keys[i], i);
        }
        if (before < by.per_token) {
            chosen[before] = i;
        }
    }
    __syncthreads();
    float sum = 0.f;
    for (int n = 0; by.is_normalized && n < by.per_token; n++) {
        sum = __fadd_rn(sum, score[chosen[n]]);
    }
    sum = fmaxf(sum, by.min_sum);
    for (int n = first; n < by.per_token; n += step) {
        const size_t use = (size_t)blockIdx.x * by.per_token + n;
        const float weight = score[chosen[n]];
        const float scaled = __fmul_rn(by.is_normalized ? __fdiv_rn(weight, sum) : weight, by.scale);
        ids[use] = chosen[n];
        weights[use] = factors ? __fmul_rn(scaled, factors[chosen[n]]) : scaled;
    }
}

// Sorts `uses` uses, whose experts are `ids`: uses[place] is the use at a place, places[use] the place of a use. Makes
// groups of up to `size` uses; there is room for `room`. One block.
__device__ void sort(const int *ids, int *uses, int *places, Group *groups, int count, int num_experts, int size,
                     int room) {
    DYNAMIC_SHARED(memory);
    // Uses of each expert, then the next place for one; and the number of groups.
    int *next = reinterpret_cast<int *>(memory), *used = next + num_experts;
    const int first = threadIdx.x, step = blockDim.x;
    for (int i = first; i < num_experts; i += step) {
        next[i] = 0;
    }
    wait_for_previous();
    __syncthreads();
    for (int i = first; i < count; i += step) {
        atomicAdd(&next[ids[i]], 1);
    }
    __syncthreads();
    // A thread of the first warp has consecutive experts.
    if (threadIdx.x < 32) {
        const int each = (num_experts + 31) / 32;
        const int from = min((int)threadIdx.x * each, num_experts), to = min(from + each, num_experts);
        int place = 0, group = 0;
        for (int i = from; i < to; i++) {
            place += next[i];
            group += (next[i] + size - 1) / size;
        }
        // Sums up to this thread, then before it.
        const int own_places = place, own_groups = group;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int more_places = __shfl_up_sync(ALL, place, distance);
            const int more_groups = __shfl_up_sync(ALL, group, distance);
            if ((int)threadIdx.x >= distance) {
                place += more_places;
                group += more_groups;
            }
        }
        if (threadIdx.x == 31) {
            *used = group;
        }
        place -= own_places;
        group -= own_groups;
        for (int i = from; i < to; i++) {
            const int rows = next[i];
            next[i] = place;
            for (int row = 0; row < rows; row += size, group++) {
                groups[group] = {i, place + row, min(size, rows - row)};
            }
            place += rows;
        }
    }
    __syncthreads();
    for (int i = *used + first; i < room; i += step) {
        groups[i] = {0, 0, 0};
    }
    for (int i = first; i < count; i += step) {
        const int place = atomicAdd(&next[ids[i]], 1);
        uses[place] = i;
        places[i] = place;
    }
}

// The rows of the sorted uses: y[place] = x[uses[place] / per_token]. A block copies a row of `width` values.
template <typename T> __device__ void gather(const T *x, const int *uses, T *y, int width, int per_token) {
    wait_for_previous();
    x += (size_t)(uses[blockIdx.x] / per_token) * width;
    y += (size_t)blockIdx.x * width;
    constexpr int LEN = Pack<T>::LEN;
    if (width % LEN == 0) {
        for (int i = threadIdx.x; i < width / LEN; i += blockDim.x) {
            reinterpret_cast<uint4 *>(y)[i] = reinterpret_cast<const uint4 *>(x)[i];
        }
        return;
    }
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        y[i] = x[i];
    }
}

// Activations; the numbers are those of experts/cuda.rs.
enum Activation { SILU, GELU, GELU_TANH, RELU2, CLAMPED_SWISH };

// activation(gate) * up, or only the former without `up`.
__device__ __forceinline__ float activated(int activation, float gate, float up) {
    switch (activation) {
    case SILU:
        return silu(gate) * up;
    case GELU:
        return gelu(gate) * up;
    case GELU_TANH:
        return gelu_tanh(gate) * up;
    case RELU2:
        return relu2(gate) * up;
    default:
        // NaN stays NaN, which fminf and fmaxf would make a number.
        gate = gate > 7.f ? 7.f : gate;
        up = up < -7.f ? -7.f : up > 7.f ? 7.f : up;
        return gate / (1.f + __expf(-1.702f * gate)) * (up + 1.f);
    }
}

// The activations of the sorted uses, [uses, width]. The rows of gate and up are `stride` values apart. Without `up`, a
// longer row has the values of up after those of gate; otherwise there is no up. bias: those of gate, then those of up,
// [experts, ...], or null.
template <typename T>
__device__ void activate(const T *gate, const T *up, const T *bias, const int *uses, const int *ids, T *y, int width,
                         int stride, int activation) {
    wait_for_previous();
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) {
        return;
    }
    up = !up && stride > width ? gate + width : up;
    const size_t at = (size_t)blockIdx.x * stride + i;
    float of_gate = widen(gate[at]), of_up = up ? widen(up[at]) : 1.f;
    if (bias) {
        const T *own = bias + (size_t)ids[uses[blockIdx.x]] * (up ? 2 : 1) * width + i;
        of_gate = __fadd_rn(of_gate, widen(own[0]));
        of_up = up ? __fadd_rn(of_up, widen(own[width])) : of_up;
    }
    y[(size_t)blockIdx.x * width + i] = narrow<T>(activated(activation, of_gate, of_up));
}

// For each row the sum of the outputs of its experts, at `places`, with its weights, in the order of its choices; then what
// the expert of all rows adds, times the sigmoid of its factor, if there are such. bias: [experts, width] or null.
template <typename T>
__device__ void combine(const T *x, const int *places, const int *ids, const float *weights, const T *bias,
                        const T *shared, const float *factors, T *y, int width, int per_token) {
    wait_for_previous();
    const int row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= width) {
        return;
    }
    float sum = 0.f;
    for (int n = 0; n < per_token; n++) {
        const size_t use = (size_t)row * per_token + n;
        float value = widen(x[(size_t)places[use] * width + i]);
        if (bias) {
            value = __fadd_rn(value, widen(bias[(size_t)ids[use] * width + i]));
        }
        sum = fmaf(weights[use], value, sum);
    }
    if (shared) {
        const float factor = factors ? __fdiv_rn(1.f, __fadd_rn(1.f, expf(-factors[row]))) : 1.f;
        sum = fmaf(factor, widen(shared[(size_t)row * width + i]), sum);
    }
    y[(size_t)row * width + i] = narrow<T>(sum);
}

} // namespace experts

extern "C" __global__ void choose_experts(const float *logits, const float *correction, const float *factors, int *ids,
                                          float *weights, int count, int per_token, int is_softmax, int groups,
                                          int groups_per_token, int best, int is_normalized, float min_sum, float scale) {
    const experts::Choice by = {count, per_token, is_softmax, groups, groups_per_token, best, is_normalized, min_sum, scale};
    experts::choose(logits, correction, factors, ids, weights, by);
}
extern "C" __global__ void __launch_bounds__(1024)
    sort_experts(const int *ids, int *uses, int *places, experts::Group *groups, int count, int num_experts, int size,
                 int room) {
    experts::sort(ids, uses, places, groups, count, num_experts, size, room);
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void score_experts_##NAME(const float *w, const float *bias, const T *x, float *y, int outputs, \
                                                    int inputs, int rows) {                                            \
        experts::scores(w, bias, x, y, outputs, inputs, rows);                                                         \
    }                                                                                                                  \
    extern "C" __global__ void experts_any_##NAME(const uint64_t *weights, const experts::Group *groups, const T *x,   \
                                                  T *y, int outputs, int inputs) {                                     \
        experts::product(weights, groups, x, y, outputs, inputs);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void gather_experts_##NAME(const T *x, const int *uses, T *y, int width, int per_token) {    \
        experts::gather(x, uses, y, width, per_token);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void activate_experts_##NAME(const T *gate, const T *up, const T *bias, const int *uses,     \
                                                       const int *ids, T *y, int width, int stride, int activation) {  \
        experts::activate(gate, up, bias, uses, ids, y, width, stride, activation);                                    \
    }                                                                                                                  \
    extern "C" __global__ void combine_experts_##NAME(const T *x, const int *places, const int *ids,                   \
                                                      const float *weights, const T *bias, const T *shared,            \
                                                      const float *factors, T *y, int width, int per_token) {          \
        experts::combine(x, places, ids, weights, bias, shared, factors, y, width, per_token);                         \
    }
FOR_FLOATS(KERNELS)
#undef KERNELS
