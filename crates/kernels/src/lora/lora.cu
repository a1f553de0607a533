// What LoRA adapters add to products: y += B (scale * A x), where each row has an adapter of its own, or none. One launch
// has rows of any adapters, as in Punica (Chen et al. 2023, arXiv 2310.18547) and S-LoRA (Sheng et al. 2023, arXiv
// 2311.03285).
//
// A row has the address of its adapter's table, or 0. So a recorded graph takes in any adapters: the table and the weights
// are reached through the row. The sums of a row are in one order, whatever adapters its neighbours have; only consecutive
// rows of one adapter share the reads of its weights.
#include "../cuda/common.cuh"

namespace lora {

// Rows of a block.
constexpr int ROWS = 8;

// What an adapter adds to one of the weights that are side by side in a layer; as in lora/cuda.rs.
struct Part {
    // Addresses of A, [rank, inputs], and of B transposed, [rank, outputs].
    uint64_t down, up;
    // 0 = nothing is added to these outputs; and its first product with A among those of the layer.
    int rank, start;
    // Its first output among those of the layer, and how many it has.
    int first, outputs;
    float scale;
    int unused;
};

// The part of a row's adapter that `is_wanted`, of the `count` parts of a layer from `first` on; null if there is none.
template <typename F>
__device__ __forceinline__ const Part *find(uint64_t adapter, int first, int count, F is_wanted) {
    const Part *parts = reinterpret_cast<const Part *>(adapter);
    for (int i = first; adapter && i < first + count; i++) {
        if (is_wanted(parts[i])) {
            return parts + i;
        }
    }
    return nullptr;
}

// The end of the rows from `row` on that have one adapter, up to `end`.
__device__ __forceinline__ int end_of_run(const uint64_t *adapters, int row, int end) {
    int next = row + 1;
    while (next < end && adapters[next] == adapters[row]) {
        next++;
    }
    return next;
}

// Fills a pack with the values from `from` on, of which there are `left`, and zeros after them.
template <typename T> __device__ __forceinline__ void load(Pack<T> &pack, const T *from, int left, bool is_aligned) {
    if (is_aligned) {
        pack.load(from);
        return;
    }
#pragma unroll
    for (int i = 0; i < Pack<T>::LEN; i++) {
        pack.values[i] = i < left ? from[i] : narrow<T>(0.f);
    }
}

// Products of COUNT or fewer rows with a row of A, by a warp. A lane has every 32nd pack of inputs.
template <int COUNT, typename T>
__device__ __forceinline__ void multiply(const T *w, float scale, const T *x, float *y, int rows, int inputs, int width) {
    constexpr int LEN = Pack<T>::LEN;
    const int lane = threadIdx.x % 32;
    // Weights are aligned if rows are whole packs.
    const bool is_aligned = inputs % LEN == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(uint4) == 0;
    float sums[COUNT] = {};
    for (int i = lane * LEN; i < inputs; i += 32 * LEN) {
        Pack<T> by, of;
        load(by, w + i, inputs - i, is_aligned);
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            // In the place of missing rows is the last one again.
            load(of, x + (size_t)min(r, rows - 1) * inputs + i, inputs - i, is_aligned);
#pragma unroll
            for (int j = 0; j < LEN; j++) {
                sums[r] = fmaf(widen(by.values[j]), widen(of.values[j]), sums[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        const float sum = warp_sum(sums[r]);
        if (lane == 0 && r < rows) {
            y[(size_t)r * width] = __fmul_rn(scale, sum);
        }
    }
}

// y = scale * A x for all parts of a layer, [rows, width], of which a row has only as many as its adapter's ranks say. x:
// [rows, inputs]. A warp computes one value of ROWS rows.
template <typename T>
__device__ void shrink(const uint64_t *adapters, const T *x, float *y, int rows, int inputs, int width, int first, int count) {
    wait_for_previous();
    const int of = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    const int start = blockIdx.x * ROWS, end = min(start + ROWS, rows);
    for (int row = start, next; row < end; row = next) {
        next = end_of_run(adapters, row, end);
        const Part *part = find(adapters[row], first, count, [=](const Part &one) {
            return of >= one.start && of < one.start + one.rank;
        });
        if (!part) {
            continue;
        }
        const T *w = reinterpret_cast<const T *>(part->down) + (size_t)(of - part->start) * inputs;
        const T *from = x + (size_t)row * inputs;
        float *to = y + (size_t)row * width + of;
        if (next == row + 1) {
            multiply<1>(w, part->scale, from, to, 1, inputs, width);
        } else {
            multiply<ROWS>(w, part->scale, from, to, next - row, inputs, width);
        }
    }
}

// y += B x, where x is what `shrink` has computed. y: [rows, outputs]. A thread computes one output of ROWS rows. An output
// to which nothing is added is not written.
template <typename T>
__device__ void expand(const uint64_t *adapters, const float *x, T *y, int rows, int outputs, int width, int first, int count) {
    wait_for_previous();
    const int output = blockIdx.y * blockDim.x + threadIdx.x;
    const int start = blockIdx.x * ROWS, end = min(start + ROWS, rows);
    if (output >= outputs) {
        return;
    }
    for (int row = start, next; row < end; row = next) {
        next = end_of_run(adapters, row, end);
        const Part *part = find(adapters[row], first, count, [=](const Part &one) {
            return output >= one.first && output < one.first + one.outputs;
        });
        if (!part || part->rank == 0) {
            continue;
        }
        const T *w = reinterpret_cast<const T *>(part->up) + (output - part->first);
        const float *from = x + (size_t)row * width + part->start;
        float sums[ROWS] = {};
        for (int i = 0; i < part->rank; i++) {
            const float by = widen(w[(size_t)i * part->outputs]);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                // As above.
                sums[r] = fmaf(by, from[(size_t)min(r, next - row - 1) * width + i], sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (row + r < next) {
                T &to = y[(size_t)(row + r) * outputs + output];
                to = narrow<T>(__fadd_rn(widen(to), sums[r]));
            }
        }
    }
}

} // namespace lora

#define KERNELS(T, NAME)                                                                           \
    extern "C" __global__ void lora_shrink_##NAME(const uint64_t *adapters, const T *x, float *y,  \
                                                  int rows, int inputs, int width, int first,      \
                                                  int count) {                                     \
        lora::shrink(adapters, x, y, rows, inputs, width, first, count);                           \
    }                                                                                              \
    extern "C" __global__ void lora_expand_##NAME(const uint64_t *adapters, const float *x, T *y,  \
                                                  int rows, int outputs, int width, int first,     \
                                                  int count) {                                     \
        lora::expand(adapters, x, y, rows, outputs, width, first, count);                          \
    }
FOR_FLOATS(KERNELS)
#undef KERNELS
