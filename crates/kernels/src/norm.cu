// Residual sum and RMSNorm or LayerNorm of each row, with one block per row.
#include "norm.cuh"

// Packs of 16 bytes that a thread keeps in registers.
constexpr int PACKS = NORM_PACKS;

// out: [2, rows, width], first the sums, then the normalized sums.
template <typename T>
__device__ void add_norm(const T *x, const T *delta, const T *weight, T *out, int width, float eps) {
    __shared__ float scratch[32];
    constexpr int LEN = Pack<T>::LEN;
    const size_t at = (size_t)blockIdx.x * width;
    x += at;
    delta += at;
    T *sums = out + at, *normed = out + (size_t)gridDim.x * width + at;
    float square = 0.f;
    if (width % LEN != 0 || width > PACKS * LEN * (int)blockDim.x) {
        wait_for_previous();
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            T sum = residual_sum(x[i], delta[i]);
            sums[i] = sum;
            square = fmaf(widen(sum), widen(sum), square);
        }
        float scale = norm_scale(block_sum(square, scratch), width, eps);
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            normed[i] = normalized(sums[i], scale, weight[i]);
        }
        return;
    }
    // The residual stream is older than what the previous kernel adds to it.
    Pack<T> by[PACKS], sum[PACKS];
    auto place = [&](int p) { return ((int)threadIdx.x + p * (int)blockDim.x) * LEN; };
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            by[p].load(weight + place(p));
            sum[p].load(x + place(p));
        }
    }
    wait_for_previous();
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            Pack<T> more;
            more.load(delta + place(p));
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                sum[p].values[i] = residual_sum(sum[p].values[i], more.values[i]);
                square = fmaf(widen(sum[p].values[i]), widen(sum[p].values[i]), square);
            }
            *reinterpret_cast<uint4 *>(sums + place(p)) = sum[p].bits;
        }
    }
    const float scale = norm_scale(block_sum(square, scratch), width, eps);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                out.values[i] = normalized(sum[p].values[i], scale, by[p].values[i]);
            }
            *reinterpret_cast<uint4 *>(normed + place(p)) = out.bits;
        }
    }
}

// The same with LayerNorm. `bias` may be null.
template <typename T>
__device__ void add_layer_norm(const T *x, const T *delta, const T *weight, const T *bias, T *out, int width, float eps) {
    __shared__ float scratch[32];
    constexpr int LEN = Pack<T>::LEN;
    const size_t at = (size_t)blockIdx.x * width;
    x += at;
    delta += at;
    T *sums = out + at, *normed = out + (size_t)gridDim.x * width + at;
    float all = 0.f, square = 0.f;
    auto result = [&](T sum, float mean, float scale, T by, T plus) {
        const float value = (widen(sum) - mean) * scale * widen(by);
        return narrow<T>(bias == nullptr ? value : __fadd_rn(value, widen(plus)));
    };
    if (width % LEN != 0 || width > PACKS * LEN * (int)blockDim.x) {
        wait_for_previous();
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            sums[i] = residual_sum(x[i], delta[i]);
            all = __fadd_rn(all, widen(sums[i]));
        }
        const float mean = block_sum(all, scratch) / width;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const float centered = widen(sums[i]) - mean;
            square = fmaf(centered, centered, square);
        }
        const float scale = norm_scale(block_sum(square, scratch), width, eps);
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            normed[i] = result(sums[i], mean, scale, weight[i], bias == nullptr ? weight[i] : bias[i]);
        }
        return;
    }
    Pack<T> by[PACKS], plus[PACKS], sum[PACKS];
    auto place = [&](int p) { return ((int)threadIdx.x + p * (int)blockDim.x) * LEN; };
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            by[p].load(weight + place(p));
            plus[p].load((bias == nullptr ? weight : bias) + place(p));
            sum[p].load(x + place(p));
        }
    }
    wait_for_previous();
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            Pack<T> more;
            more.load(delta + place(p));
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                sum[p].values[i] = residual_sum(sum[p].values[i], more.values[i]);
                all = __fadd_rn(all, widen(sum[p].values[i]));
            }
            *reinterpret_cast<uint4 *>(sums + place(p)) = sum[p].bits;
        }
    }
    const float mean = block_sum(all, scratch) / width;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                const float centered = widen(sum[p].values[i]) - mean;
                square = fmaf(centered, centered, square);
            }
        }
    }
    const float scale = norm_scale(block_sum(square, scratch), width, eps);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            Pack<T> out;
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                out.values[i] = result(sum[p].values[i], mean, scale, by[p].values[i], plus[p].values[i]);
            }
            *reinterpret_cast<uint4 *>(normed + place(p)) = out.bits;
        }
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void add_norm_##NAME(const T *x, const T *delta, const T *weight,        \
                                               T *out, int width, float eps) {                     \
        add_norm(x, delta, weight, out, width, eps);                                               \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        add_layer_norm_##NAME(const T *x, const T *delta, const T *weight, const T *bias, T *out,  \
                              int width, float eps) {                                              \
        add_layer_norm(x, delta, weight, bias, out, width, eps);                                   \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
