// Products of many rows with a dense weight, with the bits that gemv.cu gives a row.
//
// There, each of `chains` warps adds up every chains-th step of 32 inputs, and their sums are added in the order
// of the warps. Here, a thread computes one chain after the other: the sum of the current one and the total of
// those before it are in its registers. So a block may have any number of outputs and rows, and every weight that
// it reads serves all its rows.
//
// Weights and activations are copied to shared memory, some steps ahead: of each output and row the 64 bytes of a
// step. So the threads of a warp read 8 consecutive lines without bank conflicts. Half a line of the L2 cache is
// read for one chain and the other half for the next one, soon enough to still be there.
#include "../cuda/tensor.cuh"

namespace tiles {

// Inputs of a step, as in gemv.cu, and parts of 16 bytes of it.
constexpr int STEP = 32, PARTS = 4;
// Steps that are copied together.
constexpr int TOGETHER = 2;

// A block of WM * WN warps computes OUTPUTS outputs of ROWS rows. A warp computes M strips of 16 outputs and, of
// the tiles of 8 rows, N tiles, WN apart.
template <int M_, int N_, int WM_, int WN_, int STAGES_> struct Shape {
    static constexpr int M = M_, N = N_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int OUTPUTS = 16 * M * WM, ROWS = 8 * N * WN, LINES = OUTPUTS + ROWS, THREADS = 32 * WM * WN;
    // Lines that the block copies at a time.
    static constexpr int AT_ONCE = THREADS / PARTS;
    static_assert(OUTPUTS % AT_ONCE == 0 && ROWS % AT_ONCE == 0, "a thread copies either weights or activations");
};
using Small = Shape<1, 4, 2, 2, 6>;
using Medium = Shape<2, 4, 2, 2, 5>;
using Large = Shape<4, 4, 2, 4, 3>;

// A step of a chain. Chains follow each other.
struct Place {
    int chain = 0, step = 0;

    // Goes to the next step, and returns whether it is one of another chain.
    __device__ __forceinline__ bool advance(int chains, int steps) {
        step += chains;
        if (step < steps) {
            return false;
        }
        chain++;
        step = chain;
        return true;
    }
};

// Adds the sums of a chain to the total of those before it, and begins the next one.
template <typename S>
__device__ __forceinline__ void end_chain(float (&totals)[S::M][S::N][4], float (&sums)[S::M][S::N][4]) {
#pragma unroll
    for (int m = 0; m < S::M; m++) {
#pragma unroll
        for (int n = 0; n < S::N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                totals[m][n][i] = __fadd_rn(totals[m][n][i], sums[m][n][i]);
                sums[m][n][i] = 0.f;
            }
        }
    }
}

// w: [outputs, inputs], x: [rows, inputs], y: [rows, outputs]. blockIdx.x selects rows, blockIdx.y outputs: blocks
// that read the same weights run at the same time.
template <typename T, typename S>
__device__ void product(const T *w, const T *x, T *y, int outputs, int inputs, int rows, int chains) {
    DYNAMIC_SHARED(memory);
    T *ring = reinterpret_cast<T *>(memory);
    const int first_row = blockIdx.x * S::ROWS, first_output = blockIdx.y * S::OUTPUTS;
    const int steps = inputs / STEP, row_tiles = (min(rows - first_row, S::ROWS) + 7) / 8;
    chains = min(chains, steps);

    // The lines that this thread copies its part of. In the place of outputs and rows that do not exist is the last one.
    constexpr int COPIES = S::LINES / S::AT_ONCE, OF_WEIGHTS = S::OUTPUTS / S::AT_ONCE;
    const int own_line = threadIdx.x / PARTS, part = threadIdx.x % PARTS * 8;
    const T *sources[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int line = own_line + i * S::AT_ONCE;
        const T *output = w + (size_t)min(first_output + line, outputs - 1) * inputs;
        const T *row = x + (size_t)min(first_row + max(line - S::OUTPUTS, 0), rows - 1) * inputs;
        sources[i] = (i < OF_WEIGHTS ? output : row) + part;
    }
    auto copy = [&](int stage, Place &from, int first, int end) {
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            if (from.chain >= chains) {
                break;
            }
            T *to = ring + (stage * TOGETHER + k) * S::LINES * STEP + own_line * STEP + part;
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const int row = own_line + i * S::AT_ONCE - S::OUTPUTS;
                if (i >= first && i < end && row < 8 * row_tiles) {
                    copy_async(to + i * S::AT_ONCE * STEP, sources[i] + from.step * STEP, true);
                }
            }
            from.advance(chains, steps);
        }
    };
    // No kernel writes weights.
    Place weights, next;
