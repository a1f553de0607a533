// A whole forward of up to 16 rows in one launch: a block on each multiprocessor runs all phases, and all blocks wait
// for one another between two phases. Every value has the bits that the kernels of the single ops give it.
//
// On a host, the emulator runs all blocks of a phase before the next phase.
#pragma once
#include "attention.cuh"
#include "products.cuh"

// What a block needs all the time, in its shared memory: there it does not have to be read again after each barrier.
template <typename T> struct Now {
    Plan plan;
    Rows<T> rows;
    Phase phase;
};

// Shared memory: the barriers of the ring, Now, what phases need, and from `ring_at` on the slots.
constexpr int BARRIER_BYTES = 2 * MAX_SLOTS * 8, NOW_BYTES = 512;
static_assert(sizeof(Now<f16>) <= NOW_BYTES, "no room");

// A phase in words, one for each thread from the second warp on: the first thread has other things to do.
constexpr int PHASE_WORDS = sizeof(Phase) / sizeof(uint64_t);
__device__ __forceinline__ int phase_word() { return (int)threadIdx.x - 32; }
__device__ __forceinline__ bool has_phase_word() { return phase_word() >= 0 && phase_word() < PHASE_WORDS; }
__device__ __forceinline__ uint64_t word_of(const Phase *phase) {
    return has_phase_word() ? reinterpret_cast<const uint64_t *>(phase)[phase_word()] : 0;
}
__device__ __forceinline__ void put_word(Phase &to, uint64_t word) {
    if (has_phase_word()) {
        reinterpret_cast<uint64_t *>(&to)[phase_word()] = word;
    }
}

template <typename T, int TILES>
__device__ __forceinline__ void run_phase(const Now<T> &now, Ring &ring, unsigned char *memory) {
    const Plan &plan = now.plan;
    const Phase &phase = now.phase;
    const Rows<T> &rows = now.rows;
    if (phase.kind == ATTENTION) {
        if (plan.d == 64) {
            attention_phase<T, 64>(plan, phase, rows, memory);
        } else {
            attention_phase<T, 128>(plan, phase, rows, memory);
        }
    } else if (phase.kind == NORM) {
        auto &shared = *reinterpret_cast<ProductMemory<TILES> *>(memory);
        for (int row = blockIdx.x; row < rows.wanted_count; row += gridDim.x) {
            norm_rows(rows.x, rows.wanted + row, 1, plan.hidden, static_cast<const T *>(phase.norm), plan.eps, false,
                      shared.squares, rows.normed + (size_t)row * plan.hidden, plan.hidden);
        }
    } else {
        product_phase<T, TILES>(plan, phase, rows, ring, memory);
    }
}

#ifdef __CUDACC__
__device__ __forceinline__ int first_phase() { return 0; }
__device__ __forceinline__ int end_of_phases(const Plan &plan) { return plan.count; }

// Waits until all blocks have ended phase `number`; what they wrote is then visible. Makes the next phase that of `now`.
// The counters of each call begin at zero: the counter before this one is not needed any more, and that of the last
// call's last barrier is reset before anybody can come to its place.
template <typename T> __device__ __forceinline__ void wait_for_blocks(Now<T> &now, int number) {
    const uint64_t word = word_of(now.plan.phases + number + 1);
    sync_computing();
    put_word(now.phase, word);
    if (threadIdx.x == 0) {
        unsigned *ended = now.plan.ended + number;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(ended) : "memory");
        unsigned count;
        // Only the last read has to make what others wrote visible.
        do {
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(ended) : "memory");
        } while (count < gridDim.x);
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        if (blockIdx.x == 0) {
            now.plan.ended[number > 0 ? number - 1 : now.plan.count - 2] = 0;
        }
    }
    sync_computing();
}
#else
__device__ __forceinline__ int first_phase() { return emulator::phase; }
__device__ __forceinline__ int end_of_phases(const Plan &) { return emulator::phase + 1; }
template <typename T> void wait_for_blocks(Now<T> &, int) {}
#endif

// By the copying warp: all copies of the phases, in the order in which they are needed.
__device__ __forceinline__ void copy_phases(const Plan &plan, int end, Ring &ring) {
    for (int i = first_phase(); i < end; i++) {
        const Phase &phase = plan.phases[i];
        if (phase.kind != ATTENTION && phase.kind != NORM) {
            copy_phase(phase, ring);
        }
    }
}

template <typename T, int TILES>
__device__ __forceinline__ void forward(const Plan &plan, const Rows<T> &rows, int ring_at, int ring_slots) {
    DYNAMIC_SHARED(memory);
    Ring ring(memory, memory + ring_at, plan.half_bytes, ring_slots);
    const int end = end_of_phases(plan);
    if (threadIdx.x >= COMPUTING) {
        copy_phases(plan, end, ring);
        ring.end_of_filling();
        return;
    }
    Now<T> &now = *reinterpret_cast<Now<T> *>(memory + BARRIER_BYTES);
    put_word(now.phase, word_of(plan.phases + first_phase()));
    if (threadIdx.x == 0) {
        now.plan = plan;
        now.rows = rows;
    }
    ring.begin();
    sync_computing();
    for (int i = first_phase(); i < end; i++) {
        run_phase<T, TILES>(now, ring, memory + BARRIER_BYTES + NOW_BYTES);
        if (i + 1 < end) {
            wait_for_blocks(now, i);
        }
    }
}
