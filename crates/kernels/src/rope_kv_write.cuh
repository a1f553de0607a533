// Head norms and rotary position embedding of a head, by the threads of a warp.
#pragma once
#include "cuda/common.cuh"

// The heads of rows, and what becomes of them. qkv: [rows, all, d]: first `heads` queries, then the keys, then as many
// values; or [rows, all - kv_heads, d] if `values_are_keys`: the values are the keys without norm and rotation. A row begins
// `stride` values after the one before; 0 = these are all. cos, sin: [rows, half], or null if half is 0; values of a head
// from 2 * half on are not rotated. q_norm and k_norm: [d], or with `whole` [heads, d] and [kv_heads, d], or null. The norm of a head is that of the rotated head with
// `norms_rotated`. Values have a norm without weights with `norms_values`, with an eps of its own.
template <typename T> struct Heads {
    const T *qkv, *cos, *sin, *q_norm, *k_norm;
    int heads, all, d, half, whole;
    float eps;
    int norms_rotated = 0, values_are_keys = 0, norms_values = 0;
    float value_eps = 0.f;
    int stride = 0;

    __device__ __forceinline__ int kv_heads() const { return (all - heads) / 2; }

    // A value that is not computed, in T or in f32.
    template <typename To> static __device__ __forceinline__ To as_it_is(T x) {
        if constexpr (sizeof(To) == sizeof(T)) {
            return x;
        } else {
            return widen(x);
        }
    }

    // The two values of a pair, rotated.
    static __device__ __forceinline__ float rotated(float a, float b, T cos, T sin) {
        return __fsub_rn(__fmul_rn(a, widen(cos)), __fmul_rn(b, widen(sin)));
    }
    static __device__ __forceinline__ float rotated_other(float a, float b, T cos, T sin) {
        return __fadd_rn(__fmul_rn(a, widen(sin)), __fmul_rn(b, widen(cos)));
    }

    // Writes a head of a row to `to`, in T or, before values are rounded to it, in f32. Calls `wait` before it reads anything
    // of qkv, and after it has begun to read the rest.
    template <typename To, typename Wait>
    __device__ __forceinline__ void write(int row, int head, To *to, Wait wait) const {
        // A thread loads so many pairs or values before it stores the first: the compiler does not know that no load
        // reads what was stored.
        constexpr int PAIRS = 2, VALUES = 4;
        const int lane = threadIdx.x % 32;
        const bool key = head >= heads, value = head >= heads + kv_heads();
        const int stored = values_are_keys ? all - kv_heads() : all;
        const T *heads_of_row = qkv + (size_t)row * (stride > 0 ? stride : stored * d);
        const T *x = heads_of_row + (value && values_are_keys ? head - kv_heads() : head) * d;
        const int pairs = value ? 0 : half;
        const T *norm = value ? nullptr : key ? k_norm : q_norm;
        // All heads together have one norm, or each has its own.
        const T *from = whole ? heads_of_row + (key ? heads : 0) * d : x;
        const int width = whole ? (key ? kv_heads() : heads) * d : d;
        if (norm != nullptr) {
            norm += x - from;
        }
        T c[PAIRS] = {}, s[PAIRS] = {}, by_a[PAIRS] = {}, by_b[PAIRS] = {};
        auto load_factors = [&](int first) {
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
                const int i = first + 32 * n;
                if (i < pairs) {
                    c[n] = cos[row * half + i];
                    s[n] = sin[row * half + i];
                    if (norm != nullptr) {
                        by_a[n] = norm[i];
                        by_b[n] = norm[i + half];
                    }
                }
            }
        };
        load_factors(lane);
        wait();
        float scale = 1.f;
        const bool normed_value = value && norms_values;
        if (norm != nullptr && norms_rotated) {
            float square = 0.f;
            for (int i = lane; i < pairs; i += 32) {
                const float a = widen(x[i]), b = widen(x[i + half]);
                const float first = rotated(a, b, cos[row * half + i], sin[row * half + i]);
                const float second = rotated_other(a, b, cos[row * half + i], sin[row * half + i]);
                square = fmaf(second, second, fmaf(first, first, square));
            }
            for (int i = 2 * pairs + lane; i < d; i += 32) {
                square = fmaf(widen(x[i]), widen(x[i]), square);
            }
            scale = rsqrtf(warp_sum(square) / d + eps);
        } else if (norm != nullptr || normed_value) {
            const int width_of_norm = value ? d : width;
            const T *values = value ? x : from;
            float square = 0.f;
            for (int i = lane; i < width_of_norm; i += 32) {
                square = fmaf(widen(values[i]), widen(values[i]), square);
            }
            scale = rsqrtf(warp_sum(square) / width_of_norm + (value ? value_eps : eps));
        }
        for (int first = lane; first < pairs; first += 32 * PAIRS) {
            if (first > lane) {
                load_factors(first);
            }
            T left[PAIRS] = {}, right[PAIRS] = {};
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
                const int i = first + 32 * n;
                if (i < pairs) {
                    left[n] = x[i];
                    right[n] = x[i + half];
                }
            }
#pragma unroll
            for (int n = 0; n < PAIRS; n++) {
                const int i = first + 32 * n;
                if (i < pairs) {
                    float a = widen(left[n]), b = widen(right[n]);
                    if (norm != nullptr && !norms_rotated) {
                        a = a * scale * widen(by_a[n]);
                        b = b * scale * widen(by_b[n]);
                    }
                    float first = rotated(a, b, c[n], s[n]), second = rotated_other(a, b, c[n], s[n]);
                    if (norm != nullptr && norms_rotated) {
                        first = first * scale * widen(by_a[n]);
                        second = second * scale * widen(by_b[n]);
                    }
                    to[i] = narrow<To>(first);
                    to[i + half] = narrow<To>(second);
                }
            }
        }
        for (int first = 2 * pairs + lane; first < d; first += 32 * VALUES) {
            T values[VALUES] = {};
#pragma unroll
            for (int n = 0; n < VALUES; n++) {
                if (first + 32 * n < d) {
                    values[n] = x[first + 32 * n];
                }
            }
#pragma unroll
            for (int n = 0; n < VALUES; n++) {
                const int i = first + 32 * n;
                if (i < d) {
                    to[i] = norm != nullptr  ? narrow<To>(widen(values[n]) * scale * widen(norm[i]))
                            : normed_value ? narrow<To>(widen(values[n]) * scale)
                                           : as_it_is<To>(values[n]);
                }
            }
        }
    }

    // As above, when all of qkv can be read.
    template <typename To> __device__ __forceinline__ void write(int row, int head, To *to) const {
        write(row, head, to, [] {});
    }

    // Rounds a head of a row once, from f32, to a pool in blocks or in FP8, from value `at` on. `in_f32` is memory of the
    // warp for its values.
    template <typename Pool, typename Wait>
    __device__ __forceinline__ void write_rounded(int row, int head, float *in_f32, const Pool &pool, size_t at,
                                                  Wait wait) const {
        write(row, head, in_f32, wait);
        __syncwarp();
        quantize(in_f32, d, pool, at);
    }
};

// The parameters of kernels that say what becomes of heads; HEADS makes Heads of them, and of those that are called as its
// other members.
#define HEAD_PARAMETERS                                                                            \
    int half, int whole, float eps, int norms_rotated, int values_are_keys, int norms_values,      \
        float value_eps, int stride
#define HEADS(T)                                                                                   \
    Heads<T> {                                                                                     \
        qkv, cos, sin, q_norm, k_norm, heads, all, d, half, whole, eps, norms_rotated,             \
            values_are_keys, norms_values, value_eps, stride                                       \
    }
