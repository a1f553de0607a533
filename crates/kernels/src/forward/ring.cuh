// The ring in shared memory through which weights stream: one warp copies them in the order in which the others need
// them, without waiting for the phases.
#pragma once
#include "../cuda/tensor.cuh"
#include "plan.cuh"

// Slots of a ring, at most.
constexpr int MAX_SLOTS = 32;

// Where a warp's units are in a slot, one of each step, and what these share with others, as offsets. A half of a slot has
// HALF_UNITS places for units, then what these share. It belongs to a step, if all warps have the same strip, or else
// to a strip of OF = HALF_WARPS warps.
template <int OF> struct Places {
    int units[STEPS], shared[STEPS];

    // `warp` of those of the strip.
    __device__ __forceinline__ Places(int warp, int half_bytes, int unit_bytes, int super_bytes) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int half = OF == WARPS ? step : threadIdx.x / 32 / HALF_WARPS;
            const int place = OF == WARPS ? warp : HALF_WARPS * step + warp;
            units[step] = half * half_bytes + place * unit_bytes;
            shared[step] = half * half_bytes + HALF_UNITS * unit_bytes + place / 4 * super_bytes;
        }
    }
};

// Waits for the computing threads of the block; their teams have the next IDs.
__device__ __forceinline__ void sync_computing() { sync_team<COMPUTING>(1); }

#ifdef __CUDACC__
struct Ring {
    // Where slots begin, and the barriers of each slot: it is full, it is empty.
    uint32_t slots, full, empty;
    int half_bytes, count;
    // The next slot, and the last bit of how often all slots were passed.
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

    // A ring whose barriers are ready, at this time.
    __device__ __forceinline__ Ring(uint32_t slots, uint32_t full, int half_bytes, int count, int state)
        : slots(slots), full(full), empty(full + 8 * MAX_SLOTS), half_bytes(half_bytes), count(count), slot(state / 2),
          parity(state % 2) {}
    __device__ __forceinline__ int state() const { return 2 * slot + (int)parity; }
    __device__ __forceinline__ void set_state(int state) {
        slot = state / 2;
        parity = state % 2;
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

    // By the copying warp: fills the next slot, when everybody has read it. Half of the lanes have copies to each half.
    __device__ __forceinline__ void fill(const RangeCopy &own) {
        const int lane = threadIdx.x % 32;
        wait_for(empty + 8 * slot, parity ^ 1);
        const int bytes = __reduce_add_sync(0xffffffffu, own.bytes);
        if (lane == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full + 8 * slot), "r"(bytes) : "memory");
        }
        // The barrier knows what it waits for.
        __syncwarp();
        if (own.bytes > 0) {
            copy(slots + (2 * slot + lane / HALF_LANES) * half_bytes + own.to, own.from, own.bytes);
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
    SharedAddress slots, full = nullptr;
    int half_bytes, count, step = 0;

    using Fill = std::array<RangeCopy, 32>;
    static std::vector<Fill> &filled() {
        static std::vector<Fill> all;
        return all;
    }

    Ring(unsigned char *, unsigned char *memory, int half_bytes, int count)
        : slots(memory), half_bytes(half_bytes), count(count) {
        // By the first lane of the block that comes here.
        static int lanes = 0;
        if (threadIdx.x >= COMPUTING && lanes++ % 32 == 0) {
            filled().clear();
        }
    }

    Ring(SharedAddress slots, SharedAddress, int half_bytes, int count, int state)
        : slots(slots), half_bytes(half_bytes), count(count), step(state) {}
    int state() const { return step; }
    void set_state(int state) { step = state; }

    void fill(const RangeCopy &own) {
        filled().resize(std::max<size_t>(filled().size(), step + 1));
        filled()[step++][threadIdx.x % 32] = own;
    }
    void end_of_filling() { sync_team<FORWARD_THREADS>(15); }
    void begin() { sync_team<FORWARD_THREADS>(15); }
    SharedAddress wait() {
        const SharedAddress at = slots + 2 * (step % count) * half_bytes;
        sync_computing();
        if (threadIdx.x == 0) {
            memset(at, 0xff, 2 * half_bytes);
            for (int lane = 0; lane < 32; lane++) {
                const RangeCopy &from = filled().at(step)[lane];
                if (from.bytes > 0) {
                    memcpy(at + lane / HALF_LANES * half_bytes + from.to, from.from, from.bytes);
                }
            }
        }
        sync_computing();
        return at;
    }
    void release() { step++; }
};
#endif
