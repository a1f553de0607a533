// Tensor core operations, which the threads of a warp execute together.
//
// The fragment tables for mma.m16n8k16 in the PTX manual say which values of a matrix a thread holds.
#pragma once
#include "common.cuh"

// d += a * b, where a is 16 x 16 and b is 16 x 8.
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// d = a * b.
template <typename T>
__device__ __forceinline__ void multiply_only(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

// Of 16 outputs by 8 rows: a warp stores its sums, as `multiply` makes them, to `own`.
__device__ __forceinline__ void keep_tile(const float (&d)[4], float *own);
// One of them: the sum over WARPS warps, in their order. The sums of the first warp are at `first`, the next ones `stride`
// floats after each other.
template <int WARPS> __device__ __forceinline__ float sum_of_tile(const float *first, int stride, int output, int row);
// Both: all threads of the block store the sums over its WARPS warps to y, `width` values a row.
template <typename T, int WARPS>
__device__ __forceinline__ void store_tile(const float (&d)[4], float *own, const float *first, int stride, T *y,
                                           int width, int rows, int outputs);

// Two values packed in 32 bits; the first is in the lower half.
template <typename T> __device__ __forceinline__ uint32_t narrow_pair(float first, float second);

// Loads four 8 x 8 matrices of 16-bit values, whose rows become columns of b: thread t gives the
// address of row t % 8 of matrix t / 8 in shared memory, aligned to 16 bytes.
__device__ __forceinline__ void load_transposed(uint32_t (&b)[4], const void *row);

// An address in shared memory, as a number: the compiler keeps it in a register instead of computing it again
// from the thread's index wherever it is used. It must be the same for all threads of a warp.
#ifdef __CUDACC__
using SharedAddress = uint32_t;
#else
using SharedAddress = unsigned char *;
#endif
__device__ __forceinline__ SharedAddress shared_address(void *at);
// `lane`, in a register.
__device__ __forceinline__ int kept_lane(int lane);
// An address, the same for all threads of a warp, in registers.
__device__ __forceinline__ const unsigned char *kept_address(const void *at);
// `x`, of which the compiler knows nothing: it does not compute what follows from it before it is needed.
__device__ __forceinline__ int not_constant(int x);
// The same of a pointer, which stays in registers, as it does not follow from anything.
template <typename T> __device__ __forceinline__ T *kept(T *at);
// Loads 16, 8 or 4 bytes; they are not moved across copies and waits for them.
__device__ __forceinline__ uint4 load_shared_16(SharedAddress at);
__device__ __forceinline__ uint2 load_shared_8(SharedAddress at);
__device__ __forceinline__ uint32_t load_shared_4(SharedAddress at);
// As copy_async, of bytes that exist.
__device__ __forceinline__ void copy_async_to(SharedAddress to, const void *global);
// As copy_async_to; the bytes around them come to the L2 cache, too.
__device__ __forceinline__ void copy_async_of_line(SharedAddress to, const void *global);

// Copies 16 bytes from global to shared memory, or writes zeros there if `exists` is false, while the
// thread goes on. The 128 bytes around them come to the L2 cache. Copies belong to the next end_of_copies.
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool exists);
__device__ __forceinline__ void end_of_copies();
// Waits for the thread's own copies, except those of the last PENDING ends.
template <int PENDING> __device__ __forceinline__ void wait_for_copies();

