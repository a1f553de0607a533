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
__device__ CALLED void norm_rows(const T *x, const uint32_t *ids, int rows, int width, const T *weight, float eps,
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

// The units of a warp in a slot of the ring: calls `load(step)` for each, `read(step, slot)` when they are there, and
// `add(step)`, which may come before the next step is read. OF warps have a strip, of which `unit` is this warp's first
// unit in the slot; missing = there is no strip, but warps without one wait as often as the others.
template <int OF, bool AT_ONCE, typename Load, typename Read, typename Add>
__device__ __forceinline__ void take_slot(Ring &ring, int unit, int count, bool missing, Load load, Read read, Add add) {
    if (!missing && unit + OF < count) {
        load(0);
        load(1);
        const SharedAddress slot = ring.wait();
        read(0, slot);
        if constexpr (!AT_ONCE) {
            add(0);
        }
        read(1, slot);
        ring.release();
        if constexpr (AT_ONCE) {
            add(0);
        }
        add(1);
    } else if (!missing && unit < count) {
        load(0);
        read(0, ring.wait());
        ring.release();
        add(0);
    } else {
        ring.wait();
        ring.release();
    }
}

// Sums of a warp at their place among those that are kept.
template <int TILES> __device__ __forceinline__ void keep(float *kept, const float (&sums)[TILES][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float *to = kept + (t * WARPS + threadIdx.x / 32) * TILE_SUMS + lane / 4 * 8 + lane % 4 * 2;
        to[0] = sums[t][0];
        to[1] = sums[t][1];
        to[64] = sums[t][2];
        to[65] = sums[t][3];
    }
}

// What the functions that multiply get, one by one, because structs would be passed in memory: the ring, rows that are
// multiplied, and `passes` strips of a part, of which this warp's end after `real`. The sums of each pass follow those
// of the one before from `kept` on.
#define TASK                                                                                                           \
    SharedAddress slots, SharedAddress full, int half_bytes, int slots_count, int state, const T *first, int stride,    \
        int rows_count, int inputs, int passes, int real, float *kept

// Products in the order of product.cuh: a warp takes every OF-th unit of a strip. Returns the state of the ring.
template <typename F, typename T, int TILES, int OF> __device__ CALLED int multiply_units(TASK) {
    Ring ring(slots, full, half_bytes, slots_count, state);
    const Inputs<T> x{first, stride, rows_count};
    const int lane = kept_lane(threadIdx.x % 32), g = lane / 4, p = lane % 4, warp = threadIdx.x / 32 % OF;
    const int count = (inputs + UNIT_INPUTS - 1) / UNIT_INPUTS;
    const Places<OF> places(warp, ring.half_bytes, F::UNIT, F::SUPER);
    const T *rows[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        rows[t] = x.row(8 * t + g) + UNIT_INPUTS * warp + 4 * p;
    }
    for (int pass = 0; pass < passes; pass++, kept += TILES * WARPS * TILE_SUMS) {
        float sums[TILES][4] = {};
        for (int unit = warp, at = 0; unit - warp < count; unit += STEPS * OF, at += STEPS * OF * UNIT_INPUTS) {
            Activations activations[STEPS][TILES];
            uint32_t a[STEPS][FRAGMENTS][4];
            Scales scales[STEPS];
            take_slot<OF, TILES == 1>(
                ring, unit, count, pass >= real,
                [&](int step) {
                    // Units of 256 inputs are whole.
                    const bool is_whole = F::SUPER > 0 || UNIT_INPUTS * (unit + step * OF) + 32 < inputs;
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        activations[step][t].load(rows[t] + at + step * OF * UNIT_INPUTS, is_whole ? 32 : 0);
                    }
                },
                [&](int step, SharedAddress slot) {
                    const SharedUnit stored{slot + places.units[step], slot + places.shared[step]};
                    unpack<F, T>(a[step], stored, lane);
                    scales[step] = read_scales<F, T>(stored, g);
                },
                [&](int step) {
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        add<F, T>(sums[t], a[step], scales[step], activations[step][t]);
                    }
                });
        }
        keep(kept, sums);
    }
    return ring.state();
}

// The same for a dense weight, in the order of gemv.cu.
template <typename T, int TILES, int OF> __device__ CALLED int multiply_dense(TASK) {
    Ring ring(slots, full, half_bytes, slots_count, state);
    const Inputs<T> x{first, stride, rows_count};
    const int lane = kept_lane(threadIdx.x % 32), g = lane / 4, q = lane % 4, warp = threadIdx.x / 32 % OF;
    const int count = units_of(DENSE, inputs), own = g * DENSE_ROW + 16 * q;
    const Places<OF> places(warp, ring.half_bytes, DENSE_UNIT, 0);
    const T *rows[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        rows[t] = x.row(8 * t + g) + DENSE_INPUTS * warp + 8 * q;
    }
    for (int pass = 0; pass < passes; pass++, kept += TILES * WARPS * TILE_SUMS) {
        float sums[TILES][4] = {};
        for (int unit = warp, at = 0; unit - warp < count; unit += STEPS * OF, at += STEPS * OF * DENSE_INPUTS) {
            uint4 low[STEPS], high[STEPS], activations[STEPS][TILES];
            take_slot<OF, true>(
                ring, unit, count, pass >= real,
                [&](int step) {
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        activations[step][t] = *reinterpret_cast<const uint4 *>(rows[t] + at + step * OF * DENSE_INPUTS);
                    }
                },
                [&](int step, SharedAddress slot) {
                    low[step] = load_shared_16(slot + places.units[step] + own);
                    high[step] = load_shared_16(slot + places.units[step] + own + 8 * DENSE_ROW);
                },
                [&](int step) {
                    const uint32_t one[4] = {low[step].x, high[step].x, low[step].y, high[step].y};
                    const uint32_t two[4] = {low[step].z, high[step].z, low[step].w, high[step].w};
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        multiply<T>(sums[t], one, activations[step][t].x, activations[step][t].y);
                        multiply<T>(sums[t], two, activations[step][t].z, activations[step][t].w);
                    }
                });
        }
        keep(kept, sums);
    }
    return ring.state();
}

