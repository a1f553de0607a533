// CUDA on the host, as far as our kernels use it. Blocks run one after the other in a random order, and the threads of a
// block are coroutines that switch where they wait for each other. For tests only, and slow.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after the other, so shared memory is static.
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DYNAMIC_SHARED(name) unsigned char *name = emulator::dynamic_shared[emulator::block_of_cluster()]

using std::max;
using std::min;

struct Dim {
    int x, y, z;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
// Maximum shared memory of a block on a large GPU, and the guard bytes after it.
constexpr size_t MAX_SHARED = 227 << 10, GUARD = 256;
// Maximum number of blocks of a cluster, which run at the same time, and of warps of all of them.
constexpr int MAX_CLUSTER = 8, MAX_WARPS = 64;
extern unsigned char dynamic_shared[MAX_CLUSTER][MAX_SHARED + GUARD];
// Values that the threads of a warp exchange. There are two places for them, which threads use in turns: when
// one of them comes to the same place again, all others have read what it wrote there.
extern uint64_t exchange[MAX_WARPS][2][32];
// Eight floats with which the compiler computes at once.
typedef float Row __attribute__((vector_size(32)));
// What each thread of a warp has of the matrices that it multiplies: of the left one, the right one, and the sum.
struct Fragments {
    uint32_t a[4][32], b[2][32];
    Row d[16];
};
extern Fragments fragments[MAX_WARPS][2];
// The thread that runs, of those of its cluster, and the number of its blocks.
extern int current, blocks_of_cluster;
// Exchanges of each thread with those of its warp so far.
extern int exchanges[32 * MAX_WARPS];
inline int turn() { return exchanges[current]++ % 2; }
void wait_for_warp();
// The last thread to arrive calls `last` before they go on.
void wait_for_warp(void (*last)(void *), void *argument);
void wait_for_block();
void wait_for_cluster();
// Waits for `count` threads of the block that come here with the same `id`, below 16 (bar.sync).
void wait_for_team(int id, int count);
// Reports a bug of a kernel that a real GPU might silently ignore, and ends the program.
[[noreturn]] void end(const char *bug);
// Runs `kernel` for each thread of each block, with `shared` bytes of dynamic shared memory, in clusters of so many blocks
// of the second dimension.
void launch(Dim grid, int threads, const std::function<void()> &kernel, size_t shared = MAX_SHARED, int cluster = 1);
// The phase that runs, of a kernel whose blocks wait for one another between phases: it is launched once for each.
extern int phase;
// A warp of its cluster.
inline int warp() { return current / 32; }
inline int lane() { return current % 32; }
inline int block_of_cluster() { return blocks_of_cluster == 1 ? 0 : current / blockDim.x; }
// What another block of the cluster has where this one has `shared`.
inline const unsigned char *memory_of_block(const unsigned char *shared, int number) {
    return dynamic_shared[number] + (shared - dynamic_shared[block_of_cluster()]);
}
template <typename To, typename From> To cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace emulator

// Vectors have the alignment that a GPU requires.
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
struct alignas(8) float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
    return emulator::cast<float>(uint32_t(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    uint32_t bits = emulator::cast<uint32_t>(x);
    if (x != x) {
        return {0x7fff};
    }
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

struct __half {
    uint16_t bits;
};
inline float __half2float(__half x) {
#ifdef __F16C__
    if ((x.bits & 0x7c00) != 0x7c00) {
        return _cvtsh_ss(x.bits);
    }
#endif
    int exponent = x.bits >> 10 & 31, places = x.bits & 1023;
    float magnitude = exponent == 31 ? (places ? NAN : INFINITY)
                      : exponent     ? emulator::cast<float>(uint32_t(exponent + 112) << 23 | places << 13)
                                     : places * 0x1p-24f;
    return x.bits >> 15 ? -magnitude : magnitude;
}
inline __half __float2half_rn(float x) {
    uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    // From halfway between the largest number and the next one there would be, rounds to infinity.
    if (!(std::fabs(x) < 65520)) {
        return {uint16_t(x == x ? sign | 0x7c00 : 0x7fff)};
    }
#ifdef __F16C__
    return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)};
#endif
    int exponent;
    std::frexp(x, &exponent);
    exponent = x == 0 ? -13 : std::max(exponent, -13);
    // In units in the last place, with 11 bits; a carry goes into the exponent.
    uint16_t places = uint16_t(std::nearbyint(std::ldexp(std::fabs(x), 11 - exponent)));
    return {uint16_t(sign | (((exponent + 13) << 10) + places))};
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp() { emulator::wait_for_warp(); }
template <typename T> T __shfl_sync(unsigned, T x, int lane) {
    auto &warp = emulator::exchange[emulator::warp()][emulator::turn()];
    static_assert(sizeof x <= sizeof warp[0]);
    memcpy(&warp[emulator::lane()], &x, sizeof x);
    emulator::wait_for_warp();
    T other;
    memcpy(&other, &warp[lane], sizeof other);
    return other;
}
template <typename T> T __shfl_xor_sync(unsigned all, T x, int mask) { return __shfl_sync(all, x, emulator::lane() ^ mask); }
// The first threads get their own.
template <typename T> T __shfl_up_sync(unsigned all, T x, int distance) {
    return __shfl_sync(all, x, emulator::lane() < distance ? emulator::lane() : emulator::lane() - distance);
}
// What the other threads of a warp have for `x`.
template <typename T> std::array<T, 32> emulate_gather(T x) {
    auto &warp = emulator::exchange[emulator::warp()][emulator::turn()];
    static_assert(sizeof x <= sizeof warp[0]);
    memcpy(&warp[emulator::lane()], &x, sizeof x);
    emulator::wait_for_warp();
    std::array<T, 32> all;
    for (int i = 0; i < 32; i++) {
        memcpy(&all[i], &warp[i], sizeof x);
    }
    return all;
}
// The additions of five shuffles, where threads wait once: most of a small product's time would be waits.
inline float emulate_warp_sum(float x) {
    auto sums = emulate_gather(x);
    for (int half = 16; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            sums[i] += sums[i + half];
        }
    }
    return sums[0];
}
inline bool __any_sync(unsigned, bool x) {
    bool any = false;
    for (bool one : emulate_gather(x)) {
        any |= one;
    }
    return any;
}
// Atomic, because threads switch only where they wait.
template <typename T> T atomicAdd(T *to, std::type_identity_t<T> x) {
    T before = *to;
    *to += x;
    return before;
}
inline unsigned atomicAdd(unsigned *to, unsigned x) {
    unsigned before = *to;
    *to += x;
    return before;
}
inline void __threadfence() {}
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline uint32_t __float_as_uint(float x) { return emulator::cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return emulator::cast<float>(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = x | uint64_t(y) << 32;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        out |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    }
    return out;
}
inline int __float_as_int(float x) { return emulator::cast<int>(x); }
inline float __int_as_float(int x) { return emulator::cast<float>(x); }

// mma.m16n8k16.row.col with f32 sums. After the fragment tables in the PTX manual, the values of all lanes one after the
// other are quarters of the left matrix, halves of the right one's columns, and halves of the sum.
template <typename T> void multiply(emulator::Fragments &all) {
    auto value = [](const uint32_t *quarter, int i) {
        T value;
        memcpy(&value, reinterpret_cast<const unsigned char *>(quarter) + i * sizeof value, sizeof value);
        return widen(value);
    };
    float left[16][16];
    emulator::Row right[16];
    for (int group = 0; group < 8; group++) {
        for (int i = 0; i < 8; i++) {
            left[group][i] = value(all.a[0], group * 8 + i);
            left[8 + group][i] = value(all.a[1], group * 8 + i);
            left[group][8 + i] = value(all.a[2], group * 8 + i);
            left[8 + group][8 + i] = value(all.a[3], group * 8 + i);
            right[i][group] = value(all.b[0], group * 8 + i);
            right[8 + i][group] = value(all.b[1], group * 8 + i);
        }
    }
    // Four rows at a time, because the additions of one wait for one another.
    emulator::Row *sum = all.d;
    for (int row = 0; row < 16; row += 4) {
        emulator::Row a = sum[row], b = sum[row + 1], c = sum[row + 2], d = sum[row + 3];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++) {
            a += left[row][k] * right[k];
            b += left[row + 1][k] * right[k];
            c += left[row + 2][k] * right[k];
            d += left[row + 3][k] * right[k];
        }
        sum[row] = a, sum[row + 1] = b, sum[row + 2] = c, sum[row + 3] = d;
    }
}
template <typename T>
void emulate_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    auto &all = emulator::fragments[emulator::warp()][emulator::turn()];
    const int lane = emulator::lane();
    for (int i = 0; i < 4; i++) {
        all.a[i][lane] = a[i];
    }
    all.b[0][lane] = b0;
    all.b[1][lane] = b1;
    float *sums[2] = {&all.d[lane / 4][lane % 4 * 2], &all.d[8 + lane / 4][lane % 4 * 2]};
    memcpy(sums[0], d, 8);
    memcpy(sums[1], d + 2, 8);
    emulator::wait_for_warp([](void *all) { multiply<T>(*static_cast<emulator::Fragments *>(all)); }, &all);
    memcpy(d, sums[0], 8);
    memcpy(d + 2, sums[1], 8);
}