#pragma unroll
    for (int stage = 0; stage < S::STAGES - 1; stage++) {
        copy(stage, weights, 0, OF_WEIGHTS);
    }
    wait_for_previous();
#pragma unroll
    for (int stage = 0; stage < S::STAGES - 1; stage++) {
        copy(stage, next, OF_WEIGHTS, COPIES);
        end_of_copies();
    }

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, p = lane % 4;
    const int first_strip = warp / S::WN * S::M, first_tile = warp % S::WN;
    float sums[S::M][S::N][4] = {}, totals[S::M][S::N][4] = {};
    int stage = 0;
    for (Place now; now.chain < chains; stage = stage + 1 == S::STAGES ? 0 : stage + 1) {
        wait_for_copies<S::STAGES - 2>();
        // Everybody's copies have arrived, and everybody has read what the next copies overwrite.
        __syncthreads();
        copy(stage == 0 ? S::STAGES - 1 : stage - 1, next, 0, COPIES);
        end_of_copies();
#pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            if (now.chain >= chains) {
                break;
            }
            const T *lines = ring + (stage * TOGETHER + k) * S::LINES * STEP + g * STEP + p * 8;
            auto line = [&](int number) { return *reinterpret_cast<const uint4 *>(lines + number * STEP); };
            uint32_t one[S::M][4], two[S::M][4];
#pragma unroll
            for (int m = 0; m < S::M; m++) {
                const uint4 a = line((first_strip + m) * 16), b = line((first_strip + m) * 16 + 8);
                one[m][0] = a.x, one[m][1] = b.x, one[m][2] = a.y, one[m][3] = b.y;
                two[m][0] = a.z, two[m][1] = b.z, two[m][2] = a.w, two[m][3] = b.w;
            }
#pragma unroll
            for (int n = 0; n < S::N; n++) {
                const int tile = first_tile + n * S::WN;
                if (tile < row_tiles) {
                    const uint4 c = line(S::OUTPUTS + tile * 8);
#pragma unroll
                    for (int m = 0; m < S::M; m++) {
                        multiply<T>(sums[m][n], one[m], c.x, c.y);
                        multiply<T>(sums[m][n], two[m], c.z, c.w);
                    }
                }
            }
            if (now.advance(chains, steps)) {
                end_chain<S>(totals, sums);
            }
        }
    }
    wait_for_copies<0>();
#pragma unroll
    for (int m = 0; m < S::M; m++) {
#pragma unroll
        for (int n = 0; n < S::N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int output = first_output + (first_strip + m) * 16 + g + i / 2 * 8;
                const int row = first_row + (first_tile + n * S::WN) * 8 + p * 2 + i % 2;
                if (output < outputs && row < rows) {
                    y[(size_t)row * outputs + output] = narrow<T>(totals[m][n][i]);
                }
            }
        }
    }
}

} // namespace tiles

#define KERNEL(T, NAME, S, SHAPE)                                                                              \
    extern "C" __global__ void __launch_bounds__(tiles::S::THREADS)                                            \
        tiles_##SHAPE##_##NAME(const T *w, const T *x, T *y, int outputs, int inputs, int rows, int chains) {  \
        tiles::product<T, tiles::S>(w, x, y, outputs, inputs, rows, chains);                                   \
    }
#define KERNELS(T, NAME)                                                                                       \
    KERNEL(T, NAME, Small, small)                                                                              \
    KERNEL(T, NAME, Medium, medium)                                                                            \
    KERNEL(T, NAME, Large, large)
KERNELS(f16, f16)
KERNELS(bf16, bf16)
#undef KERNELS
#undef KERNEL
