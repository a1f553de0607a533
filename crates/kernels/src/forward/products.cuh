// The phases with products: norms before them, and what becomes of their sums.
#pragma once
#include "../glu.cuh"
#include "../norm.cuh"
#include "../quant/cuda/formats.cuh"
#include "../quant/cuda/product.cuh"
#include "ring.cuh"

// Passes whose sums are kept before all warps finish them together, each for so many tiles of rows. Few phases have
// more for a block, so these wait for one another only once.
template <int TILES> constexpr int KEPT = 4 / TILES;
// Sums of a strip and a tile of rows, and the most rows of a call.
constexpr int TILE_SUMS = OUTPUTS * 8, MAX_FORWARD_ROWS = 16;
// Values between the normed rows, so that the threads of a warp read different banks.
constexpr int ROW_PADDING = 16;

// Shared memory of such a phase.
template <int TILES> struct ProductMemory {
    // Sums of warps.
    float sums[KEPT<TILES>][TILES][WARPS][TILE_SUMS];
    float squares[MAX_FORWARD_ROWS][MAX_NORM_THREADS / 32];
    // Then the normed rows.
};

// Rows that are multiplied: in global or in shared memory.
template <typename T> struct Inputs {
    const T *first;
    int stride, count;

    __device__ __forceinline__ const T *row(int i) const { return first + (size_t)min(i, count - 1) * stride; }
};

// A value of the stream. `is_first`: nothing was added to it, which makes zeros positive.
template <typename T> __device__ __forceinline__ T streamed(T value, bool is_first) {
    return is_first ? residual_sum(value, narrow<T>(0.f)) : value;
}

// Brings memory that is soon read into the first-level cache.
__device__ __forceinline__ void prefetch(const void *at) {
#ifdef __CUDACC__
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
#else
    (void)at;
#endif
}

// The norms of `rows` rows of `x`, those that `ids` names if it is not null, with the bits of add_norm. All computing
// threads call it.
template <typename T>
__device__ __forceinline__ void norm_rows(const T *x, const uint32_t *ids, int rows, int width, const T *weight, float eps,
                                          bool is_first, float (*squares)[MAX_NORM_THREADS / 32], T *to, int stride) {
    constexpr int LEN = Pack<T>::LEN;
    const int threads = norm_threads<T>(width), warps = threads / 32, lane = threadIdx.x % 32;
    // Calls `work` with each row, the warp that would have taken it, and a pack of this thread.
    auto for_packs = [&](auto begin, auto work, auto end) {
        for (int i = threadIdx.x / 32; i < rows * warps; i += WARPS) {
            const int row = i / warps, warp = i % warps;
            const T *from = x + (size_t)(ids ? ids[row] : row) * width;
            begin(row);
#pragma unroll
            for (int p = 0; p < NORM_PACKS; p++) {
                const int at = (32 * warp + lane + p * threads) * LEN;
                if (at < width) {
                    Pack<T> pack;
                    pack.load(from + at);
#pragma unroll
                    for (int j = 0; j < LEN; j++) {
                        pack.values[j] = streamed(pack.values[j], is_first);
                    }
                    work(row, at, pack);
                }
            }
            end(row, warp);
        }
    };
    float value;
    for_packs([&](int) { value = 0.f; },
              [&](int, int at, const Pack<T> &pack) {
                  prefetch(weight + at);
#pragma unroll
                  for (int j = 0; j < LEN; j++) {
                      value = fmaf(widen(pack.values[j]), widen(pack.values[j]), value);
                  }
              },
              [&](int row, int warp) {
                  value = warp_sum(value);
                  if (lane == 0) {
                      squares[row][warp] = value;
                  }
              });
    sync_computing();
    for_packs([&](int row) { value = norm_scale(sum_of_warps(squares[row], warps), width, eps); },
              [&](int row, int at, const Pack<T> &pack) {
                  Pack<T> by, out;
                  by.load(weight + at);
#pragma unroll
                  for (int j = 0; j < LEN; j++) {
                      out.values[j] = normalized(pack.values[j], value, by.values[j]);
                  }
                  *reinterpret_cast<uint4 *>(to + (size_t)row * stride + at) = out.bits;
              },
              [](int, int) {});
    sync_computing();
}

