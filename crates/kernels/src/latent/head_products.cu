// Products of a part of each head of rows with a matrix of that head.
//
// The inputs of an output are divided into CHAINS: a chain has every CHAINS-th step of 32 inputs, and the sums of chains
// are added in their order. Kernels for few rows have a warp for each chain; for many rows a warp computes all chains of
// its outputs, one after another. So a row has the same bits in any number of rows.
#include "../cuda/tensor.cuh"

namespace heads {

// As in dense/gemv.cu, which says which inputs a thread reads.
constexpr int OUTPUTS = 16, STEP = 32;
constexpr int CHAINS = 4, THREADS = CHAINS * 32;
// Tiles of 8 rows of a block with many rows, the same as in latent/cuda.rs.
constexpr int TILES = 8;
// Rows that share a pass over a matrix without tensor cores.
constexpr int ROWS = 8;

// Where heads are in rows, in values: from a head to the next, and from a row to the next.
struct Strides {
    int head, row;
};

// The sums of a chain for 16 outputs of 8 * TILES rows from `x` on, of which `rows` exist. `w` is the thread's first output,
// and `high` is as far from it as the output eight later. Calls `wait` before it reads anything of x.
template <typename T, int TILES, typename Wait>
__device__ __forceinline__ void sum_chain(float (&d)[TILES][4], const T *w, size_t high, const T *x, int x_row, int rows,
                                          int inputs, int chain, Wait wait) {
    const int lane = threadIdx.x % 32, at = lane % 4 * 8, steps = inputs / STEP;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.f;
    }
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    uint4 a = zeros, b = zeros;
    auto load = [&](int step) {
        if (step < steps) {
            a = *reinterpret_cast<const uint4 *>(w + step * STEP);
            b = *reinterpret_cast<const uint4 *>(w + high + step * STEP);
        }
    };
    // No kernel writes matrices.
    load(chain);
    wait();
    for (int step = chain; step < steps; step += CHAINS) {
        const uint32_t one[4] = {a.x, b.x, a.y, b.y}, two[4] = {a.z, b.z, a.w, b.w};
        load(step + CHAINS);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const int row = t * 8 + lane / 4;
            const T *from = x + (size_t)row * x_row + step * STEP + at;
            const uint4 c = row < rows ? *reinterpret_cast<const uint4 *>(from) : zeros;
            multiply<T>(d[t], one, c.x, c.y);
            multiply<T>(d[t], two, c.z, c.w);
        }
    }
}

// w: [heads, outputs, inputs], for up to 8 * TILES rows. A block computes 16 outputs of a head.
template <typename T, int TILES>
__device__ void few(const T *w, const T *x, T *y, int outputs, int inputs, int rows, Strides of_x, Strides of_y) {
    __shared__ float sums[CHAINS][OUTPUTS * 8];
    const int chain = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.z, first = blockIdx.y * OUTPUTS;
    const int low = min(first + lane / 4, outputs - 1), high = min(first + lane / 4 + 8, outputs - 1);
    w += ((size_t)head * outputs + low) * inputs + lane % 4 * 8;
    x += (size_t)head * of_x.head;
    y += (size_t)head * of_y.head + first;
    float d[TILES][4];
    sum_chain<T, TILES>(d, w, (size_t)(high - low) * inputs, x, of_x.row, rows, inputs, chain, [] { wait_for_previous(); });
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        if (t > 0) {
            // All sums of the tile before have been read.
            __syncthreads();
        }
        store_tile<T, CHAINS>(d[t], sums[chain], sums[0], OUTPUTS * 8, y + (size_t)8 * t * of_y.row, of_y.row, rows - 8 * t,
                              outputs - first);
    }
}

