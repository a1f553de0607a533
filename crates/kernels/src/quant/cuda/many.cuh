// Products of more than 8 rows with a quantized weight, with the bits that product.cuh gives a row.
//
// There, each of `chains` warps has a sum of its own, of every chains-th unit, and their sums are added in the order of
// the warps. Here, these sums are called chains: a warp computes one after the other, so a block may have any number of
// outputs and rows, whatever the weight has chains. What the activations of rows add up to, for offsets, is computed
// once for all strips of a block.
#pragma once
#include "product.cuh"

namespace many {

// A block computes STRIPS strips of 16 outputs of 8 * TILES rows. Its warps are GROUPS groups of a warp for each strip.
// Groups compute different chains at the same time. The warps of a group share the activations that they copy to
// shared memory, as a ring of STAGES units. A multiprocessor has room for BLOCKS blocks.
template <int STRIPS_, int TILES_, int GROUPS_, int STAGES_, int BLOCKS_> struct Shape {
    static constexpr int STRIPS = STRIPS_, TILES = TILES_, GROUPS = GROUPS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr int ROWS = 8 * TILES, WARPS = STRIPS * GROUPS, THREADS = 32 * WARPS;
    static constexpr int GROUP_THREADS = 32 * STRIPS;
};
// As in quant/cuda.rs. Low blocks are for 9 to 16 rows.
using Low = Shape<4, 2, 4, 3, 2>;
using Small = Shape<2, 4, 8, 2, 1>;
using Medium = Shape<4, 4, 4, 3, 1>;
using Large = Shape<8, 8, 2, 3, 1>;

// Bytes of a row's activations of a unit, and the bytes of them that the threads of a fragment's row read.
constexpr int ROW_BYTES = UNIT_INPUTS * 2, FRAGMENT_BYTES = ROW_BYTES / FRAGMENTS;
// Tiles between which the compiler may move instructions.
constexpr int TOGETHER = 2;

// A unit of a chain. GROUPS chains from `chain` on are a round, in which each group computes one of them.
struct Place {
    int chain, unit;

    // Goes to the group's next unit, and returns whether it is one of the next round. All groups get there at the same
    // time: the units of the round's first chain are counted, which has the most.
    template <int GROUPS> __device__ __forceinline__ bool advance(int chains, int group, int count) {
        unit += chains;
        if (unit - group < count) {
            return false;
        }
        chain += GROUPS;
        unit = chain + group;
        return true;
    }
};

// What the activations of each row add up to in a block of inputs, as of_ones computes it: of rows 2 p and 2 p + 1 of a
// tile, for block after block and part after part.
template <typename F, typename T> struct RowSums {
    using Products = BlockProducts<F, T>;
    static constexpr int LOADS = Products::PARTS, TILE_BYTES = 4 * LOADS * 16;

    // Of a tile. One output has what all have.
    __device__ __forceinline__ static void store(float2 *tile, const Activations &rows, int lane) {
#pragma unroll
        for (int block = 0; block < 2; block++) {
            const auto all = Products::of_ones(rows.x[2 * block], rows.x[2 * block + 1]);
#pragma unroll
            for (int part = 0; part < Products::PARTS; part++) {
                if (lane < 4) {
                    tile[(lane * 2 + block) * Products::PARTS + part] = make_float2(all.parts[part][0], all.parts[part][1]);
                }
            }
        }
    }

    float values[LOADS][4];
    __device__ __forceinline__ void load(SharedAddress tile, int p) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const uint4 bits = load_shared_16(tile + 16 * (LOADS * p + i));
            values[i][0] = __uint_as_float(bits.x), values[i][1] = __uint_as_float(bits.y);
            values[i][2] = __uint_as_float(bits.z), values[i][3] = __uint_as_float(bits.w);
        }
    }
    __device__ __forceinline__ Products of_block(int block) const {
        Products products;
#pragma unroll
        for (int part = 0; part < Products::PARTS; part++) {
            const int at = Products::PARTS * block + part;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                products.parts[part][i] = values[at / 2][at % 2 * 2 + i % 2];
            }
        }
        return products;
    }
};

