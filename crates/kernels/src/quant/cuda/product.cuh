// Products of a few rows with a quantized weight, limited by the memory's bandwidth, and dequantization.
//
// Tensor cores multiply activations with quants, which are exact integers in f16 and in bf16. The sum over a
// block of 32 inputs (16 if each 16 have a scale of their own) is then multiplied with the block's scale, in
// f32, and added to the sum of the row; an offset, and what all quants of the block have too much (IN_BASE), is
// multiplied with the sum of the block's activations, which tensor cores also compute. So no weight is rounded, and a row has the same additions in the same order in any
// number of rows. In the place of missing rows is the last one again, and in that of a missing block of inputs the
// one before, which is multiplied with scales of zero.
//
// A block of the grid computes 16 outputs, or some strips of 16. Each of its WARPS warps takes every WARPS-th unit of 64 inputs, and
// their sums are added in the order of the warps. So WARPS must depend on the weight alone.
#pragma once
#include "unpack.cuh"

// Bytes of shared memory that a block has without asking for more.
constexpr int MAX_STATIC_SHARED = 48 << 10;
// Units that are on their way or in use per warp, at most.
constexpr int MAX_STAGES = 4;
// Tiles of 8 rows whose activations are loaded before they are needed, of many rows.
constexpr int AHEAD = 2;
constexpr int SUM_BYTES = OUTPUTS * 8 * sizeof(float);

// Activations of a unit, of one row: for each fragment the inputs 4 p .. 4 p + 4.
struct Activations {
    uint2 x[FRAGMENTS];

    // `second` is where its second block of 32 is. Not __ldg: they may be written while this block already
    // runs.
    template <typename T> __device__ __forceinline__ void load(const T *first, int second) {
        x[0] = *reinterpret_cast<const uint2 *>(first);
        x[1] = *reinterpret_cast<const uint2 *>(first + 16);
        x[2] = *reinterpret_cast<const uint2 *>(first + second);
        x[3] = *reinterpret_cast<const uint2 *>(first + second + 16);
    }
};

template <typename T> struct Ones;
template <> struct Ones<f16> {
    static constexpr uint32_t PAIR = 0x3c003c00;
};
template <> struct Ones<bf16> {
    static constexpr uint32_t PAIR = 0x3f803f80;
};

// Products of a block of 32 inputs with 8 rows: of all, or of each 16 that have a scale of their own.
template <typename F, typename T> struct BlockProducts {
    static constexpr int PARTS = F::Kind::HALF_BLOCKS ? 2 : 1;
    float parts[PARTS][4];

    // `a` and `next` are the fragments of the block, `x` and `after` those of the rows.
    __device__ __forceinline__ BlockProducts(const uint32_t (&a)[4], const uint32_t (&next)[4], const uint2 &x,
                                             const uint2 &after) {
        multiply_only<T>(parts[0], a, x.x, x.y);
        if constexpr (PARTS == 2) {
            multiply_only<T>(parts[1], next, after.x, after.y);
        } else {
            multiply<T>(parts[0], next, after.x, after.y);
        }
    }
    // Sums of the activations, in the same order.
    __device__ __forceinline__ static BlockProducts of_ones(const uint2 &x, const uint2 &after) {
        constexpr uint32_t ONE = Ones<T>::PAIR;
        const uint32_t ones[4] = {ONE, ONE, ONE, ONE};
        return {ones, ones, x, after};
    }
    // sums += the products, times what block `block` has in `by`: scales or offsets.
    __device__ __forceinline__ void add_to(float (&sums)[4], int block, const float (&by)[2][FRAGMENTS]) const {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[i] = fmaf(by[i / 2][2 * block + part], parts[part][i], sums[i]);
            }
        }
    }
};

// sums += the products of a unit's fragments and of 8 rows.
template <typename F, typename T>
__device__ __forceinline__ void add(float (&sums)[4], const uint32_t (&a)[FRAGMENTS][4], const Scales &scales,
                                    const Activations &rows) {
#pragma unroll
    for (int block = 0; block < 2; block++) {
        const uint2 &x = rows.x[2 * block], &after = rows.x[2 * block + 1];
        const BlockProducts<F, T> products(a[2 * block], a[2 * block + 1], x, after);
        products.add_to(sums, block, scales.scale);
        if constexpr (HAS_OFFSET<F, T>) {
            BlockProducts<F, T>::of_ones(x, after).add_to(sums, block, scales.offset);
        }
    }
}