// sums += the units of a strip that are this warp's: as in product.cuh, `warp` of its warps takes every such unit. A slot
// of the ring has those of two steps.
template <typename F, typename T, int TILES>
__device__ __forceinline__ void add_units(float (&sums)[TILES][4], Ring &ring, const Inputs<T> &x, int inputs, int warps,
                                          int warp, bool exists) {
    const int lane = kept_lane(threadIdx.x % 32), g = lane / 4, p = lane % 4;
    const int count = (inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    const Places places(warp, warps, ring.half_bytes, F::UNIT, F::SUPER);
    const T *rows[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        rows[t] = x.row(8 * t + g) + UNIT_INPUTS * warp + 4 * p;
    }
    for (int unit = warp; unit - warp < count; unit += STEPS * warps) {
        // Loads what the activations of a step are.
        Activations activations[STEPS][TILES];
        auto load = [&](int step) {
            const int at = unit + step * warps;
            // Units of 256 inputs are whole.
            const bool is_whole = F::SUPER > 0 || UNIT_INPUTS * at + 32 < inputs;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                activations[step][t].load(rows[t] + step * UNIT_INPUTS * warps, is_whole ? 32 : 0);
            }
        };
        uint32_t a[STEPS][FRAGMENTS][4];
        Scales scales[STEPS];
        auto read = [&](SharedAddress slot, int step) {
            const SharedUnit stored{slot + places.units[step], slot + places.shared[step]};
            unpack<F, T>(a[step], stored, lane);
            scales[step] = read_scales<F, T>(stored, g);
        };
        auto add_step = [&](int step) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                add<F, T>(sums[t], a[step], scales[step], activations[step][t]);
            }
        };
        if (exists && unit + warps < count) {
            load(0);
            load(1);
            const SharedAddress slot = ring.wait();
            read(slot, 0);
            if constexpr (TILES > 1) {
                add_step(0);
            }
            read(slot, 1);
            ring.release();
            if constexpr (TILES == 1) {
                add_step(0);
            }
            add_step(1);
        } else if (exists && unit < count) {
            load(0);
            read(ring.wait(), 0);
            ring.release();
            add_step(0);
        } else {
            ring.wait();
            ring.release();
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            rows[t] += STEPS * UNIT_INPUTS * warps;
        }
    }
}

// Calls add_units for the format of the part.
template <typename T, int TILES>
__device__ __forceinline__ void multiply_strip(float (&sums)[TILES][4], Ring &ring, const Inputs<T> &x, int inputs, int warps,
                                               const Strip &strip) {
    const int warp = threadIdx.x / 32 % warps;
    const bool exists = strip.part != nullptr;
#define CASE(F, NUMBER)                                                                            \
    case NUMBER:                                                                                   \
        add_units<F, T, TILES>(sums, ring, x, inputs, warps, warp, exists);                        \
        break;
    switch (exists ? strip.part->format : 2) { FOR_FORMATS(CASE) }
#undef CASE
}

// The sum over the warps of a strip, in their order; `own` are the sums of the first one at one place.
__device__ __forceinline__ float sum_of_strip(const float *own, int warps) {
    float sum = 0.f;
    for (int first = 0; first < warps; first += HALF_WARPS) {
#pragma unroll
        for (int warp = 0; warp < HALF_WARPS; warp++) {
            sum = __fadd_rn(sum, own[(first + warp) * TILE_SUMS]);
        }
    }
    return sum;
}

// What becomes of a phase's sums.
template <typename T> struct Results {
    const Plan &plan;
    const Phase &phase;
    const Rows<T> &rows;

    // A sum as the product would return it.
    __device__ __forceinline__ T rounded(const Part &part, int output, float sum) const {
        const T *bias = static_cast<const T *>(part.bias);
        return bias ? residual_sum(narrow<T>(sum), bias[output]) : narrow<T>(sum);
    }

    __device__ __forceinline__ void store(const Part &part, int row, int output, float sum) const {
        const T value = rounded(part, output, sum);
        const size_t at = (size_t)row * phase.width + part.column + output;
        switch (phase.kind) {
        case QKV:
            static_cast<T *>(plan.qkv)[at] = value;
            break;
        case ATTENTION_OUT:
        case DOWN:
            // Nobody else reads or writes this value now.
            rows.x[at] = residual_sum(streamed(rows.x[at], phase.is_first), value);
            break;
        default:
            rows.logits[at] = widen(value);
        }
    }

    __device__ __forceinline__ void store_gated(int row, int output, float gate_sum, float up_sum) const {
        const T gate = rounded(phase.parts[0], output, gate_sum), up = rounded(phase.parts[1], output, up_sum);
        static_cast<T *>(plan.wide)[(size_t)row * phase.width + output] =
            phase.activation == 0   ? gated<silu>(gate, up)
            : phase.activation == 1 ? gated<gelu>(gate, up)
                                    : gated<gelu_tanh>(gate, up);
    }

    // Adds the sums of warps that are this thread's, and stores them. A work of several passes has further sums.
    template <int TILES>
    __device__ __forceinline__ void finish(const Work &work, const float (*sums)[WARPS][TILE_SUMS], int count) const {
        const int i = threadIdx.x % (TILES * TILE_SUMS), tile = i / TILE_SUMS;
        const int output = i % OUTPUTS, row = i % TILE_SUMS / OUTPUTS, at_row = 8 * tile + row;
        if (at_row >= count) {
            return;
        }
        const float *from = sums[tile][0] + output * 8 + row;
        const int warps = work.warps();
        // The other strip is that of the other warps, or of the next pass.
        const int to_second = warps == WARPS ? TILES * WARPS * TILE_SUMS : HALF_WARPS * TILE_SUMS;
        const bool has_second = work.second.part != nullptr;
        const float of_first = sum_of_strip(from, warps), of_second = has_second ? sum_of_strip(from + to_second, warps) : 0.f;
        const int at_first = OUTPUTS * work.first.index + output, at_second = OUTPUTS * work.second.index + output;
        if (phase.kind == GATE_UP) {
            if (at_first < work.first.part->outputs) {
                store_gated(at_row, at_first, of_first, of_second);
            }
            return;
        }
        if (at_first < work.first.part->outputs) {
            store(*work.first.part, at_row, at_first, of_first);
        }
        if (has_second && at_second < work.second.part->outputs) {
            store(*work.second.part, at_row, at_second, of_second);
        }
    }
};

