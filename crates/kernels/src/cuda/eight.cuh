// Eight values of a thread, for shared memory.
#pragma once
#include "tensor.cuh"

// Rounds them and stores them; `to` is aligned to 16 bytes.
template <typename T> __device__ __forceinline__ void put_eight(const float (&x)[8], T *to) {
    *reinterpret_cast<uint4 *>(to) = make_uint4(narrow_pair<T>(x[0], x[1]), narrow_pair<T>(x[2], x[3]),
                                                narrow_pair<T>(x[4], x[5]), narrow_pair<T>(x[6], x[7]));
}
__device__ __forceinline__ void put_eight(const float (&x)[8], float *to) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        *reinterpret_cast<uint4 *>(to + i) = make_uint4(__float_as_uint(x[i]), __float_as_uint(x[i + 1]),
                                                        __float_as_uint(x[i + 2]), __float_as_uint(x[i + 3]));
    }
}
