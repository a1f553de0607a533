// candle's kernels for quantized weights, with candle's names and parameters: lookups, and products with
// activations that are first quantized to 8 bits in blocks of 32.
#include "cuda/common.cuh"
#include "gpu.h"

namespace {

constexpr int BLOCK = 32;

float half_at(const uint8_t *at) {
    f16 half;
    memcpy(&half, at, sizeof half);
    return widen(half);
}

// 32 weights: scale * quant + offset, with a scale per half.
struct Block {
    int8_t quants[BLOCK];
    float scales[2], offset;

    float value(int k) const { return scales[k / 16] * quants[k] + offset; }
};

// GGUF's formats: their NUMBER, the bytes of SPAN blocks that are stored together, and how to read one.
// SUM: products multiply the offset with the sum of the activations before quantization.
struct Q4_1 {
    static constexpr int NUMBER = 3, SPAN = 1, BYTES = 20;
    static constexpr bool SUM = true;

    static void read(const uint8_t *at, int, Block &block) {
        block.scales[0] = block.scales[1] = half_at(at);
        block.offset = half_at(at + 2);
        for (int k = 0; k < BLOCK; k++) {
            block.quants[k] = at[4 + k % 16] >> (k / 16 * 4) & 15;
        }
    }
};

struct Q5_1 {
    static constexpr int NUMBER = 7, SPAN = 1, BYTES = 24;
    static constexpr bool SUM = true;

    static void read(const uint8_t *at, int, Block &block) {
        block.scales[0] = block.scales[1] = half_at(at);
        block.offset = half_at(at + 2);
        uint32_t high;
        memcpy(&high, at + 4, sizeof high);
        for (int k = 0; k < BLOCK; k++) {
            block.quants[k] = (at[8 + k % 16] >> (k / 16 * 4) & 15) | (high >> k & 1) << 4;
        }
    }
};

struct Q8_0 {
    static constexpr int NUMBER = 8, SPAN = 1, BYTES = 34;
    static constexpr bool SUM = false;

    static void read(const uint8_t *at, int, Block &block) {
        block.scales[0] = block.scales[1] = half_at(at);
        block.offset = 0;
        memcpy(block.quants, at + 2, BLOCK);
    }
};

struct Q4_K {
    static constexpr int NUMBER = 12, SPAN = 8, BYTES = 144;
    static constexpr bool SUM = false;

    static void read(const uint8_t *at, int sub, Block &block) {
        // Eight pairs of 6-bit values in 12 bytes.
        const uint8_t *s = at + 4;
        int scale = sub < 4 ? s[sub] & 63 : (s[sub + 4] & 15) | s[sub - 4] >> 6 << 4;
        int offset = sub < 4 ? s[sub + 4] & 63 : s[sub + 4] >> 4 | s[sub] >> 6 << 4;
        block.scales[0] = block.scales[1] = half_at(at) * scale;
        block.offset = -(half_at(at + 2) * offset);
        for (int k = 0; k < BLOCK; k++) {
            block.quants[k] = at[16 + sub / 2 * BLOCK + k] >> (sub % 2 * 4) & 15;
        }
    }
};

struct Q6_K {
    static constexpr int NUMBER = 14, SPAN = 8, BYTES = 210;
    static constexpr bool SUM = false;

