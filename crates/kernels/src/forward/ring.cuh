// The ring in shared memory through which weights stream: one warp copies them in the order in which the others need
// them, without waiting for the phases.
#pragma once
#include "../cuda/tensor.cuh"
#include "plan.cuh"

// Slots of a ring, at most.
constexpr int MAX_SLOTS = 32;

// Where a warp's units are in a slot, one of each step, and what these share with others, as offsets. A half of a slot has
// HALF_UNITS places for units, then what these share. It belongs to a step, if all warps have the same strip, or else
// to a strip.
struct Places {
    int units[STEPS], shared[STEPS];

    // `warp` of the `warps` of the strip of this warp.
    __device__ __forceinline__ Places(int warp, int warps, int half_bytes, int unit_bytes, int super_bytes) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int half = warps == WARPS ? step : threadIdx.x / 32 / HALF_WARPS;
            const int place = warps == WARPS ? warp : HALF_WARPS * step + warp;
            units[step] = half * half_bytes + place * unit_bytes;
            shared[step] = half * half_bytes + HALF_UNITS * unit_bytes + place / 4 * super_bytes;
        }
    }
};

// Waits for the computing threads of the block, or for those of one team: THREADS threads with the same ID, from 1.
template <int THREADS> __device__ __forceinline__ void sync_team(int id) {
#ifdef __CUDACC__
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
#else
    emulator::wait_for_team(id, THREADS);
#endif
}
__device__ __forceinline__ void sync_computing() { sync_team<COMPUTING>(1); }

#ifdef __CUDACC__
struct Ring {
    // Where slots begin, and the barriers of each slot: it is full, it is empty.
    uint32_t slots, full, empty;
    int half_bytes, count;
    int slot = 0;
    uint32_t parity = 0;

    // `barriers` has room for 2 * MAX_SLOTS of 8 bytes. All threads of the block call it.
    __device__ Ring(unsigned char *barriers, unsigned char *memory, int half_bytes, int count)
        : slots((uint32_t)__cvta_generic_to_shared(memory)), full((uint32_t)__cvta_generic_to_shared(barriers)),
          empty(full + 8 * MAX_SLOTS), half_bytes(half_bytes), count(count) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; i++) {
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(full + 8 * i) : "memory");
                asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty + 8 * i), "n"(WARPS) : "memory");
            }
            // Copies are done by another unit of the multiprocessor, which must see the barriers.
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }

    __device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t phase) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "AGAIN: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
                     "@p bra DONE;\n"
                     "bra AGAIN;\n"
                     "DONE:\n"
                     "}" ::"r"(barrier), "r"(phase) : "memory");
    }
    __device__ __forceinline__ void advance() {
        if (++slot == count) {
            slot = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void copy(uint32_t to, const void *from, int bytes) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(from), "r"(bytes), "r"(full + 8 * slot)
                     : "memory");
    }

    // By one thread of the copying warp: fills the next slot, when everybody has read it.
    __device__ __forceinline__ void fill(const HalfOfSlot (&halves)[2]) {
        wait_for(empty + 8 * slot, parity ^ 1);
        int bytes = 0;
        for (int half = 0; half < 2; half++) {
            const HalfOfSlot &from = halves[half];
            bytes += from.count * from.unit_bytes + from.supers_count() * from.super_bytes;
        }
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full + 8 * slot), "r"(bytes) : "memory");
        for (int half = 0; half < 2; half++) {
            const HalfOfSlot &from = halves[half];
            const uint32_t to = slots + (2 * slot + half) * half_bytes;
            if (from.count > 0) {
                copy(to, from.units, from.count * from.unit_bytes);
            }
            if (from.count > 0 && from.super_bytes > 0) {
                copy(to + HALF_UNITS * from.unit_bytes, from.supers, from.supers_count() * from.super_bytes);
            }
        }
        advance();
    }
    __device__ __forceinline__ void end_of_filling() {}

    // By the computing warps: the address of the next slot, when it is full.
    __device__ __forceinline__ SharedAddress wait() {
        wait_for(full + 8 * slot, parity);
        return slots + 2 * slot * half_bytes;
    }
    // The warp has read its part of the slot.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(empty + 8 * slot) : "memory");
        }
        advance();
    }
    __device__ __forceinline__ void begin() {}
};
#else
// On the host, a phase's copies are listed before anybody computes, and made when they are waited for.
struct Ring {
    SharedAddress slots;
    int half_bytes, count, step = 0;

    struct Filled {
        HalfOfSlot halves[2];
    };
    static std::vector<Filled> &filled() {
        static std::vector<Filled> all;
        return all;
    }

    Ring(unsigned char *, unsigned char *memory, int half_bytes, int count)
        : slots(memory), half_bytes(half_bytes), count(count) {
        if (threadIdx.x == COMPUTING) {
            filled().clear();
        }
    }

    void fill(const HalfOfSlot (&halves)[2]) { filled().push_back({{halves[0], halves[1]}}); }
    void end_of_filling() { sync_team<FORWARD_THREADS>(15); }
    void begin() { sync_team<FORWARD_THREADS>(15); }
    SharedAddress wait() {
        const SharedAddress at = slots + 2 * (step % count) * half_bytes;
        sync_computing();
        if (threadIdx.x % COMPUTING < 2) {
            const HalfOfSlot &from = filled().at(step).halves[threadIdx.x];
            SharedAddress to = at + threadIdx.x * half_bytes;
            memset(to, 0xff, half_bytes);
            if (from.count > 0) {
                memcpy(to, from.units, from.count * from.unit_bytes);
                memcpy(to + HALF_UNITS * from.unit_bytes, from.supers, from.supers_count() * from.super_bytes);
            }
        }
        sync_computing();
        return at;
    }
    void release() { step++; }
};
#endif
