// Keys and values in blocks of Q8_0, as q8_blocks.rs makes them: 32 values of a head are signed bytes, times an f16 scale.
// A pool on a GPU has the bytes of all its blocks first, then all scales, so that both are aligned.
#pragma once
#include "cuda/eight.cuh"
#include "cuda/tensor.cuh"

// The blocks of a pool. Values are counted from the first one of the pool.
template <typename Byte, typename Scale> struct BlocksOf {
    static constexpr int BLOCK = 32;
    Byte *bytes;
    Scale *scales;
};
using Q8Blocks = BlocksOf<const int8_t, const f16>;
using NewQ8Blocks = BlocksOf<int8_t, f16>;

// Rounds the `count` values at `from` to the blocks that begin with value `at`, by the threads of a warp: whole blocks, with
// the bytes that `quantize` of q8_blocks.rs gives.
__device__ __forceinline__ void quantize(const float *from, int count, const NewQ8Blocks &to, size_t at) {
    // A thread has four values of a block.
    constexpr int VALUES = 4, THREADS = NewQ8Blocks::BLOCK / VALUES;
    // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    constexpr float ROUND = 12582912.f, LARGEST = 127.f;
    constexpr uint16_t NOT_A_NUMBER = 0x7e00;
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < count; first += 32 * VALUES) {
        const int own = first + lane * VALUES;
        const bool exists = own < count;
        float x[VALUES] = {}, largest = 0.f;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            x[i] = exists ? from[own + i] : 0.f;
            // Whatever is not finite makes the scale infinite.
            largest = fmaxf(largest, fabsf(x[i]) < INFINITY ? fabsf(x[i]) : INFINITY);
        }
#pragma unroll
        for (int mask = THREADS / 2; mask > 0; mask /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
        }
        f16 scale = narrow<f16>(__fdiv_rn(largest, LARGEST));
        const float by = widen(scale), inverse = by > 0.f ? __fdiv_rn(1.f, by) : 0.f;
        uint32_t bytes = 0;
        if (by < INFINITY) {
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                // Only a scale without all bits is so small that there is more than LARGEST.
                const float y = fminf(fmaxf(__fmul_rn(x[i], inverse), -LARGEST), LARGEST);
                bytes |= (__float_as_uint(__fadd_rn(y, ROUND)) & 255) << 8 * i;
            }
        } else {
            memcpy(&scale, &NOT_A_NUMBER, sizeof scale);
        }
        if (exists) {
            *reinterpret_cast<uint32_t *>(to.bytes + at + own) = bytes;
            if (lane % THREADS == 0) {
                to.scales[(at + own) / NewQ8Blocks::BLOCK] = scale;
            }
        }
    }
}

// 16 values of a block, as a thread loads them.
struct Q8Piece {
    static constexpr int LEN = 16;
    uint4 bytes;
    float scale;

    // Zeros, if they do not exist.
    __device__ __forceinline__ void load(const Q8Blocks &pool, size_t at, bool exists) {
        bytes = exists ? *reinterpret_cast<const uint4 *>(pool.bytes + at) : make_uint4(0, 0, 0, 0);
        scale = exists ? widen(pool.scales[at / Q8Blocks::BLOCK]) : 0.f;
    }

    // The values, of which each is rounded once, to `to` in shared memory.
    template <typename T> __device__ __forceinline__ void store(T *to) const {
        const uint32_t words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
        // A float from 2^15 on has an integer below 2^8 in its second byte. 2^15 and the 128 by which bytes are shifted to
        // have no sign are subtracted as a multiple of the scale: both products are exact, so the difference is.
        const float minus = __fmul_rn(scale, -(32768.f + 128.f));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t shifted = words[2 * half + i / 4] ^ 0x80808080u;
                x[i] = fmaf(scale, __uint_as_float(__byte_perm(shifted, 0x47000000u, 0x7404 | i % 4 << 4)), minus);
            }
            put_eight(x, to + half * 8);
        }
    }
};