// A pass of a work: each warp keeps its sums in `kept`.
template <typename T, int TILES>
__device__ __forceinline__ void multiply_and_keep(float (&kept)[TILES][WARPS][TILE_SUMS], Ring &ring, const Inputs<T> &x,
                                                  int inputs, const Work &work, int pass) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[TILES][4];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0.f;
    }
    multiply_strip<T, TILES>(sums, ring, x, inputs, work.warps(), work.of(pass, warp / HALF_WARPS));
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float *to = kept[t][warp] + lane / 4 * 8 + lane % 4 * 2;
        to[0] = sums[t][0];
        to[1] = sums[t][1];
        to[64] = sums[t][2];
        to[65] = sums[t][3];
    }
}

// The works of a phase that are this block's.
template <typename T, int TILES>
__device__ __forceinline__ void product_phase(const Plan &plan, const Phase &phase, const Rows<T> &rows, Ring &ring,
                                              unsigned char *memory) {
    const int works = works_of(phase);
    if ((int)blockIdx.x >= works) {
        return;
    }
    ProductMemory<TILES> &shared = *reinterpret_cast<ProductMemory<TILES> *>(memory);
    const int count = phase.kind == LOGITS ? rows.wanted_count : rows.rows;
    Inputs<T> x{nullptr, phase.inputs, count};
    if (phase.kind == ATTENTION_OUT || phase.kind == DOWN) {
        x.first = static_cast<const T *>(phase.kind == DOWN ? plan.wide : plan.attended);
    } else {
        T *normed = reinterpret_cast<T *>(&shared + 1);
        x.stride += ROW_PADDING;
        norm_rows(rows.x, phase.kind == LOGITS ? rows.wanted : nullptr, count, phase.inputs,
                  static_cast<const T *>(phase.norm), plan.eps, phase.is_first, shared.squares, normed, x.stride);
        x.first = normed;
    }
    const Results<T> results{plan, phase, rows};
    // Passes of a work, which is the same for all works of a phase that have several.
    const int passes = phase.kind == GATE_UP ? work_of(phase, 0).passes() : 1;
    const int kept_works = KEPT<TILES> / passes;
    for (int first = blockIdx.x; first < works; first += gridDim.x * kept_works) {
        const int end = min(works, first + (int)gridDim.x * kept_works);
        auto *kept = shared.sums;
        for (int number = first; number < end; number += gridDim.x) {
            const Work work = work_of(phase, number);
            for (int pass = 0; pass < passes; pass++) {
                multiply_and_keep<T, TILES>(*kept++, ring, x, phase.inputs, work, pass);
            }
        }
        sync_computing();
        // A thread finishes one sum, and the one of the other strip.
        const int pass = threadIdx.x / (TILES * TILE_SUMS), number = first + (int)gridDim.x * (pass / passes);
        if (pass % passes == 0 && number < end) {
            results.template finish<TILES>(work_of(phase, number), shared.sums[pass], count);
        }
        // Before somebody writes other sums there.
        sync_computing();
    }
}

// By the copying warp: the copies for such a phase.
__device__ __forceinline__ void copy_phase(const Phase &phase, Ring &ring) {
    const int works = works_of(phase), count = (phase.inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    for (int number = blockIdx.x; number < works; number += gridDim.x) {
        const Work work = work_of(phase, number);
        for (int pass = 0; pass < work.passes(); pass++) {
            const Strip lower = work.of(pass, 0), upper = work.of(pass, 1);
            // Copies of the parts, because fills are barriers for loads.
            const Part first = *lower.part, second = upper.part ? *upper.part : Part{};
            for (int unit = 0; unit < count; unit += STEPS * first.warps) {
                if (first.warps == WARPS) {
                    ring.fill({units_of(first, lower.index, unit, count), units_of(first, lower.index, unit + WARPS, count)});
                } else {
                    // Without a second strip, no unit is before the last one.
                    ring.fill({units_of(first, lower.index, unit, count),
                               units_of(second, upper.index, unit, upper.part ? count : 0)});
                }
            }
        }
    }
}