// A warp copies a unit, and what it shares with others, to shared memory.
template <typename F>
__device__ __forceinline__ void copy_unit(SharedAddress to, const Units<F> &units, int unit, int lane) {
    to += 16 * lane;
    const unsigned char *from = units.unit(unit) + 16 * lane;
#pragma unroll
    for (int at = 0; at < F::UNIT; at += 512) {
        if (at + 512 <= F::UNIT || lane < (F::UNIT - at) / 16) {
            copy_async_to(to + at, from + at);
        }
    }
    if (F::SUPER > 0 && lane < F::SUPER / 16) {
        copy_async_to(to + F::UNIT, units.super(unit) + 16 * lane);
    }
}

// Weights of a launch, at most; as in quant/cuda.rs.
constexpr int MAX_WEIGHTS = 3;
// The units of weights with the same inputs, and their outputs, which are side by side in the product. Missing weights
// have none.
struct Weights {
    const unsigned char *units[MAX_WEIGHTS];
    int outputs[MAX_WEIGHTS];
};
// One of them, the first strip that a block computes of it, and the column of its first output.
struct BlockOfWeight {
    const unsigned char *units;
    int outputs, first_strip, column;

    // blockIdx.y counts blocks of STRIPS strips, weight after weight.
    template <int STRIPS> __device__ __forceinline__ static BlockOfWeight of(const Weights &weights, int column) {
        int block = blockIdx.y;
        BlockOfWeight of{weights.units[0], weights.outputs[0], 0, column};
#pragma unroll
        for (int i = 1; i < MAX_WEIGHTS; i++) {
            const int blocks = (of.outputs + OUTPUTS * STRIPS - 1) / (OUTPUTS * STRIPS);
            if (block >= blocks) {
                block -= blocks;
                of = {weights.units[i], weights.outputs[i], 0, of.column + of.outputs};
            } else {
                break;
            }
        }
        of.first_strip = block * STRIPS;
        return of;
    }
};

// x: [rows, inputs]; y: [rows, width], of which the outputs of these weights begin at `column`; for up to 8 * TILES rows.
template <typename F, typename T, int TILES, int WARPS>
__device__ void product(const Weights &weights, const T *x, T *y, int inputs, int rows, int width, int column) {
    constexpr int STAGE = F::UNIT + F::SUPER;
    constexpr int FITTING = MAX_STATIC_SHARED / (WARPS * STAGE);
    constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES;
    static_assert(STAGES >= 2 && STAGES * STAGE >= SUM_BYTES && STAGE % 16 == 0, "no room");
    __shared__ __align__(16) unsigned char ring[WARPS][STAGES * STAGE];

    const int warp = threadIdx.x / 32, lane = kept_lane(threadIdx.x % 32), g = lane / 4, p = lane % 4;
    const BlockOfWeight weight = BlockOfWeight::of<1>(weights, column);
    const Units<F> units(weight.units, weight.outputs, inputs, weight.first_strip);
    const SharedAddress stages = shared_address(ring[warp]);

    // Copies a unit to a place in the ring, if there is one. Counts as a group of copies in any case.
    auto copy = [&](int unit, int place) {
        if (unit < units.count) {
            copy_unit<F>(stages + place, units, unit, lane);
        }
        end_of_copies();
    };
    // No kernel writes weights.
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        copy(warp + i * WARPS, i * STAGE);
    }
    wait_for_previous();

    // Where the unit is in row 0.
    x += UNIT_INPUTS * warp + 4 * p;
    auto load = [&](Activations &to, int unit, int tile) {
        // Units of 256 inputs are whole.
        const bool is_whole = F::SUPER > 0 || UNIT_INPUTS * unit + 32 < inputs;
        to.load(x + min(8 * tile + g, rows - 1) * inputs, is_whole ? 32 : 0);
    };
    float sums[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0.f;
    }
    // Places in the ring: of this unit, and of the one before, whose place the next copies take.
    int place = 0, before_place = (STAGES - 1) * STAGE;
    for (int unit = warp; unit < units.count; unit += WARPS, x += UNIT_INPUTS * WARPS) {
        Activations activations[TILES];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            load(activations[t], unit, t);
        }
        wait_for_copies<STAGES - 2>();
        // Everybody's copies have arrived, and everybody has read what the next copies overwrite.
        __syncwarp();
        copy(unit + (STAGES - 1) * WARPS, before_place);
        const SharedUnit now{stages + place, stages + place + F::UNIT};
        before_place = place;
        place = place + STAGE == STAGES * STAGE ? 0 : place + STAGE;
        uint32_t a[FRAGMENTS][4];
        unpack<F, T>(a, now, lane);
        const Scales scales = read_scales<F, T>(now, g);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            add<F, T>(sums[t], a, scales, activations[t]);
        }
    }
    wait_for_copies<0>();
    const auto sums_of = [&](int warp) { return reinterpret_cast<float *>(ring[warp]); };
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        // A warp overwrites its own part of the ring, or what everybody has added.
        __syncthreads();
        const int first = weight.first_strip * OUTPUTS;
        store_tile<T, WARPS>(sums[t], sums_of(warp), sums_of(0), STAGES * STAGE / sizeof(float),
                             y + (size_t)8 * t * width + weight.column + first, width, rows - 8 * t,
                             weight.outputs - first);
    }
}

