#include "emulator.h"
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <sys/mman.h>
#include <vector>
#ifndef __x86_64__
#include <ucontext.h>
#endif

Dim threadIdx, blockIdx, blockDim, gridDim;

#ifdef __x86_64__
// Switches stacks. ucontext would spend most of its time on a system call for the signal mask at each
// switch. This pushes the callee-saved registers to the old stack, writes its top to `from`, and pops the
// registers from the new stack.
extern "C" void emulator_switch(void **from, void *to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
    endbr64
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");
#endif

namespace emulator {

alignas(16) unsigned char dynamic_shared[MAX_CLUSTER][MAX_SHARED + GUARD];
uint64_t exchange[MAX_WARPS][2][32];
Fragments fragments[MAX_WARPS][2];
int exchanges[32 * MAX_WARPS];
int phase = 0, current, blocks_of_cluster = 1;

namespace {

constexpr size_t STACK = 1 << 16;

// Where a coroutine continues.
#ifdef __x86_64__
struct Context {
    void *top;

    void go_to(Context &other) { emulator_switch(&top, other.top); }

    void start_with(void (*function)(), char *stack) {
        // Six registers, the address to continue at, and the return address of a call.
        void **at = reinterpret_cast<void **>(stack + STACK);
        at[-1] = nullptr;
        at[-2] = reinterpret_cast<void *>(function);
        top = at - 8;
    }
};
#else
struct Context {
    ucontext_t context;

    void go_to(Context &other) { swapcontext(&context, &other.context); }

    void start_with(void (*function)(), char *stack) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = STACK;
        makecontext(&context, function, 0);
    }
};
#endif

// Threads of a warp, a bit each.
using Lanes = uint32_t;
// Those of all warps that can run, and the number of the threads that have ended.
Lanes ready[MAX_WARPS];
int ended;
// The number of threads of the cluster and of their warps, and 1 or -1: the direction to the next thread.
int count, warps_of_cluster, direction;

Lanes bit_of(int thread) { return Lanes(1) << thread % 32; }

// A barrier: threads wait until all threads of the group that have not ended arrive. Nobody waits there before a kernel begins
// and after it has ended.
struct Barrier {
    int alive = 0, waiting = 0;
    Lanes threads[MAX_WARPS] = {};

    void pass() {
        if (waiting > 0 && waiting >= alive) {
            waiting = 0;
            for (int i = 0; i < warps_of_cluster; i++) {
                ready[i] |= threads[i];
                threads[i] = 0;
            }
        }
    }
};

// Of each thread. The stacks are elsewhere, so that contexts are in few lines of the cache.
Context threads[32 * MAX_WARPS];
std::vector<char *> stacks;
const std::function<void()> *body;
Context scheduler;
Barrier cluster, blocks[MAX_CLUSTER], warps[MAX_WARPS], teams[MAX_CLUSTER][16];

void set_current(int thread) {
    current = thread;
    threadIdx = {thread, 0, 0};
    if (blocks_of_cluster > 1) {
        threadIdx.x %= blockDim.x;
        blockIdx.y = blockIdx.y / blocks_of_cluster * blocks_of_cluster + block_of_cluster();
    }
}

// The next thread after the current one that can run; -1 = there is none. A warp goes on until it waits for another one, so
// that it is far ahead of those for which it should have waited.
int next_thread() {
    const bool forwards = direction > 0;
    // Those behind the current thread; then all of each warp, at first of the current one.
    const Lanes others = forwards ? ~Lanes(1) << current % 32 : bit_of(current) - 1;
    int warp = current / 32;
    Lanes some = ready[warp] & others;
    for (int i = 0; some == 0 && i < warps_of_cluster; i++) {
        some = ready[warp];
        if (some == 0) {
            warp += direction;
            warp = warp < 0 ? warps_of_cluster - 1 : warp == warps_of_cluster ? 0 : warp;
        }
    }
    if (some == 0) {
        return -1;
    }
    return warp * 32 + (forwards ? std::countr_zero(some) : 31 - std::countl_zero(some));
}

// Goes on with the next thread that can run; when all have ended, with the scheduler.
void go_to_next(Context &from) {
    const int next = next_thread();
    if (next >= 0) {
        set_current(next);
        from.go_to(threads[next]);
        return;
    }
    if (ended < count) {
        end("threads wait for one another for ever");
    }
    from.go_to(scheduler);
}

void wait(Barrier &barrier) {
    const int thread = current, warp = thread / 32;
    ready[warp] &= ~bit_of(thread);
    barrier.threads[warp] |= bit_of(thread);
    barrier.waiting++;
    barrier.pass();
    if (!(ready[warp] & bit_of(thread))) {
        go_to_next(threads[thread]);
    }
}

void run() {
    (*body)();
    if (!copies_of_thread().empty()) {
        end("a thread ends before its copies have arrived");
    }
    ended++;
    ready[warp()] &= ~bit_of(current);
    for (Barrier *barrier : {&cluster, &blocks[block_of_cluster()], &warps[warp()]}) {
        barrier->alive--;
        barrier->pass();
    }
    go_to_next(threads[current]);
}

void run_cluster(size_t shared) {
    // CUDA does not define an order of threads: a kernel that relies on one fails in every second block.
    static bool backwards = false;
    backwards = !backwards;
    cluster.alive = count;
    for (int i = 0; i < blocks_of_cluster; i++) {
        blocks[i].alive = blockDim.x;
    }
    ended = 0;
    for (int i = 0; i < warps_of_cluster; i++) {
        warps[i].alive = std::min(32, count - 32 * i);
        ready[i] = ~Lanes(0) >> (32 - warps[i].alive);
    }
    // The initial contents of shared memory are undefined.
    for (int i = 0; i < blocks_of_cluster; i++) {
        memset(dynamic_shared[i], 0xff, shared + GUARD);
    }
    for (int i = 0; i < count; i++) {
        exchanges[i] = 0;
        threads[i].start_with(run, stacks[i]);
    }
    direction = backwards ? -1 : 1;
    set_current(backwards ? count - 1 : 0);
    scheduler.go_to(threads[current]);
    for (int i = 0; i < blocks_of_cluster; i++) {
        const unsigned char *after = dynamic_shared[i] + shared;
        if (std::any_of(after, after + GUARD, [](unsigned char byte) { return byte != 0xff; })) {
            fprintf(stderr, "a block writes beyond its %zu bytes of shared memory\n", shared);
            exit(2);
        }
    }
}

} // namespace

void end(const char *bug) {
    fprintf(stderr, "%s\n", bug);
    exit(2);
}

void wait_for_block() { wait(blocks[block_of_cluster()]); }
void wait_for_cluster() { wait(cluster); }
void wait_for_team(int id, int count) {
    Barrier &team = teams[block_of_cluster()][id];
    team.alive = count;
    wait(team);
}
void wait_for_warp() { wait(warps[warp()]); }
void wait_for_warp(void (*last)(void *), void *argument) {
    Barrier &barrier = warps[warp()];
    if (barrier.waiting + 1 >= barrier.alive) {
        last(argument);
    }
    wait(barrier);
}

void launch(Dim grid, int threads_a_block, const std::function<void()> &kernel, size_t shared, int cluster) {
    body = &kernel;
    gridDim = grid;
    blocks_of_cluster = cluster;
    count = threads_a_block * cluster;
    warps_of_cluster = (count + 31) / 32;
    blockDim = {threads_a_block, 1, 1};
    if (count > 32 * MAX_WARPS || cluster > MAX_CLUSTER || grid.y % cluster != 0) {
        fprintf(stderr, "%d blocks in clusters of %d with %d threads\n", grid.y, cluster, threads_a_block);
        exit(2);
    }
    while ((int)stacks.size() < count) {
        // Each switch is to another stack: with small pages, most time would go to finding them.
        constexpr size_t HUGE_PAGE = 2 << 20, EACH = STACK + 64 * 17;
        static char *next, *end;
        if (size_t(end - next) < EACH) {
            constexpr size_t SOME = 4 * HUGE_PAGE;
            next = static_cast<char *>(aligned_alloc(HUGE_PAGE, SOME));
            end = next + SOME;
            madvise(next, SOME, MADV_HUGEPAGE);
        }
        // Their tops are not all in the same set of the cache, as they are not a power of two apart.
        stacks.push_back(next);
        next += EACH;
    }
    // CUDA does not define an order of blocks either. Those of a cluster run together.
    static std::minstd_rand random;
    const Dim clusters{grid.x, grid.y / cluster, grid.z};
    std::vector<int> order((size_t)clusters.x * clusters.y * clusters.z);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int i : order) {
        blockIdx = {i % clusters.x, i / clusters.x % clusters.y * cluster, i / clusters.x / clusters.y};
        run_cluster(shared);
    }
}

} // namespace emulator
