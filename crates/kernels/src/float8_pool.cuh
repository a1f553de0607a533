// Keys and values in FP8 (E4M3) without scales: a sign, four bits of exponent with bias 7 and three of the fraction. There
// are no infinities; the largest number is 448.
#pragma once
#include "cuda/eight.cuh"
#include "cuda/tensor.cuh"

// The numbers of a pool. They are counted from the first one of the pool.
template <typename Byte> struct Float8sOf {
    Byte *numbers;
};
using Float8s = Float8sOf<const uint8_t>;
using NewFloat8s = Float8sOf<uint8_t>;

// The nearest number, of two that are equally near the even one; the largest number for whatever is larger.
__device__ __forceinline__ uint32_t round_to_e4m3(float x) {
    // The smallest normal number, and its reciprocal times the eight subnormal ones below it.
    constexpr float NORMAL = 1.f / 64, STEPS = 512.f;
    constexpr uint32_t LARGEST = 0x7e, NOT_A_NUMBER = 0x7f;
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    const float size = fabsf(x);
    if (!(size < INFINITY)) {
        return sign | (size == INFINITY ? LARGEST : NOT_A_NUMBER);
    }
    if (size < NORMAL) {
        // Adding 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
        return sign | (__float_as_uint(__fadd_rn(__fmul_rn(size, STEPS), 8388608.f)) & 0xff);
    }
    // To three bits of the fraction, with a carry to the exponent, whose bias is 120 less.
    const uint32_t own = bits & 0x7fffffffu, rounded = (own + 0x7ffffu + (own >> 20 & 1)) >> 20;
    const uint32_t number = rounded - (120 << 3);
    return sign | (number < LARGEST ? number : LARGEST);
}

// A number that is the low byte.
__device__ __forceinline__ float widen_e4m3(uint32_t number) {
    constexpr uint32_t NOT_A_NUMBER = 0x7f;
    if ((number & 0x7f) == NOT_A_NUMBER) {
        return NAN;
    }
    // The bits of a float that is 2^120 times smaller.
    return __fmul_rn(__uint_as_float((number & 0x7f) << 20 | (number & 0x80) << 24), 0x1p120f);
}

// Rounds the `count` values at `from`, a multiple of four, to the numbers that begin at `at`, by the threads of a warp.
__device__ __forceinline__ void quantize(const float *from, int count, const NewFloat8s &to, size_t at) {
    constexpr int VALUES = 4;
    for (int own = threadIdx.x % 32 * VALUES; own < count; own += 32 * VALUES) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            word |= round_to_e4m3(from[own + i]) << 8 * i;
        }
        *reinterpret_cast<uint32_t *>(to.numbers + at + own) = word;
    }
}

// 16 numbers, as a thread loads them.
struct Float8Piece {
    static constexpr int LEN = 16;
    uint4 numbers;

    // Zeros, if they do not exist.
    __device__ __forceinline__ void load(const Float8s &pool, size_t at, bool exists) {
        numbers = exists ? *reinterpret_cast<const uint4 *>(pool.numbers + at) : make_uint4(0, 0, 0, 0);
    }

    // The values, which every dtype has, to `to` in shared memory.
    template <typename T> __device__ __forceinline__ void store(T *to) const {
        const uint32_t words[] = {numbers.x, numbers.y, numbers.z, numbers.w};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = widen_e4m3(words[2 * half + i / 4] >> i % 4 * 8 & 255);
            }
            put_eight(x, to + half * 8);
        }
    }
};
