// Layers that read a text one token after another: a short convolution, after which each head has a matrix that takes in
// the token and gives an output.
//
// What a forward does is data, which plan.rs makes once for all layers: the tokens of the forward, the steps of each
// sequence, and what it keeps. A token's values depend on the tokens before it alone: each is computed by the same
// instructions in one order, whatever the forwards into which a text is divided.
//
// The memory of a state is private to these kernels: the matrices of all heads, each [columns, rows] (on the CPU [rows,
// columns]), and then the window, [taps - 1, channels], in f32. Beside it are the inputs of draft nodes, [nodes, inputs].
#include "../glu.cuh"

namespace recurrent {

// The most tokens that are mixed, and the columns of a matrix that a warp takes; as in cuda.rs.
constexpr int MAX_TAPS = 16, COLUMNS = 4;
// What numbers stand for: as in plan.rs.
constexpr int NONE = -1, EMPTY = -2, UNUSED = 0x7fffffff;

// The steps of a sequence, and what it keeps: first places and ends.
struct Part {
    int first_step, last_step, first_keep, last_keep;
};

// Before the token, the state is that of slot `from`, or goes on (NONE), or is EMPTY. The step takes in `token` (or NONE),
// gives the output of `row` (or NONE), and writes the state to slot `to` (or NONE).
struct Step {
    int token, row, from, to;
};

// A window that ends with `token` is written to `slot`, or an EMPTY one; or, with a `node`, the inputs of `token` are, as
// those of the node.
struct Keep {
    int token, slot, node;
};

// The inputs of a token are in row `source` of the forward, or in slot `slot`, as those of node -1 - source; UNUSED = there
// is no token. `before`: the token before it, or the window of `slot` (NONE), or nothing (EMPTY).
struct Token {
    int slot, source, before;
};

// Sizes of a layer, as in mod.rs: the values of a row are its gate (heads * columns), then its inputs.
struct Sizes {
    int heads, columns, rows, channels, scalars, taps;

    __device__ __forceinline__ int values() const { return heads * columns; }
    __device__ __forceinline__ int inputs() const { return channels + scalars; }
    __device__ __forceinline__ int width() const { return values() + inputs(); }
    __device__ __forceinline__ int matrix() const { return rows * columns; }
};

// Where states and inputs are. states: of each slot the addresses of its state and of its nodes.
template <typename T> struct Memory {
    const T *x;
    const uint64_t *states;
    const Token *tokens;
    Sizes sizes;

    __device__ __forceinline__ float *window(int slot) const {
        return reinterpret_cast<float *>(states[2 * slot]) + (size_t)sizes.heads * sizes.matrix();
    }

    __device__ __forceinline__ T *nodes(int slot) const { return reinterpret_cast<T *>(states[2 * slot + 1]); }

    // Input i of a token.
    __device__ __forceinline__ T input(const Token &token, int i) const {
        return token.source >= 0 ? x[(size_t)token.source * sizes.width() + sizes.values() + i]
                                 : nodes(token.slot)[(size_t)(-1 - token.source) * sizes.inputs() + i];
    }

    // Calls `take` with a channel of the last `count` tokens up to `token`, which is the first. A window is that of
    // `slot`.
    template <typename Take>
    __device__ __forceinline__ void last(int token, int slot, int channel, int count, Take take) const {
        int in_window = sizes.taps - 1;
#pragma unroll
        for (int back = 0; back < MAX_TAPS; back++) {
            if (back >= count) {
                break;
            }
            float value = 0.f;
            if (token >= 0) {
                const Token own = tokens[token];
                value = widen(input(own, channel));
                token = own.before;
            } else if (token == NONE) {
                in_window--;
                value = window(slot)[(size_t)in_window * sizes.channels + channel];
            }
            take(back, value);
        }
    }
};

// The channels of each token mixed with those of the tokens before, and its scalars. conv: [taps, channels], that of the
// own token first; bias: [channels] or null; mixed: [tokens, inputs].
template <typename T>
__device__ void mix(const Memory<T> &all, const float *conv, const float *bias, float *mixed, int count) {
    const Sizes &sizes = all.sizes;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_previous();
    if (i >= sizes.inputs()) {
        return;
    }
    for (int at = blockIdx.y; at < count; at += gridDim.y) {
        const Token token = all.tokens[at];
        if (token.source == UNUSED) {
            continue;
        }
        float *to = mixed + (size_t)at * sizes.inputs() + i;
        if (i >= sizes.channels) {
            *to = widen(all.input(token, i));
            continue;
        }
        float sum = bias == nullptr ? 0.f : bias[i];
        all.last(at, token.slot, i, sizes.taps,
                 [&](int back, float x) { sum = fmaf(x, conv[(size_t)back * sizes.channels + i], sum); });
        *to = __fdiv_rn(sum, __fadd_rn(1.f, expf(-sum)));
    }
}

__device__ __forceinline__ float softplus(float x) {
    return __fadd_rn(fmaxf(x, 0.f), log1pf(expf(-fabsf(x))));
}

// A token as a head sees it: its inputs, mixed.
struct Mixed {
    const float *channels, *scalars;
};

// The columns of a matrix that a warp has: a thread has rows lane, lane + 32 and so on. Rows and columns that there are
// not are 0.
template <int ROWS> struct State {
    float values[COLUMNS][ROWS];

    template <typename Do> __device__ __forceinline__ void each(int rows, Do f) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int row = threadIdx.x % 32 + 32 * r;
                if (row < rows) {
                    f(values[c][r], c, row);
                }
            }
        }
    }
};

