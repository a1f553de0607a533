// The random numbers of the coupled acceptance rule; see `gumbel_max.rs`.

#pragma once
#include "cuda/common.cuh"

// The exponentially distributed number of token `id`, above 0, with the bits of `gumbel_max.rs`: -ln(1 - v),
// where v is a hash of key and id. No step is fused, so that a CPU gets the same.
__device__ __forceinline__ float exponential(uint64_t key, uint32_t id) {
    uint32_t h = id ^ (uint32_t)key;
    h = (h ^ (h >> 17)) * 0xed5ad4bbu;
    h ^= (uint32_t)(key >> 32);
    h = (h ^ (h >> 11)) * 0xac4c1b51u;
    h = (h ^ (h >> 15)) * 0x31848babu;
    h ^= h >> 14;
    float v = __fmul_rn(__fadd_rn((float)(int)(h >> 1), 0.5f), 0x1p-31f);
    v = fminf(v, 1.f - 0x1p-24f);
    // ln(y) = e * ln(2) + ln(1 + f), with 1 + f from sqrt(1/2) to sqrt(2); Cephes, logf.
    int bits = __float_as_int(__fsub_rn(1.f, v));
    int e = (bits - 0x3f3504f3) >> 23;
    float m = __int_as_float(bits - e * (1 << 23));
    // 1 - v is rounded, -v is not.
    float f = e == 0 ? -v : __fsub_rn(m, 1.f);
    float p = 7.0376836292e-2f;
    p = __fsub_rn(__fmul_rn(p, f), 1.1514610310e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 1.1676998740e-1f);
    p = __fsub_rn(__fmul_rn(p, f), 1.2420140846e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 1.4249322787e-1f);
    p = __fsub_rn(__fmul_rn(p, f), 1.6668057665e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 2.0000714765e-1f);
    p = __fsub_rn(__fmul_rn(p, f), 2.4999993993e-1f);
    p = __fadd_rn(__fmul_rn(p, f), 3.3333331174e-1f);
    float z = __fmul_rn(f, f);
    float ln = __fsub_rn(__fmul_rn(__fmul_rn(f, z), p), __fmul_rn(0.5f, z));
    ln = __fadd_rn(__fadd_rn(ln, f), __fmul_rn((float)e, 0.693147180559945f));
    return -ln;
}