#ifdef __CUDACC__
#define ON_TENSOR_CORES(T, NAME)                                                                   \
    template <>                                                                                    \
    __device__ __forceinline__ void multiply<T>(float (&d)[4], const uint32_t (&a)[4],             \
                                                uint32_t b0, uint32_t b1) {                        \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, "          \
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                               \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                       \
    }                                                                                              \
    template <>                                                                                    \
    __device__ __forceinline__ void multiply_only<T>(float (&d)[4], const uint32_t (&a)[4],        \
                                                     uint32_t b0, uint32_t b1) {                   \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, "          \
            "{%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"                                           \
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));             \
    }                                                                                              \
    template <> __device__ __forceinline__ uint32_t narrow_pair<T>(float first, float second) {    \
        uint32_t pair;                                                                             \
        asm("cvt.rn." NAME "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));           \
        return pair;                                                                               \
    }
ON_TENSOR_CORES(f16, "f16")
ON_TENSOR_CORES(bf16, "bf16")
#undef ON_TENSOR_CORES

__device__ __forceinline__ void load_transposed(uint32_t (&b)[4], const void *row) {
    // volatile: must not be moved across writes to the shared memory.
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

__device__ __forceinline__ SharedAddress shared_address(void *at) {
    return __shfl_sync(0xffffffffu, (uint32_t)__cvta_generic_to_shared(at), 0);
}
__device__ __forceinline__ int kept_lane(int lane) { return __shfl_sync(0xffffffffu, lane, lane); }
__device__ __forceinline__ const unsigned char *kept_address(const void *at) {
    return reinterpret_cast<const unsigned char *>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(at), 0));
}
__device__ __forceinline__ int not_constant(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <typename T> __device__ __forceinline__ T *kept(T *at) {
    asm volatile("" : "+l"(at));
    return at;
}
__device__ __forceinline__ uint4 load_shared_16(SharedAddress at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_shared_8(SharedAddress at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ uint32_t load_shared_4(SharedAddress at) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ __forceinline__ void copy_async_to(SharedAddress to, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_of_line(SharedAddress to, const void *global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async(void *shared, const void *global, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global), "r"(exists ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#else
template <typename T>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emulate_mma<T>(d, a, b0, b1);
}
template <typename T>
void multiply_only(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    d[0] = d[1] = d[2] = d[3] = 0.f;
    emulate_mma<T>(d, a, b0, b1);
}
template <typename T> uint32_t narrow_pair(float first, float second) {
    return narrow<T>(first).bits | uint32_t(narrow<T>(second).bits) << 16;
}
inline void load_transposed(uint32_t (&b)[4], const void *row) { emulate_ldmatrix_trans(b, row); }
inline SharedAddress shared_address(void *at) { return static_cast<SharedAddress>(at); }
inline int kept_lane(int lane) { return lane; }
inline const unsigned char *kept_address(const void *at) { return static_cast<const unsigned char *>(at); }
inline int not_constant(int x) { return x; }
template <typename T> T *kept(T *at) { return at; }
inline uint4 load_shared_16(SharedAddress at) { return *reinterpret_cast<const uint4 *>(at); }
inline uint2 load_shared_8(SharedAddress at) { return *reinterpret_cast<const uint2 *>(at); }
inline uint32_t load_shared_4(SharedAddress at) { return *reinterpret_cast<const uint32_t *>(at); }
inline void copy_async_to(SharedAddress to, const void *global) { emulate_copy_async(to, global, true); }
inline void copy_async_of_line(SharedAddress to, const void *global) { emulate_copy_async(to, global, true); }
inline void copy_async(void *shared, const void *global, bool exists) {
    emulate_copy_async(shared, global, exists);
}
inline void end_of_copies() { emulate_end_of_copies(); }
template <int PENDING> void wait_for_copies() { emulate_wait_for_copies(PENDING); }
#endif

__device__ __forceinline__ void keep_tile(const float (&d)[4], float *own) {
    const int at = threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4 * 2;
    own[at] = d[0];
    own[at + 1] = d[1];
    own[at + 64] = d[2];
    own[at + 65] = d[3];
}

template <int WARPS> __device__ __forceinline__ float sum_of_tile(const float *first, int stride, int output, int row) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < WARPS; j++) {
        sum = __fadd_rn(sum, first[j * stride + output * 8 + row]);
    }
    return sum;
}

template <typename T, int WARPS>
__device__ __forceinline__ void store_tile(const float (&d)[4], float *own, const float *first, int stride, T *y,
                                           int width, int rows, int outputs) {
    keep_tile(d, own);
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * 8; i += WARPS * 32) {
        const int output = i % 16, row = i / 16;
        const float sum = sum_of_tile<WARPS>(first, stride, output, row);
        if (row < rows && output < outputs) {
            y[(size_t)row * width + output] = narrow<T>(sum);
        }
    }
}