// A thread's rows of a vector.
template <int ROWS> struct Vector {
    float values[ROWS];

    __device__ __forceinline__ void load(const float *from, int rows) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int row = threadIdx.x % 32 + 32 * r;
            values[r] = row < rows ? from[row] : 0.f;
        }
    }

    // The vector times 1 / sqrt(its squared length + eps) * by.
    __device__ __forceinline__ void normalize(float eps, float by) {
        float square = 0.f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            square = fmaf(values[r], values[r], square);
        }
        const float scale = __fdiv_rn(by, sqrtf(__fadd_rn(warp_sum(square), eps)));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            values[r] = __fmul_rn(values[r], scale);
        }
    }

    __device__ __forceinline__ float product(const float (&state)[ROWS]) const {
        float sum = 0.f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            sum = fmaf(state[r], values[r], sum);
        }
        return warp_sum(sum);
    }
};

// The values of a warp's columns, of which there are `count`; the others are 0.
__device__ __forceinline__ void load_columns(float (&to)[COLUMNS], const float *from, int count) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        to[c] = c < count ? from[c] : 0.f;
    }
}

// The gated delta rule; delta_net.rs says what it computes.
struct Delta {
    // Added to the squared length of q and of k.
    static constexpr float LENGTH_EPS = 1e-6f;
    // [heads] each.
    const float *decay, *dt_bias;
    int key_heads, is_tiled;

    // What a warp reads of a token.
    template <int ROWS> struct Inputs {
        Vector<ROWS> q, k;
        float v[COLUMNS], b, a;
    };

    template <int ROWS>
    __device__ __forceinline__ Inputs<ROWS> load(const Sizes &sizes, int head, int column, const Mixed &token) const {
        const int dim = sizes.rows, keys = key_heads * dim;
        const int at = (is_tiled ? head % key_heads : head / (sizes.heads / key_heads)) * dim;
        Inputs<ROWS> inputs;
        inputs.q.load(token.channels + at, dim);
        inputs.k.load(token.channels + keys + at, dim);
        load_columns(inputs.v, token.channels + 2 * keys + head * sizes.columns + column, sizes.columns - column);
        inputs.b = token.scalars[head];
        inputs.a = token.scalars[sizes.heads + head];
        return inputs;
    }

    // Calls `out` with each column and what the token reads of it, if there is an output.
    template <int ROWS, typename Out>
    __device__ __forceinline__ void take(const Sizes &sizes, int head, const Inputs<ROWS> &token, State<ROWS> &state,
                                         bool has_output, Out out) const {
        Vector<ROWS> q = token.q, k = token.k;
        k.normalize(LENGTH_EPS, 1.f);
        if (has_output) {
            q.normalize(LENGTH_EPS, __fdiv_rn(1.f, sqrtf((float)sizes.rows)));
        }
        const float keep = expf(__fmul_rn(decay[head], softplus(__fadd_rn(token.a, dt_bias[head]))));
        const float beta = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-token.b)));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                state.values[c][r] = __fmul_rn(state.values[c][r], keep);
            }
            const float by = __fmul_rn(__fsub_rn(token.v[c], k.product(state.values[c])), beta);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                state.values[c][r] = fmaf(k.values[r], by, state.values[c][r]);
            }
            if (has_output) {
                out(c, q.product(state.values[c]));
            }
        }
    }
};

// Mamba 2; mamba.rs says what it computes.
struct Mamba {
    // [heads] each.
    const float *decay, *dt_bias, *skip;
    int groups;
    float least, most;

    // See Delta.
    template <int ROWS> struct Inputs {
        Vector<ROWS> b, c;
        float x[COLUMNS], step;
    };