    static void read(const uint8_t *at, int sub, Block &block) {
        // Two runs of 128, each with 64 bytes of low nibbles and 32 bytes of bit pairs.
        int run = sub / 4, part = sub % 4;
        const uint8_t *low = at + run * 64 + part % 2 * BLOCK, *high = at + 128 + run * 32;
        for (int k = 0; k < BLOCK; k++) {
            int bits = (low[k] >> (part / 2 * 4) & 15) | (high[k] >> (2 * part) & 3) << 4;
            block.quants[k] = int8_t(bits - 32);
        }
        for (int half = 0; half < 2; half++) {
            block.scales[half] = half_at(at + 208) * int8_t(at[192 + 2 * sub + half]);
        }
        block.offset = 0;
    }
};

// Block b of weights that begin at `at`.
template <typename F> void read_block(const void *at, size_t b, Block &block) {
    F::read(static_cast<const uint8_t *>(at) + b / F::SPAN * F::BYTES, b % F::SPAN, block);
}

// The product with activations scale * quant. `sum` is the sum of the activations; without SUM, that of
// the quants is used.
template <bool SUM> float product(const Block &block, const int8_t *quants, float scale, float sum) {
    int halves[2] = {}, all = 0;
    for (int k = 0; k < BLOCK; k++) {
        halves[k / 16] += block.quants[k] * quants[k];
        all += quants[k];
    }
    return scale * (block.scales[0] * halves[0] + block.scales[1] * halves[1]) +
           block.offset * (SUM ? sum : scale * all);
}

// One block of threads per id, and several for long rows.
template <typename F>
void get_rows(const void *weights, const uint32_t *ids, float *to, int64_t columns, size_t row_bytes) {
    const uint8_t *row = static_cast<const uint8_t *>(weights) + ids[blockIdx.x] * row_bytes;
    for (int64_t b = blockIdx.y * blockDim.x + threadIdx.x; b < columns / BLOCK; b += gridDim.y * blockDim.x) {
        Block block;
        read_block<F>(row, b, block);
        for (int k = 0; k < BLOCK; k++) {
            to[blockIdx.x * columns + b * BLOCK + k] = block.value(k);
        }
    }
}

template <typename F, typename T> void dequantize(const void *weights, T *to, size_t blocks) {
    const size_t threads = (size_t)blockDim.x * gridDim.x;
    for (size_t b = (size_t)blockIdx.x * blockDim.x + threadIdx.x; b < blocks; b += threads) {
        Block block;
        read_block<F>(weights, b, block);
        for (int k = 0; k < BLOCK; k++) {
            to[b * BLOCK + k] = narrow<T>(block.value(k));
        }
    }
}
template <typename F, typename T> void dequantize_counted(const void *weights, T *to, int count) {
    // This kernel counts values, the others count blocks.
    dequantize<F>(weights, to, F::NUMBER == Q5_1::NUMBER ? count / BLOCK : count);
}
template <typename F, typename T> void dequantize_all(const void *weights, T *to) {
    dequantize<F>(weights, to, gridDim.x * F::SPAN);
}

// In the following kernels a block has one thread, which does all of its work.

// Quantizes 32 activations of `row` from `first` on, with zeros beyond `columns`; returns scale and sum.
template <typename T>
void quantize(const T *row, int64_t first, int64_t columns, int8_t *quants, float &scale, float &sum) {
    float values[BLOCK], most = 0;
    sum = 0;
    for (int k = 0; k < BLOCK; k++) {
        values[k] = first + k < columns ? widen(row[first + k]) : 0;
        most = std::max(most, std::fabs(values[k]));
        sum += values[k];
    }
    scale = most / 127;
    for (int k = 0; k < BLOCK; k++) {
        quants[k] = scale > 0 ? int8_t(std::round(values[k] / scale)) : 0;
    }
}

struct Q8_1 {
    f16 scale, sum;
    int8_t quants[BLOCK];
};

// Quantizes rows one after the other; a block of threads takes 256 values of a row.
template <typename T> void quantize_rows(const T *from, void *to, int columns, int padded) {
    int end = std::min((blockIdx.x + 1) * 256, padded);
    for (int first = blockIdx.x * 256; first < end; first += BLOCK) {
        Q8_1 &block = static_cast<Q8_1 *>(to)[(blockIdx.y * int64_t(padded) + first) / BLOCK];
        float scale, sum;
        quantize(from + blockIdx.y * int64_t(columns), first, columns, block.quants, scale, sum);
        block.scale = narrow<f16>(scale);
        block.sum = narrow<f16>(sum);
    }
}

// Products with N rows of activations; strides count blocks of activations, or results.
template <typename F, typename T, int N>
void multiply_few(const void *weights, const void *activations, T *to, int columns, int rows, int stride,
                  int stride_to) {
    constexpr int ROWS = N == 1 ? 1 : 2;
    auto y = static_cast<const Q8_1 *>(activations);
    for (int row = blockIdx.x * ROWS; row < (blockIdx.x + 1) * ROWS; row++) {
        float sums[N] = {};
        for (int b = 0; b < columns / BLOCK; b++) {
            Block block;
            // Like candle's kernel, also reads beyond the last row if the number of rows is odd.
            read_block<F>(weights, size_t(row) * (columns / BLOCK) + b, block);
            for (int n = 0; n < N; n++) {
                const Q8_1 &x = y[n * stride + b];
                sums[n] += product<F::SUM>(block, x.quants, widen(x.scale), widen(x.sum));
            }
        }
        for (int n = 0; n < N && row < rows; n++) {
            to[n * stride_to + row] = narrow<T>(sums[n]);
        }
    }
}

// 128 activations of a row: four blocks, with a scale or a pair of scale and sum each.
struct Q8_1x4 {
    union {
        float scales[4];
        f16 pairs[4][2];
    };
    int8_t quants[4][BLOCK];
};

// The first 128 activations of all rows come first; a block of threads takes 512 values of a row.
template <bool SUM>
void quantize_columns(const float *from, const int *ids, void *to, int64_t columns, int64_t stride, int64_t, int64_t,
                      int64_t padded, int rows, int) {
    if (ids || gridDim.z != 1 || padded % 128 != 0) {
        gpu::fault("no emulation of chosen activations");
    }
    int64_t end = std::min<int64_t>((blockIdx.y + 1) * 512, padded);
    for (int64_t first = blockIdx.y * 512; first < end; first += BLOCK) {
        Q8_1x4 &block = static_cast<Q8_1x4 *>(to)[first / 128 * rows + blockIdx.x];
        int part = first % 128 / BLOCK;
        float scale, sum;
        quantize(from + blockIdx.x * stride, first, columns, block.quants[part], scale, sum);
        if (SUM) {
            block.pairs[part][0] = narrow<f16>(scale);
            block.pairs[part][1] = narrow<f16>(sum);
        } else {
            block.scales[part] = scale;
        }
    }
}

// Products with many rows of activations. candle's kernel leaves partial sums to another kernel, which
// has nothing to do here.
template <typename F>
void multiply_many(const char *weights, const int *activations, const int *ids, const int *, float *to, float *,
                   int columns, int rows, int count, int stride, int all, int stride_to, int, int channels, int, int,
                   int, int, int samples, int, int, int, int) {
    if (ids || channels != 1 || samples != 1) {
        gpu::fault("no emulation of chosen weights");
    }
    // Formats with an offset have sums here.
    constexpr bool SUM = F::SUM || F::NUMBER == Q4_K::NUMBER;
    auto y = reinterpret_cast<const Q8_1x4 *>(activations);
    std::vector<float> sums(count);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        std::fill(sums.begin(), sums.end(), 0.f);
        for (int b = 0; b < columns / BLOCK; b++) {
            Block block;
            read_block<F>(weights, size_t(row) * stride * F::SPAN + b, block);
            for (int n = 0; n < count; n++) {
                const Q8_1x4 &x = y[b / 4 * all + n];
                float scale = SUM ? widen(x.pairs[b % 4][0]) : x.scales[b % 4];
                float sum = SUM ? widen(x.pairs[b % 4][1]) : 0;
                sums[n] += product<SUM>(block, x.quants[b % 4], scale, sum);
            }
        }
        for (int n = 0; n < count; n++) {
            to[size_t(n) * stride_to + row] = sums[n];
        }
    }
}
void fixup(const int *, const int *, float *, const float *, int, int, int, size_t, int, size_t, int, size_t, int) {}

