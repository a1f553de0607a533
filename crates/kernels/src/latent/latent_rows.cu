// What latent attention computes of rows beside products and attention: norms of latent vectors, rotations of keys and of
// queries, and the write of keys to their pool.
#include "../norm.cuh"
#include "../slots.cuh"

namespace latent {

// The RMSNorm of `width` values, by all threads of a block.
template <typename T> __device__ void norm(const T *x, const T *weight, T *y, int width, float eps) {
    __shared__ float scratch[32];
    float square = 0.f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        square = fmaf(widen(x[i]), widen(x[i]), square);
    }
    const float scale = norm_scale(block_sum(square, scratch), width, eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        y[i] = normalized(x[i], scale, weight[i]);
    }
}

// Rotates the pairs `first`, `first + step` and so on: value i is paired with value i + half.
template <typename T>
__device__ __forceinline__ void rotate(const T *x, const T *cos, const T *sin, T *y, int half, int first, int step) {
    for (int i = first; i < half; i += step) {
        const float a = widen(x[i]), b = widen(x[i + half]), c = widen(cos[i]), s = widen(sin[i]);
        y[i] = narrow<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
        y[i + half] = narrow<T>(__fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c)));
    }
}

// Of row blockIdx.x: block 0 writes the norm of the latent vector and the rotated key, which are side by side in `latents`,
// to the row's slot; the other blocks rotate the last values of queries, a warp each of a head at a time. latents: rows of
// `stride` values; q: [rows, heads, nope + 2 * half], in rows of `q_stride` values; cos, sin: [rows, half]; pool: [num_slots,
// rank + 2 * half]; queries: [rows, heads, rank + 2 * half].
template <typename T>
__device__ void write(const T *latents, int stride, const T *q, int q_stride, const T *cos, const T *sin, const T *weight,
                      const uint32_t *slots, T *pool, T *queries, int heads, int rank, int nope, int half, float eps) {
    const int row = blockIdx.x, kept = rank + 2 * half;
    const uint32_t slot = slots[row];
    cos += (size_t)row * half;
    sin += (size_t)row * half;
    wait_for_previous();
    if (blockIdx.y == 0) {
        if (slot != NO_SLOT) {
            const T *x = latents + (size_t)row * stride;
            T *to = pool + (size_t)slot * kept;
            rotate(x + rank, cos, sin, to + rank, half, threadIdx.x, blockDim.x);
            norm(x, weight, to, rank, eps);
        }
        return;
    }
    const int warps = blockDim.x / 32, first = (blockIdx.y - 1) * warps + threadIdx.x / 32;
    for (int head = first; head < heads; head += (gridDim.y - 1) * warps) {
        rotate(q + (size_t)row * q_stride + (size_t)head * (nope + 2 * half) + nope, cos, sin,
               queries + ((size_t)row * heads + head) * kept + rank, half, threadIdx.x % 32, 32);
    }
}

} // namespace latent

#define KERNELS(T, NAME)                                                                           \
    extern "C" __global__ void norm_part_##NAME(const T *x, const T *weight, T *y, int stride,     \
                                                int first, int width, float eps) {                 \
        wait_for_previous();                                                                       \
        latent::norm(x + (size_t)blockIdx.x * stride + first, weight,                              \
                     y + (size_t)blockIdx.x * width, width, eps);                                  \
    }                                                                                              \
    extern "C" __global__ void latent_write_##NAME(                                                \
        const T *products, const T *q, const T *cos, const T *sin, const T *weight,                \
        const uint32_t *slots, T *pool, T *queries, int stride, int first, int q_stride,           \
        int heads, int rank, int nope, int half, float eps) {                                      \
        latent::write(products + first, stride, q, q_stride, cos, sin, weight, slots, pool,        \
                      queries, heads, rank, nope, half, eps);                                      \
    }
FOR_FLOATS(KERNELS)
#undef KERNELS
