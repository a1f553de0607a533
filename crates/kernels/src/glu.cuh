// activation(gate) * up of single values.
#pragma once
#include "cuda/common.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }

__device__ __forceinline__ float gelu_tanh(float x) {
    return 0.5f * x * (1.f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
}

// NaN stays NaN, which fmaxf would make a number.
__device__ __forceinline__ float relu2(float x) {
    const float positive = x < 0.f ? 0.f : x;
    return positive * positive;
}

template <float (*ACTIVATION)(float), typename T> __device__ __forceinline__ T gated(T gate, T up) {
    return narrow<T>(ACTIVATION(widen(gate)) * widen(up));
}

// The activations by their numbers, those of `fused` in glu.rs.
template <typename T> __device__ __forceinline__ T gated(int activation, T gate, T up) {
    return activation == 0 ? gated<silu>(gate, up) : activation == 1 ? gated<gelu>(gate, up) : gated<gelu_tanh>(gate, up);
}