    template <int ROWS>
    __device__ __forceinline__ Inputs<ROWS> load(const Sizes &sizes, int head, int column, const Mixed &token) const {
        const float *shared = token.channels + sizes.values() + head / (sizes.heads / groups) * sizes.rows;
        Inputs<ROWS> inputs;
        inputs.b.load(shared, sizes.rows);
        inputs.c.load(shared + groups * sizes.rows, sizes.rows);
        load_columns(inputs.x, token.channels + head * sizes.columns + column, sizes.columns - column);
        inputs.step = token.scalars[head];
        return inputs;
    }

    template <int ROWS, typename Out>
    __device__ __forceinline__ void take(const Sizes &, int head, const Inputs<ROWS> &token, State<ROWS> &state,
                                         bool has_output, Out out) const {
        const float step = fminf(fmaxf(softplus(__fadd_rn(token.step, dt_bias[head])), least), most);
        const float keep = expf(__fmul_rn(decay[head], step));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float value = token.x[c], by = __fmul_rn(step, value);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                state.values[c][r] = fmaf(token.b.values[r], by, __fmul_rn(state.values[c][r], keep));
            }
            if (has_output) {
                out(c, fmaf(skip[head], value, token.c.product(state.values[c])));
            }
        }
    }
};

// The steps of a sequence, by a warp for COLUMNS columns of a head's matrix. mixed: as `mix` wrote it; raw: [rows, values],
// what the heads read.
template <int ROWS, typename Rule>
__device__ void run(const Rule &rule, const Part *parts, const Step *steps, const uint64_t *states, const float *mixed,
                    float *raw, const Sizes &sizes) {
    const int groups = (sizes.columns + COLUMNS - 1) / COLUMNS;
    const int unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int head = unit / groups, column = unit % groups * COLUMNS;
    wait_for_previous();
    if (head >= sizes.heads) {
        return;
    }
    const Part part = parts[blockIdx.y];
    // Of the columns that there are.
    auto matrix = [&](int slot) {
        return reinterpret_cast<float *>(states[2 * slot]) + (size_t)head * sizes.matrix() + (size_t)column * sizes.rows;
    };
    using Inputs = typename Rule::template Inputs<ROWS>;
    auto step_at = [&](int i) { return i < part.last_step ? steps[i] : Step{NONE, NONE, NONE, NONE}; };
    auto load = [&](const Step &step) {
        if (step.token == NONE) {
            return Inputs{};
        }
        const float *inputs = mixed + (size_t)step.token * sizes.inputs();
        return rule.template load<ROWS>(sizes, head, column, Mixed{inputs, inputs + sizes.channels});
    };
    State<ROWS> state = {};
    // What a step reads is on its way while the step before computes: few warps share a multiprocessor, so nothing else
    // hides the wait.
    Step step = step_at(part.first_step), next = step_at(part.first_step + 1);
    Inputs token = load(step);
    for (int i = part.first_step; i < part.last_step; i++) {
        const Step after = step_at(i + 2);
        const Inputs of_next = load(next);
        if (step.from != NONE) {
            const float *from = step.from == EMPTY ? nullptr : matrix(step.from);
            state.each(sizes.rows, [&](float &value, int c, int row) {
                const bool is_there = from != nullptr && column + c < sizes.columns;
                value = is_there ? from[c * sizes.rows + row] : 0.f;
            });
        }
        if (step.token != NONE) {
            float *out = raw + (size_t)max(step.row, 0) * sizes.values() + head * sizes.columns + column;
            rule.take(sizes, head, token, state, step.row != NONE, [&](int c, float value) {
                if (threadIdx.x % 32 == 0 && column + c < sizes.columns) {
                    out[c] = value;
                }
            });
        }
        if (step.to != NONE) {
            float *to = matrix(step.to);
            state.each(sizes.rows, [&](float &value, int c, int row) {
                if (column + c < sizes.columns) {
                    to[c * sizes.rows + row] = value;
                }
            });
        }
        step = next;
        next = after;
        token = of_next;
    }
}

