// Products of a few rows with a dense weight, limited by the memory's bandwidth.
//
// One tensor core instruction takes 16 outputs, 16 inputs and 8 rows; missing rows are padded with
// zeros. So any number of rows has the same additions in the same order, and a row has the same bits
// whether it is decoded alone or verified in a batch. More than 8 rows are divided into tiles of 8. tiles.cu
// has the same additions for more than 8 * TILES rows.
//
// A block computes 16 outputs. Each of its WARPS warps takes every WARPS-th step of 32 inputs, and their
// sums are added in the order of the warps. So WARPS must depend on the weight alone.
//
// A block of a GATED product computes 16 outputs of a weight whose first half are gates: it has WARPS warps for the gates
// and as many for the outputs that these are multiplied with, which are the other half.
#include "../cuda/tensor.cuh"
#include "../experts/groups.cuh"
#include "../gated_tile.cuh"

constexpr int OUTPUTS = 16;
constexpr int STEP = 32;
// w: [outputs, inputs], x: [rows, inputs], y: [rows, outputs], for up to 8 * TILES rows. A thread of a warp
// reads 8 consecutive inputs of outputs lane / 4 and lane / 4 + 8, and of row lane / 4. Which input goes to
// which place in the instruction does not matter, as long as both sides agree. If the product is GATED, w is
// [2 * outputs, inputs].
template <typename T, int TILES, int WARPS, bool GATED = false>
__device__ void gemv(const T *w, const T *x, T *y, int outputs, int inputs, int rows, int activation = 0) {
    // Steps that a warp loads before it uses the first.
    constexpr int AHEAD = 2;
    __shared__ float sums[GATED ? 2 * WARPS : WARPS][OUTPUTS * 8];
    // Of all warps of the block, and of those that share the inputs.
    const int number = threadIdx.x / 32, warp = GATED ? number % WARPS : number, lane = threadIdx.x % 32;
    if (GATED && number >= WARPS) {
        w += (size_t)outputs * inputs;
    }
    const int first_output = blockIdx.y * OUTPUTS;
    const int output = first_output + lane / 4, at = lane % 4 * 8;
    const T *low = w + (size_t)min(output, outputs - 1) * inputs + at;
    const T *high = w + (size_t)min(output + 8, outputs - 1) * inputs + at;
    float d[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.f;
    }
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const int steps = inputs / STEP;
    uint4 a[AHEAD], b[AHEAD];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int step = first + i * WARPS;
            const bool exists = step < steps;
            a[i] = exists ? load_once(low + step * STEP) : zeros;
            b[i] = exists ? load_once(high + step * STEP) : zeros;
        }
    };
    // No kernel writes weights.
    load(warp);
    wait_for_previous();
    for (int first = warp; first < steps;) {
        uint4 c[AHEAD][TILES];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int step = first + i * WARPS;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const int row = t * 8 + lane / 4;
                const uint4 *from = reinterpret_cast<const uint4 *>(x + (size_t)row * inputs + step * STEP + at);
                // Not __ldg: x may be written while this block already runs.
                c[i][t] = row < rows && step < steps ? *from : zeros;
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const uint32_t one[4] = {a[i].x, b[i].x, a[i].y, b[i].y};
            const uint32_t two[4] = {a[i].z, b[i].z, a[i].w, b[i].w};
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                multiply<T>(d[t], one, c[i][t].x, c[i][t].y);
                multiply<T>(d[t], two, c[i][t].z, c[i][t].w);
            }
        }
        first += WARPS * AHEAD;
        if (first < steps) {
            load(first);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        if (t > 0) {
            // All sums of the tile before have been read.
            __syncthreads();
        }
        T *to = y + (size_t)8 * t * outputs + first_output;
        if constexpr (GATED) {
            store_gated_tile<T, WARPS>(d[t], sums[number], sums[0], OUTPUTS * 8, to, outputs, rows - 8 * t,
                                       outputs - first_output, activation);
        } else {
            store_tile<T, WARPS>(d[t], sums[number], sums[0], OUTPUTS * 8, to, outputs, rows - 8 * t,
                                 outputs - first_output);
        }
    }
}

#define KERNEL(T, NAME, TILES, WARPS)                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                       \
        gemv##TILES##_##WARPS##_##NAME(const T *w, const T *x, T *y, int outputs, int inputs,      \
                                       int rows) {                                                 \
        gemv<T, TILES, WARPS>(w, x, y, outputs, inputs, rows);                                     \
    }
#define GATED(T, NAME, TILES, WARPS)                                                               \
    extern "C" __global__ void __launch_bounds__(2 * WARPS * 32)                                   \
        gated_gemv##TILES##_##WARPS##_##NAME(const T *w, const T *x, T *y, int outputs, int inputs,\
                                             int rows, int activation) {                           \
        gemv<T, TILES, WARPS, true>(w, x, y, outputs, inputs, rows, activation);                   \
    }
// Groups of up to 8 rows times the weights of their experts.
#define OF_EXPERTS(T, NAME, WARPS)                                                                 \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                       \
        experts_gemv_##WARPS##_##NAME(const uint64_t *weights, const experts::Group *groups,       \
                                      const T *x, T *y, int outputs, int inputs) {                 \
        wait_for_previous();                                                                       \
        const experts::Group group = groups[blockIdx.x];                                           \
        if (group.rows > 0) {                                                                      \
            gemv<T, 1, WARPS>(experts::weight_of<T>(weights, group), x + (size_t)group.first * inputs, \
                              y + (size_t)group.first * outputs, outputs, inputs, group.rows);     \
        }                                                                                          \
    }
#define KERNELS(T, NAME)                                                                           \
    KERNEL(T, NAME, 1, 8)                                                                          \
    KERNEL(T, NAME, 2, 8)                                                                          \
    KERNEL(T, NAME, 1, 16)                                                                         \
    KERNEL(T, NAME, 2, 16)                                                                         \
    GATED(T, NAME, 1, 8)                                                                           \
    GATED(T, NAME, 2, 8)                                                                           \
    GATED(T, NAME, 1, 16)                                                                          \
    GATED(T, NAME, 2, 16)                                                                          \
    OF_EXPERTS(T, NAME, 8)                                                                         \
    OF_EXPERTS(T, NAME, 16)
KERNELS(f16, f16)
KERNELS(bf16, bf16)
#undef KERNELS
#undef OF_EXPERTS
#undef GATED
#undef KERNEL
