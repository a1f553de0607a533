// Shared by the kernels: dtypes, conversions, reductions.
//
// Additions that affect a row's bits are written as fmaf or with intrinsics, in an order that depends
// on the row alone: neither on the other rows of a launch nor on its grid.

#pragma once
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
// The dynamic shared memory of the launch.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
// A function that is called: it has its own registers, and the compiler does not make its caller larger.
#define CALLED __noinline__
#else
#define CALLED inline
// Tests compile the kernels for the host.
#include "emulator.h"
#endif

using bf16 = __nv_bfloat16;
using f16 = __half;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ f16 narrow<f16>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }

// 16 bytes as values of T.
template <typename T> struct Pack {
    static constexpr int LEN = 16 / sizeof(T);
    union {
        uint4 bits;
        T values[LEN];
    };
    __device__ __forceinline__ Pack() {}
    __device__ __forceinline__ void load(const T *from) {
        bits = *reinterpret_cast<const uint4 *>(from);
    }
};

// Kernels of a model's layers start while the kernel before them ends (programmatic dependent launch), if they
// are compiled for a GPU that can do that: gpu.rs looks for the instruction. A thread waits here until the
// kernel before has ended and all its writes are visible. Only then may the next kernel start, so all kernels
// before the previous one have ended when a kernel starts: until it waits, it may read what they wrote, but
// not what the previous one writes. Tables are an exception: after the kernel that writes them, the next one
// starts only when it has ended (Launch::run_apart in gpu.rs).
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The threads of a team wait for one another: THREADS threads of a block, whole warps, with the same ID, from 1 to 15.
template <int THREADS> __device__ __forceinline__ void sync_team(int id) {
#ifdef __CUDACC__
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
#else
    emulator::wait_for_team(id, THREADS);
#endif
}

// Loads 16 bytes that no other thread needs, so that they need not stay in the first-level cache. Others
// need the bytes around them.
__device__ __forceinline__ uint4 load_once(const void *from) {
#ifdef __CUDACC__
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
#else
    return *static_cast<const uint4 *>(from);
#endif
}

// Brings the 128 bytes around an address into the second-level cache, which also holds whatever is written there
// afterwards. So a kernel may do it before it waits for the previous one.
__device__ __forceinline__ void prefetch_line(const void *at) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Counts a block, for which one of its threads calls this: whether it is the last of `count`. It then sees what the callers
// of the others wrote before, and what their blocks wrote before a barrier; after a barrier, so does its block. `arrived`
// is 0 before the first and after the last.
__device__ __forceinline__ bool is_last_of(uint32_t *arrived, uint32_t count) {
    uint32_t before;
#ifdef __CUDACC__
    // Releases what came before, and acquires; two fences would wait for memory twice.
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(arrived))
                 : "memory");
#else
    before = atomicAdd(arrived, 1u);
#endif
    const bool is_last = before + 1 == count;
    if (is_last) {
        *arrived = 0;
    }
    return is_last;
}

// The sum over a warp; every thread gets the same.
__device__ __forceinline__ float warp_sum(float x) {
#ifdef __CUDACC__
    for (int mask = 16; mask > 0; mask >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, mask);
    }
    return x;
#else
    return emulate_warp_sum(x);
#endif
}

// The sum over the warps of a block, whose own sums are in `scratch`.
__device__ __forceinline__ float sum_of_warps(const float *scratch, int warps) {
    float sum = 0.f;
    for (int i = 0; i < warps; i++) {
        sum += scratch[i];
    }
    return sum;
}

// The sum over a block of up to 1024 threads; every thread gets the same. `scratch` has 32 floats.
__device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) {
        scratch[warp] = x;
    }
    __syncthreads();
    float sum = sum_of_warps(scratch, blockDim.x / 32);
    __syncthreads();
    return sum;
}

// Defines a kernel for each dtype that activations may have.
#define FOR_FLOATS(KERNEL)                                                                         \
    KERNEL(float, f32)                                                                             \
    KERNEL(f16, f16)                                                                               \
    KERNEL(bf16, bf16)