// The same for many rows: a warp has STRIPS strips of 16 outputs, so that the activations that it reads serve all of
// them, and 8 * TILES rows, which blockIdx.x selects. It unpacks one block of 32 inputs at a time, for which its
// registers suffice. Every sum has the additions of `product` in their order. In the place of missing rows are zeros.
template <typename F, typename T, int TILES, int WARPS, int STRIPS>
__device__ void product_of_many(const Weights &weights, const T *x, T *y, int inputs, int rows, int width,
                                int column) {
    constexpr int STRIP = F::UNIT + F::SUPER, STAGE = STRIPS * STRIP, STAGES = 2;
    static_assert(STAGES * STAGE >= SUM_BYTES && STRIP % 16 == 0, "no room");
    DYNAMIC_SHARED(memory);

    const int before = blockIdx.x * 8 * TILES;
    x += (size_t)before * inputs;
    y += (size_t)before * width;
    rows = min(rows - before, 8 * TILES);
    const int warp = threadIdx.x / 32, lane = kept_lane(threadIdx.x % 32), g = lane / 4, p = lane % 4;
    unsigned char *ring = memory + warp * STAGES * STAGE;
    const SharedAddress stages = shared_address(ring);
    const BlockOfWeight weight = BlockOfWeight::of<STRIPS>(weights, column);
    const int strips = min(STRIPS, (weight.outputs + OUTPUTS - 1) / OUTPUTS - weight.first_strip);
    const Units<F> units(weight.units, weight.outputs, inputs, weight.first_strip);

    // Strips that do not exist keep what the shared memory holds.
    auto copy = [&](int unit, int place) {
        if (unit < units.count) {
            Units<F> of_strip = units;
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                if (s < strips) {
                    copy_unit<F>(stages + place + s * STRIP, of_strip, unit, lane);
                }
                of_strip.advance();
            }
        }
        end_of_copies();
    };
    // No kernel writes weights.
    copy(warp, 0);
    wait_for_previous();

    x += UNIT_INPUTS * warp + 4 * p + (size_t)g * inputs;
    float sums[STRIPS][TILES][4] = {};
    int place = 0;
    for (int unit = warp; unit < units.count; unit += WARPS, x += UNIT_INPUTS * WARPS, place = STAGE - place) {
        wait_for_copies<0>();
        // Everybody's copies have arrived, and everybody has read what the next copies overwrite.
        __syncwarp();
        copy(unit + WARPS, STAGE - place);
        // Units of 256 inputs are whole.
        const bool is_whole = F::SUPER > 0 || UNIT_INPUTS * unit + 32 < inputs;
#pragma unroll
        for (int block = 0; block < 2; block++) {
            // Those of the next tiles: a pointer to each would not fit in the registers.
            const T *next = x + (block > 0 && is_whole ? 32 : 0);
            const int stride = not_constant(8 * inputs);
            uint2 activations[AHEAD][2];
            auto load = [&](int tile) {
                const bool exists = 8 * tile + g < rows;
                uint2 *to = activations[tile % AHEAD];
                to[0] = exists ? *reinterpret_cast<const uint2 *>(next) : make_uint2(0, 0);
                to[1] = exists ? *reinterpret_cast<const uint2 *>(next + 16) : make_uint2(0, 0);
                next += stride;
            };
#pragma unroll
            for (int t = 0; t < AHEAD; t++) {
                load(t);
            }
            // Those of the other block are not used, and not computed.
            uint32_t a[STRIPS][FRAGMENTS][4];
            Scales scales[STRIPS];
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                const SharedAddress at = stages + place + s * STRIP;
                const SharedUnit now{at, at + F::UNIT};
                unpack<F, T>(a[s], now, lane);
                scales[s] = read_scales<F, T>(now, g);
            }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (8 * t >= rows) {
                    break;
                }
                const uint2 x = activations[t % AHEAD][0], after = activations[t % AHEAD][1];
                if (t + AHEAD < TILES) {
                    load(t + AHEAD);
                }
#pragma unroll
                for (int s = 0; s < STRIPS; s++) {
                    const BlockProducts<F, T> products(a[s][2 * block], a[s][2 * block + 1], x, after);
                    products.add_to(sums[s][t], block, scales[s].scale);
                }
                if constexpr (HAS_OFFSET<F, T>) {
                    const auto all = BlockProducts<F, T>::of_ones(x, after);
#pragma unroll
                    for (int s = 0; s < STRIPS; s++) {
                        all.add_to(sums[s][t], block, scales[s].offset);
                    }
                }
            }
        }
    }
    wait_for_copies<0>();
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            if (8 * t >= rows) {
                break;
            }
            // A warp overwrites its own part of the ring, or what everybody has added.
            __syncthreads();
            const int first = (weight.first_strip + s) * OUTPUTS;
            store_tile<T, WARPS>(sums[s][t], reinterpret_cast<float *>(ring), reinterpret_cast<float *>(memory),
                                 STAGES * STAGE / sizeof(float), y + (size_t)8 * t * width + weight.column + first,
                                 width, rows - 8 * t, weight.outputs - first);
        }
    }
}