// The activations of a unit in shared memory: 128 bytes a row, whose fragments lie in another order in each of four
// rows, so that the threads of a warp read them without bank conflicts.
struct SharedRows {
    SharedAddress at[FRAGMENTS];

    __device__ __forceinline__ SharedRows(SharedAddress rows, int g, int p) {
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            at[m] = rows + ROW_BYTES * g + 8 * p + (m ^ g % 4) * FRAGMENT_BYTES;
        }
    }
    __device__ __forceinline__ Activations tile(int t) const {
        Activations rows;
#pragma unroll
        for (int m = 0; m < FRAGMENTS; m++) {
            rows.x[m] = load_shared_8(at[m] + 8 * ROW_BYTES * t);
        }
        return rows;
    }
};

// x: [rows, inputs]; y: [rows, width], of which the outputs of these weights begin at `column`. The block computes rows from
// `before` on. If the product is GATED, the first two weights are gate and up, a block has half of its strips of each, and
// y is activation(gate) * up.
template <typename F, typename T, typename S, bool GATED = false>
__device__ void product(const Weights &weights, const T *x, T *y, int inputs, int rows, int width, int column,
                        int chains, int before, int activation = 0) {
    constexpr int STRIP = F::UNIT + F::SUPER, STRIPS_AT = S::ROWS * ROW_BYTES;
    // Also room for the sums of two tiles. As in quant/cuda.rs.
    constexpr int READ = STRIPS_AT + S::STRIPS * STRIP, TWO_TILES = 2 * S::STRIPS * SUM_BYTES;
    constexpr int GROUP = READ > TWO_TILES ? READ : TWO_TILES, STAGE = S::GROUPS * GROUP;
    static_assert(STRIP % 16 == 0, "copies have 16 bytes");
    using Sums = RowSums<F, T>;
    constexpr int SUMS = S::TILES * Sums::TILE_BYTES;
    DYNAMIC_SHARED(memory);
    __shared__ __align__(16) unsigned char row_sums[S::GROUPS * SUMS];

    x += (size_t)before * inputs;
    y += (size_t)before * width;
    rows = min(rows - before, S::ROWS);
    const int warp = threadIdx.x / 32, lane = kept_lane(threadIdx.x % 32), g = lane / 4, p = lane % 4;
    const int group = warp / S::STRIPS, strip = warp % S::STRIPS;
    // Strips of a weight.
    constexpr int STRIPS = GATED ? S::STRIPS / 2 : S::STRIPS;
    const BlockOfWeight weight =
        GATED ? BlockOfWeight{strip < STRIPS ? weights.units[0] : weights.units[1], weights.outputs[0], (int)blockIdx.y * STRIPS, column}
              : BlockOfWeight::of<STRIPS>(weights, column);
    const int of_weight = weight.first_strip + strip % STRIPS;
    const bool exists = of_weight < (weight.outputs + OUTPUTS - 1) / OUTPUTS;
    Units<F> units(weight.units, weight.outputs, inputs, of_weight);
    const SharedAddress own = shared_address(memory + group * GROUP);
    auto sync_group = [&] { sync_team<S::GROUP_THREADS>(1 + group); };

    // A thread copies 16 bytes of its strip's unit, and the same 16 bytes of some rows, ROWS_APART apart. Rows that do not
    // exist keep what the shared memory holds, which no other row gets.
    constexpr int PIECES = ROW_BYTES / 16, ROWS_APART = S::GROUP_THREADS / PIECES, COPIES = S::ROWS / ROWS_APART;
    static_assert(ROWS_APART % 4 == 0, "all rows of a thread have the same order");
    const int number = threadIdx.x % S::GROUP_THREADS, piece = number % PIECES, first_row = number / PIECES;
    const int to_piece = not_constant(first_row * ROW_BYTES + (piece / 2 ^ first_row % 4) * FRAGMENT_BYTES + piece % 2 * 16);
    const auto *from_piece = kept(reinterpret_cast<const unsigned char *>(x + (size_t)first_row * inputs + 8 * piece));
    const int rows_left = not_constant(rows - first_row);
    units.units = kept(units.units + 16 * lane);
    units.supers = kept(units.supers + 16 * lane);
    auto copy = [&](int stage, const Place &from, bool of_weights, bool of_rows) {
        if (from.unit >= units.count) {
            return;
        }
        const SharedAddress to = own + stage;
        if (of_rows) {
            // Units of 256 inputs are whole. The block before is in the place of a missing one.
            const bool is_whole = F::SUPER > 0 || UNIT_INPUTS * from.unit + 32 < inputs;
            const auto *at = from_piece + (size_t)from.unit * ROW_BYTES;
            at -= is_whole || piece < PIECES / 2 ? 0 : ROW_BYTES / 2;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                if (i * ROWS_APART < rows_left) {
                    copy_async_to(to + to_piece + i * ROWS_APART * ROW_BYTES,
                                  at + (size_t)inputs * (i * ROWS_APART * (int)sizeof(T)));
                }
            }
        }
        if (of_weights && exists) {
            copy_unit<F>(to + STRIPS_AT + strip * STRIP, units, from.unit, lane);
        }
    };
    Place next{0, group};
    // No kernel writes weights.
