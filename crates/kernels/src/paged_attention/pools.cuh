// What a pool of keys or values is an array of, and how a chunk of one comes to shared memory.
#pragma once
#include "../float8_pool.cuh"
#include "../q8_blocks.cuh"
#include "paged_attention.cuh"

// Numbers of the dtype that the kernels compute in.
template <typename T> struct Numbers {
    static constexpr bool IS_WIDENED = false;
    // Values of 128 bytes.
    static constexpr int LINE = 128 / sizeof(T);
    const T *values;

    __device__ __forceinline__ void prefetch(size_t at) const { prefetch_line(values + at); }
};

// Blocks, which are widened on their way to shared memory, to the dtype that the kernels compute in.
struct Blocks : Q8Blocks {
    static constexpr bool IS_WIDENED = true;
    static constexpr int LINE = 128;
    using Piece = Q8Piece;

    __device__ __forceinline__ void prefetch(size_t at) const {
        prefetch_line(bytes + at);
        prefetch_line(scales + at / BLOCK);
    }
};

// FP8, which is widened in the same way.
struct Float8Pool : Float8s {
    static constexpr bool IS_WIDENED = true;
    static constexpr int LINE = 128;
    using Piece = Float8Piece;

    __device__ __forceinline__ void prefetch(size_t at) const { prefetch_line(numbers + at); }
};

// The pool that is written, as it is read.
template <typename T> __device__ __forceinline__ Numbers<T> as_read(T *pool) { return {pool}; }
__device__ __forceinline__ Blocks as_read(const NewQ8Blocks &pool) { return {{pool.bytes, pool.scales}}; }
__device__ __forceinline__ Float8Pool as_read(const NewFloat8s &pool) { return {{pool.numbers}}; }

// Where values of a pool go.
template <typename T, typename Pool> struct Destination {
    const Pool &from;
    T *to;
    // Values from a key to the next one.
    int pitch;
};

// Widens VALUES values of each key of a chunk, of all N pools, by THREADS threads. `place` says where in the pools the values
// of a key are from one of them on; below 0 = they are zeros.
template <int VALUES, int THREADS, typename T, int N, typename Pool, typename Place>
__device__ __forceinline__ void widen_chunk(int thread, const Place &place, const Destination<T, Pool> (&all)[N]) {
    using Piece = typename Pool::Piece;
    // The pieces of a key, those of a thread in a pool, and those that it loads before it stores the first.
    constexpr int PIECES = VALUES / Piece::LEN, OWN = CHUNK * PIECES / THREADS, MOST = 4 / N;
    constexpr int BATCH = OWN < MOST ? OWN : MOST;
    static_assert(CHUNK * PIECES % THREADS == 0 && OWN % BATCH == 0);
#pragma unroll 1
    for (int first = 0; first < OWN; first += BATCH) {
        Piece pieces[BATCH][N];
        auto key = [&](int i) { return ((first + i) * THREADS + thread) / PIECES; };
        auto value = [&](int i) { return ((first + i) * THREADS + thread) % PIECES * Piece::LEN; };
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const long long at = place(key(i), value(i));
#pragma unroll
            for (int n = 0; n < N; n++) {
                pieces[i][n].load(all[n].from, at, at >= 0);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                pieces[i][n].store(all[n].to + key(i) * all[n].pitch + value(i));
            }
        }
    }
}
