// Residual sum and RMSNorm or LayerNorm of each row, with one block per row.
#include "norm.cuh"

// Packs of 16 bytes that a thread keeps in registers.
constexpr int PACKS = NORM_PACKS;

// out: [2, rows, width], first the sums, then the normalized sums. A LayerNorm is CENTERED: each row's mean is subtracted
// before the RMSNorm, and `bias`, which may be null, is added after it. `x` is read before `wait_for_previous`: the previous
// kernel must not write it.
//
// `delta` may be null: then it is zero, `x` may come from the previous kernel, and out is [rows, width], without sums.
template <bool CENTERED, typename T>
__device__ void add_norm(const T *x, const T *delta, const T *weight, const T *bias, T *out, int width, float eps) {
    __shared__ float scratch[32];
    constexpr int LEN = Pack<T>::LEN;
    const size_t at = (size_t)blockIdx.x * width;
    const bool adds = delta != nullptr;
    x += at;
    delta = adds ? delta + at : nullptr;
    T *sums = out + at, *normed = out + (adds ? (size_t)gridDim.x * width : 0) + at;
    float mean = 0.f, square = 0.f;
    // The first pass adds up the sums that are centered later, or the squares of those that are not.
    auto note = [&](T sum) {
        if constexpr (CENTERED) {
            mean = __fadd_rn(mean, widen(sum));
        } else {
            square = fmaf(widen(sum), widen(sum), square);
        }
    };
    auto note_centered = [&](T sum) {
        const float value = widen(sum) - mean;
        square = fmaf(value, value, square);
    };
    auto result = [&](T sum, float scale, T by, const T *plus) {
        if constexpr (CENTERED) {
            const float value = (widen(sum) - mean) * scale * widen(by);
            return narrow<T>(bias == nullptr ? value : __fadd_rn(value, widen(*plus)));
        } else {
            return normalized(sum, scale, by);
        }
    };
    if (width % LEN != 0 || width > PACKS * LEN * (int)blockDim.x) {
        wait_for_previous();
        auto sum = [&](int i) { return residual_sum(x[i], adds ? delta[i] : narrow<T>(0.f)); };
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            const T own = sum(i);
            if (adds) {
                sums[i] = own;
            }
            note(own);
        }
        if constexpr (CENTERED) {
            mean = block_sum(mean, scratch) / width;
            for (int i = threadIdx.x; i < width; i += blockDim.x) {
                note_centered(sum(i));
            }
        }
        float scale = norm_scale(block_sum(square, scratch), width, eps);
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            normed[i] = result(sum(i), scale, weight[i], bias + i);
        }
        return;
    }
    // The residual stream is older than what the previous kernel adds to it.
    Pack<T> by[PACKS], plus[CENTERED ? PACKS : 1], sum[PACKS];
    auto place = [&](int p) { return ((int)threadIdx.x + p * (int)blockDim.x) * LEN; };
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            by[p].load(weight + place(p));
            if (CENTERED && bias != nullptr) {
                plus[CENTERED ? p : 0].load(bias + place(p));
            }
            if (adds) {
                sum[p].load(x + place(p));
            }
        }
    }
    wait_for_previous();
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        if (place(p) < width) {
            Pack<T> more;
            if (adds) {
                more.load(delta + place(p));
            } else {
                sum[p].load(x + place(p));
                more.bits = make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < LEN; i++) {
                sum[p].values[i] = residual_sum(sum[p].values[i], more.values[i]);
                note(sum[p].values[i]);
            }
            if (adds) {
                *reinterpret_cast<uint4 *>(sums + place(p)) = sum[p].bits;
            }
        }
    }
    if constexpr (CENTERED) {
        mean = block_sum(mean, scratch) / width;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            if (place(p) < width) {
#pragma unroll
                for (int i = 0; i < LEN; i++) {
                    note_centered(sum[p].values[i]);
                }
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
                out.values[i] = result(sum[p].values[i], scale, by[p].values[i], &plus[CENTERED ? p : 0].values[i]);
            }
            *reinterpret_cast<uint4 *>(normed + place(p)) = out.bits;
        }
    }
}

#define KERNEL(T, NAME)                                                                            \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        add_norm_##NAME(const T *x, const T *delta, const T *weight, T *out, int width,            \
                        float eps) {                                                               \
        add_norm<false, T>(x, delta, weight, nullptr, out, width, eps);                            \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(1024)                                             \
        add_layer_norm_##NAME(const T *x, const T *delta, const T *weight, const T *bias, T *out,  \
                              int width, float eps) {                                              \
        add_norm<true>(x, delta, weight, bias, out, width, eps);                                   \
    }
FOR_FLOATS(KERNEL)
#undef KERNEL