// A warp computes 16 outputs of a head for 8 * TILES rows, a block those of CHAINS warps.
template <typename T>
__device__ void many(const T *w, const T *x, T *y, int outputs, int inputs, int rows, Strides of_x, Strides of_y) {
    const int lane = threadIdx.x % 32, head = blockIdx.z, first = (blockIdx.y * CHAINS + threadIdx.x / 32) * OUTPUTS;
    const int low = min(first + lane / 4, outputs - 1), high = min(first + lane / 4 + 8, outputs - 1);
    const int first_row = blockIdx.x * 8 * TILES;
    rows -= first_row;
    w += ((size_t)head * outputs + low) * inputs + lane % 4 * 8;
    x += (size_t)head * of_x.head + (size_t)first_row * of_x.row;
    y += (size_t)head * of_y.head + (size_t)first_row * of_y.row;
    wait_for_previous();
    float sums[TILES][4] = {};
#pragma unroll 1
    for (int chain = 0; chain < CHAINS; chain++) {
        float d[TILES][4];
        sum_chain<T, TILES>(d, w, (size_t)(high - low) * inputs, x, of_x.row, rows, inputs, chain, [] {});
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[t][i] = __fadd_rn(sums[t][i], d[t][i]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int output = first + lane / 4 + i / 2 * 8, row = t * 8 + lane % 4 * 2 + i % 2;
            if (output < outputs && row < rows) {
                y[(size_t)row * of_y.row + output] = narrow<T>(sums[t][i]);
            }
        }
    }
}

// For dtypes and numbers of inputs that tensor cores do not take. A warp computes an output of ROWS rows.
template <typename T>
__device__ void any(const T *w, const T *x, T *y, int outputs, int inputs, int rows, Strides of_x, Strides of_y) {
    wait_for_previous();
    const int lane = threadIdx.x % 32, head = blockIdx.z, first = blockIdx.x * ROWS;
    const int output = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (output >= outputs) {
        return;
    }
    rows = min(ROWS, rows - first);
    w += ((size_t)head * outputs + output) * inputs;
    x += (size_t)head * of_x.head + (size_t)first * of_x.row;
    y += (size_t)head * of_y.head + (size_t)first * of_y.row + output;
    float sums[ROWS] = {};
    for (int i = lane; i < inputs; i += 32) {
        const float by = widen(w[i]);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            // In the place of missing rows is the last one again.
            sums[r] = fmaf(by, widen(x[(size_t)min(r, rows - 1) * of_x.row + i]), sums[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && r < rows) {
            y[(size_t)r * of_y.row] = narrow<T>(sum);
        }
    }
}

} // namespace heads

#define PARAMETERS(T)                                                                              \
    const T *w, const T *x, T *y, int outputs, int inputs, int rows, int x_head, int x_row,        \
        int y_head, int y_row
#define ARGS w, x, y, outputs, inputs, rows, {x_head, x_row}, {y_head, y_row}
#define ANY(T, NAME)                                                                               \
    extern "C" __global__ void __launch_bounds__(heads::THREADS)                                   \
        head_products_any_##NAME(PARAMETERS(T)) {                                                  \
        heads::any<T>(ARGS);                                                                       \
    }
#define ON_TENSOR_CORES_OF(T, NAME)                                                                \
    extern "C" __global__ void __launch_bounds__(heads::THREADS)                                   \
        head_products_1_##NAME(PARAMETERS(T)) {                                                    \
        heads::few<T, 1>(ARGS);                                                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(heads::THREADS)                                   \
        head_products_2_##NAME(PARAMETERS(T)) {                                                    \
        heads::few<T, 2>(ARGS);                                                                    \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(heads::THREADS)                                   \
        head_products_many_##NAME(PARAMETERS(T)) {                                                 \
        heads::many<T>(ARGS);                                                                      \
    }
FOR_FLOATS(ANY)
ON_TENSOR_CORES_OF(f16, f16)
ON_TENSOR_CORES_OF(bf16, bf16)
#undef ON_TENSOR_CORES_OF
#undef ANY
#undef ARGS
#undef PARAMETERS