// ldmatrix.x4.trans: a thread gets, from each matrix, the values of two rows in one column.
inline void emulate_ldmatrix_trans(uint32_t (&b)[4], const void *row) {
    auto &rows = emulator::exchange[emulator::warp()][emulator::turn()];
    rows[emulator::lane()] = reinterpret_cast<uintptr_t>(row);
    emulator::wait_for_warp();
    const int column = emulator::lane() / 4, first = emulator::lane() % 4 * 2;
    for (int matrix = 0; matrix < 4; matrix++) {
        auto value = [&](int row) {
            return uint32_t(reinterpret_cast<const uint16_t *>(rows[matrix * 8 + row])[column]);
        };
        b[matrix] = value(first) | value(first + 1) << 16;
    }
    // All have read before one goes on to write there.
    emulator::wait_for_warp();
}

// cp.async: bytes that arrive only when their thread waits for them. Until then there are NaNs. A GPU may read and write them
// at any time before, so neither the bytes nor the place may change.
struct Copy {
    void *to;
    // Null = zeros.
    const void *from;
    // What was there when the copy began.
    unsigned char bytes[16];
    // Groups that ended since; 0 = its own has not ended.
    int ends;
};
inline std::vector<Copy> &copies_of_thread() {
    static std::vector<Copy> all[32 * emulator::MAX_WARPS];
    return all[emulator::current];
}
inline void emulate_copy_async(void *shared, const void *global, bool exists) {
    Copy copy = {shared, exists ? global : nullptr, {}, 0};
    if (exists) {
        memcpy(copy.bytes, global, 16);
    }
    memset(shared, 0xff, 16);
    copies_of_thread().push_back(copy);
}
inline void emulate_end_of_copies() {
    for (Copy &copy : copies_of_thread()) {
        copy.ends++;
    }
}
inline void emulate_wait_for_copies(int pending) {
    std::erase_if(copies_of_thread(), [&](const Copy &copy) {
        const bool done = copy.ends > pending;
        if (done) {
            const unsigned char *place = static_cast<const unsigned char *>(copy.to);
            if (copy.from != nullptr && memcmp(copy.from, copy.bytes, 16) != 0) {
                emulator::end("a kernel writes what a copy still reads");
            }
            if (std::any_of(place, place + 16, [](unsigned char byte) { return byte != 0xff; })) {
                emulator::end("a kernel writes where a copy still writes");
            }
            memcpy(copy.to, copy.bytes, 16);
        }
        return done;
    });
}
