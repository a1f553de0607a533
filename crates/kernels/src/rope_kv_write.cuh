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

    // Writes a head of a row to `to`.
    __device__ __forceinline__ void write(int row, int head, T *to) const {
        const int lane = threadIdx.x % 32;
        const T *x = qkv + ((size_t)row * all + head) * d;
        if (head >= heads + kv_heads()) {
            for (int i = lane; i < d; i += 32) {
                to[i] = x[i];
            }
            return;
        }
        const bool key = head >= heads;
        const T *norm = key ? k_norm : q_norm;
        float scale = 1.f;
        if (norm != nullptr) {
            // All heads together have one norm, or each has its own.
            const T *from = whole ? qkv + ((size_t)row * all + (key ? heads : 0)) * d : x;
            const int width = whole ? (key ? kv_heads() : heads) * d : d;
            norm += x - from;
            float square = 0.f;
            for (int i = lane; i < width; i += 32) {
                square = fmaf(widen(from[i]), widen(from[i]), square);
            }
            scale = rsqrtf(warp_sum(square) / width + eps);
        }
        for (int i = lane; i < half; i += 32) {
            float a = widen(x[i]), b = widen(x[i + half]);
            if (norm != nullptr) {
                a = a * scale * widen(norm[i]);
                b = b * scale * widen(norm[i + half]);
            }
            float c = widen(cos[row * half + i]), s = widen(sin[row * half + i]);
            to[i] = narrow<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
            to[i + half] = narrow<T>(__fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c)));
        }
        for (int i = 2 * half + lane; i < d; i += 32) {
            to[i] = norm != nullptr ? narrow<T>(widen(x[i]) * scale * widen(norm[i])) : x[i];
        }
    }
};
