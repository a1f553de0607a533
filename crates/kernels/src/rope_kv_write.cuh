// Head norms and rotary position embedding of a head, by the threads of a warp.
#pragma once
#include "cuda/common.cuh"

// The heads of rows, and what becomes of them. qkv: [rows, all, d]: first `heads` queries, then the keys, then as many
// values. cos, sin: [rows, half], or null if half is 0; values of a head from 2 * half on are not rotated. q_norm and
// k_norm: [d], or with `whole` [heads, d] and [kv_heads, d], or null.
template <typename T> struct Heads {
    const T *qkv, *cos, *sin, *q_norm, *k_norm;
    int heads, all, d, half, whole;
    float eps;

    __device__ __forceinline__ int kv_heads() const { return (all - heads) / 2; }

    // Writes a head of a row to `to`. Calls `wait` before it reads anything of qkv, and after it has begun to read the rest.
    template <typename Wait> __device__ __forceinline__ void write(int row, int head, T *to, Wait wait) const {
        // A thread loads so many pairs or values before it stores the first: the compiler does not know that no load
        // reads what was stored.
        constexpr int PAIRS = 2, VALUES = 4;
        const int lane = threadIdx.x % 32;
        const T *x = qkv + ((size_t)row * all + head) * d;
        const bool key = head >= heads, value = head >= heads + kv_heads();
        const int pairs = value ? 0 : half;
        const T *norm = value ? nullptr : key ? k_norm : q_norm;
        // All heads together have one norm, or each has its own.
        const T *from = whole ? qkv + ((size_t)row * all + (key ? heads : 0)) * d : x;
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
        if (norm != nullptr) {
            float square = 0.f;
            for (int i = lane; i < width; i += 32) {
                square = fmaf(widen(from[i]), widen(from[i]), square);
            }
            scale = rsqrtf(warp_sum(square) / width + eps);
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
                    if (norm != nullptr) {
                        a = a * scale * widen(by_a[n]);
                        b = b * scale * widen(by_b[n]);
                    }
                    to[i] = narrow<T>(__fsub_rn(__fmul_rn(a, widen(c[n])), __fmul_rn(b, widen(s[n]))));
                    to[i + half] = narrow<T>(__fadd_rn(__fmul_rn(a, widen(s[n])), __fmul_rn(b, widen(c[n]))));
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
                    to[i] = norm != nullptr ? narrow<T>(widen(values[n]) * scale * widen(norm[i])) : values[n];
                }
            }
        }
    }

    // As above, when all of qkv can be read.
    __device__ __forceinline__ void write(int row, int head, T *to) const {
        write(row, head, to, [] {});
    }
};
