// Products of many rows with a dense weight, with the bits that gemv.cu gives a row.
//
// There, each of `chains` warps adds up every chains-th step of 32 inputs, and their sums are added in the order of
// the warps. Here, a team of warps computes a chain, and the teams of a block compute some chains side by side. No team
// waits for another one before its chain ends. Then all threads add the chains' sums in their order. The other chains
// are computed by the other blocks of a cluster, or by the same block in further passes.
//
// A team has a ring of stages in shared memory, each with a step: 64 bytes of each output and row. It copies weights
// and activations there, some stages ahead. As in gemv.cu, a thread reads 16 bytes at a time. So 8 threads read two
// consecutive lines without bank conflicts.
//
// Blocks read the activations again and again, from the L2 cache. The more outputs a block has, the less often; the
// fewer chains, the less of them.
#include "../cuda/cluster.cuh"
#include "../cuda/tensor.cuh"
#include "../experts/groups.cuh"

namespace tiles {

// Inputs of a step, as in gemv.cu, the bytes of them, and the parts of 16 bytes.
constexpr int STEP = 32, LINE = 2 * STEP, PARTS = LINE / 16;
// A warp computes so many strips of 16 outputs and tiles of 8 rows: their sums are half of its registers.
constexpr int STRIPS = 4, TILES = 8;

// WM * WN warps are a team, CHAINS teams a block. It computes OUTPUTS outputs of ROWS rows.
template <int WM, int WN_, int CHAINS_, int STAGES_> struct Shape {
    static constexpr int WN = WN_, CHAINS = CHAINS_, STAGES = STAGES_;
    static constexpr int OUTPUTS = 16 * STRIPS * WM, ROWS = 8 * TILES * WN, LINES = OUTPUTS + ROWS;
    static constexpr int TEAM = 32 * WM * WN, THREADS = TEAM * CHAINS, RESULTS = OUTPUTS * ROWS;
    // Lines that a team copies at a time.
    static constexpr int AT_ONCE = TEAM / PARTS;
    static_assert(OUTPUTS % AT_ONCE == 0 && ROWS % AT_ONCE == 0, "a thread copies either weights or activations");
    // Bytes of a stage, of a ring, of a chain's sums, which take the place of the ring, and of the whole block. It has
    // the sums of earlier passes, too.
    static constexpr int STAGE = LINES * LINE, RING = STAGES * STAGE, SUMS = 4 * RESULTS;
    static constexpr int OF_TEAM = RING > SUMS ? RING : SUMS, SHARED = CHAINS * OF_TEAM + SUMS;
};
// For GPUs whose blocks have less than 227 KiB. Every GPU has room for one, with 164 KiB for two.
using Small = Shape<1, 1, 4, 2>;
// For up to 64 rows, and for more.
using Wide = Shape<2, 1, 4, 4>;
using Large = Shape<2, 2, 2, 5>;
static_assert(Small::SHARED <= 80 << 10 && Wide::SHARED <= 227 << 10 && Large::SHARED <= 227 << 10, "what there is");

// Where a chain's sum is, of those that the block has of it. Threads of a warp store sums of 4 rows 2 apart, and of
// consecutive outputs, without bank conflicts.
template <typename S> __device__ __forceinline__ int place_of_sum(int row, int output) {
    return row * S::OUTPUTS + (output ^ row / 2 % 4 * 8);
}

// The threads of a team wait for one another.
template <typename S> __device__ __forceinline__ void wait_for_team(int team) {
    if constexpr (S::TEAM == 32) {
        __syncwarp();
    } else {
        sync_team<S::TEAM>(team + 1);
    }
}

// Adds a step to the sums of a warp. The lines of its outputs begin at `outputs`, those of its rows at `rows`. `zero` is 0.
template <typename T>
__device__ __forceinline__ void add_step(float (&sums)[STRIPS][TILES][4], SharedAddress outputs, SharedAddress rows,
                                         uint32_t zero) {
    // A thread's part of a line.
    auto part = [](SharedAddress lines, int number) { return load_shared_16(lines + number * LINE); };
    uint4 c[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        c[n] = part(rows, n * 8);
    }
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        const uint4 a = part(outputs, m * 16), b = part(outputs, m * 16 + 8);
        // The instruction takes four registers in a row. Without zeros, the compiler moves them there for each use.
        const uint32_t one[4] = {a.x | zero, b.x | zero, a.y | zero, b.y | zero};
        const uint32_t two[4] = {a.z | zero, b.z | zero, a.w | zero, b.w | zero};
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            multiply<T>(sums[m][n], one, c[n].x, c[n].y);
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            multiply<T>(sums[m][n], two, c[n].z, c[n].w);
        }
    }
}

