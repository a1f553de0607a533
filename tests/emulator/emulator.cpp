#include "emulator.h"
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

unsigned char dynamic_shared[1 << 18];
uint32_t exchange[32][32][6];

namespace {

struct Thread {
    ucontext_t context;
    bool ended;
    std::vector<char> stack = std::vector<char>(1 << 18);
};

// Threads that wait for all of a group that have not ended.
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

std::vector<Thread> threads;
std::function<void()> body;
ucontext_t scheduler;
int current;
Barrier block, warps[32];

void wait(Barrier &barrier) {
    long before = barrier.passed;
    barrier.waiting++;
    barrier.pass();
    while (barrier.passed == before) {
        swapcontext(&threads[current].context, &scheduler);
    }
}

void run() {
    body();
    threads[current].ended = true;
    for (Barrier *barrier : {&block, &warps[current / 32]}) {
        barrier->alive--;
        barrier->pass();
    }
    swapcontext(&threads[current].context, &scheduler);
}

void run_block(int count) {
    block = Barrier{count};
    std::fill_n(warps, 32, Barrier{});
    // What a block finds in its memory is anything.
    memset(dynamic_shared, 0xff, sizeof dynamic_shared);
    for (int i = 0; i < count; i++) {
        Thread &thread = threads[i];
        thread.ended = false;
        warps[i / 32].alive++;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, run, 0);
    }
    for (long rounds = 0; block.alive > 0; rounds++) {
        if (rounds > 10'000'000) {
            fprintf(stderr, "threads wait for one another for ever\n");
            exit(2);
        }
        for (current = 0; current < count; current++) {
            if (!threads[current].ended) {
                threadIdx = {current, 0, 0};
                swapcontext(&scheduler, &threads[current].context);
            }
        }
    }
}

} // namespace

void wait_for_block() { wait(block); }
void wait_for_warp() { wait(warps[current / 32]); }

void launch(Dim grid, int count, std::function<void()> kernel) {
    body = kernel;
    gridDim = grid;
    blockDim = {count, 1, 1};
    if ((int)threads.size() < count) {
        threads.resize(count);
    }
    for (int z = 0; z < grid.z; z++) {
        for (int y = 0; y < grid.y; y++) {
            for (int x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                run_block(count);
            }
        }
    }
}

} // namespace emulator
