// Short causal convolutions over the paged pool of a layer, one of each channel.
#include "paged_attention/paged_attention.cuh"
#include "slots.cuh"

namespace short_conv {

// The most rows of a tile, and the most tokens that are mixed; as in short_conv.rs.
constexpr int MAX_ROWS = 64, MAX_TAPS = 16;

// The product of B and x of each row, to the row's slot: the first half of its channels to the pool of K, the other one to
// that of V. products: [rows, 3 * channels], of each row B, C and x; pools: [num_slots, half].
template <typename T>
__device__ void write(const T *products, const uint32_t *slots, T *k_pool, T *v_pool, int half, uint32_t count) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t channels = 2 * half, row = i / channels, channel = i % channels;
    const uint32_t slot = i < count ? slots[row] : NO_SLOT;
    wait_for_previous();
    if (slot == NO_SLOT) {
        return;
    }
    const T *b = products + (size_t)row * 3 * channels, *x = b + 2 * channels;
    T *pool = channel < (uint32_t)half ? k_pool : v_pool;
    pool[(size_t)slot * half + channel % half] = narrow<T>(__fmul_rn(widen(b[channel]), widen(x[channel])));
}

// The slot of the token that is `back` before a row of a tile, in the sequence or up the row's branch of a tree; NO_SLOT
// before the first token; as in span.rs.
__device__ __forceinline__ uint32_t slot_before(const Tile &tile, int row, int back, const uint32_t *blocks,
                                                const uint64_t *trees, int block_size) {
    row += tile.start;
    int position = tile.context + row - back;
    if (tile.tree >= 0) {
        // Its ancestors and itself. A parent comes before its node, so the nearest is the last one.
        uint64_t path = trees[tile.tree + row] & (~0ull >> (63 - row));
        const int len = __popcll(path);
        position = tile.context - (back + 1 - len);
        if (back < len) {
            int last = row;
            for (int i = 0; i < back; i++) {
                path ^= 1ull << last;
                while (!(path >> last & 1)) {
                    last--;
                }
            }
            position = tile.context + last;
        }
    }
    return position < 0 ? NO_SLOT : blocks[tile.blocks + position / block_size] * block_size + position % block_size;
}

// Of each row the sum of its last tokens, the furthest first, times C. c: [rows, channels] with `stride` values from row to
// row; weights: [taps, channels], that of the row's own token first; bias: [channels] or null; out: [rows, channels].
template <typename T>
__device__ void convolve(const T *c, const T *k_pool, const T *v_pool, const float *weights, const float *bias, T *out,
                         const Tile *tiles, const uint32_t *blocks, const uint64_t *trees, int half, int taps,
                         int block_size, int stride) {
    __shared__ uint32_t slots[MAX_ROWS * MAX_TAPS];
    const Tile tile = tiles[blockIdx.y];
    for (int i = threadIdx.x; i < tile.rows * taps; i += blockDim.x) {
        slots[i] = slot_before(tile, i / taps, i % taps, blocks, trees, block_size);
    }
    wait_for_previous();
    __syncthreads();
    const int channels = 2 * half, channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) {
        return;
    }
    const T *pool = (channel < half ? k_pool : v_pool) + channel % half;
    for (int row = 0; row < tile.rows; row++) {
        float sum = 0.f;
        for (int back = taps - 1; back >= 0; back--) {
            const uint32_t slot = slots[row * taps + back];
            if (slot != NO_SLOT) {
                sum = fmaf(weights[back * channels + channel], widen(pool[(size_t)slot * half]), sum);
            }
        }
        if (bias != nullptr) {
            sum = __fadd_rn(sum, bias[channel]);
        }
        const size_t at = tile.first + row;
        out[at * channels + channel] = narrow<T>(__fmul_rn(widen(c[at * stride + channel]), sum));
    }
}

} // namespace short_conv

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void short_conv_write_##NAME(const T *products, const uint32_t *slots,   \
                                                       T *k_pool, T *v_pool, int half,             \
                                                       uint32_t count) {                           \
        short_conv::write(products, slots, k_pool, v_pool, half, count);                           \
    }                                                                                              \
    extern "C" __global__ void short_conv_##NAME(                                                  \
        const T *c, const T *k_pool, const T *v_pool, const float *weights, const float *bias,     \
        T *out, const Tile *tiles, const uint32_t *blocks, const uint64_t *trees, int half,        \
        int taps, int block_size, int stride) {                                                    \
        short_conv::convolve(c, k_pool, v_pool, weights, bias, out, tiles, blocks, trees, half,    \
                             taps, block_size, stride);                                            \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