// The outputs of a row: what the heads of a group read, gated and normalized. raw: [rows, values]; norm: [values] or, if it
// is of each group, [width], or, after gates that come first, null: there is none; out: [rows, values]. A block has one
// group, of `width` values, of one row.
template <typename T>
__device__ void finish(const T *x, const float *raw, const float *norm, T *out, const Sizes &sizes, int width,
                       int norm_of_each, int gates_first, float eps) {
    __shared__ float scratch[32];
    wait_for_previous();
    const int first = blockIdx.y * width;
    const size_t at = (size_t)blockIdx.x * sizes.values() + first;
    const T *gates = x + (size_t)blockIdx.x * sizes.width() + first;
    auto gate = [&](int i) { return silu(widen(gates[i])); };
    auto value = [&](int i) { return gates_first ? __fmul_rn(raw[at + i], gate(i)) : raw[at + i]; };
    if (norm == nullptr) {
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            out[at + i] = narrow<T>(value(i));
        }
        return;
    }
    float square = 0.f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        square = fmaf(value(i), value(i), square);
    }
    const float scale = rsqrtf(__fadd_rn(__fdiv_rn(block_sum(square, scratch), (float)width), eps));
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float by = norm[norm_of_each ? i : first + i];
        const float normed = __fmul_rn(__fmul_rn(value(i), scale), by);
        out[at + i] = narrow<T>(gates_first ? normed : __fmul_rn(normed, gate(i)));
    }
}

// What the slots of a sequence keep beside matrices. A thread has an input, of which it reads all that it needs of a window
// before it writes one; nodes come last.
template <typename T> __device__ void keep(const Memory<T> &all, const Part *parts, const Keep *keeps) {
    const Sizes &sizes = all.sizes;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    wait_for_previous();
    if (i >= sizes.inputs()) {
        return;
    }
    const Part part = parts[blockIdx.y];
    for (int n = part.first_keep; n < part.last_keep; n++) {
        const Keep own = keeps[n];
        if (own.node != NONE) {
            all.nodes(own.slot)[(size_t)own.node * sizes.inputs() + i] = all.input(all.tokens[own.token], i);
        } else if (i < sizes.channels) {
            // The slot of the window that the tokens begin with is that of the tokens.
            const int slot = own.token >= 0 ? all.tokens[own.token].slot : own.slot, count = sizes.taps - 1;
            float values[MAX_TAPS];
            all.last(own.token, slot, i, count, [&](int back, float value) { values[back] = value; });
            float *window = all.window(own.slot);
#pragma unroll
            for (int back = 0; back < MAX_TAPS; back++) {
                if (back < count) {
                    window[(size_t)(count - 1 - back) * sizes.channels + i] = values[back];
                }
            }
        }
    }
}

} // namespace recurrent

#define SIZES int heads, int columns, int rows, int channels, int scalars, int taps
#define THE_SIZES                                                                                  \
    { heads, columns, rows, channels, scalars, taps }

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void recurrent_mix_##NAME(                                               \
        const T *x, const uint64_t *states, const recurrent::Token *tokens, const float *conv,     \
        const float *bias, float *mixed, SIZES, int count) {                                       \
        recurrent::mix<T>({x, states, tokens, THE_SIZES}, conv, bias, mixed, count);               \
    }                                                                                              \
    extern "C" __global__ void recurrent_finish_##NAME(                                            \
        const T *x, const float *raw, const float *norm, T *out, SIZES, int width,                 \
        int norm_of_each, int gates_first, float eps) {                                            \
        recurrent::finish(x, raw, norm, out, THE_SIZES, width, norm_of_each, gates_first, eps);    \
    }                                                                                              \
    extern "C" __global__ void recurrent_keep_##NAME(                                              \
        const T *x, const uint64_t *states, const recurrent::Token *tokens,                        \
        const recurrent::Part *parts, const recurrent::Keep *keeps, SIZES) {                       \
        recurrent::keep<T>({x, states, tokens, THE_SIZES}, parts, keeps);                          \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL

// ROWS * 32 rows of a matrix at most.
#define KERNEL(ROWS)                                                                               \
    extern "C" __global__ void __launch_bounds__(128) recurrent_delta_##ROWS(                      \
        const recurrent::Part *parts, const recurrent::Step *steps, const uint64_t *states,        \
        const float *mixed, float *raw, const float *decay, const float *dt_bias, SIZES,           \
        int key_heads, int is_tiled) {                                                             \
        recurrent::run<ROWS>(recurrent::Delta{decay, dt_bias, key_heads, is_tiled}, parts, steps,  \
                             states, mixed, raw, THE_SIZES);                                       \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(128) recurrent_mamba_##ROWS(                      \
        const recurrent::Part *parts, const recurrent::Step *steps, const uint64_t *states,        \
        const float *mixed, float *raw, const float *decay, const float *dt_bias,                  \
        const float *skip, SIZES, int groups, float least, float most) {                           \
        recurrent::run<ROWS>(recurrent::Mamba{decay, dt_bias, skip, groups, least, most}, parts,   \
                             steps, states, mixed, raw, THE_SIZES);                                \
    }
KERNEL(4)
KERNEL(8)
#undef KERNEL
#undef THE_SIZES
#undef SIZES