#pragma unroll
    for (int stage = 0; stage < S::STAGES - 1; stage++) {
        copy(stage * STAGE, next, true, false);
        next.advance<S::GROUPS>(chains, group, units.count);
    }
    wait_for_previous();
    next = {0, group};
#pragma unroll
    for (int stage = 0; stage < S::STAGES - 1; stage++) {
        copy(stage * STAGE, next, false, true);
        end_of_copies();
        next.advance<S::GROUPS>(chains, group, units.count);
    }

    float sums[S::TILES][4] = {};
    // At the end of a round, the chains of all groups are added to the totals, a few tiles at a time, through the stage
    // that was read last. A thread adds up pairs of values, in the order in which a warp's threads hold them.
    constexpr int FITTING = GROUP / (S::STRIPS * SUM_BYTES), AT_ONCE = FITTING >= 4 ? 4 : 2;
    constexpr int PARTS = S::TILES / AT_ONCE, PAIRS = AT_ONCE * S::STRIPS * 64 / S::THREADS;
    static_assert(FITTING >= 2 && PAIRS * S::THREADS == AT_ONCE * S::STRIPS * 64, "no room");
    float2 totals[PARTS][PAIRS] = {};
    auto end_round = [&](int stage) {
        unsigned char *first = memory + stage;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            if (8 * AT_ONCE * part >= rows) {
                break;
            }
            // All have read the stage, or what was stored there before.
            __syncthreads();
#pragma unroll
            for (int t = 0; t < AT_ONCE; t++) {
                float (&sum)[4] = sums[AT_ONCE * part + t];
                float2 *to = reinterpret_cast<float2 *>(first + group * GROUP) + (t * S::STRIPS + strip) * 64 + lane;
                to[0] = make_float2(sum[0], sum[1]);
                to[32] = make_float2(sum[2], sum[3]);
                sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                float2 &total = totals[part][i];
#pragma unroll
                for (int j = 0; j < S::GROUPS; j++) {
                    const float2 sum = reinterpret_cast<const float2 *>(first + j * GROUP)[threadIdx.x + i * S::THREADS];
                    total.x = __fadd_rn(total.x, sum.x);
                    total.y = __fadd_rn(total.y, sum.y);
                }
            }
        }
        // Before somebody copies to the stage.
        __syncthreads();
    };

    SharedAddress own_sums = own;
    if constexpr (HAS_OFFSET<F, T>) {
        own_sums = shared_address(row_sums + group * SUMS);
    }
    // Places in the ring: of this stage, and of the one before, whose place the next copies take.
    int stage = 0, stage_before = (S::STAGES - 1) * STAGE;
    for (Place now{0, group}; now.chain < min(chains, units.count);) {
        wait_for_copies<S::STAGES - 2>();
        // Everybody's copies have arrived, and everybody has read what the next copies overwrite.
        sync_group();
        copy(stage_before, next, true, true);
        end_of_copies();
        next.advance<S::GROUPS>(chains, group, units.count);
        // The same for the whole group.
        if (now.unit < units.count) {
            const SharedAddress stored = own + stage, at = stored + STRIPS_AT + strip * STRIP;
            const SharedRows activations(stored, g, p);
            if constexpr (HAS_OFFSET<F, T>) {
#pragma unroll
                for (int t = 0; t < S::TILES; t += S::STRIPS) {
                    if (8 * (t + strip) < rows) {
                        float2 *tile = reinterpret_cast<float2 *>(row_sums + group * SUMS + (t + strip) * Sums::TILE_BYTES);
                        Sums::store(tile, activations.tile(t + strip), lane);
                    }
                }
            }
            uint32_t a[FRAGMENTS][4];
            const SharedUnit unit{at, at + F::UNIT};
            unpack<F, T>(a, unit, lane);
            const Scales scales = read_scales<F, T>(unit, g);
            if constexpr (HAS_OFFSET<F, T>) {
                sync_group();
            }
#pragma unroll
            for (int t = 0; t < S::TILES; t++) {
                if (t % TOGETHER == 0 && 8 * t >= rows) {
                    break;
                }
                const Activations tile = activations.tile(t);
                Sums of_rows;
                if constexpr (HAS_OFFSET<F, T>) {
                    of_rows.load(own_sums + t * Sums::TILE_BYTES, p);
                }
#pragma unroll
                for (int block = 0; block < 2; block++) {
                    const BlockProducts<F, T> products(a[2 * block], a[2 * block + 1], tile.x[2 * block],
                                                       tile.x[2 * block + 1]);
                    products.add_to(sums[t], block, scales.scale);
                    if constexpr (HAS_OFFSET<F, T>) {
                        of_rows.of_block(block).add_to(sums[t], block, scales.offset);
                    }
                }
            }
        }
        if (now.advance<S::GROUPS>(chains, group, units.count)) {
            end_round(stage);
        }
        stage_before = stage;
        stage = stage + STAGE == S::STAGES * STAGE ? 0 : stage + STAGE;
    }
    wait_for_copies<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            // See end_round.
            const int index = threadIdx.x + i * S::THREADS, of = index % 32, half = index / 32 % 2;
            const int output = (weight.first_strip + index / 64 % STRIPS) * OUTPUTS + of / 4 + 8 * half;
            const int row = 8 * (AT_ONCE * part + index / 64 / S::STRIPS) + 2 * (of % 4);
            const float2 total = totals[part][i];
            bool is_stored = output < weight.outputs;
            T first = narrow<T>(total.x), second = narrow<T>(total.y);
            if constexpr (GATED) {
                // Through the shared memory, which nobody reads any more after the first barrier.
                float2 *all = reinterpret_cast<float2 *>(memory);
                __syncthreads();
                all[threadIdx.x] = total;
                __syncthreads();
                is_stored = is_stored && index / 64 % S::STRIPS < STRIPS;
                const float2 up = all[is_stored ? threadIdx.x + 64 * STRIPS : threadIdx.x];
                first = gated(activation, first, narrow<T>(up.x));
                second = gated(activation, second, narrow<T>(up.y));
            }
            T *to = y + (size_t)row * width + weight.column + output;
            if (is_stored && row < rows) {
                to[0] = first;
            }
            if (is_stored && row + 1 < rows) {
                to[width] = second;
            }
        }
    }
}

} // namespace many