template <typename F, typename T, int N> void add_few(const std::string &name) {
    if constexpr (N > 0) {
        gpu::add(name + std::to_string(N), multiply_few<F, T, N>);
        add_few<F, T, N - 1>(name);
    }
}

template <typename F> void add_for(const std::string &type, const std::string &small) {
    gpu::add("get_rows_" + type, get_rows<F>);
    const std::string dequantized = "dequantize_block_" + type;
    if constexpr (F::SPAN == 1) {
        gpu::add(dequantized + "_f32", dequantize_counted<F, float>);
        gpu::add(dequantized + "_f16", dequantize_counted<F, f16>);
    } else {
        gpu::add(dequantized + "_f32", dequantize_all<F, float>);
        gpu::add(dequantized + "_f16", dequantize_all<F, f16>);
    }
    add_few<F, float, 8>("mmvq_gguf_" + small + "_f32_plain_cuda");
    add_few<F, f16, 8>("mmvq_gguf_" + small + "_f16_plain_cuda");
    add_few<F, bf16, 8>("mmvq_gguf_" + small + "_bf16_plain_cuda");
    // Template arguments: the format's number, columns of a tile, and whether there are partial tiles.
    for (int tile = 8; tile <= 128; tile += 8) {
        for (const char *parts : {"0", "1"}) {
            std::string arguments =
                "IL9ggml_type" + std::to_string(F::NUMBER) + "ELi" + std::to_string(tile) + "ELb" + parts + "EEv";
            gpu::add("_Z9mul_mat_q" + arguments + "PKcPKiS4_S4_PfS5_iiiiiiiiiiiiiiiii", multiply_many<F>);
            gpu::add("_Z24mul_mat_q_stream_k_fixup" + arguments + "PKiS2_PfPKfiiimimimi", fixup);
        }
    }
}

[[maybe_unused]] const bool added = [] {
    add_for<Q4_1>("q4_1", "q4_1");
    add_for<Q5_1>("q5_1", "q5_1");
    add_for<Q8_0>("q8_0", "q8_0");
    add_for<Q4_K>("q4_K", "q4_k");
    add_for<Q6_K>("q6_K", "q6_k");
    gpu::add("mmvq_gguf_quantize_q8_1_f32", quantize_rows<float>);
    gpu::add("mmvq_gguf_quantize_q8_1_f16", quantize_rows<f16>);
    gpu::add("mmvq_gguf_quantize_q8_1_bf16", quantize_rows<bf16>);
    gpu::add("_Z17quantize_mmq_q8_1IL18mmq_q8_1_ds_layout0EEvPKfPKiPvlllllii", quantize_columns<false>);
    gpu::add("_Z17quantize_mmq_q8_1IL18mmq_q8_1_ds_layout1EEvPKfPKiPvlllllii", quantize_columns<true>);
    return true;
}();

} // namespace