template <typename T, int TILES>
__device__ __forceinline__ void multiply_part(Ring &ring, const Part &part, const Inputs<T> &x, int inputs, int passes, int real,
                                              float *kept) {
    const bool all = part.warps == WARPS;
#define RUN(FUNCTION)                                                                              \
    ring.set_state(FUNCTION(ring.slots, ring.full, ring.half_bytes, ring.count, ring.state(), x.first, x.stride, x.count, \
                            inputs, passes, real, kept))
#define CASE(F, NUMBER)                                                                            \
    case NUMBER:                                                                                   \
        if (all) {                                                                                 \
            RUN((multiply_units<F, T, TILES, WARPS>));                                             \
        } else {                                                                                   \
            RUN((multiply_units<F, T, TILES, HALF_WARPS>));                                        \
        }                                                                                          \
        break;
    switch (part.format) {
        FOR_FORMATS(CASE)
    default:
        if (all) {
            RUN((multiply_dense<T, TILES, WARPS>));
        } else {
            RUN((multiply_dense<T, TILES, HALF_WARPS>));
        }
    }
#undef CASE
#undef RUN
}
#undef TASK

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
        static_cast<T *>(plan.wide)[(size_t)row * phase.width + output] = gated(phase.activation, gate, up);
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

// The works of a phase that are this block's.
template <typename T, int TILES>
__device__ __forceinline__ void product_phase(const Plan &plan, const Phase &phase, const Rows<T> &rows, Ring &ring,
                                              unsigned char *memory) {
    const int works = works_of(phase), stride = gridDim.x;
    int number = blockIdx.x;
    if (number >= works) {
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
    const int half = threadIdx.x / 32 / HALF_WARPS;
    // Passes of a work, which is the same for all works of a phase that have several, and those that are kept.
    const int passes = phase.kind == GATE_UP ? work_of(phase, 0).passes() : 1;
    int first = number, kept = 0;
    auto multiply_next = [&](const Part &part, int passes, int real) {
        multiply_part<T, TILES>(ring, part, x, phase.inputs, passes, real, shared.sums[kept][0][0]);
        kept += passes;
    };
    auto finish = [&](bool is_last) {
        sync_computing();
        // A thread finishes one sum, and the one of the other strip.
        const int pass = threadIdx.x / (TILES * TILE_SUMS);
        if (pass < kept && pass % passes == 0) {
            results.template finish<TILES>(work_of(phase, first + stride * (pass / passes)), shared.sums[pass], count);
        }
        // Before somebody writes other sums there; the end of the phase waits, too.
        if (!is_last) {
            sync_computing();
        }
        first = number;
        kept = 0;
    };
    int end = 0;
    for (int i = 0; i < (phase.kind == GATE_UP ? 1 : phase.part_count); i++) {
        const Part &part = phase.parts[i];
        end += phase.kind == GATE_UP ? works : works_of(part);
        while (number < end) {
            const int next = min((KEPT<TILES> - kept) / passes, (end - number + stride - 1) / stride);
            number += next * stride;
            if (passes == 2) {
                for (int n = 0; n < next; n++) {
                    multiply_next(part, 1, 1);
                    multiply_next(phase.parts[1], 1, 1);
                }
            } else if (phase.kind == GATE_UP) {
                multiply_next(phase.parts[half], next, next);
            } else {
                // The last strip of an odd number has no other beside it.
                const bool is_alone = half == 1 && part.warps < WARPS && part.strips % 2 == 1 && number - stride == end - 1;
                multiply_next(part, next, next - is_alone);
            }
            if (kept + passes > KEPT<TILES>) {
                finish(false);
            }
        }
    }
    if (kept > 0) {
        finish(true);
    }
}

// By the copying warp: the copies for such a phase.
__device__ __forceinline__ void copy_phase(const Phase &phase, Ring &ring) {
    const int works = works_of(phase), lane = threadIdx.x % 32, half = lane / HALF_LANES;
    for (int number = blockIdx.x; number < works; number += gridDim.x) {
        const Work work = work_of(phase, number);
        const int warps = work.warps(), count = units_of(work.first.part->format, phase.inputs);
        for (int pass = 0; pass < work.passes(); pass++) {
            const Strip strip = work.of(pass, half);
            // A copy of it, because fills are barriers for loads.
            const Part part = strip.part ? *strip.part : Part{};
            for (int unit = 0; unit < count; unit += STEPS * warps) {
                const int first = strip.part == nullptr ? count : warps == WARPS ? unit + half * WARPS : unit;
                ring.fill(copy_of(part, strip.index, first, count, lane % HALF_LANES));
            }
        }
    }
}
