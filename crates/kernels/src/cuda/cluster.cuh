// Clusters: blocks that run at the same time and read each other's shared memory, on GPUs of compute capability 9.0 or
// higher. The blocks of a cluster are consecutive in the second dimension of the grid. A launch says how many they
// are; without that, and on other GPUs, a block is alone.
#pragma once
#include "common.cuh"

#ifdef __CUDACC__
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int blocks_of_cluster() {
    uint32_t count;
    asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(count));
    return count;
}
__device__ __forceinline__ int block_of_cluster() {
    uint32_t number;
    asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(number));
    return number;
}
// All threads of the cluster wait for one another.
__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where block `number` of the cluster has what this block has at `shared`.
__device__ __forceinline__ const unsigned char *memory_of_block(const unsigned char *shared, int number) {
    uint64_t at;
    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(shared), "r"(number));
    return reinterpret_cast<const unsigned char *>(at);
}
#else
__device__ __forceinline__ int blocks_of_cluster() { return 1; }
__device__ __forceinline__ int block_of_cluster() { return 0; }
__device__ __forceinline__ void wait_for_cluster() { __syncthreads(); }
__device__ __forceinline__ const unsigned char *memory_of_block(const unsigned char *shared, int) { return shared; }
#endif
#else
inline int blocks_of_cluster() { return emulator::blocks_of_cluster; }
inline int block_of_cluster() { return emulator::block_of_cluster(); }
inline void wait_for_cluster() { emulator::wait_for_cluster(); }
inline const unsigned char *memory_of_block(const unsigned char *shared, int number) {
    return emulator::memory_of_block(shared, number);
}
#endif