// The first row and output of a block, and how many there are in all.
struct Place {
    int row, output, rows, outputs;
};

// Adds the chains that the blocks of a cluster have computed in this pass. A thread adds some results, of those that
// its block has of the cluster's. The sums of earlier passes are kept in `memory` until the last one.
template <typename T, typename S>
__device__ __forceinline__ void add_chains(unsigned char *memory, T *y, Place place, bool is_first, bool is_last) {
    // Results that a thread adds at a time.
    constexpr int MANY = 8;
    const int blocks = blocks_of_cluster(), apart = blocks * S::THREADS;
    float *kept = reinterpret_cast<float *>(memory + S::CHAINS * S::OF_TEAM);
#pragma unroll 1
    for (int from = block_of_cluster() * S::THREADS + threadIdx.x; from < S::RESULTS; from += MANY * apart) {
        float totals[MANY];
#pragma unroll
        for (int k = 0; k < MANY; k++) {
            const int at = from + k * apart;
            totals[k] = is_first || at >= S::RESULTS ? 0.f : kept[at];
        }
#pragma unroll 1
        for (int block = 0; block < blocks; block++) {
            const unsigned char *its = memory_of_block(memory, block);
#pragma unroll
            for (int k = 0; k < MANY; k++) {
                const int at = min(from + k * apart, S::RESULTS - 1);
#pragma unroll
                for (int i = 0; i < S::CHAINS; i++) {
                    const float *sums = reinterpret_cast<const float *>(its + i * S::OF_TEAM);
                    totals[k] = __fadd_rn(totals[k], sums[place_of_sum<S>(at / S::OUTPUTS, at % S::OUTPUTS)]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < MANY; k++) {
            const int at = from + k * apart, row = place.row + at / S::OUTPUTS, output = place.output + at % S::OUTPUTS;
            if (at >= S::RESULTS) {
                break;
            }
            if (!is_last) {
                kept[at] = totals[k];
            } else if (row < place.rows && output < place.outputs) {
                y[(size_t)row * place.outputs + output] = narrow<T>(totals[k]);
            }
        }
    }
}

// w: [outputs, inputs], x: [rows, inputs], y: [rows, outputs], of which the block computes those from first_row on.
// blockIdx.x selects rows, blockIdx.y outputs and, if the blocks of a cluster share them, chains: blocks that read the
// same weights run at the same time.
template <typename T, typename S>
__device__ void product(const T *w, const T *x, T *y, int outputs, int inputs, int rows, int chains, int first_row) {
    DYNAMIC_SHARED(memory);
    const int blocks = blocks_of_cluster(), block = block_of_cluster();
    const int first_output = blockIdx.y / blocks * S::OUTPUTS;
    const int steps = inputs / STEP, row_tiles = (min(rows - first_row, S::ROWS) + 7) / 8;
    const int team = threadIdx.x / S::TEAM, own = threadIdx.x % S::TEAM;
    // The compiler would compute these again for each copy.
    const SharedAddress ring = shared_address(memory + team * S::OF_TEAM);
    const unsigned char *weights = kept_address(w + (size_t)first_output * inputs);
    const unsigned char *activations = kept_address(x + (size_t)first_row * inputs);

    // Where the parts of lines are that this thread copies. In the place of outputs and rows that do not exist is the
    // last one.
    constexpr int COPIES = S::LINES / S::AT_ONCE, OF_WEIGHTS = S::OUTPUTS / S::AT_ONCE;
    uint32_t parts[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int line = own / PARTS + i * S::AT_ONCE;
        const int of = i < OF_WEIGHTS ? min(line, outputs - 1 - first_output)
                                      : min(line - S::OUTPUTS, rows - 1 - first_row);
        parts[i] = of * inputs * 2 + own % PARTS * 16;
    }
    const SharedAddress own_part = ring + own * 16;
    auto copy = [&](int stage, int step, int first, int end) {
        const unsigned char *from_weights = weights + (size_t)step * LINE;
        const unsigned char *from_activations = activations + (size_t)step * LINE;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int row = i * S::AT_ONCE - S::OUTPUTS;
            if (i >= first && i < end && row < 8 * row_tiles) {
                copy_async_of_line(own_part + stage + i * S::TEAM * 16,
                                   (i < OF_WEIGHTS ? from_weights : from_activations) + parts[i]);
            }
        }
    };

    const int warp = own / 32, lane = own % 32;
    const int output = warp / S::WN * STRIPS * 16, row = warp % S::WN * TILES * 8;
    const uint32_t zero = (uint32_t)rows >> 31;
    for (int first = block * S::CHAINS; first < chains; first += blocks * S::CHAINS) {
        const int chain = first + team;
        int next = chain;
#pragma unroll
        for (int i = 0; i < S::STAGES - 1; i++) {
            if (chain + i * chains < steps) {
                copy(i * S::STAGE, chain + i * chains, 0, OF_WEIGHTS);
            }
        }
        if (first == block * S::CHAINS) {
            // No kernel writes weights.
            wait_for_previous();
        }
#pragma unroll
        for (int i = 0; i < S::STAGES - 1; i++, next += chains) {
            if (next < steps) {
                copy(i * S::STAGE, next, OF_WEIGHTS, COPIES);
            }
            end_of_copies();
        }
        float sums[STRIPS][TILES][4] = {};
        int stage = 0, free = (S::STAGES - 1) * S::STAGE;
        for (int step = chain; step < steps; step += chains, next += chains) {
            wait_for_copies<S::STAGES - 2>();
            // The team's copies have arrived, and it has read what the next ones overwrite.
            wait_for_team<S>(team);
            if (next < steps) {
                copy(free, next, 0, COPIES);
            }
            end_of_copies();
            const SharedAddress lines = ring + stage + lane * 16;
            add_step<T>(sums, lines + output * LINE, lines + (S::OUTPUTS + row) * LINE, zero);
            free = stage;
            stage = stage + S::STAGE == S::RING ? 0 : stage + S::STAGE;
        }
        // Warps of the team may still read the ring.
        wait_for_team<S>(team);
        float *to = reinterpret_cast<float *>(memory + team * S::OF_TEAM);
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int of_row = row + n * 8 + lane % 4 * 2 + i % 2;
                    to[place_of_sum<S>(of_row, output + m * 16 + lane / 4 + i / 2 * 8)] = sums[m][n][i];
                }
            }
        }
        wait_for_cluster();
        const Place place = {first_row, first_output, rows, outputs};
        add_chains<T, S>(memory, y, place, first < blocks * S::CHAINS, first + blocks * S::CHAINS >= chains);
        // The sums have been read: by the threads that fill the rings, and before a block ends and its memory with it.
        wait_for_cluster();
    }
}

} // namespace tiles

