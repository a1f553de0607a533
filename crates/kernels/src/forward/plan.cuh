// What one launch computes: a list of phases, each of which reads what earlier phases have written. plan.rs writes
// these structs, field by field.
#pragma once
#include "../cuda/common.cuh"
#include "../quant/cuda/unpack.cuh"

// Warps that compute, half of them, and steps of a strip that are copied together.
constexpr int WARPS = 16, HALF_WARPS = 8, STEPS = 2;
constexpr int COMPUTING = WARPS * 32;
// Their threads, then a warp that copies weights.
constexpr int FORWARD_THREADS = COMPUTING + 32;
// Weights that a phase multiplies, at most.
constexpr int MAX_PARTS = 3;

enum Kind {
    // The products with the norm of the stream; their outputs are side by side.
    QKV,
    // Rope, the write of K and V, and attention.
    ATTENTION,
    // A product that is added to the stream: of the attention's output, or of the MLP's gated values.
    ATTENTION_OUT,
    DOWN,
    // activation(gate) * up of products with the norm of the stream: one part each.
    GATE_UP,
    // The product with the norm of the wanted rows of the stream, or only that norm.
    LOGITS,
    NORM,
};

enum PoolKind { NUMBERS, BLOCKS_OF_8_BITS, FLOAT8S };

// The format of a weight in the type of activations, [outputs, inputs]. Its units have DENSE_INPUTS inputs of 16 outputs:
// a step of gemv.cu. In shared memory, the units of an output follow each other in rows with a place between them, so
// that the threads of a warp read different banks.
constexpr int DENSE = 0, DENSE_INPUTS = 32, DENSE_UNIT = 2 * DENSE_INPUTS, DENSE_ROW = WARPS * DENSE_UNIT + 64;

// A weight that is multiplied, or some strips of it: see unpack.cuh.
struct Part {
    // Its units, and the parts that units share; a dense weight, and nothing.
    const unsigned char *units, *supers;
    // [outputs], in the type of activations; null = none.
    const void *bias;
    // The number of its blocks in GGUF files, QuantKind's or DENSE, and the warps of a strip.
    int format, warps;
    int unit_bytes, super_bytes;
    // Its strips in the weight.
    int first, strips;
    // Its outputs, and the first of them in the phase's result.
    int outputs, column;
};

struct Phase {
    Part parts[MAX_PARTS];
    // Weights of the norm of the stream, the pools, and weights of the norms of heads.
    const void *norm, *k, *v, *q_norm, *k_norm;
    const float *sinks;
    // Of pools in blocks.
    const void *k_scales, *v_scales;
    int kind, part_count;
    // Values of a row that are multiplied, and of a row of the result.
    int inputs, width;
    // Whether it is the first layer: the stream is the embedding, to which nothing was added.
    int is_first;
    // 0 = SiLU, 1 = GELU, 2 = GELU by tanh.
    int activation;
    // As in Heads.
    int half, whole;
    float head_eps;
    // As in Scores.
    float scale, cap;
    int window;
    // What the pools are, a PoolKind.
    int pools;
};

struct Plan {
    const Phase *phases;
    // For each phase, the blocks that have ended it; for each tile and K/V head, the chunks that are done.
    unsigned *ended, *arrived;
    // Results of phases: [rows, width] each, in the type of activations.
    void *qkv, *attended, *wide;
    int count, hidden, heads, kv_heads, d, block_size;
    float eps;
    // Bytes of a half of a slot of the ring.
    int half_bytes;
};

static_assert(sizeof(Part) == 7 * 8 && sizeof(Phase) == (3 * 7 + 15) * 8 && sizeof(Plan) == 10 * 8, "as in plan.rs");

// The rows of one call. The residual stream `x`, [rows, hidden], is overwritten.
template <typename T> struct Rows {
    T *x;
    // [rows, half]
    const T *cos, *sin;
    const uint32_t *slots;
    // As in Args of attention.
    const struct Tile *tiles;
    const uint32_t *blocks;
    const uint64_t *trees;
    float *partials;
    // The rows whose logits, [wanted_count, vocabulary], or norms, [wanted_count, hidden], are computed.
    const uint32_t *wanted;
    float *logits;
    T *normed;
    int rows, wanted_count, tile_count, chunks;
};

// A strip of a part; part = null: none.
struct Strip {
    const Part *part;
    int index;
};

// What a block computes at a time: two strips at once, by eight warps each, or one or two after each other, by all
// warps.
struct Work {
    // The second one may be none.
    Strip first, second;

    __device__ __forceinline__ int warps() const { return first.part->warps; }
    __device__ __forceinline__ int passes() const { return warps() == WARPS && second.part ? 2 : 1; }
    // The strip of one half of the warps in a pass.
    __device__ __forceinline__ Strip of(int pass, int half) const {
        return (warps() == WARPS ? pass : half) == 0 ? first : second;
    }
};

__device__ __forceinline__ int works_of(const Part &part) { return part.warps == WARPS ? part.strips : (part.strips + 1) / 2; }

// Number of works of a phase.
__device__ __forceinline__ int works_of(const Phase &phase) {
    if (phase.kind == GATE_UP) {
        return phase.parts[0].strips;
    }
    int count = 0;
    for (int i = 0; i < phase.part_count; i++) {
        count += works_of(phase.parts[i]);
    }
    return count;
}

__device__ __forceinline__ Work work_of(const Phase &phase, int number) {
    if (phase.kind == GATE_UP) {
        return {{&phase.parts[0], number}, {&phase.parts[1], number}};
    }
    const Part *part = phase.parts;
    for (int works = works_of(*part); number >= works; works = works_of(*part)) {
        number -= works;
        part++;
    }
    if (part->warps == WARPS) {
        return {{part, number}, {nullptr, 0}};
    }
    const bool both = 2 * number + 1 < part->strips;
    return {{part, 2 * number}, {both ? part : nullptr, 2 * number + 1}};
}

// Units of a strip.
__device__ __forceinline__ int units_of(int format, int inputs) {
    return format == DENSE ? inputs / DENSE_INPUTS : (inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
}

// A half of a slot of the ring has up to HALF_UNITS units that follow each other in a strip, and the parts that these
// share. HALF_LANES lanes of the copying warp copy it, each one range: all units, what they share, or those of an output.
constexpr int HALF_UNITS = WARPS, HALF_LANES = 16;
struct RangeCopy {
    const unsigned char *from;
    // Its place in the half.
    int to, bytes;
};

// What lane `lane` of them copies from unit `first` on, of the `count` units of a strip.
__device__ __forceinline__ RangeCopy copy_of(const Part &part, int strip, int first, int count, int lane) {
    const int units = min(count - first, HALF_UNITS);
    const size_t number = part.first + strip;
    if (units <= 0) {
        return {nullptr, 0, 0};
    }
    if (part.format == DENSE) {
        // In the place of missing outputs is the last one again.
        const size_t output = OUTPUTS * (size_t)part.first + min(OUTPUTS * strip + lane, part.outputs - 1);
        return {part.units + (output * count + first) * DENSE_UNIT, lane * DENSE_ROW, units * DENSE_UNIT};
    }
    if (lane == 0) {
        return {part.units + (number * count + first) * part.unit_bytes, 0, units * part.unit_bytes};
    }
    if (lane == 1) {
        return {part.supers + (number * (count / 4) + first / 4) * part.super_bytes, HALF_UNITS * part.unit_bytes,
                (units + 3) / 4 * part.super_bytes};
    }
    return {nullptr, 0, 0};
}
