// The kernels of a format: products of few and of more rows, and dequantization.
#pragma once
#include "../../experts/groups.cuh"
#include "many.cuh"

// Warps of a block that dequantizes.
constexpr int DEQUANTIZING_WARPS = 8;

// Stores four values at a place that is aligned for all of them.
template <typename T> __device__ __forceinline__ void store_four(T *to, const T (&values)[4]) {
    if constexpr (sizeof(T) == 2) {
        uint2 word;
        memcpy(&word, values, sizeof word);
        *reinterpret_cast<uint2 *>(to) = word;
    } else {
        uint4 word;
        memcpy(&word, values, sizeof word);
        *reinterpret_cast<uint4 *>(to) = word;
    }
}

// Weights [outputs, inputs] as values of T: row n of y is output ids[n], or without ids output first + n, for
// `count` rows. blockIdx.x selects an id, or 16 outputs, of which there may be many; `first` is a multiple of 16.
template <typename F, typename T>
__device__ void dequantize(const unsigned char *w, const uint32_t *ids, T *y, int outputs, int inputs, int first,
                           int count) {
    wait_for_previous();
    const int unit = blockIdx.y * DEQUANTIZING_WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, p = lane % 4;
    const int n = blockIdx.x;
    const uint32_t id = ids ? ids[n] : 0;
    const int strip = ids ? id / OUTPUTS : first / OUTPUTS + n;
    const Units<F> units(w, outputs, inputs, strip);
    if (unit >= units.count || id >= (uint32_t)outputs) {
        return;
    }
    const GlobalUnit stored{units.unit(unit), units.super(unit)};
    uint32_t a[FRAGMENTS][4];
    // All quants, and floats over FLOATS_BY, are exact in f16.
    unpack<F, f16>(a, stored, lane);
    // Not yet times FLOATS_BY, which could be infinite.
    const Scales scales = F::Kind::read(stored, F::SCALES, g);
    // Whether the four inputs of a thread are all in the row, or none is, and aligned.
    const bool whole = inputs % 4 == 0 && reinterpret_cast<size_t>(y) % (4 * sizeof(T)) == 0;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int output = g + 8 * half, input = UNIT_INPUTS * unit + 16 * m + 4 * p;
            const int row = ids ? n : OUTPUTS * n + output;
            const bool wanted = ids ? output == (int)(id % OUTPUTS) : row < count;
            if (!wanted || input >= inputs) {
                continue;
            }
            const float offset = F::Kind::OFFSET ? scales.offset[half][m] : 0.f;
            constexpr float BY = FLOATS_BY<F, f16>;
            auto value = [&](float quant) { return narrow<T>(fmaf(scales.scale[half][m], quant * BY, offset)); };
            const uint32_t first = a[m][half], second = a[m][half + 2];
            const T values[4] = {value(low_half(first)), value(high_half(first)), value(low_half(second)),
                                 value(high_half(second))};
            T *to = y + (size_t)row * inputs + input;
            if (whole) {
                store_four(to, values);
            } else {
                for (int i = 0; i < 4 && input + i < inputs; i++) {
                    to[i] = values[i];
                }
            }
        }
    }
}

// Blocks that a multiprocessor has room for, so many that enough copies are on their way.
constexpr int min_blocks(int tiles, int warps) { return tiles == 1 ? 32 / warps : 2; }

#define PARAMETERS(T)                                                                                         \
    const unsigned char *first, const unsigned char *second, const unsigned char *third, int outputs,         \
        int outputs_of_second, int outputs_of_third, const T *x, T *y, int inputs, int rows, int width, int column
#define WEIGHTS                                                                                               \
    Weights { {first, second, third}, {outputs, outputs_of_second, outputs_of_third} }
#define PRODUCT(F, NAME, T, SUFFIX, TILES, WARPS)                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, min_blocks(TILES, WARPS))                        \
        product_##NAME##_##TILES##_##WARPS##_##SUFFIX(PARAMETERS(T)) {                                        \
        product<F, T, TILES, WARPS>(WEIGHTS, x, y, inputs, rows, width, column);                              \
    }
#define PRODUCT_OF_MANY(F, NAME, T, SUFFIX, SHAPE, SHAPE_NAME)                                                \
    extern "C" __global__ void __launch_bounds__(many::SHAPE::THREADS, many::SHAPE::BLOCKS)                   \
        product_##NAME##_##SHAPE_NAME##_##SUFFIX(PARAMETERS(T), int chains) {                                 \
        many::product<F, T, many::SHAPE>(WEIGHTS, x, y, inputs, rows, width, column, chains,                  \
                                         blockIdx.x * many::SHAPE::ROWS);                                     \
    }
// activation(gate) * up, for up to 16 rows.
#define GATED_PARAMETERS(T)                                                                                   \
    const unsigned char *gate, const unsigned char *up, const T *x, T *y, int outputs, int inputs, int rows,  \
        int activation