#define KERNEL(T, NAME, S, SHAPE)                                                                              \
    extern "C" __global__ void __launch_bounds__(tiles::S::THREADS, 1)                                         \
        tiles_##SHAPE##_##NAME(const T *w, const T *x, T *y, int outputs, int inputs, int rows, int chains) {  \
        tiles::product<T, tiles::S>(w, x, y, outputs, inputs, rows, chains, blockIdx.x * tiles::S::ROWS);      \
    }
// Groups of up to S::ROWS rows times the weights of their experts.
#define OF_EXPERTS(T, NAME, S, SHAPE)                                                                          \
    extern "C" __global__ void __launch_bounds__(tiles::S::THREADS, 1)                                         \
        experts_tiles_##SHAPE##_##NAME(const uint64_t *weights, const experts::Group *groups, const T *x,      \
                                       T *y, int outputs, int inputs, int chains) {                            \
        wait_for_previous();                                                                                   \
        const experts::Group group = groups[blockIdx.x];                                                       \
        if (group.rows > 0) {                                                                                  \
            tiles::product<T, tiles::S>(experts::weight_of<T>(weights, group), x + (size_t)group.first * inputs, \
                                        y + (size_t)group.first * outputs, outputs, inputs, group.rows, chains, 0); \
        }                                                                                                      \
    }
#define KERNELS(T, NAME)                                                                                       \
    KERNEL(T, NAME, Small, small)                                                                              \
    KERNEL(T, NAME, Wide, wide)                                                                                \
    KERNEL(T, NAME, Large, large)                                                                              \
    OF_EXPERTS(T, NAME, Small, small)                                                                          \
    OF_EXPERTS(T, NAME, Wide, wide)
KERNELS(f16, f16)
KERNELS(bf16, bf16)
#undef KERNELS
#undef OF_EXPERTS
#undef KERNEL
