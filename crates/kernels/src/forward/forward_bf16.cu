// Forwards in one launch, in bf16.
#include "kernels.cuh"

// Earlier GPUs have no copies that barriers wait for.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
FORWARDS(bf16, bf16)
#endif