// Warps of a block that dequantizes.
constexpr int DEQUANTIZING_WARPS = 8;

// Weights [outputs, inputs] as values of T: row n of y is output ids[n], or without ids output first + n, for
// `count` rows. blockIdx.y selects an id, or 16 outputs; `first` is a multiple of 16.
template <typename F, typename T>
__device__ void dequantize(const unsigned char *w, const uint32_t *ids, T *y, int outputs, int inputs, int first,
                           int count) {
    wait_for_previous();
    const int unit = blockIdx.x * DEQUANTIZING_WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, p = lane % 4;
    const int n = blockIdx.y;
    const uint32_t id = ids ? ids[n] : 0;
    const int strip = ids ? id / OUTPUTS : first / OUTPUTS + n;
    const Units<F> units(w, outputs, inputs, strip);
    if (unit >= units.count || id >= (uint32_t)outputs) {
        return;
    }
    const GlobalUnit stored{units.unit(unit), units.super(unit)};
    uint32_t a[FRAGMENTS][4];
    // All quants are exact in f16.
    unpack<F, f16>(a, stored, lane);
    const Scales scales = read_scales<F, f16>(stored, g);
#pragma unroll
    for (int m = 0; m < FRAGMENTS; m++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int half = j % 2, output = g + 8 * half;
            const int input = UNIT_INPUTS * unit + 16 * m + 4 * p + j / 2 * 2;
            const int row = ids ? n : OUTPUTS * n + output;
            const bool wanted = ids ? output == (int)(id % OUTPUTS) : row < count;
            if (wanted && input < inputs) {
                T *to = y + (size_t)row * inputs + input;
                const float offset = F::Kind::OFFSET ? scales.offset[half][m] : 0.f;
                to[0] = narrow<T>(fmaf(scales.scale[half][m], low_half(a[m][j]), offset));
                to[1] = narrow<T>(fmaf(scales.scale[half][m], high_half(a[m][j]), offset));
            }
        }
    }
}

// Blocks that a multiprocessor has room for, so many that enough copies are on their way.
constexpr int min_blocks(int tiles, int warps) { return tiles == 1 ? 32 / warps : warps == 8 ? 3 : 2; }

#define PRODUCT_KERNEL(NAME, T, SUFFIX, TILES, WARPS, BLOCKS, FUNCTION)                                       \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                          \
        product_##NAME##_##TILES##_##WARPS##_##SUFFIX(                                                        \
            const unsigned char *first, const unsigned char *second, const unsigned char *third, int outputs, \
            int outputs_of_second, int outputs_of_third, const T *x, T *y, int inputs, int rows, int width,   \
            int column) {                                                                                     \
        const Weights weights{{first, second, third}, {outputs, outputs_of_second, outputs_of_third}};        \
        FUNCTION(weights, x, y, inputs, rows, width, column);                                                 \
    }
#define PRODUCT(F, NAME, T, SUFFIX, TILES, WARPS)                                                             \
    PRODUCT_KERNEL(NAME, T, SUFFIX, TILES, WARPS, min_blocks(TILES, WARPS), (product<F, T, TILES, WARPS>))
#define PRODUCT_OF_MANY(F, NAME, T, SUFFIX, WARPS, STRIPS)                                                    \
    PRODUCT_KERNEL(NAME, T, SUFFIX, 4, WARPS, 1, (product_of_many<F, T, 4, WARPS, STRIPS>))
#define PRODUCTS(F, NAME, T, SUFFIX)                                                                          \
    PRODUCT(F, NAME, T, SUFFIX, 1, 8)                                                                         \
    PRODUCT(F, NAME, T, SUFFIX, 2, 8)                                                                         \
    PRODUCT_OF_MANY(F, NAME, T, SUFFIX, 8, 4)                                                                 \
    PRODUCT(F, NAME, T, SUFFIX, 1, 16)                                                                        \
    PRODUCT(F, NAME, T, SUFFIX, 2, 16)                                                                        \
    PRODUCT_OF_MANY(F, NAME, T, SUFFIX, 16, 2)
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
