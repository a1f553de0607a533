// CUDA on the host, as far as our kernels use it: one block at a time, its threads as coroutines
// that take turns where they wait for one another. For tests; nothing is fast here.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// Blocks come one after the other, so what is shared in one is static.
#define __shared__ static
#define DYNAMIC_SHARED(name) unsigned char *name = emulator::dynamic_shared

using std::max;
using std::min;

struct Dim {
    int x, y, z;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
extern unsigned char dynamic_shared[];
// What threads of a warp show each other.
extern uint32_t exchange[32][32][6];
void wait_for_warp();
void wait_for_block();
// Runs `kernel` for each thread of each block.
void launch(Dim grid, int threads, std::function<void()> kernel);
inline auto &warp() { return exchange[threadIdx.x / 32]; }
inline int lane() { return threadIdx.x % 32; }
template <typename To, typename From> To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace emulator

struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
    return emulator::cast<float>(uint32_t(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits = emulator::cast<uint32_t>(x);
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct __half {
    uint16_t bits;
};
inline float __half2float(__half x) {
    float magnitude = x.bits >> 10 & 31 ? std::ldexp(float((x.bits & 1023) | 1024), (x.bits >> 10 & 31) - 25)
                                        : std::ldexp(float(x.bits & 1023), -24);
    return x.bits >> 15 ? -magnitude : magnitude;
}
// Of finite numbers that f16 has a neighbour of.
inline __half __float2half_rn(float x) {
    int exponent;
    std::frexp(x, &exponent);
    exponent = x == 0 ? -13 : std::max(exponent, -13);
    // In units of the last place, of which there are 11 bits; a carry moves on to the exponent.
    uint16_t places = uint16_t(std::nearbyint(std::ldexp(std::fabs(x), 11 - exponent)));
    uint16_t bits = uint16_t(((exponent + 13) << 10) + places);
    return {uint16_t(bits | (std::signbit(x) ? 0x8000 : 0))};
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
template <typename T> T __ldcs(const T *from) { return *from; }
template <typename T> T __ldg(const T *from) { return *from; }

inline void __syncthreads() { emulator::wait_for_block(); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) {
    auto &warp = emulator::warp();
    memcpy(warp[emulator::lane()], &x, sizeof x);
    emulator::wait_for_warp();
    T other;
    memcpy(&other, warp[emulator::lane() ^ mask], sizeof other);
    emulator::wait_for_warp();
    return other;
}
// Threads take turns only where they wait.
inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long x) {
    unsigned long long before = *to;
    *to += x;
    return before;
}
inline uint32_t __float_as_uint(float x) { return emulator::cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return emulator::cast<float>(x); }
inline int __float_as_int(float x) { return emulator::cast<int>(x); }
inline float __int_as_float(int x) { return emulator::cast<float>(x); }

// mma.m16n8k16.row.col with f32 sums, by the table of fragments in the PTX manual.
template <typename T>
void emulate_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto &warp = emulator::warp();
    const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(warp[emulator::lane()], own, sizeof own);
    emulator::wait_for_warp();
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane / 4, pair = lane % 4 * 2;
        for (int half = 0; half < 2; half++) {
            auto value = [&](int i) {
                return widen(emulator::cast<T>(uint16_t(warp[lane][i] >> (16 * half))));
            };
            for (int i = 0; i < 4; i++) {
                left[group + i % 2 * 8][pair + i / 2 * 8 + half] = value(i);
            }
            for (int i = 0; i < 2; i++) {
                right[pair + i * 8 + half][group] = value(4 + i);
            }
        }
    }
    emulator::wait_for_warp();
    int group = emulator::lane() / 4, pair = emulator::lane() % 4 * 2;
    for (int k = 0; k < 16; k++) {
        for (int i = 0; i < 4; i++) {
            d[i] += left[group + i / 2 * 8][k] * right[k][pair + i % 2];
        }
    }
}
