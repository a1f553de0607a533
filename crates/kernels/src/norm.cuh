// RMSNorm of a row, in the order of additions that all kernels with norms share.
#pragma once
#include "cuda/common.cuh"

// Packs of 16 bytes that a thread takes of a row.
constexpr int NORM_PACKS = 2;
// Threads that may take a row together.
constexpr int MAX_NORM_THREADS = 1024;

// The threads that take a row together: one for each pack, if there are so many; the same as in norm.rs.
template <typename T> __device__ __forceinline__ int norm_threads(int width) {
    const int packs = (width + Pack<T>::LEN - 1) / Pack<T>::LEN;
    return min((packs + 31) / 32 * 32, MAX_NORM_THREADS);
}

// A value of the residual stream, and what is added to it.
template <typename T> __device__ __forceinline__ T residual_sum(T a, T b) {
    return narrow<T>(__fadd_rn(widen(a), widen(b)));
}

// A normalized value; `scale` is that of its row.
template <typename T> __device__ __forceinline__ T normalized(T value, float scale, T by) {
    return narrow<T>(widen(value) * scale * widen(by));
}

// What values are multiplied with, for the sum of a row's squares.
__device__ __forceinline__ float norm_scale(float squares, int width, float eps) { return rsqrtf(squares / width + eps); }
