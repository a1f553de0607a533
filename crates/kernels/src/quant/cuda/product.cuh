// Products of a few rows with a quantized weight, limited by the memory's bandwidth.
//
// Tensor cores multiply activations with quants, which are exact integers, or floats of 8 bits, in f16 and in bf16. The
// sum over a block of 32 inputs (16 if each 16 have a scale of their own) is then multiplied with the block's scale, in
// f32, and added to the sum of the row; an offset, and what all quants of the block have too much (IN_BASE), is
// multiplied with the sum of the block's activations, which tensor cores also compute. So no weight is rounded, and a row has the same additions in the same order in any
// number of rows. In the place of missing rows is the last one again, and in that of a missing block of inputs the
// one before, which is multiplied with scales of zero, or with floats that are zero.
//
// A block of the grid computes 16 outputs. Each of its WARPS warps takes every WARPS-th unit of 64 inputs, and
// their sums are added in the order of the warps. So WARPS must depend on the weight alone. A block of a product with gate
// and up has WARPS warps for 16 outputs of each.
#pragma once
#include "../../gated_tile.cuh"
#include "unpack.cuh"

// Bytes of shared memory that a block has without asking for more.
constexpr int MAX_STATIC_SHARED = 48 << 10;
// Units that are on their way or in use per warp, at most.
constexpr int MAX_STAGES = 4;
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

    BlockProducts() = default;
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

// A warp copies a unit, and what it shares with others, to shared memory. `units` begins at the thread's 16 bytes.
template <typename F>
__device__ __forceinline__ void copy_unit(SharedAddress to, const Units<F> &units, int unit, int lane) {
    to += 16 * lane;
    const unsigned char *from = units.unit(unit);
#pragma unroll
    for (int at = 0; at < F::UNIT; at += 512) {
        if (at + 512 <= F::UNIT || lane < (F::UNIT - at) / 16) {
            copy_async_to(to + at, from + at);
        }
    }
    if (F::SUPER > 0 && lane < F::SUPER / 16) {
        copy_async_to(to + F::UNIT, units.super(unit));
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

// The ring of units of a warp, of WARPS that share the units of a strip.
template <typename F, int WARPS> struct WarpRing {
    static constexpr int STAGE = F::UNIT + F::SUPER, FITTING = MAX_STATIC_SHARED / (WARPS * STAGE);
    static constexpr int STAGES = FITTING < MAX_STAGES ? FITTING : MAX_STAGES, BYTES = STAGES * STAGE;
    static_assert(STAGES >= 2 && BYTES >= SUM_BYTES && STAGE % 16 == 0, "no room");
};

// The sums of a warp, number `warp` of WARPS that share the strip, over its units, for up to 8 * TILES rows.
template <typename F, typename T, int TILES, int WARPS>
__device__ __forceinline__ void multiply_strip(float (&sums)[TILES][4], unsigned char *ring, const BlockOfWeight &weight,
                                               const T *x, int inputs, int rows, int warp) {
    constexpr int STAGE = WarpRing<F, WARPS>::STAGE, STAGES = WarpRing<F, WARPS>::STAGES;
    const int lane = kept_lane(threadIdx.x % 32), g = lane / 4, p = lane % 4;
    Units<F> units(weight.units, weight.outputs, inputs, weight.first_strip);
    units.units += 16 * lane;
    units.supers += 16 * lane;
    const SharedAddress stages = shared_address(ring);

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
}

// The outputs of a strip of a weight: x is [rows, inputs], y is [rows, width]; for up to 8 * TILES rows. `rings` has a ring
// for each of WARPS warps.
template <typename F, typename T, int TILES, int WARPS>
__device__ __forceinline__ void product_of_strip(unsigned char *rings, const BlockOfWeight &weight, const T *x, T *y, int inputs,
                                                 int rows, int width) {
    constexpr int BYTES = WarpRing<F, WARPS>::BYTES;
    const int warp = threadIdx.x / 32, first = weight.first_strip * OUTPUTS;
    unsigned char *ring = rings + warp * BYTES;
    float sums[TILES][4];
    multiply_strip<F, T, TILES, WARPS>(sums, ring, weight, x, inputs, rows, warp);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        // A warp overwrites its own part of the ring, or what everybody has added.
        __syncthreads();
        store_tile<T, WARPS>(sums[t], reinterpret_cast<float *>(ring), reinterpret_cast<float *>(rings),
                             BYTES / sizeof(float), y + (size_t)8 * t * width + weight.column + first, width, rows - 8 * t,
                             weight.outputs - first);
    }
}

// y: [rows, width], of which the outputs of these weights begin at `column`.
template <typename F, typename T, int TILES, int WARPS>
__device__ void product(const Weights &weights, const T *x, T *y, int inputs, int rows, int width, int column) {
    __shared__ __align__(16) unsigned char rings[WARPS * WarpRing<F, WARPS>::BYTES];
    const BlockOfWeight weight = BlockOfWeight::of<1>(weights, column);
    product_of_strip<F, T, TILES, WARPS>(rings, weight, x, y, inputs, rows, width);
}

// activation(gate) * up of weights [outputs, inputs]; y: [rows, outputs].
template <typename F, typename T, int TILES, int WARPS>
__device__ void gated_product(const unsigned char *gate, const unsigned char *up, const T *x, T *y, int outputs, int inputs,
                              int rows, int activation) {
    constexpr int BYTES = WarpRing<F, WARPS>::BYTES;
    DYNAMIC_SHARED(rings);
    const int number = threadIdx.x / 32, warp = number % WARPS, strip = blockIdx.y;
    unsigned char *ring = rings + number * BYTES;
    float sums[TILES][4];
    multiply_strip<F, T, TILES, WARPS>(sums, ring, {number < WARPS ? gate : up, outputs, strip, 0}, x, inputs, rows, warp);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        // See above.
        __syncthreads();
        const int first = strip * OUTPUTS;
        store_gated_tile<T, WARPS>(sums[t], reinterpret_cast<float *>(ring), reinterpret_cast<float *>(rings),
                                   BYTES / sizeof(float), y + (size_t)8 * t * outputs + first, outputs, rows - 8 * t,
                                   outputs - first, activation);
    }
}
