#include "emulator.h"
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
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

// A barrier: threads wait until all threads of the group that have not ended arrive.
struct Barrier {
    int alive = 0, waiting = 0;
    long passed = 0;

    void pass() {
        if (waiting > 0 && waiting >= alive) {
            waiting = 0;
            passed++;
        }
    }
};

struct Thread {
    Context context;
    bool ended;
    // Where it waits, and how often threads had passed there.
    const Barrier *at;
    long before;
    // Exchanges with the threads of its warp so far.
    int exchanges;
    alignas(16) char stack[STACK];

    bool can_run() const { return !ended && (!at || at->passed != before); }
};

std::vector<Thread *> threads;
const std::function<void()> *body;
Context scheduler;
// The number of threads of the cluster, and 1 or -1: the direction to the next thread.
int count, direction;
Barrier cluster, blocks[MAX_CLUSTER], warps[MAX_WARPS], teams[MAX_CLUSTER][16];

void set_current(int thread) {
    current = thread;
    threadIdx = {thread % blockDim.x, 0, 0};
    if (blocks_of_cluster > 1) {
        blockIdx.y = blockIdx.y / blocks_of_cluster * blocks_of_cluster + block_of_cluster();
    }
}

// Goes on with the next thread that can run; when all have ended, with the scheduler.
void go_to_next(Context &from) {
    bool all_ended = true;
    int next = current;
    for (int i = 0; i < count; i++) {
        next += direction;
        next = next < 0 ? count - 1 : next == count ? 0 : next;
        all_ended &= threads[next]->ended;
        if (!threads[next]->can_run()) {
            continue;
        }
        set_current(next);
        from.go_to(threads[next]->context);
        return;
    }
    if (!all_ended) {
        fprintf(stderr, "threads wait for one another for ever\n");
        exit(2);
    }
    from.go_to(scheduler);
}

void wait(Barrier &barrier) {
    Thread &thread = *threads[current];
    thread.at = &barrier;
    thread.before = barrier.passed;
    barrier.waiting++;
    barrier.pass();
    if (!thread.can_run()) {
        go_to_next(thread.context);
    }
    thread.at = nullptr;
}

void run() {
    Thread &thread = *threads[current];
    (*body)();
    thread.ended = true;
    for (Barrier *barrier : {&cluster, &blocks[block_of_cluster()], &warps[warp()]}) {
        barrier->alive--;
        barrier->pass();
    }
    go_to_next(thread.context);
}

void run_cluster(size_t shared) {
    // CUDA does not define an order of threads: a kernel that relies on one fails in every second block.
    static bool backwards = false;
    backwards = !backwards;
    cluster = Barrier{count};
    std::fill_n(blocks, MAX_CLUSTER, Barrier{blockDim.x});
    std::fill_n(warps, MAX_WARPS, Barrier{});
    std::fill_n(teams[0], MAX_CLUSTER * 16, Barrier{});
    // The initial contents of shared memory are undefined.
    for (int i = 0; i < blocks_of_cluster; i++) {
        memset(dynamic_shared[i], 0xff, shared + GUARD);
    }
    for (int i = 0; i < count; i++) {
        Thread &thread = *threads[i];
        thread.ended = false;
        thread.at = nullptr;
        thread.exchanges = 0;
        warps[i / 32].alive++;
        thread.context.start_with(run, thread.stack);
    }
    direction = backwards ? -1 : 1;
    set_current(backwards ? count - 1 : 0);
    scheduler.go_to(threads[current]->context);
    for (int i = 0; i < blocks_of_cluster; i++) {
        const unsigned char *after = dynamic_shared[i] + shared;
        if (std::any_of(after, after + GUARD, [](unsigned char byte) { return byte != 0xff; })) {
            fprintf(stderr, "a block writes beyond its %zu bytes of shared memory\n", shared);
            exit(2);
        }
    }
}

} // namespace

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
int turn() { return threads[current]->exchanges++ % 2; }

void launch(Dim grid, int threads_a_block, const std::function<void()> &kernel, size_t shared, int cluster) {
    body = &kernel;
    gridDim = grid;
    blocks_of_cluster = cluster;
    count = threads_a_block * cluster;
    blockDim = {threads_a_block, 1, 1};
    if (count > 32 * MAX_WARPS || cluster > MAX_CLUSTER || grid.y % cluster != 0) {
        fprintf(stderr, "%d blocks in clusters of %d with %d threads\n", grid.y, cluster, threads_a_block);
        exit(2);
    }
    while ((int)threads.size() < count) {
        threads.push_back(new Thread);
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