#define GATED(F, NAME, T, SUFFIX, TILES, WARPS)                                                               \
    extern "C" __global__ void __launch_bounds__(2 * WARPS * 32, min_blocks(TILES, WARPS) / 2)                \
        gated_##NAME##_##TILES##_##WARPS##_##SUFFIX(GATED_PARAMETERS(T)) {                                    \
        gated_product<F, T, TILES, WARPS>(gate, up, x, y, outputs, inputs, rows, activation);                 \
    }
#define GATED_OF_MANY(F, NAME, T, SUFFIX, SHAPE, SHAPE_NAME)                                                  \
    extern "C" __global__ void __launch_bounds__(many::SHAPE::THREADS, many::SHAPE::BLOCKS)                   \
        gated_##NAME##_##SHAPE_NAME##_##SUFFIX(GATED_PARAMETERS(T), int chains) {                             \
        many::product<F, T, many::SHAPE, true>({{gate, up}, {outputs, outputs}}, x, y, inputs, rows, outputs, \
                                               0, chains, blockIdx.x * many::SHAPE::ROWS, activation);        \
    }
// Groups of rows times the weights of their experts: of up to 8 rows, or of up to 64.
#define EXPERTS(F, NAME, T, SUFFIX, WARPS)                                                                    \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, min_blocks(1, WARPS))                            \
        experts_##NAME##_##WARPS##_##SUFFIX(const uint64_t *weights, const experts::Group *groups, const T *x, \
                                            T *y, int outputs, int inputs) {                                  \
        wait_for_previous();                                                                                  \
        const experts::Group group = groups[blockIdx.x];                                                      \
        if (group.rows > 0) {                                                                                 \
            product<F, T, 1, WARPS>({{experts::weight_of<unsigned char>(weights, group)}, {outputs}},         \
                                    x + (size_t)group.first * inputs, y + (size_t)group.first * outputs, inputs, \
                                    group.rows, outputs, 0);                                                  \
        }                                                                                                     \
    }
#define EXPERTS_OF_MANY(F, NAME, T, SUFFIX)                                                                   \
    extern "C" __global__ void __launch_bounds__(many::Large::THREADS, many::Large::BLOCKS)                   \
        experts_##NAME##_large_##SUFFIX(const uint64_t *weights, const experts::Group *groups, const T *x,    \
                                        T *y, int outputs, int inputs, int chains) {                          \
        wait_for_previous();                                                                                  \
        const experts::Group group = groups[blockIdx.x];                                                      \
        if (group.rows > 0) {                                                                                 \
            many::product<F, T, many::Large>({{experts::weight_of<unsigned char>(weights, group)}, {outputs}}, \
                                             x + (size_t)group.first * inputs,                                \
                                             y + (size_t)group.first * outputs, inputs, group.rows, outputs, 0, \
                                             chains, 0);                                                      \
        }                                                                                                     \
    }
#define PRODUCTS(F, NAME, T, SUFFIX)                                                                          \
    PRODUCT(F, NAME, T, SUFFIX, 1, 8)                                                                         \
    PRODUCT(F, NAME, T, SUFFIX, 1, 16)                                                                        \
    PRODUCT(F, NAME, T, SUFFIX, 2, 16)                                                                        \
    PRODUCT_OF_MANY(F, NAME, T, SUFFIX, Low, low)                                                             \
    PRODUCT_OF_MANY(F, NAME, T, SUFFIX, Small, small)                                                         \
    PRODUCT_OF_MANY(F, NAME, T, SUFFIX, Medium, medium)                                                       \
    PRODUCT_OF_MANY(F, NAME, T, SUFFIX, Large, large)                                                         \
    GATED(F, NAME, T, SUFFIX, 1, 8)                                                                           \
    GATED(F, NAME, T, SUFFIX, 1, 16)                                                                          \
    GATED(F, NAME, T, SUFFIX, 2, 16)                                                                          \
    GATED_OF_MANY(F, NAME, T, SUFFIX, Low, low)                                                               \
    EXPERTS(F, NAME, T, SUFFIX, 8)                                                                            \
    EXPERTS(F, NAME, T, SUFFIX, 16)                                                                           \
    EXPERTS_OF_MANY(F, NAME, T, SUFFIX)
#define DEQUANTIZE(F, NAME, T, SUFFIX)                                                                        \
    extern "C" __global__ void __launch_bounds__(DEQUANTIZING_WARPS * 32)                                     \
        dequantize_##NAME##_##SUFFIX(const unsigned char *w, const uint32_t *ids, T *y, int outputs,          \
                                     int inputs, int first, int count) {                                      \
        dequantize<F, T>(w, ids, y, outputs, inputs, first, count);                                           \
    }
// All kernels of a format.
#define KERNELS_OF(F, NAME)                                                                                   \
    PRODUCTS(F, NAME, f16, f16)                                                                               \
    PRODUCTS(F, NAME, bf16, bf16)                                                                             \
    DEQUANTIZE(F, NAME, float, f32)                                                                           \
    DEQUANTIZE(F, NAME, f16, f16)                                                                             \
    DEQUANTIZE(F, NAME, bf16, bf16)
